"""Follows the steps that a device was given: their losses are checked, their work is counted.

A device gets step s + 1 before the host has read the numbers of step s, so that it never waits.
The ledger reads them a step late, and all of them before anything is logged or saved: a state whose
loss was bad never becomes a checkpoint.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from train import origin
from v41flash.config import ModelConfig

# How many cross entropies a new one is compared with, and from how many on.
_RECENT = 32
_ENOUGH = 8
_MAX_IDS_SHOWN = 64


class TrainingDiverged(RuntimeError):
    """The loss is not finite or has exploded; the text is one line for the user.

    Attributes:
        step: the update whose numbers are bad.
        batch: number of its batch in the stream of its stage.
    """

    def __init__(self, text: str, step: int = 0, batch: int = 0):
        """`text` is the whole line."""
        super().__init__(text)
        self.step, self.batch = step, batch


@dataclasses.dataclass(frozen=True)
class Dispatched:
    """A step that the device was given.

    Attributes:
        step: number of updates done after it.
        batch: number of its batch in the stream of its stage.
        metrics: f32 scalars, still on the device, and "nonfinite" (`train.origin`).
        document_ids: i64, documents of this host's rows, -1 padded.
        flops: useful FLOPs of the step, over all devices.
    """

    step: int
    batch: int
    metrics: Mapping[str, Any]
    document_ids: np.ndarray
    flops: float


class Ledger:
    """Numbers of a run, step by step.

    Attributes:
        values: metrics of the newest step that was read.
        recent: cross entropies that a new one is compared with; part of a checkpoint, so that a
            resumed run judges like an uninterrupted one.
    """

    def __init__(self, model: ModelConfig, max_loss_spike: float, recent: Sequence[float] = ()):
        """Starts the clock; `max_loss_spike` as in `train.settings.TrainSettings`."""
        self.values: dict[str, float] = {}
        self._model = model
        self.recent = deque(recent, maxlen=_RECENT)
        self._max_loss_spike = max_loss_spike
        self._pending: deque[Dispatched] = deque()
        self.restart_clock()

    def restart_clock(self) -> None:
        """What was not training (compilation, evaluation, saving) does not count as step time."""
        self._start = time.perf_counter()
        self._steps = 0
        self._tokens = 0.0
        self._flops = 0.0

    def forget(self) -> None:
        """Another stage begins: its cross entropies have another level."""
        self.recent.clear()

    def add(self, dispatched: Dispatched) -> None:
        """Takes a step in."""
        self._pending.append(dispatched)

    def settle(self, keep: int = 0) -> int | None:
        """Reads the numbers of all steps but the `keep` newest, waiting for the device.

        Returns:
            The newest step that was read, or None.

        Raises:
            TrainingDiverged: the first of them whose state is lost.
        """
        read = None
        while len(self._pending) > keep:
            done = self._pending.popleft()
            values = jax.device_get(dict(done.metrics))
            nonfinite = values.pop("nonfinite")
            self.values = {name: float(value) for name, value in values.items()}
            self._check(done, nonfinite)
            self._steps += 1
            self._tokens += self.values["tokens"]
            self._flops += done.flops
            read = done.step
        return read

    def tokens_per_second(self) -> float:
        """Document tokens a second since the clock started; padding does not count."""
        return self._tokens / (time.perf_counter() - self._start)

    def rates(self, ceiling: float | None) -> dict[str, float]:
        """Speed of the steps read since the clock started.

        Args:
            ceiling: FLOP/s of all devices together, or None.

        Returns:
            tokens_per_second, step_seconds, and mfu where there is a ceiling.
        """
        elapsed = time.perf_counter() - self._start
        rates = {"tokens_per_second": self._tokens / elapsed, "step_seconds": elapsed / self._steps}
        if ceiling:
            rates["mfu"] = self._flops / elapsed / ceiling
        return rates

    def _check(self, done: Dispatched, nonfinite: Mapping[str, Any]) -> None:
        values = self.values
        problem = None
        for name in ("loss", "grad_norm", "indexer_grad_norm"):
            if not math.isfinite(values[name]):
                where = origin.describe(self._model, nonfinite)
                problem = f"{name} is {values[name]}; {where}"
                break
        # Not the loss: weights and kind of its other terms may change, their scale is their own.
        ce = values["ce"]
        if problem is None and self._max_loss_spike and len(self.recent) >= _ENOUGH:
            usual = statistics.median(self.recent)
            if ce > usual + self._max_loss_spike:
                problem = (
                    f"ce {ce:.4g} is more than train.max_loss_spike {self._max_loss_spike:g} "
                    f"above the recent {usual:.4g}"
                )
        if problem is not None:
            ids = done.document_ids[done.document_ids >= 0].tolist()
            shown = ", ".join(map(str, ids[:_MAX_IDS_SHOWN]))
            if len(ids) > _MAX_IDS_SHOWN:
                shown += f" and {len(ids) - _MAX_IDS_SHOWN} more"
            raise TrainingDiverged(
                f"step {done.step}: {problem}; document ids of its batch: {shown}",
                done.step,
                done.batch,
            )
        self.recent.append(ce)
