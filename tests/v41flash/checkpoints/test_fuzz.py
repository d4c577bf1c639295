"""Damaged and hostile folders cost one clear error, whatever is in them, and little memory.

The quick run makes some 200 cases, the slow one more than 2,000.
"""

import json
import os
import tracemalloc

import hypothesis
import hypothesis.strategies as st
import pytest

from tests.v41flash.checkpoints import folders
from v41flash.checkpoints import hf
from v41flash.checkpoints.published import CONFIG, INDEX, Published, problems
from v41flash.checkpoints.tensor_files import MAX_HEADER_BYTES, FileError, TensorFile
from v41flash.errors import InputError

QUICK = pytest.param(1, id="quick")
SLOW = pytest.param(12, id="slow", marks=pytest.mark.slow)
# Of Python objects that a file may cost, whatever it says: those of its JSON, 25 bytes a byte.
_BOUND = 64 << 20


def examples(count):
    return hypothesis.settings(
        max_examples=count,
        deadline=None,
        suppress_health_check=list(hypothesis.HealthCheck),
        phases=[hypothesis.Phase.generate],
    )


def one_line(action):
    """Runs it; an InputError of one line is all that it may raise. Within `_BOUND` bytes."""
    tracemalloc.start()
    try:
        return action()
    except InputError as error:
        assert len(str(error).splitlines()) == 1 and len(str(error)) < 2000
        return None
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < _BOUND


@pytest.fixture(scope="module")
def template():
    return (folders.RECORDED / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def recorded_config():
    return json.loads((folders.RECORDED / CONFIG).read_text())


# JSON of any shape, with the keys, names and numbers that headers and configurations are made of.
_numbers = st.one_of(
    st.integers(-3, 70),
    st.sampled_from([2**31, 2**32, 2**62, 2**63, 2**64, 10**30, -(2**63), 10**400]),
    st.floats(allow_nan=True, allow_infinity=True),
)
_words = st.one_of(
    st.sampled_from(
        ["dtype", "shape", "data_offsets", "BF16", "F8_E4M3", "I8", "__metadata__", "weight_map"]
    ),
    st.sampled_from(["", "embed.weight", "../../etc/passwd", "a\nb", "\0", "model.safetensors"]),
    st.text(max_size=8),
)
_json = st.recursive(
    st.one_of(st.none(), st.booleans(), _numbers, _words),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(_words, inner, max_size=4)
    ),
    max_leaves=12,
)
_entry = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.one_of(st.sampled_from(["BF16", "F32", "I8", "F8_E8M0", "F4"]), _json),
        "shape": st.one_of(st.lists(_numbers, max_size=4), _json),
        "data_offsets": st.one_of(st.lists(_numbers, min_size=2, max_size=2), _json),
        "extra": _json,
    },
)
_lengths = st.none() | st.integers(0, 2**64 - 1)
_header = st.one_of(st.dictionaries(_words, st.one_of(_entry, _json), max_size=4), _json)


@pytest.mark.parametrize("factor", [QUICK, SLOW])
def test_headers(tmp_path, factor):
    path = tmp_path / "model.safetensors"

    @examples(50 * factor)
    @hypothesis.given(
        header=_header, length=st.none() | st.integers(0, 2**64 - 1), tail=st.binary()
    )
    def run(header, length, tail):
        text = json.dumps(header).encode()
        length = len(text) if length is None else length
        path.write_bytes(length.to_bytes(8, "little") + text + tail)
        file = one_line(lambda: TensorFile(path))
        for name in file.entries if file is not None else ():
            one_line(lambda: file.read(name))  # noqa: B023

    run()


@pytest.mark.parametrize("factor", [QUICK, SLOW])
def test_bytes_changed_and_cut(tmp_path, template, factor):
    """Whatever happens to the bytes of a good file, `problems` and `open` say so in lines."""
    folder = folders.copy(tmp_path / "folder")
    path = folder / "model.safetensors"
    header = 8 + int.from_bytes(template[:8], "little")

    @examples(25 * factor)
    @hypothesis.given(
        edits=st.lists(
            st.tuples(st.integers(0, header - 1), st.integers(0, 255)), min_size=1, max_size=4
        ),
        cut=st.none() | st.integers(0, len(template)),
    )
    def run(edits, cut):
        data = bytearray(template)
        for place, value in edits:
            data[place] = value
        path.write_bytes(bytes(data[:cut]))
        found = one_line(lambda: list(problems(folder)))
        assert found is None or all(len(line.splitlines()) == 1 for line in found)
        opened = one_line(lambda: Published.open(folder))
        assert (opened is None) == (found is None or bool(found))

    run()


def _leaves(tree, path=()):
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from _leaves(value, (*path, key))
    else:
        yield path


@pytest.mark.parametrize("factor", [QUICK, SLOW])
def test_configurations(tmp_path, recorded_config, factor):
    folder = folders.copy(tmp_path / "folder")
    paths = [*_leaves(recorded_config)]
    places = st.sampled_from([*paths, *{path[:-1] for path in paths if len(path) > 1}])

    @examples(75 * factor)
    @hypothesis.given(changes=st.lists(st.tuples(places, _json), min_size=1, max_size=3))
    def run(changes):
        config = json.loads(json.dumps(recorded_config))
        for path, value in changes:
            node = config
            for key in path[:-1]:
                node = node.get(key) if isinstance(node, dict) else None
            if isinstance(node, dict):
                node[path[-1]] = value
        (folder / CONFIG).write_text(json.dumps(config))
        one_line(lambda: list(problems(folder)))

    run()


@pytest.mark.parametrize("factor", [QUICK, SLOW])
def test_indices(tmp_path, factor):
    folder = folders.copy(tmp_path / "folder")
    names = sorted(folders.tensors(folder))
    files = st.one_of(st.just("model.safetensors"), _words, _numbers)
    maps = st.dictionaries(st.one_of(st.sampled_from(names), _words), files, max_size=4)
    index = st.one_of(st.fixed_dictionaries({"weight_map": maps, "metadata": _json}), _json)

    @examples(50 * factor)
    @hypothesis.given(index=index)
    def run(index):
        (folder / INDEX).write_text(json.dumps(index))
        one_line(lambda: list(problems(folder)))
        assert sorted(os.listdir(folder)) == sorted([CONFIG, INDEX, "model.safetensors"])

    run()


# -- Cases that a generator does not find ---------------------------------------------------------

DEEP = "[" * 100_000
TEXTS = {
    "deep": DEEP,
    "digits": '{"a": ' + "9" * 10_000 + "}",
    "twice": '{"a": 1, "a": 2}',
    "not utf-8": b"\xff\xfe{}",
    "empty": "",
    "a list": "[]",
}


@pytest.mark.parametrize("case", TEXTS)
@pytest.mark.parametrize("name", [CONFIG, INDEX, "model.safetensors"])
def test_texts_that_parsers_choke_on(tmp_path, capsys, name, case):
    folder = folders.copy(tmp_path / "folder")
    text = TEXTS[case]
    data = text if isinstance(text, bytes) else text.encode()
    if name == "model.safetensors":
        data = len(data).to_bytes(8, "little") + data
    (folder / name).write_bytes(data)
    assert hf.main(["inspect", str(folder)]) == 1
    captured = capsys.readouterr()
    assert name in captured.err + captured.out
    assert len(captured.err.splitlines()) <= 1


@pytest.mark.parametrize(
    "key, value",
    [
        ("n_routed_experts", 10**9),
        ("dspark_n_routed_experts", 10**12),
        ("engram_num_embeddings", [10**15, 10**15]),
        ("vocab_size", 2**62),
    ],
)
def test_counts_that_would_never_end(tmp_path, key, value):
    folder = folders.copy(tmp_path / "folder")
    folders.change_config(folder, **{key: value})
    found = one_line(lambda: list(problems(folder)))
    assert found is None or len(found) < 100


def test_a_header_too_long_is_not_read(tmp_path):
    path = tmp_path / "model.safetensors"
    with path.open("wb") as file:
        file.write((MAX_HEADER_BYTES + 1).to_bytes(8, "little"))
        file.truncate(MAX_HEADER_BYTES * 4)
    with pytest.raises(FileError, match="must be at most"):
        one_line_error(path)


def one_line_error(path):
    tracemalloc.start()
    try:
        TensorFile(path)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 1 << 20
