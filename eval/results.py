"""results.jsonl of a sweep: one line for every point that has been run.

Lines are only ever appended, each in one write under a lock, so that several processes may add
theirs; a line that a crash cut short is passed over. Of a point's lines the last one counts, but a
finished point stays finished.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from eval.sweep import Point, SweepError

FILE = "results.jsonl"
DONE, FAILED = "done", "failed"


def append(workdir: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Adds lines."""
    text = "".join(json.dumps(row) + "\n" for row in rows)
    with open(workdir / FILE, "ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        # What a crash left without its end is a line of its own.
        if file.tell() and _last_byte(workdir / FILE) != b"\n":
            text = "\n" + text
        file.write(text.encode())
        file.flush()
        os.fsync(file.fileno())


def _last_byte(path: Path) -> bytes:
    with open(path, "rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1)


def read(workdir: Path) -> dict[str, dict[str, Any]]:
    """Point id -> its line."""
    path, rows = workdir / FILE, {}
    if not path.exists():
        return rows
    for line in path.read_text(errors="replace").splitlines():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        if rows.get(row["id"], {}).get("status") != DONE or row["status"] == DONE:
            rows[row["id"]] = row
    return rows


def check(rows: dict[str, dict[str, Any]], points: Iterable[Point], workdir: Path) -> None:
    """Refuses results of points that were something else when they were made.

    Raises:
        SweepError: names the first point and what has changed.
    """
    for point in points:
        row = rows.get(point.id)
        if row is None or row["status"] != DONE:
            continue
        then, now = row["definition"], point.variant.definition()
        if then != now:
            key = _difference(then, now)
            raise SweepError(
                f"{workdir / FILE}: point {point.id} was made with another {key}; give another "
                "--workdir, another name to the variant, or take the line out of the file"
            )


def _difference(then: Any, now: Any, path: str = "") -> str:
    """"training.overrides.train.steps (20, now 30)": the first of what differs."""
    if isinstance(then, dict) and isinstance(now, dict):
        for key in sorted(then.keys() | now.keys()):
            if then.get(key) != now.get(key):
                return _difference(then.get(key), now.get(key), f"{path}.{key}".lstrip("."))
    return f"{path} ({json.dumps(then)}, now {json.dumps(now)})"
