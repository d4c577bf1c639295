"""Where a run writes its numbers: metrics.jsonl, TensorBoard event files, and the terminal."""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path
from typing import Any

import tensorboardX
import tqdm

FILE = "metrics.jsonl"


class ReportError(RuntimeError):
    """The numbers of a run cannot be written; the text is one line for the user."""


def read(workdir: Path) -> list[dict[str, Any]]:
    """The logged objects of a run, oldest first; a line cut short by a crash is left out."""
    path = workdir / FILE
    if not path.exists():
        return []
    rows = []
    for line in path.read_text().splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return rows


def truncate(workdir: Path, step: int) -> None:
    """Drops what was logged after `step`: those steps are about to be done again."""
    if (workdir / FILE).exists():
        _rewrite(workdir, [row for row in read(workdir) if row["step"] <= step])


def replace_last(workdir: Path, row: dict[str, Any]) -> None:
    """Puts `row` in place of everything that was logged from its step on."""
    _rewrite(workdir, [*(old for old in read(workdir) if old["step"] < row["step"]), row])


def _rewrite(workdir: Path, rows: list[dict[str, Any]]) -> None:
    path = workdir / FILE
    partial = path.with_suffix(".partial")
    partial.write_text("".join(json.dumps(row) + "\n" for row in rows))
    os.replace(partial, path)


class Reporter:
    """Writes logged steps and shows progress; a progress bar on a terminal, plain lines otherwise.

    Everything is a no-op when `active` is False (all processes but the first).
    """

    def __init__(self, workdir: Path, *, first_step: int, last_step: int, active: bool = True):
        """Opens the files; steps after `first_step` that an earlier run logged are dropped."""
        self._active = active
        self._bar = None
        self._path = workdir / FILE
        if not active:
            return
        truncate(workdir, first_step)
        self._file = open(self._path, "a", buffering=1)
        self._events = tensorboardX.SummaryWriter(
            str(workdir), purge_step=first_step + 1 if first_step else None, flush_secs=10
        )
        self._last_step = last_step
        if sys.stderr.isatty():
            self._bar = tqdm.tqdm(
                total=last_step, initial=first_step, unit="step", dynamic_ncols=True, smoothing=0.1
            )

    def rewind(self, step: int) -> None:
        """Drops what was logged after `step`: those updates are about to be done again."""
        if not self._active:
            return
        self._file.close()
        truncate(self._path.parent, step)
        self._file = open(self._path, "a", buffering=1)
        if self._bar is not None:
            self._bar.update(step - self._bar.n)

    def line(self, text: str) -> None:
        """Prints a line without breaking the progress bar."""
        if not self._active:
            return
        if self._bar is not None:
            self._bar.write(text)
        else:
            print(text, flush=True)

    def advance(self, step: int, loss: float, tokens_per_second: float | None) -> None:
        """Moves the progress bar to `step`."""
        if self._bar is None:
            return
        rate = f", {tokens_per_second:,.0f} tok/s" if tokens_per_second else ""
        self._bar.set_postfix_str(f"loss {loss:.4f}{rate}", refresh=False)
        self._bar.update(step - self._bar.n)

    def write(self, values: dict[str, Any]) -> None:
        """Writes one logged step: `values` must hold "step"; numbers go to TensorBoard too.

        Raises:
            ReportError: the disk is full, the folder gone.
        """
        if not self._active:
            return
        step = values["step"]
        try:
            self._file.write(json.dumps(values) + "\n")
            for name, value in values.items():
                if name != "step":
                    self._events.add_scalar(name, value, step)
        except OSError as error:
            raise ReportError(f"step {step} cannot be logged in {self._path}: {error}") from error
        if self._bar is None:
            self.line(self._summary(values))

    def _summary(self, values: dict[str, Any]) -> str:
        step = values["step"]
        parts = [f"step {step}/{self._last_step}", f"loss {values['loss']:.4f}"]
        if "tokens_per_second" in values:
            parts.append(f"{values['tokens_per_second']:,.0f} tok/s")
        if "step_seconds" in values:
            parts.append(f"ETA {duration((self._last_step - step) * values['step_seconds'])}")
        if "score" in values:
            parts.append(f"score {values['score']:.3f} in {values['tokens']:.0f} tokens")
        if "heldout_bits_per_byte" in values:
            parts.append(f"held-out {values['heldout_bits_per_byte']:.4f} bits/byte")
        parts += [f"{name} {values[name]:.3f}" for name in values if name.startswith("task_")]
        return "  ".join(parts)

    def close(self) -> None:
        """Flushes and closes everything.

        Raises:
            ReportError: as `write`.
        """
        if not self._active:
            return
        if self._bar is not None:
            self._bar.close()
        try:
            with self._events:
                self._file.close()
        except OSError as error:
            raise ReportError(f"{self._path} cannot be completed: {error}") from error


def duration(seconds: float) -> str:
    """1:02:03 or 2:03."""
    minutes, rest = divmod(math.ceil(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
