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
        ([CONFIG, "--topology=v5p:2x2x1", "--optimization=O9"], "should be one of <O0|"),
    ):
        assert aot.main(arguments) == 2
        said = capsys.readouterr().err
        assert words in said and said.count("\n") == 1


def compiled(folder, *arguments, **variables):
    """The report of a step, compiled in a process of its own: the compiler wants its environment
    first, and keeps no programs in a cache."""
    env = {name: value for name, value in os.environ.items() if "CACHE" not in name} | variables
    command = [sys.executable, "-m", "train.aot", *arguments, f"--json={folder / 'report.json'}"]
    done = subprocess.run(
        command, env=env | {"JAX_PLATFORMS": "cpu"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads((folder / "report.json").read_text())


@pytest.mark.slow
@needs_compiler
def test_step_compiles_for_an_absent_pod(tmp_path):
    sizes = ["--config.mesh.data=1", "--config.mesh.fsdp=2", "--config.mesh.expert=2"]
    sizes += ["--config.model.engram_row_multiple=4"]
    report = compiled(tmp_path, CONFIG, "--topology=v5p:2x2x1", "--stage=1", *sizes)
    assert report["devices"] == 4 and report["device_kind"] == "TPU v5"
    assert 0 < report["parameter_bytes"] < report["peak_bytes"] < report["hbm_bytes"]
    assert report["collectives"]["all-gather"]["bytes"] > 0
    assert report["dot_flops"] > 0
    assert report["optimization"] == aot.OPTIMIZATION[0]


@pytest.mark.slow
@needs_compiler
def test_tables_that_do_not_divide_are_one_line():
    command = [sys.executable, "-m", "train.aot", CONFIG, "--topology=v5p:2x2x1"]
    done = subprocess.run(
        [*command, "--program=decode", "--tokens=65536"], capture_output=True, text=True
    )
    assert done.returncode == 2 and "model.engram_row_multiple=4 fills them up" in done.stderr


# Topologies of each generation, and their devices.
GENERATIONS = {"v5e:4x4": 16, "v5p:2x2x1": 4, "v6e:2x4": 8, "tpu7x:2x2x1": 8}


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("topology", GENERATIONS)
@pytest.mark.parametrize("program", ["train", "decode"])
def test_small_compiles_with_its_kernels_for(topology, program, tmp_path):
    """The sparse stage of the run in docs/results/small.md, and a decode step of 64K tokens."""
    devices = GENERATIONS[topology]
    arguments = ["--config=configs/small.py", f"--topology={topology}", f"--program={program}"]
    arguments += [f"--config.model.engram_row_multiple={devices}"]
    if program == "train":
        arguments += ["--stage=1", "--config.mesh.data=1", "--config.mesh.expert=2"]
        arguments += [f"--config.mesh.context={devices // 2}"]
    else:
        arguments += ["--tokens=65536"]
    variables = {}
    if topology.startswith("tpu7x"):
        # What libtpu 0.0.42.1 moves to SparseCores fails a check of its own there.
        kinds = ("all_gather", "reduce_scatter", "all_reduce")
        offload = "--xla_tpu_enable_sparse_core_collective_offload_"
        variables["LIBTPU_INIT_ARGS"] = " ".join(f"{offload}{kind}=false" for kind in kinds)
    report = compiled(tmp_path, *arguments, **variables)
    assert report["fits"] and report["devices"] == devices
    others = {op for op, found in report["kernels"].items() if set(found) != {"mosaic_tpu"}}
    assert {"sparse_attention", "indexer.select", "mhc.write_read"} <= set(report["kernels"])
    # Pools whose ranges begin within a block, a branch that is chosen at run time; the tables that
    # serving reads are in bfloat16.
    assert others <= ({"topk"} if program == "train" else {"topk", "engram_gather"})
