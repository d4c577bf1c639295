"""The same results on meshes of 8 devices, with the work spread over them."""

import json
import os
import pathlib
import subprocess
import sys

import pytest


@pytest.fixture(scope="module")
def output():
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    environment = {
        **os.environ,
        "XLA_FLAGS": flags,
        "JAX_PLATFORMS": "cpu",
        "TF_CPP_MIN_LOG_LEVEL": "2",
    }
    done = subprocess.run(
        [sys.executable, "-m", "tests.v41flash.optim.mesh_run"],
        cwd=pathlib.Path(__file__).parents[3],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def lines(output):
    """One device, then one line a mesh."""
    return output[:-2]


@pytest.fixture(scope="module")
def others(output):
    """What else an optimizer goes through on a mesh, with Auto axes and with Explicit ones."""
    return output[-2:]


def test_equal_on_every_mesh(lines):
    """Auto axes and Explicit ones, the mesh in force and the mesh given."""
    for line in lines[1:]:
        assert line["error"] < 1e-6, line


def test_state_keeps_its_layout(lines):
    for line in lines[1:]:
        assert line["momenta"] == 6 and line["kept"], line


def test_work_is_spread(lines):
    """8 heads and 16 expert halves of one shape: 24 matrices alone; on 8 devices 1 and 2 each."""
    alone, *meshes = lines
    assert alone == {"alone": 24}
    assert len(meshes) == 11
    assert {line["each"] for line in meshes} == {2}


def test_nothing_is_made_whole_that_the_optimizer_is_told_of(lines):
    """A device holds 256 elements of the largest parameter."""
    placed = [line for line in lines[1:] if line["placed"]]
    assert len(placed) == 3
    assert all(line["gathered"] <= 256 for line in placed)


@pytest.mark.parametrize("way", ["injected", "scanned"])
def test_injected_numbers_and_loops(others, way):
    """`optax.inject_hyperparams`; steps inside of scan and cond, which refuse another layout."""
    assert [line["axes"] for line in others] == ["Auto", "Explicit"]
    for line in others:
        # A rate in the state is float32, one that is not is a constant of the program.
        assert line[way]["error"] < 1e-5 and line[way]["kept"] and line[way]["momenta"] == 6, line


def test_row_sparse_steps(others):
    for line in others:
        assert line["sparse"] < 1e-6, line
