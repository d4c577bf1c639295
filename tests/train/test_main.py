"""The command line: a wrong one ends with status 2 and one line that names what is wrong."""

import os
import pathlib

import pytest

from train import main as main_lib
from v41flash.errors import InputError
from v41flash.nn import ced

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
            "--config.model.engram_layer_ids=(0,)",
            "--config.train.stages=((2, {'model.index_topk': 3}),)",
            "--config.eval.byte_ngram=true",
            "--config.mesh.distributed=False",
        ]
    )
    assert config.train.steps == 3
    assert config.optimizer.decay_from == 4
    assert config.optimizer.final_learning_rate == 0.5
    assert config.kernels.indexer == "xla"
    assert config.model.engram_layer_ids == (0,)
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
        (["--config.optimizer.name=sgd"], "optimizer.name = 'sgd'"),
        (["--config.data.path=/no/such/folder"], "/no/such/folder"),
        (["--config.data.sequence_length=100"], "data.sequence_length=100: must be a multiple"),
        (["--config.data.held_out_fraction=1.5"], "data.held_out_fraction=1.5"),
        (["--config.data.held_out_fraction=1e-15"], "the heldout split has no documents"),
        (["--config.data.tokenizer=/no/such.json"], "/no/such.json"),
        (["--config.model.engram_num_embeddings=(5,)"], "engram_num_embeddings"),
        # In a later stage, too.
        (["--config.train.stages=((3, {'data.sequence_length': 20}),)"], "sequence_length=20"),
        (["--config.train.stages=((3, {'data.batch_size': 7, 'train.accumulation': 2}),)"], "= 7"),
        (["--config.train.stages=((3, {'data.path': '/no/such'}),)"], "/no/such"),
        (["--config.mesh.distributed=True"], "mesh.distributed=True: "),
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


@pytest.mark.parametrize("workdir", ["/dev/null/run", "/dev/null"])
def test_a_folder_that_cannot_be_written(config_file, capsys, workdir):
    assert main_lib.main([f"--config={config_file}", f"--workdir={workdir}"]) == 2
    error = capsys.readouterr().err
    assert f"--workdir={workdir}: must be a folder that can be written to" in error
    assert error.count("\n") == 1


def test_a_fault_of_the_code_keeps_its_traceback(config_file, tmp_path, monkeypatch):
    """Only declared input errors become one line; a ValueError out of the model is none."""

    def fault(*_):
        raise ValueError("shapes do not match")

    monkeypatch.setattr(ced, "make_context", fault)
    with pytest.raises(ValueError, match="shapes do not match") as caught:
        main_lib.main([f"--config={config_file}", f"--workdir={tmp_path / 'run'}"])
    assert not isinstance(caught.value, InputError)
    assert any(entry.name == "fault" for entry in caught.traceback)
    assert not (tmp_path / "run").exists()


def test_the_program_leaves_the_environment_of_an_importer_alone(monkeypatch):
    assert "concurrency_optimized" not in os.environ.get("XLA_FLAGS", "")
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=1")
    main_lib.bound_cpu_memory()
    main_lib.bound_cpu_memory()
    flags = os.environ["XLA_FLAGS"].split()
    assert flags == [
        "--xla_force_host_platform_device_count=1",
        "--xla_cpu_enable_concurrency_optimized_scheduler=false",
    ]


def test_missing_flags_and_files(config_file, tmp_path, capsys):
    broken = tmp_path / "broken.py"
    broken.write_text("def get_config():\n    return no_such_name\n")
    unfinished = tmp_path / "unfinished.py"
    unfinished.write_text("def get_config(:\n")
    impossible = tmp_path / "impossible.py"
    impossible.write_text(
        "from v41flash import presets\ndef get_config():\n    presets.tiny(index_topk=-1)\n"
    )
    for arguments, names in (
        ([], "--config is missing"),
        (["--config"], "--config is missing"),
        ([f"--config={config_file}"], "--workdir is missing"),
        (["--config=no/such/file.py", "--workdir=x"], "no/such/file.py"),
        ([f"--config={broken}", "--workdir=x"], f"{broken}: line 2: NameError: "),
        ([f"--config={unfinished}", "--workdir=x"], f"{unfinished}, line 1: SyntaxError: "),
        (
            [f"--config={impossible}", "--workdir=x"],
            f"{impossible}: line 3: ConfigError: index_topk",
        ),
    ):
        assert main_lib.main(arguments) == 2
        error = capsys.readouterr().err
        assert names in error
        assert error.count("\n") == 1
    assert not pathlib.Path("x").exists()


def test_help(capsys):
    assert main_lib.main(["--help"]) == 0
    assert "--workdir" in capsys.readouterr().out
