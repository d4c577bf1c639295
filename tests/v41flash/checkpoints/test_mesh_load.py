"""Published weights go straight to where they live on a mesh."""

import json
import os
import pathlib
import subprocess
import sys

import pytest


@pytest.mark.slow
def test_every_device_gets_its_part():
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    environment = {
        **os.environ,
        "XLA_FLAGS": flags,
        "JAX_PLATFORMS": "cpu",
        "TF_CPP_MIN_LOG_LEVEL": "2",
    }
    done = subprocess.run(
        [sys.executable, "-m", "tests.v41flash.checkpoints.mesh_load"],
        cwd=pathlib.Path(__file__).parents[3],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(lines) == 2
    for line in lines:
        assert line["error"] == 0 and line["spread"] > 50, line
