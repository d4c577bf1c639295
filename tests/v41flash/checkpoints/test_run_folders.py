"""Run folders of imports and exports: tokenizers that go along, and what is in the way."""

import json
import shutil

import pytest

from tests.v41flash.checkpoints import folders
from v41flash.checkpoints import hf, inventory, published, streams, workdirs
from v41flash.checkpoints.tensor_files import Item, write
from v41flash.errors import InputError
from v41flash.serving.run import Run
from v41flash.text.tokenizer import file_fingerprint


def run(*arguments):
    return hf.main([str(argument) for argument in arguments])


def refused(capsys, status, *arguments):
    """The one line of an error."""
    capsys.readouterr()
    assert run(*arguments) == status
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1
    return error


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """The recorded folder with a tokenizer of bytes."""
    folder = folders.copy(tmp_path_factory.mktemp("source") / "published")
    folders.write_tokenizer(folder / "tokenizer.json")
    return folder


@pytest.fixture(scope="module")
def workdir(source, tmp_path_factory):
    """An import of it that was moved since."""
    folder = tmp_path_factory.mktemp("runs")
    assert run("import", source, f"--workdir={folder / 'first'}") == 0
    return (folder / "first").rename(folder / "moved")


def write_run(folder, config):
    """A run folder of a configuration and an empty checkpoint."""
    (folder / "checkpoints" / "0").mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


# -- Tokenizers -----------------------------------------------------------------------------------


def test_a_tokenizer_goes_along(source, workdir, tmp_path, capsys, monkeypatch):
    back, again = tmp_path / "back", tmp_path / "again"
    assert run("export", f"--workdir={workdir}", back) == 0
    assert (back / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    assert "; no " not in capsys.readouterr().out
    written = []
    monkeypatch.setattr(streams, "write", lambda *own: written.append(own))
    assert run("import", back, f"--workdir={again}") == 0
    assert "tokenizer tokenizer.json" in capsys.readouterr().out
    config = json.loads((again / "config.json").read_text())
    file = workdirs.tokenizer_file(config["data"]["tokenizer"], again)
    assert file == again / "tokenizer.json"
    ids = (config["model"][f"{role}_token_id"] for role in ("bos", "eos", "pad"))
    assert written[0][2]["tokenizer"] == file_fingerprint(file.read_bytes(), *ids)


def test_a_named_tokenizer(source, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(streams, "write", lambda *_: None)
    monkeypatch.chdir(source)
    for given, stored in (("tokenizer.json", "tokenizer.json"), ("byte", "byte")):
        target = tmp_path / given
        assert run("import", source, f"--workdir={target}", f"--tokenizer={given}") == 0
        assert json.loads((target / "config.json").read_text())["data"]["tokenizer"] == stored
        assert (target / "tokenizer.json").exists() == (given == "tokenizer.json")
    arguments = ("import", source, f"--workdir={tmp_path / 'none'}", "--tokenizer=absent.json")
    assert "tokenizer 'absent.json': no such file" in refused(capsys, 2, *arguments)
    assert not (tmp_path / "none").exists()


def test_a_tokenizer_of_another_model(workdir, tmp_path, capsys):
    """One line at the import where its file is at hand, otherwise where it is used."""
    source = folders.copy(tmp_path / "published")
    (source / "tokenizer.json").write_text('{"a": 1}')
    target = f"--workdir={tmp_path / 'run'}"
    assert "tokenizer.json" in refused(capsys, 2, "import", source, target)
    assert not (tmp_path / "run").exists()

    large = tmp_path / "large"
    shutil.copytree(workdir, large)
    config = json.loads((large / "config.json").read_text())
    config["data"]["tokenizer"] = "byte"
    (large / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match=r"large: tokenizer 'byte' has 259 ids; .* is 256"):
        Run.load(large)


def test_what_cannot_stay_packed(tmp_path, capsys):
    arguments = ("import", folders.RECORDED.parent / "layout_i", f"--workdir={tmp_path / 'run'}")
    assert "take --weights=bfloat16 or float32" in refused(capsys, 2, *arguments)


def test_a_shard_out_of_reach_is_named_once(tmp_path, capsys):
    folder = tmp_path / "published"
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copyfile(folders.RECORDED / name, folder / name)
    names = list(folders.tensors(folder))
    shard = "model-00001-of-00001.safetensors"
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").unlink()
    (folder / shard).write_bytes(data[:100])
    index = {"metadata": {}, "weight_map": dict.fromkeys(names, shard)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert run("inspect", folder) == 1
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert f"{shard}: {len(names)} tensors are out of reach" in lines[1]


def test_an_export_says_that_it_has_no_tokenizer(workdir, tmp_path, capsys):
    named = tmp_path / "run"
    shutil.copytree(workdir, named)
    config = json.loads((named / "config.json").read_text())
    config["data"]["tokenizer"] = "byte"
    (named / "config.json").write_text(json.dumps(config))
    assert run("export", f"--workdir={named}", tmp_path / "back") == 0
    assert "no tokenizer.json: the tokenizer is 'byte'" in capsys.readouterr().out
    assert not (tmp_path / "back" / "tokenizer.json").exists()
    config["data"]["tokenizer"] = "gone.json"
    (named / "config.json").write_text(json.dumps(config))
    error = refused(capsys, 2, "export", f"--workdir={named}", tmp_path / "other")
    assert "tokenizer 'gone.json': no such file" in error


# -- What is in the way ---------------------------------------------------------------------------


def test_a_run_without_checkpoints_is_kept(source, tmp_path, capsys):
    for text in ('{"train": {"steps": 5, "stages": []}}', "[]", "{"):
        (tmp_path / "config.json").write_text(text)
        error = refused(capsys, 2, "import", source, f"--workdir={tmp_path}")
        assert "config.json: belongs to another run" in error
        assert (tmp_path / "config.json").read_text() == text
        assert not (tmp_path / "tokenizer.json").exists()


def test_an_interrupted_import_is_done_again(source, tmp_path, capsys, monkeypatch):
    def fail(*_):
        raise OSError(28, "No space left on device", "checkpoints")

    target = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(streams, "write", fail)
        error = refused(capsys, 1, "import", source, f"--workdir={target}")
    assert error == "error: checkpoints: No space left on device\n"
    monkeypatch.setattr(streams, "write", lambda *_: None)
    assert run("import", source, f"--workdir={target}", "--weights=bfloat16") == 0
    model = json.loads((target / "config.json").read_text())["model"]
    assert model["weight_form"] == "expanded"


def test_what_an_interrupted_export_left(workdir, tmp_path):
    partial = tmp_path / "back.partial"
    partial.mkdir()
    (partial / "model-00001-of-00009.safetensors").write_bytes(b"half")
    assert run("export", f"--workdir={workdir}", tmp_path / "back") == 0
    assert run("inspect", tmp_path / "back") == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["back"]
    assert len(list((tmp_path / "back").iterdir())) == 3


def test_targets_that_cannot_be(workdir, tmp_path, capsys):
    file = tmp_path / "file"
    file.write_text("kept")
    assert "is not a folder" in refused(capsys, 2, "export", f"--workdir={workdir}", file)
    assert str(file) in refused(capsys, 1, "export", f"--workdir={workdir}", file / "below")
    arguments = ("import", folders.RECORDED, f"--workdir={file / 'below'}")
    assert str(file) in refused(capsys, 1, *arguments)
    assert file.read_text() == "kept"


SECTIONS = {"model": {}, "data": {"tokenizer": "byte"}, "train": {}}
CONFIGS = {
    "empty": ({}, "model must be an object"),
    "a list": ([], "must be a JSON object"),
    "a number": (5, "must be a JSON object"),
    "a section": (SECTIONS | {"train": []}, "train must be an object"),
    "tokenizer": (SECTIONS | {"data": {}}, "data.tokenizer = None: must be a text"),
    "init_from": (SECTIONS | {"train": {"init_from": 5}}, "train.init_from = 5: must be a text"),
    "model": (SECTIONS, "config.json: model: "),
    "vision": (SECTIONS | {"model": {"vision": 5}}, "config.json: model: "),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_a_configuration_that_is_none(tmp_path, capsys, case):
    config, message = CONFIGS[case]
    folder = write_run(tmp_path / "run", config)
    error = refused(capsys, 2, "export", f"--workdir={folder}", tmp_path / "back")
    assert message in error and str(folder) in error


def test_a_base_of_another_form(workdir, tmp_path, capsys):
    config = json.loads((workdir / "config.json").read_text())
    config["model"] |= {"weight_form": "expanded", "activation_format": "none"}
    base = write_run(tmp_path / "base", config)
    arguments = ("export", f"--workdir={workdir}", f"--base={base}", tmp_path / "back")
    error = refused(capsys, 2, *arguments)
    assert f"{base}: model.weight_form is 'expanded'; the run's is 'packed'" in error


# -- Folders without end --------------------------------------------------------------------------


def test_tensors_of_all_files_are_counted(tmp_path, capsys, monkeypatch):
    folder = folders.copy(tmp_path / "folder")
    _, tensors = inventory.totals(published.read_config(folder))
    monkeypatch.setattr(published, "_MAX_TENSORS", tensors)
    assert run("inspect", folder) == 0
    write(folder / "more.safetensors", [Item("more", "U8", (0,), [])])
    error = refused(capsys, 1, "inspect", folder)
    assert f"{tensors + 1} tensors; a folder has at most {tensors}" in error


def test_files_are_counted(tmp_path, capsys, monkeypatch):
    folder = folders.copy(tmp_path / "folder")
    monkeypatch.setattr(published, "_MAX_COUNT", 40)
    for number in range(40):
        (folder / f"{number}.safetensors").touch()
    assert "41 tensor files; must be at most 40" in refused(capsys, 1, "inspect", folder)
