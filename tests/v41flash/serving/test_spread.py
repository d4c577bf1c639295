"""Serving on a mesh draws what one device draws."""

import os
import subprocess
import sys

import pytest


@pytest.mark.slow
def test_steps_on_four_devices_equal_those_on_one():
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4"
    env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    command = [sys.executable, "-m", "tests.v41flash.serving.mesh_steps"]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.splitlines() == ["equal"]
