"""Tokens and table rows reach their devices whatever the load is: nothing is dropped."""

import os
import subprocess
import sys

import pytest

from v41flash import exchange


def test_room_is_bounded_and_never_beyond_what_there_is():
    assert exchange.capacity(100, 1) == 100
    assert exchange.capacity(1000, 8) == 192  # 1.5 x 125, in eights
    assert exchange.capacity(5, 8) == 5
    for items in (1, 7, 64, 4096):
        for devices in (2, 16, 512):
            room = exchange.capacity(items, devices)
            assert items / devices <= room <= max(items, 8)


@pytest.fixture(scope="module")
def printed():
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    command = [sys.executable, "-m", "tests.v41flash.mesh_exchange"]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_every_token_reaches_its_experts(printed):
    assert [line for line in printed if line.startswith("experts")] == [
        "experts even",
        "experts one expert",
        "experts one device",
    ]


def test_every_row_comes_and_its_gradient_goes_home(printed):
    names = ["tables even", "tables one row", "tables one device", "tables none"]
    assert [line for line in printed if line.startswith("tables")] == 2 * names
