"""Which commit of this checkout runs: what a number is worth nothing without."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import NamedTuple


class Checkout(NamedTuple):
    """The commit, and whether tracked files differ from it; None where git does not say."""

    commit: str | None
    modified: bool | None


def read() -> Checkout:
    """The checkout that this file lies in."""
    status = _git("status", "--porcelain", "--untracked-files=no")
    return Checkout(_git("rev-parse", "HEAD"), None if status is None else bool(status))


def _git(*arguments: str) -> str | None:
    root = Path(__file__).resolve().parent.parent
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=root, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
