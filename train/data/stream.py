"""An endless stream of batches by step: epochs that are packed anew, and the iterator over them.

What a batch holds is `train.data.pipeline`'s matter; here is where step s lies in which epoch, and
a state that is one step number.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import grain
import numpy as np

from train.data import packing
from v41flash.errors import InputError

Batch = dict[str, np.ndarray]

_MAX_PREFETCH_THREADS = 4
# grain wants a length; this many steps are never reached.
_ENDLESS = 1 << 40


class Epochs:
    """Rows 0, 1, 2, .. of an endless sequence of epochs, each shuffled and packed anew."""

    def __init__(
        self,
        lengths: np.ndarray,
        sequence_length: int,
        seed: int,
        window: int,
        limit: packing.Limit | None = None,
    ):
        """Arguments as for `packing.pack`; nothing is packed before it is asked for."""
        self._lengths = lengths
        self._arguments = dict(seed=seed, window=window, limit=limit)
        self._sequence_length = sequence_length
        self._first_row = [0]  # of every epoch packed so far, and the one after
        self._plans: dict[int, packing.Plan] = {}
        self._lock = threading.Lock()  # prefetch threads share the plans

    def _plan(self, epoch: int) -> packing.Plan:
        if epoch not in self._plans:
            plan = packing.pack(
                self._lengths, self._sequence_length, epoch=epoch, **self._arguments
            )
            self._plans[epoch] = plan
            # Prefetch threads are a few batches apart, so they share two or three epochs.
            while len(self._plans) > 3:
                del self._plans[next(iter(self._plans))]  # the one packed first
            if epoch == len(self._first_row) - 1:
                self._first_row.append(self._first_row[-1] + plan.num_rows)
        return self._plans[epoch]

    def plan(self, epoch: int) -> packing.Plan:
        """The rows of one epoch."""
        with self._lock:
            return self._plan(epoch)

    def locate(self, row: int) -> tuple[packing.Plan, int]:
        """The plan that holds a row, and the row's number in it."""
        with self._lock:
            # Packing decides how many rows an epoch has, so all before it get packed once.
            while self._first_row[-1] <= row:
                self._plan(len(self._first_row) - 1)
            epoch = int(np.searchsorted(self._first_row, row, side="right")) - 1
            return self._plan(epoch), row - self._first_row[epoch]


class Steps:
    """grain's random-access source: item s is this host's slice of the batch at step s."""

    def __init__(self, build: Callable[[int], Batch], description: str):
        """`build` makes the batch of a step."""
        self._build = build
        self._description = description

    def __len__(self) -> int:
        return _ENDLESS

    def __getitem__(self, step: int) -> Batch:
        return self._build(int(step))

    def __repr__(self) -> str:
        return self._description


class TrainIterator(Iterator[Batch]):
    """Endless batches from a given step on; its state is one step number."""

    def __init__(self, dataset: grain.MapDataset, start_step: int, prefetch: int, fingerprint: str):
        """Use `Data.train_iterator`."""
        self._dataset = dataset
        self._read_options = grain.ReadOptions(
            num_threads=min(prefetch, _MAX_PREFETCH_THREADS), prefetch_buffer_size=prefetch
        )
        self._fingerprint = fingerprint
        self._inner: Any = None
        self._seek(start_step)

    def _seek(self, step: int) -> None:
        if not 0 <= step < _ENDLESS:
            raise ValueError(f"step {step}: the data stream has steps 0 .. {_ENDLESS - 1}")
        self.close()
        self.step = step

    def __next__(self) -> Batch:
        """The batch of `self.step`; the step then moves on by one."""
        if self._inner is None:
            rest = self._dataset.slice(slice(self.step, None))
            self._inner = iter(rest.to_iter_dataset(self._read_options))
        batch = next(self._inner)
        self.step += 1
        return batch

    def state(self) -> dict[str, Any]:
        """JSON-able state: the step of the next batch, and what stream it counts in."""
        return {"step": self.step, "fingerprint": self._fingerprint}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Goes on from a state that `state()` returned, here or in another process.

        Raises:
            InputError: see `check_fingerprint`.
        """
        check_fingerprint(state["fingerprint"], self._fingerprint)
        self._seek(int(state["step"]))

    def close(self) -> None:
        """Stops the prefetch threads; the iterator can still go on."""
        if self._inner is not None:
            self._inner.close()
            self._inner = None


def check_fingerprint(saved: str, current: str) -> None:
    """Refuses to go on in another stream of batches than the one that was saved.

    Raises:
        InputError: other documents, tokenizer, split, seed or pack_window (batch size and sequence
            length may change between stages).
    """
    if saved != current:
        raise InputError(
            f"the saved data state belongs to the stream {saved!r}, this run's is {current!r}: "
            "corpus or data settings changed since the checkpoint"
        )
