"""Kills writers of a store at random moments and looks at what they leave.

    python -m tests.v41flash.tiers.kill_store [DIR]       # 200 kills, at least 100 inside a write

Two processes write pages of the published size without a pause, and the store is so small that
pages are removed all the time. One of the two is killed (SIGKILL) after a random time; a file left
in `writing/` that nobody holds shows that it was inside the write of a page. Then every page of the
store is read, while the other one goes on: it must be what belongs under its key, byte for byte,
and the budget must hold.
"""

from __future__ import annotations

import fcntl
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np

from v41flash.tiers import page_file
from v41flash.tiers.disk import DiskStore
from v41flash.tiers.keys import digest, page_key

ROOT = Path(__file__).parents[3]
# 128 tokens of 890 bytes.
SIZE = 128 * 890
NUMBERS, ROOM = 48, 12
BUDGET = ROOM * page_file.file_bytes(SIZE)
WRITERS = 2


class Outcome(NamedTuple):
    """What happened.

    Attributes:
        kills: processes killed.
        inside: of them, those killed inside the write of a page.
        checked: pages read afterwards and found right.
        missing: pages that were removed before they could be read.
        largest: bytes that the store took at most.
    """

    kills: int
    inside: int
    checked: int
    missing: int
    largest: int


def key(number: int) -> bytes:
    return digest(b"kill", number.to_bytes(4, "little"))


def payload(number: int) -> bytes:
    return np.random.default_rng(number).bytes(SIZE)


def write(folder: str, seed: int, rounds: int) -> None:
    """Writes and reads pages, for ever where `rounds` is 0; prints how many it read. Exit status 3:
    one was wrong, 4: the budget was exceeded."""
    store = DiskStore(folder, budget=BUDGET, min_lifetime=0)
    pages = {number: (key(number), payload(number)) for number in range(NUMBERS)}
    rng = np.random.default_rng(seed)
    print("ready", flush=True)
    done = 0
    while done < rounds or not rounds:
        number = int(rng.integers(NUMBERS))
        found = store.get(pages[number][0], SIZE)
        if found is None:
            store.put(*pages[number])
        elif found != pages[number][1]:
            sys.exit(3)
        if store.usage > BUDGET:
            sys.exit(4)
        done += 1
    assert not store.counts.damaged and not store.counts.failed
    print(store.counts.hits)


def start(folder: Path, seed: int, rounds: int = 0) -> subprocess.Popen:
    """A process that writes, once it has begun."""
    arguments = [str(folder), str(seed), str(rounds)]
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.v41flash.tiers.kill_store", *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
    )
    assert process.stdout.readline() == b"ready\n"
    return process


def left_behind(folder: Path) -> bool:
    """Whether there is a file that was being written by a process that is no more. (The other
    writer may have removed it already: then this kill does not count.)"""
    with open(folder / "lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for path in (folder / "writing").iterdir():
            with path.open() as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    continue
                return True
    return False


def run(folder: Path, kills: int, inside: int, seed: int = 0) -> Outcome:
    """Goes on until so many were killed, and so many of them inside a write."""
    rng = np.random.default_rng(seed)
    expected = {key(number).hex(): number for number in range(NUMBERS)}
    writers = [start(folder, number) for number in range(WRITERS)]
    killed = hit = checked = missing = largest = 0
    try:
        while killed < kills or hit < inside:
            assert killed < 5 * kills, f"only {hit} of {killed} kills met a write"
            time.sleep(rng.uniform(0, 0.06))
            one = int(rng.integers(WRITERS))
            writers[one].kill()
            assert writers[one].wait() == -signal.SIGKILL
            writers[one].stdout.close()
            killed += 1
            hit += left_behind(folder)
            store = DiskStore(folder, budget=BUDGET, min_lifetime=0)
            for path in folder.glob("pages/*/*"):
                found = store.get(page_key(path.name), SIZE)
                assert found in (None, payload(expected[path.name])), f"wrong page {path}"
                checked += found is not None
                missing += found is None
            assert store.counts.damaged == 0, "a damaged page under its own name"
            largest = max(largest, store.usage)
            assert largest <= BUDGET
            writers[one] = start(folder, WRITERS + killed)
    finally:
        for writer in writers:
            writer.kill()
            writer.wait()
            writer.stdout.close()
    store = DiskStore(folder, budget=BUDGET, min_lifetime=0)
    assert not list((folder / "writing").iterdir())
    files = sum(path.stat().st_size for path in folder.glob("pages/*/*"))
    assert files <= store.usage <= BUDGET
    return Outcome(killed, hit, checked, missing, largest)


if __name__ == "__main__":
    if len(sys.argv) == 4:
        write(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
    elif len(sys.argv) == 2:
        print(run(Path(sys.argv[1]), kills=200, inside=100))
    else:
        with tempfile.TemporaryDirectory() as name:
            print(run(Path(name), kills=200, inside=100))
