"""Runs code that a model wrote: in a process of its own, with little time and memory, no network.

    result = run("print(int(input()) + 1)", stdin="41", seconds=5.0)
    result.status, result.output                                        # "ok", "42\\n"

The process has an empty folder to itself (removed afterwards), a clean environment, limits on CPU
time, memory, file sizes and open files, and a deadline. On Linux, where the system allows user
namespaces, it also has no network and its own process table, which ends with it: whatever it has
started ends too. `isolation()` says which of that is so. This keeps honest mistakes from doing
harm; it is no fortress: files that this user can read can be read by the code.
"""

from __future__ import annotations

import functools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

_CHILD = Path(__file__).with_name("sandbox_child.py")
_UNSHARE = ("unshare", "--user", "--map-root-user", "--net", "--pid", "--fork", "--kill-child")
_OUTPUT_BYTES = 1 << 20
_MEMORY_BYTES = 1 << 30


class Result(NamedTuple):
    """What came of a program.

    Attributes:
        status: "ok" (it ended with 0), "error" or "timeout".
        output: what it printed, the first megabyte.
        error: the last line of what it printed as errors.
    """

    status: str
    output: str
    error: str


@functools.cache
def isolation() -> str:
    """"namespaces" (no network, own processes), or "limits alone"."""
    if sys.platform != "linux" or shutil.which(_UNSHARE[0]) is None:
        return "limits alone"
    tried = subprocess.run([*_UNSHARE, "true"], capture_output=True, check=False)
    return "namespaces" if tried.returncode == 0 else "limits alone"


def run(
    code: str, *, stdin: str = "", seconds: float = 10.0, memory_bytes: int = _MEMORY_BYTES
) -> Result:
    """Runs a Python program.

    Args:
        code: its text.
        stdin: what it may read.
        seconds: of CPU, and of the clock.
        memory_bytes: of address space.
    """
    with tempfile.TemporaryDirectory(prefix="v41flash_code_") as name:
        folder = Path(name)
        # Surrogates come of bytes that are no text; Python says so better than we do.
        (folder / "main.py").write_text(code, encoding="utf-8", errors="surrogateescape")
        work = folder / "work"
        work.mkdir()
        command = [sys.executable, "-I", str(_CHILD), str(seconds), str(memory_bytes)]
        command.append(str(folder / "main.py"))
        if isolation() == "namespaces":
            command = [*_UNSHARE, *command]
        out, error = folder / "out", folder / "error"
        with open(out, "wb") as out_file, open(error, "wb") as error_file:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=out_file,
                stderr=error_file,
                cwd=work,
                env={"PATH": os.defpath, "HOME": str(work), "TMPDIR": str(work)},
                start_new_session=True,
            )
            status = _wait(process, stdin.encode("utf-8", "replace"), seconds)
        lines = _read(error).strip().splitlines()
        return Result(status, _read(out), lines[-1].strip() if lines else "")


def _wait(process: subprocess.Popen, stdin: bytes, seconds: float) -> str:
    try:
        # Starting an interpreter takes a moment that is not the program's.
        process.communicate(stdin, timeout=seconds + 1.0)
    except subprocess.TimeoutExpired:
        return "timeout"
    finally:
        _kill(process)
    if process.returncode in (-signal.SIGXCPU, 128 + signal.SIGXCPU, -signal.SIGKILL):
        return "timeout"
    return "ok" if process.returncode == 0 else "error"


def _kill(process: subprocess.Popen) -> None:
    """Whatever is left of the session."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def _read(path: Path) -> str:
    with open(path, "rb") as file:
        return file.read(_OUTPUT_BYTES).decode("utf-8", "replace")
