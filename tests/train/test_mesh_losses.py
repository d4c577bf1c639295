"""A short run has the same losses on every mesh."""

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
)


def losses(sizes):
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    command = [sys.executable, "-m", "tests.train.mesh_losses", "quickstart"]
    command += [str(STEPS), str(BATCH), str(LENGTH), json.dumps(sizes)]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])["losses"]


@pytest.mark.slow
def test_losses_do_not_depend_on_the_mesh():
    first, *others = map(losses, MESHES)
    assert len(first) == STEPS and first[-1] < first[0]
    for other in others:
        np.testing.assert_allclose(other, first, rtol=1e-5)
