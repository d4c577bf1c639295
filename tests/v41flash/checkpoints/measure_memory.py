"""Peak memory of import and export, on a synthetic checkpoint of some size.

    python -m tests.v41flash.checkpoints.measure_memory FOLDER [--experts=24 --table_start=170000]

writes a checkpoint with the published widths into FOLDER (9 GiB by default; four times that is
needed), imports it packed and as bfloat16, exports the packed one, compares the files byte by byte
and prints, for every command, its seconds and the largest resident size that the kernel saw. What
it wrote is deleted.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

from tests.v41flash.checkpoints import synthetic
from v41flash.checkpoints import inventory
from v41flash.checkpoints.published import Published

GIB = 2**30
_SHARD_BYTES = 2 * GIB
_COMPARED_BYTES = 64 << 20


class Measured(NamedTuple):
    """A command: its name, wall seconds, peak resident bytes."""

    name: str
    seconds: float
    peak: int


def measure(name: str, *arguments: object) -> Measured:
    """Runs `v41flash.checkpoints.hf` in a process of its own."""
    command = [sys.executable, "-m", "v41flash.checkpoints.hf", *map(str, arguments)]
    started = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise RuntimeError(f"{name}: status {status}")
    # Kilobytes on Linux.
    return Measured(name, time.perf_counter() - started, usage.ru_maxrss * 1024)


def same(first: Path, second: Path) -> bool:
    """Whether two folders hold the same tensors, byte by byte."""
    one, other = Published.open(first), Published.open(second)
    for tensor in inventory.inventory(one.config):
        rows = tensor.shape[0]
        step = max(_COMPARED_BYTES // max(tensor.bytes // rows, 1), 1)
        for at in range(0, rows, step):
            end = min(at + step, rows)
            if (one.raw(tensor.name, at, end) != other.raw(tensor.name, at, end)).any():
                return False
    return one.config == other.config


def run(folder: Path, table_start: int, experts: int) -> tuple[int, int, list[Measured]]:
    """(bytes of the checkpoint, of its largest file, measurements)."""
    config = synthetic.reduced(table_start, experts)
    source, packed, wide, back = (folder / name for name in ("source", "packed", "wide", "back"))
    try:
        largest = synthetic.make(source, config, _SHARD_BYTES)
        results = [measure("inspect", "inspect", source)]
        results += [measure("import packed", "import", source, f"--workdir={packed}")]
        results += [measure("export packed", "export", back, f"--workdir={packed}")]
        if not same(source, back):
            raise RuntimeError("the export differs from what was imported")
        shutil.rmtree(packed)
        shutil.rmtree(back)
        arguments = ("import", source, f"--workdir={wide}", "--weights=bfloat16")
        results += [measure("import bfloat16", *arguments)]
    finally:
        for path in (source, packed, wide, back):
            shutil.rmtree(path, ignore_errors=True)
    return inventory.totals(config)[0], largest, results


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--experts", type=int, default=24)
    parser.add_argument("--table_start", type=int, default=170_000)
    arguments = parser.parse_args()
    size, largest, results = run(arguments.folder, arguments.table_start, arguments.experts)
    print(f"checkpoint {size / GIB:.2f} GiB, largest file {largest / GIB:.2f} GiB")
    print("| command | peak resident, GiB | seconds |\n|---|---|---|")
    for name, seconds, peak in results:
        print(f"| {name} | {peak / GIB:.2f} | {seconds:.0f} |")


if __name__ == "__main__":
    main()
