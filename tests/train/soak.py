"""Long runs on one accelerator: steady memory, steady steps, a restart, and the same bits again.

    python -m tests.train.soak --workdir=DIR [--config=configs/small.py --minutes=16]
    python -m tests.train.soak --workdir=DIR --same_bits [--steps=20]

Without --same_bits: two runs one after the other, each half of the time, with checkpoints and
evaluation; in the middle of the second one SIGTERM, which must end it with status 75 and everything
saved, and the same command again. Prints for each life: the largest memory of host and device over
its course, time of steps (median, 99th percentile over median) and status, one JSON object a line.

With --same_bits: two runs of a few steps from one seed; every logged loss must be equal to the last
bit. What is known to differ on a GPU is in docs/reliability.md.

More flags of `train.main` may follow, `--config.data.path=...`, say. Exit status: 0, 1 something
was wrong.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from train import metrics
from train.stopping import STATUS

_SECONDS_BETWEEN = 2.0
# Checkpoint, logging and evaluation of a soak: often, for the time that it has.
_OFTEN = ("--config.train.log_every=5", "--config.train.checkpoint_every=50")
_UNTIL_STOPPED = 1_000_000
# Of the first half of a life, what the second half may have more: leaks grow on.
_GROWTH = 1.05


def _command(config: str, workdir: Path, flags: Sequence[str]) -> list[str]:
    command = [sys.executable, "-m", "train.main", f"--config={config}", f"--workdir={workdir}"]
    return [*command, *_OFTEN, *flags]


def _resident_bytes(process: int) -> int:
    try:
        return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * 4096
    except (OSError, IndexError):  # it has just ended
        return 0


def life(command: Sequence[str], workdir: Path, seconds: float | None) -> dict[str, Any]:
    """Runs a training process; SIGTERM after so many seconds of steps (None: to its end)."""
    before = len(metrics.read(workdir))
    process = subprocess.Popen(command)
    resident, began, stopped = [], None, None
    while process.poll() is None:
        time.sleep(_SECONDS_BETWEEN)
        if began is None and len(metrics.read(workdir)) > before:
            began = time.monotonic()
        if began is None:
            continue
        resident.append(_resident_bytes(process.pid))
        if seconds is not None and stopped is None and time.monotonic() - began > seconds:
            process.send_signal(signal.SIGTERM)
            stopped = time.monotonic()
    rows = metrics.read(workdir)[before:]
    # The first rows of a life hold what starts with it.
    steps = sorted(row["step_seconds"] for row in rows[2:])
    device = [row["peak_memory_bytes"] for row in rows if "peak_memory_bytes" in row]
    half = max(len(resident) // 2, 1)
    return {
        "status": process.returncode,
        "last_step": rows[-1]["step"] if rows else None,
        "seconds_to_stop": None if stopped is None else time.monotonic() - stopped,
        "host_bytes": [max(resident[:half], default=0), max(resident[half:-1], default=0)],
        "device_peak_bytes": device[-1] if device else None,
        "step_seconds_median": statistics.median(steps) if steps else None,
        "p99_over_median": steps[int(0.99 * (len(steps) - 1))] / statistics.median(steps)
        if steps
        else None,
    }


def _wrong(found: dict[str, Any], status: int) -> list[str]:
    faults = []
    if found["status"] != status:
        faults.append(f"exit status {found['status']}, not {status}")
    first, second = found["host_bytes"]
    if second > _GROWTH * first:
        faults.append(f"host memory grew from {first} to {second} bytes")
    return faults


def soak(config: str, workdir: Path, seconds: float, flags: Sequence[str]) -> list[str]:
    """Two runs, the second one in two lives; what was wrong."""
    faults = []
    endless = [*flags, f"--config.train.steps={_UNTIL_STOPPED}"]
    plan = (("first", seconds / 2), ("second", seconds / 4), ("second", seconds / 4))
    for name, time_of_steps in plan:
        command = _command(config, workdir / name, endless)
        found = life(command, workdir / name, time_of_steps)
        print(json.dumps({"run": name, **found}), flush=True)
        faults += [f"{name}: {fault}" for fault in _wrong(found, STATUS)]
    steps = [row["step"] for row in metrics.read(workdir / "second")]
    if steps != sorted(set(steps)):
        faults.append("second: steps are logged twice or out of order")
    return faults


def same_bits(config: str, workdir: Path, steps: int, flags: Sequence[str]) -> list[str]:
    """Two short runs; the first step in which they differ."""
    more = [*flags, f"--config.train.steps={steps}", "--config.train.log_every=1"]
    for name in ("one", "other"):
        status = subprocess.run(_command(config, workdir / name, more)).returncode
        if status:
            return [f"{name}: exit status {status}"]
    pairs = zip(metrics.read(workdir / "one"), metrics.read(workdir / "other"), strict=True)
    for one, other in pairs:
        for key in ("loss", "ce", "grad_norm", "indexer_grad_norm"):
            if one[key] != other[key]:
                return [f"step {one['step']}: {key} is {one[key]!r} and {other[key]!r}"]
    print(json.dumps({"steps": steps, "equal": True}))
    return []


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--workdir", type=Path, required=True)
    parser.add_argument("--config", default="configs/small.py")
    parser.add_argument("--minutes", type=float, default=16.0)
    parser.add_argument("--same_bits", action="store_true")
    parser.add_argument("--steps", type=int, default=20)
    chosen, flags = parser.parse_known_args(arguments)
    if chosen.same_bits:
        faults = same_bits(chosen.config, chosen.workdir, chosen.steps, flags)
    else:
        faults = soak(chosen.config, chosen.workdir, 60 * chosen.minutes, flags)
    for fault in faults:
        print(f"wrong: {fault}", file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
