"""A run of 20 steps is the same on every mesh.

Run by themselves at the configured learning rate, meshes part as soon as rounding decides
something: a gate of Engram near 0, two experts of nearly one score (docs/results/full_scale.md). So
there are two tests: each mesh by itself in small steps; and each configured step from the same
state.
"""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

STEPS, BATCH, LENGTH = 20, 8, 128
MESHES = (
    {"data": 8},
    {"expert": 2, "fsdp": 4},
    {"context": 4, "tensor": 2},
    {"fsdp": 2, "context": 2, "expert": 2},
)


def lines(module, *arguments):
    """The JSON lines of a process with eight virtual devices."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    command = [sys.executable, "-m", f"tests.train.{module}", *arguments]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.mark.slow
def test_losses_do_not_depend_on_the_mesh():
    shape = (str(STEPS), str(BATCH), str(LENGTH))
    first, *others = (
        lines("mesh_losses", "quickstart", *shape, json.dumps(sizes), "gently")[-1]["losses"]
        for sizes in MESHES
    )
    # Far above the tolerance: what is learned cannot hide below it.
    assert len(first) == STEPS and first[-1] < 0.999 * first[0]
    for other, sizes in zip(others, MESHES[1:], strict=True):
        np.testing.assert_allclose(other, first, rtol=1e-5, err_msg=str(sizes))


@pytest.mark.slow
def test_every_step_does_the_same_on_every_mesh():
    meshes = [json.dumps(sizes) for sizes in MESHES]
    results = lines("mesh_lockstep", str(STEPS), str(BATCH), str(LENGTH), *meshes)
    assert [result["mesh"] for result in results] == list(MESHES[1:])
    for result in results:
        assert len(result["losses"]) == STEPS and result["losses"][-1] < 0.6 * result["losses"][0]
        assert max(result["loss"]) < 1e-5, result
        # A gate near 0 reaches every layer below it, in the steps that have one.
        assert np.median(result["gradient"]) < 1e-4 and max(result["gradient"]) < 0.05, result
        assert np.median(result["behind_gate"]) < 1e-3, result
        assert result["collectives"]["all-to-all"] > 0
        # Where heads are split too, activations [8, 32, 128] have the shape of a part of w2.
        assert "tensor" in result["mesh"] or not result["unasked"], result["unasked"]
