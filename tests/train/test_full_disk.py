"""A full disk ends the run with one line; with room again it goes on as if nothing had been."""

import json
import shutil
import subprocess
import sys

import pytest

_APART = ["unshare", "--user", "--map-root-user", "--mount"]
_TIMES = ("tokens_per_second", "step_seconds")


def _may_mount(folder):
    if shutil.which("unshare") is None:
        return False
    mount = [*_APART, "mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    return subprocess.run(mount, capture_output=True).returncode == 0


def _numbers(found):
    return [{k: v for k, v in row.items() if k not in _TIMES} for row in found["rows"]]


@pytest.mark.slow
def test_a_full_disk(tmp_path):
    if not _may_mount(tmp_path):
        pytest.skip("no file system may be mounted here (unshare --user --mount)")
    command = [*_APART, sys.executable, "-m", "tests.train.full_disk", str(tmp_path / "runs")]
    (tmp_path / "runs").mkdir()
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    full, again, straight = json.loads(done.stdout)
    assert full["status"] == 1
    # Threads of the library may write their tracebacks before and after.
    (line,) = [line for line in full["errors"] if line.startswith("training failed: ")]
    assert "No space left on device" in line
    assert full["checkpoints"] == ["2", "4"]
    assert again["status"] == 0 and "going on from step 4" in again["output"]
    assert again["checkpoints"] == ["2", "4", "6", "8"]
    assert straight["status"] == 0
    assert _numbers(again) == _numbers(straight)
