"""A run meets the end of its disk: a file system of a few megabytes, as a Linux user may mount one.

    unshare --user --map-root-user --mount python -m tests.train.full_disk DIR

DIR/run is a file system with room for two checkpoints, in which a run that wants four is started;
then it is made larger, and the same command is given again. Prints one JSON object.
"""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys
from typing import Any

from tests.train import micro
from train import metrics

_CONFIG = """
import pathlib
from tests.train import micro

def get_config():
    return micro.config(pathlib.Path(__file__).parent, write=False)
"""


def train(folder: pathlib.Path, workdir: pathlib.Path) -> dict[str, Any]:
    """Trains eight steps; status, both outputs, and what lies in the folder of checkpoints."""
    command = [sys.executable, "-m", "train.main", f"--config={folder / 'config.py'}"]
    command += [f"--workdir={workdir}", "--config.train.checkpoint_every=2"]
    done = subprocess.run(
        [*command, "--config.train.keep_checkpoints=4"], capture_output=True, text=True
    )
    return {
        "status": done.returncode,
        "output": done.stdout,
        "errors": done.stderr.splitlines(),
        "checkpoints": sorted(path.name for path in (workdir / "checkpoints").iterdir()),
        "rows": metrics.read(workdir),
    }


def run(folder: pathlib.Path) -> list[dict[str, Any]]:
    """The run on the full disk, the same one with room, and one that always had it."""
    micro.write_corpus(folder / "text")
    (folder / "config.py").write_text(_CONFIG)
    workdir = folder / "run"
    workdir.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", workdir], check=True)
    full = train(folder, workdir)
    subprocess.run(["mount", "-o", "remount,size=64m", workdir], check=True)
    return [full, train(folder, workdir), train(folder, folder / "straight")]


if __name__ == "__main__":
    print(json.dumps(run(pathlib.Path(sys.argv[1]).absolute())))
