"""Compiling a run's step for a TPU topology that is not there."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest

from train import aot

needs_compiler = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="no libtpu (pip install -e '.[tpu]')"
)
CONFIG = "--config=configs/quickstart.py"


def test_mistakes_are_one_line(capsys):
    for arguments, words in (
        ([CONFIG], "--topology is missing"),
        ([CONFIG, "--topology=v5p:2x2x1", "--stage=9"], "stages 0 to 1"),
        (["--config=nothing.py", "--topology=v5p:2x2x1"], "no such file"),
    ):
        assert aot.main(arguments) == 2
        said = capsys.readouterr().err
        assert words in said and said.count("\n") == 1


@pytest.mark.slow
@needs_compiler
def test_step_compiles_for_an_absent_pod(tmp_path):
    """In a process of its own, as the compiler wants its environment first."""
    command = [sys.executable, "-m", "train.aot", CONFIG, "--topology=v5p:2x2x1", "--stage=1"]
    command += ["--config.mesh.data=1", "--config.mesh.fsdp=2", "--config.mesh.expert=2"]
    command += [f"--json={tmp_path / 'report.json'}"]
    done = subprocess.run(command, env=os.environ | {"JAX_PLATFORMS": "cpu"}, capture_output=True)
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["devices"] == 4 and report["device_kind"] == "TPU v5"
    assert 0 < report["parameter_bytes"] < report["peak_bytes"] < report["hbm_bytes"]
    assert report["collectives"]["all-gather"]["bytes"] > 0
    assert report["dot_flops"] > 0
