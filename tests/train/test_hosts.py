"""Several processes, and meshes one after the other, do what one process on one mesh does."""

import json
import os
import socket
import subprocess
import sys

import numpy as np
import pytest

from tests.train import micro
from train import main

ON_EIGHT = {"data": 1, "fsdp": 2, "expert": 2, "context": 2}
ON_FOUR = {"data": 2, "tensor": 2}


def start(folder, workdir, devices, mesh, steps, *flags):
    """A process that trains; `devices` are its own."""
    xla = f"--xla_force_host_platform_device_count={devices} "
    xla += "--xla_cpu_enable_concurrency_optimized_scheduler=false"
    env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": xla}
    sizes = [f"--config.mesh.{axis}={size}" for axis, size in mesh.items()]
    command = [sys.executable, "-m", "train.main", f"--config={folder / 'config.py'}"]
    command += [f"--workdir={workdir}", f"--config.train.steps={steps}", *sizes, *flags]
    return subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def finish(*processes):
    outputs = [process.communicate(timeout=900)[0] for process in processes]
    for process, output in zip(processes, outputs, strict=True):
        assert process.returncode == 0, output[-4000:]


def losses(workdir):
    rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows], rows[-1]["heldout_loss"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    where = tmp_path_factory.mktemp("hosts")
    (where / "config.py").write_text(
        "import pathlib\n"
        "from tests.train import micro\n\n\n"
        "def get_config():\n"
        "    config = micro.config(pathlib.Path(__file__).parent).unlock()\n"
        "    config.model.engram_row_multiple = 8\n"
        "    config.model.main_kv_format = 'none'\n"
        "    config.model.window_kv_format = 'none'\n"
        "    config.data.batch_size = 8\n"
        "    return config\n"
    )
    micro.write_corpus(where / "text")
    return where


@pytest.mark.slow
def test_two_processes_and_another_mesh_give_the_losses_of_one(folder, tmp_path):
    """Two processes of 4 devices do two steps; one with 4, laid out otherwise, goes on to four."""
    alone, parts = tmp_path / "alone", tmp_path / "parts"
    finish(start(folder, alone, 8, ON_EIGHT, 4))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    cluster = [f"--coordinator=127.0.0.1:{port}", "--processes=2"]
    finish(*(start(folder, parts, 4, ON_EIGHT, 2, *cluster, f"--process={i}") for i in range(2)))
    assert len(losses(parts)[0]) == 2
    saved = sorted(path.name for path in (parts / "checkpoints").iterdir())
    assert saved == ["2"]
    four = {axis: 1 for axis in ON_EIGHT} | ON_FOUR
    finish(start(folder, parts, 4, four, 4))
    (one, one_heldout), (several, several_heldout) = losses(alone), losses(parts)
    np.testing.assert_allclose(several, one, rtol=1e-5)
    np.testing.assert_allclose(several_heldout, one_heldout, rtol=1e-5)
    # The optimizer and the data went on too: a fresh start would give other losses.
    assert len(set(one)) == 4


def test_a_process_number_without_its_cluster_is_refused(folder, tmp_path, capsys):
    config = f"--config={folder / 'config.py'}"
    assert main.main([config, f"--workdir={tmp_path}", "--processes=2", "--process=2"]) == 2
    assert "give all three" in capsys.readouterr().err
