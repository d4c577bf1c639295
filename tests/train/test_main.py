"""The command line: a wrong one ends with status 2 and one line that names what is wrong."""

import pathlib

import pytest

from train import main as main_lib

_FILE = """
import pathlib
from tests.train import micro

def get_config():
    return micro.config(pathlib.Path({folder!r}))
"""


@pytest.fixture
def config_file(tmp_path):
    path = tmp_path / "config.py"
    path.write_text(_FILE.format(folder=str(tmp_path)))
    return path


def test_overrides_reach_the_configuration(config_file, tmp_path):
    config, workdir = main_lib.parse(
        [
            f"--config={config_file}",
            f"--workdir={tmp_path / 'run'}",
            "--config.train.steps=3",
            "--config.optimizer.decay_from=4",
            "--config.optimizer.final_learning_rate=0.5",
            "--config.kernels.indexer=xla",
            "--config.model.engram_layer_ids=(1,)",
            "--config.train.stages=((2, {'model.index_topk': 3}),)",
            "--config.eval.byte_ngram=true",
            "--config.mesh.distributed=False",
        ]
    )
    assert config.train.steps == 3
    assert config.optimizer.decay_from == 4
    assert config.optimizer.final_learning_rate == 0.5
    assert config.kernels.indexer == "xla"
    assert config.model.engram_layer_ids == (1,)
    assert config.train.stages == ((2, {"model.index_topk": 3}),)
    assert config.eval.byte_ngram is True
    assert config.mesh.distributed is False
    assert workdir == tmp_path / "run"
    with pytest.raises(AttributeError):
        config.train.no_such_key = 1


@pytest.mark.parametrize(
    ("flags", "names"),
    [
        (["--config.model.no_such_key=1"], "config.model.no_such_key: no such key"),
        (["--config.model.index_topkk=1"], "did you mean model.index_topk?"),
        (["--config.no_such_section.key=1"], "config.no_such_section.key"),
        (["--config.model=1"], "config.model: is a section"),
        (["--config.train.steps=many"], "config.train.steps=many"),
        (["--config.train.steps=0"], "train.steps = 0: must be at least 1"),
        (["--config.train.stages=5"], "train.stages: 5"),
        (["--config.model.index_topk=-1"], "index_topk = -1"),
        (["--config.optimizer.warmup_steps=9", "--config.optimizer.decay_from=3"], "decay_until"),
        (["--config.data.path=/no/such/folder"], "/no/such/folder"),
        (["--config.data.batch_size=3", "--config.train.accumulation=2"], "data.batch_size = 3"),
        (["--config.mesh.fsdp=1000"], "mesh"),
        (["--config.kernels.mhc=none_such"], "none_such"),
        (
            ["--config.train.stages=((1, {'model.hidden_size': 64}),)"],
            "from step 1: overrides ['model.hidden_size'] change parameter",
        ),
        (["stray"], "'stray' is no flag"),
        (["--no_such_flag=1"], "no_such_flag"),
    ],
)
def test_wrong_flags_are_one_line_and_status_two(config_file, tmp_path, capsys, flags, names):
    workdir = tmp_path / "run"
    status = main_lib.main([f"--config={config_file}", f"--workdir={workdir}", *flags])
    error = capsys.readouterr().err
    assert status == 2
    assert names in error
    assert error.count("\n") == 1
    assert not workdir.exists()


def test_missing_flags_and_files(config_file, tmp_path, capsys):
    broken = tmp_path / "broken.py"
    broken.write_text("def get_config():\n    return no_such_name\n")
    for arguments, names in (
        ([], "--config is missing"),
        (["--config"], "--config is missing"),
        ([f"--config={config_file}"], "--workdir is missing"),
        (["--config=no/such/file.py", "--workdir=x"], "no/such/file.py"),
        ([f"--config={broken}", "--workdir=x"], "no_such_name"),
    ):
        assert main_lib.main(arguments) == 2
        error = capsys.readouterr().err
        assert names in error
        assert error.count("\n") == 1
    assert not pathlib.Path("x").exists()


def test_help(capsys):
    assert main_lib.main(["--help"]) == 0
    assert "--workdir" in capsys.readouterr().out
