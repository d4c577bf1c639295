"""Runs a program that shall not outlive the process that started it.

    python -m eval.sweep_child PARENT PROGRAM [ARGUMENTS]

PARENT is that process's id; PROGRAM is a module, run as `python -m PROGRAM ARGUMENTS` is. On Linux
the kernel sends it SIGTERM when the parent ends, however that ends.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys

_PR_SET_PDEATHSIG = 1


def _end_with_parent(parent: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    # It may have ended before that was asked for.
    if os.getppid() != parent:
        sys.exit(1)


if __name__ == "__main__":
    _end_with_parent(int(sys.argv[1]))
    del sys.argv[:2]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
