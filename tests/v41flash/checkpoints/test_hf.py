"""Published folders: there and back bit for bit, and every fault of one is named."""

import json
import math
import os

import jax
import numpy as np
import pytest
from safetensors import safe_open

from tests.v41flash.checkpoints import folders
from v41flash import presets, sharding
from v41flash.checkpoints import exporting, hf, importing, inventory, leaves, names, streams
from v41flash.checkpoints.leaves import FORMS
from v41flash.checkpoints.orbax import Checkpoints
from v41flash.checkpoints.published import Published
from v41flash.config import ModelConfig
from v41flash.serving.run import Run


def run(*arguments):
    return hf.main([str(argument) for argument in arguments])


@pytest.fixture(scope="module", params=FORMS)
def imported(request, tmp_path_factory):
    """(form, run folder) of the recorded folder with a tokenizer; the run was moved since."""
    folder = tmp_path_factory.mktemp(request.param)
    folders.write_tokenizer(folder / "bytes.json")
    arguments = (f"--workdir={folder / 'made'}", f"--weights={request.param}")
    tokenizer = f"--tokenizer={folder / 'bytes.json'}"
    assert run("import", folders.RECORDED, *arguments, tokenizer) == 0
    (folder / "bytes.json").unlink()
    return request.param, (folder / "made").rename(folder / "run")


def test_there_and_back_is_bit_identical(imported, tmp_path):
    _, workdir = imported
    back = tmp_path / "back"
    assert run("export", f"--workdir={workdir}", back, "--shard-bytes=300000") == 0
    assert run("inspect", back) == 0
    assert folders.tensors(back) == folders.tensors(folders.RECORDED)
    recorded = json.loads((folders.RECORDED / "config.json").read_text())
    assert json.loads((back / "config.json").read_text()) == recorded
    index = json.loads((back / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    assert max(path.stat().st_size for path in back.glob("*.safetensors")) < 400_000
    # And once more from there.
    assert run("import", back, f"--workdir={tmp_path / 'again'}") == 0
    assert run("export", f"--workdir={tmp_path / 'again'}", tmp_path / "last") == 0
    assert folders.tensors(tmp_path / "last") == folders.tensors(folders.RECORDED)


@pytest.mark.parametrize("form", ["packed", "bfloat16"])
def test_arrays_in_many_chunks(form, tmp_path, monkeypatch):
    """What the sizes of the released model come to: chunks of a few rows, pieces of fewer."""
    monkeypatch.setattr(streams, "CHUNK_BYTES", 3000)
    monkeypatch.setattr(exporting, "_PIECE_BYTES", 700)
    published = Published.open(folders.RECORDED)
    wanted = [leaf for leaf in leaves.leaves(published, form) if leaf.path[-1] in MANY]
    streams.write(tmp_path / "checkpoints", wanted, {})
    for leaf in wanted:
        item, *path = leaf.path
        stored = streams.open_item(tmp_path / "checkpoints" / "0", item)[tuple(path)]
        small = math.prod(leaf.shape) * leaf.dtype.itemsize <= 3000
        layer = (*(1 for _ in leaf.lead), *leaf.layout.shape)
        assert small == (stored.chunk_layout.read_chunk.shape == layer)
        whole = leaf.read(tuple(slice(None) for _ in leaf.shape))
        np.testing.assert_array_equal(stored.read().result(), whole)
        where = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        abstract = {}
        names.insert(
            abstract, tuple(path), jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where)
        )
        if item in (names.MODEL, names.DRAFT):
            placed = importing.to_devices(published, abstract, form, item)
            np.testing.assert_array_equal(jax.tree.leaves(placed)[0], whole)


MANY = ("w13", "wo_b", "table", "head", "main_proj")


@pytest.mark.slow
def test_export_in_small_pieces_and_of_large_chunks(imported, tmp_path, monkeypatch):
    _, workdir = imported
    monkeypatch.setattr(exporting, "_PIECE_BYTES", 700)
    # Every chunk is too large to be read for a piece of it: arrays are read whole.
    monkeypatch.setattr(streams, "CHUNK_BYTES", 1)
    assert run("export", f"--workdir={workdir}", tmp_path / "back") == 0
    assert folders.tensors(tmp_path / "back") == folders.tensors(folders.RECORDED)


def test_the_safetensors_library_reads_what_is_written(imported, tmp_path):
    form, workdir = imported
    if form != "packed":
        pytest.skip("the files are the same")
    assert run("export", f"--workdir={workdir}", tmp_path / "back") == 0
    ours = folders.tensors(tmp_path / "back")
    with safe_open(tmp_path / "back" / "model.safetensors", framework="numpy") as file:
        assert set(file.keys()) == set(ours)
        for name, (dtype, shape, data) in ours.items():
            part = file.get_slice(name)
            assert (part.get_dtype(), tuple(part.get_shape())) == (dtype, shape)
            if dtype in ("F32", "I8"):
                assert file.get_tensor(name).tobytes() == data


def test_a_run_folder_says_what_it_is(imported):
    form, workdir = imported
    config = json.loads((workdir / "config.json").read_text())
    model = ModelConfig.from_dict(config["model"])
    published = Published.open(folders.RECORDED).config
    assert (model.hidden_size, model.layers) == (published.hidden_size, published.layers)
    assert model.weight_form == ("packed" if form == "packed" else "expanded")
    with Checkpoints(workdir / "checkpoints") as checkpoints:
        assert checkpoints.steps() == [0]
        assert checkpoints.meta(0)["config"] == config


def test_serving_reads_an_imported_run(imported):
    form, workdir = imported
    loaded = Run.load(workdir)
    assert (loaded.step, loaded.config.dense_selection) == (0, False)
    kinds = {str(leaf.dtype) for leaf in jax.tree.leaves(loaded.params)}
    assert ("uint8" in kinds) == (form == "packed")
    assert loaded.tokenizer.vocab_size == 256
    assert loaded.tokenizer.decode(loaded.tokenizer.encode("été")) == "été"


def test_parameters_restore_and_equal_the_mapping(imported):
    form, workdir = imported
    if form == "packed":
        pytest.skip("compared through the model in test_packed")
    published = Published.open(folders.RECORDED)
    expected = names.to_params(published.config, published.values)
    mesh = sharding.make_mesh({"data": 1}, jax.devices()[:1])
    where = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    abstract = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, np.float32, sharding=where), expected
    )
    with Checkpoints(workdir / "checkpoints") as checkpoints:
        restored = checkpoints.restore_params(0, abstract)
    placed = importing.to_devices(published, abstract, form)
    for tree in (restored, placed):
        jax.tree.map(np.testing.assert_array_equal, tree, expected)


def test_the_released_model_has_its_published_size():
    """96,085 tensors of 510,286,023,000 bytes, every one of them a part of some parameter."""
    config = presets.v41_flash()
    assert inventory.totals(config) == (510_286_023_000, 96_085)
    made = {}
    for parameter in names.parameters(config):
        for source in parameter.sources.values():
            made |= dict.fromkeys(source.names, parameter.layout.published)
    wanted = {name: weight.shape for name, weight in inventory.by_name(config).items()}
    assert made == wanted


# -- Faults ---------------------------------------------------------------------------------------

FILE = "model.safetensors"


def drop(name):
    return lambda tensors: {key: value for key, value in tensors.items() if key != name}


def replace(name, dtype=None, array=None):
    def change(tensors):
        entry, old = tensors[name]
        new = old if array is None else array
        entry = entry._replace(dtype=dtype or entry.dtype, shape=new.shape)
        return tensors | {name: (entry, new)}

    return change


NORM = "layers.2.attn.q_norm.weight"
EXPERT = "layers.1.ffn.experts.3.w2.weight"
FAULTS = {
    "missing": (drop(EXPERT), f"missing: {EXPERT} I8 [64, 16]"),
    "shape": (
        replace(EXPERT, array=np.zeros((64, 15), np.uint8)),
        f"{EXPERT}: shape [64, 15]; must be [64, 16]",
    ),
    "dtype": (replace(EXPERT, dtype="U8"), f"{EXPERT}: dtype U8; must be I8"),
    "unexpected": (
        lambda tensors: tensors | {"layers.2.mystery": tensors[NORM]},
        "unexpected: layers.2.mystery",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named_and_refused(tmp_path, capsys, fault):
    change, line = FAULTS[fault]
    folder = folders.copy(tmp_path / "folder")
    folders.rewrite(folder / FILE, change)
    assert run("inspect", folder) == 1
    out = capsys.readouterr().out.splitlines()
    assert len(out) == 2 and line in out[0] and "1 problems" in out[1]
    assert run("import", folder, f"--workdir={tmp_path / 'run'}") == 1
    captured = capsys.readouterr()
    assert line in captured.err and len(captured.err.splitlines()) == 1
    assert not (tmp_path / "run").exists()


def test_a_truncated_file_is_named(tmp_path, capsys):
    folder = folders.copy(tmp_path / "folder")
    path = folder / FILE
    os.truncate(path, path.stat().st_size - 10)
    assert run("inspect", folder) == 1
    assert f"{path}: truncated: 10 bytes are missing" in capsys.readouterr().out


@pytest.mark.parametrize(
    "name", ["../model.safetensors", "/etc/x.safetensors", "a/b.safetensors", "..", "x.bin", 7]
)
def test_an_index_leads_nowhere_else(tmp_path, capsys, name):
    folder = folders.copy(tmp_path / "folder")
    index = {"weight_map": {"embed.weight": name}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert run("inspect", folder) == 1
    error = capsys.readouterr().err
    assert "must be the name of a .safetensors file in the same folder" in error
    assert len(error.splitlines()) == 1


def test_an_index_that_is_wrong(tmp_path, capsys):
    folder = folders.copy(tmp_path / "folder")
    weight_map = dict.fromkeys(folders.tensors(folder), FILE)
    del weight_map[NORM]
    weight_map["mystery"] = FILE
    index = {"metadata": {"total_size": 5}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert run("inspect", folder) == 1
    out = capsys.readouterr().out
    assert f"{NORM} is not listed there" in out
    assert f"mystery is not in {FILE}" in out
    assert "total_size is 5; must be 1297992" in out


def test_v4_flash_is_refused(tmp_path, capsys):
    folder = folders.copy(tmp_path / "folder")
    (folder / "config.json").write_text(json.dumps({"model_type": "deepseek_v4"}))
    for command in (("inspect", folder), ("import", folder, f"--workdir={tmp_path / 'run'}")):
        assert run(*command) == 1
        error = capsys.readouterr().err
        assert "DeepSeek-V4 model, which is another architecture" in error
        assert len(error.splitlines()) == 1


def test_v4_flash_weights_are_refused(tmp_path, capsys):
    folder = folders.copy(tmp_path / "folder")
    routing = "layers.0.ffn.gate.tid2eid"
    folders.rewrite(folder / FILE, lambda tensors: tensors | {routing: tensors[NORM]})
    assert run("inspect", folder) == 1
    error = capsys.readouterr().err
    assert f"{routing} is a part of DeepSeek-V4-Flash, which is another architecture" in error


def test_nothing_is_overwritten(imported, tmp_path, capsys):
    _, workdir = imported
    assert run("import", folders.RECORDED, f"--workdir={workdir}") == 2
    assert "holds checkpoints already" in capsys.readouterr().err
    assert run("export", f"--workdir={workdir}", folders.RECORDED) == 2
    assert "is not empty" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((), "command"),
        (("import", "x"), "--workdir"),
        (("import", "x", "--workdir=y", "--weights=int8"), "int8"),
        (("export", "x", "--workdir=nothing"), "not a run folder"),
    ],
)
def test_usage_is_status_2_and_one_line(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    try:
        status = run(*arguments)
    except SystemExit as stop:
        status = stop.code
    error = capsys.readouterr().err
    assert status == 2
    assert message in error and len(error.splitlines()) == 1


def test_a_missing_folder_is_one_line(tmp_path, capsys):
    assert run("inspect", tmp_path / "nothing") == 1
    error = capsys.readouterr().err
    assert "nothing" in error and len(error.splitlines()) == 1
