"""Any bytes in JSONL files, any columns in Parquet files: documents, or counted as skipped."""

import functools
import gzip
import json
import os

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from train.data import sources

_fixed = functools.partial(
    settings,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)
_ROWS = st.one_of(
    st.builds(lambda text: {"text": text}, st.text(max_size=20)),
    st.builds(lambda value: {"text": value}, _JSON),
    _JSON,
)
_LINES = st.one_of(
    _ROWS.map(lambda row: json.dumps(row).encode()),
    st.binary(max_size=30),
    st.sampled_from(
        [b"", b"{", b"[" * 5000, b'{"text": "a"', b'{"text": "\\ud800"}', b"\xff\xfe", b"1e999"]
    ),
)


class _Code:
    """Unpickling it would leave a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def _read(kind, path):
    skipped = sources.Skipped()
    documents = list(sources.open_source(kind, str(path)).documents(skipped))
    for document in documents:
        assert document.data and document.data == document.texts[0].encode()
    return [document.texts[0] for document in documents], skipped


def _texts(lines):
    """What the lines hold, by Python's own parser."""
    found = []
    for line in lines:
        try:
            row = json.loads(line)
            text = row["text"] if isinstance(row, dict) else None
            if isinstance(text, str) and text.encode():
                found.append(text)
        except (ValueError, KeyError, RecursionError):
            continue
    return found


@pytest.mark.parametrize("examples", [40, pytest.param(1500, marks=pytest.mark.slow)])
def test_any_lines_are_rows_or_counted(tmp_path, examples):
    @_fixed(max_examples=examples)
    @given(st.lists(_LINES.filter(lambda line: b"\n" not in line), max_size=6), st.booleans())
    def check(lines, packed):
        path = tmp_path / ("rows.jsonl.gz" if packed else "rows.jsonl")
        data = b"\n".join(lines)
        path.write_bytes(gzip.compress(data, 1) if packed else data)
        texts, skipped = _read("jsonl", path)
        assert texts == _texts(lines)
        whole = [line for line in lines if line.strip()]
        assert sum(skipped.counts.values()) == len(whole) - len(texts)

    check()


_COLUMNS = st.one_of(
    st.lists(st.text(max_size=9) | st.none(), min_size=1, max_size=4),
    st.lists(st.binary(max_size=9), min_size=1, max_size=4),
    st.lists(st.integers(-9, 9) | st.none(), min_size=1, max_size=4),
    st.lists(st.lists(st.integers(0, 3), max_size=2), min_size=1, max_size=4),
)


@pytest.mark.parametrize("examples", [25, pytest.param(800, marks=pytest.mark.slow)])
def test_any_columns_are_rows_or_counted(tmp_path, examples):
    @_fixed(max_examples=examples)
    @given(_COLUMNS, st.sampled_from(["text", "other"]), st.integers(0, 400), st.booleans())
    def check(values, name, place, damage):
        path = tmp_path / "rows.parquet"
        pyarrow.parquet.write_table(pyarrow.table({name: values}), path)
        if damage:
            data = bytearray(path.read_bytes())
            data[place % len(data)] ^= 255
            path.write_bytes(data)
        texts, skipped = _read("parquet", path)
        assert len(texts) + sum(skipped.counts.values()) >= (0 if damage else 1)
        if damage or name != "text":
            return
        right = []
        for value in values:
            value = value.encode() if isinstance(value, str) else value
            if isinstance(value, bytes) and value:
                try:
                    right.append(value.decode())
                except UnicodeDecodeError:
                    continue
        assert texts == right

    check()


def test_nothing_in_a_file_is_run(tmp_path):
    """Pickles where arrays or rows are expected."""
    import pickle

    import numpy as np

    from train.data import store
    from v41flash.text.tokenizer import ByteTokenizer

    target = tmp_path / "it_ran"
    pickled = pickle.dumps(_Code(target))
    for kind, name in (("jsonl", "rows.jsonl"), ("parquet", "rows.parquet")):
        (tmp_path / name).write_bytes(pickled)
        texts, skipped = _read(kind, tmp_path / name)
        assert not texts and skipped.counts

    corpus = tmp_path / "corpus"
    corpus.mkdir()
    (corpus / "a.txt").write_text("some text " * 9)
    source = sources.open_source("text", str(corpus))
    opened = store.open_or_build(source, ByteTokenizer(), tmp_path / "cache")
    meta_before = (opened.folder / "meta.json").read_text()
    for path in opened.folder.glob("*.npy"):
        before = path.read_bytes()
        np.save(path, np.array([_Code(target)], object), allow_pickle=True)
        # As somebody would who knows how the store is checked.
        meta = json.loads((opened.folder / "meta.json").read_text())
        meta.pop("checksum")
        meta["files"][path.stem] = {
            "bytes": path.stat().st_size,
            "checksum": store._checksum(path),
        }
        meta["checksum"] = store._meta_checksum(meta)
        (opened.folder / "meta.json").write_text(json.dumps(meta))
        with pytest.raises(store.StoreError, match=f"{path.name} is no plain array"):
            store.open_store(opened.folder)
        path.write_bytes(before)
        (opened.folder / "meta.json").write_text(meta_before)
    assert not target.exists()
