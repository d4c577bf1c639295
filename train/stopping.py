"""A request to stop: SIGTERM lets a run save and end; a second signal ends it at once.

    stop = Stop()
    with stop.listening():
        loop.run(config, workdir, stop)     # raises `Stopped` once the state is saved

One process may get the signal some steps before the others, or alone. With every update the
processes add up who has got it, on their devices and without waiting, and read the sum one update
later; so all of them save the same step.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from v41flash.checkpoints.orbax import Checkpoints

# "Try again" (EX_TEMPFAIL): stopped on request, nothing is lost. A process that a signal has ended
# shows as 128 + signal instead.
STATUS = 75
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Stopped(Exception):
    """The run has ended on request; the text is one line for the user."""


class Stop:
    """Whether a run has been asked to stop.

    Attributes:
        requested: this process has been.
    """

    def __init__(self):
        self.requested = False
        self._votes: jax.Array | None = None

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Takes SIGTERM as the request, and any signal after the first as the end.

        A thread of its own reads the numbers of the signals, so that the second one ends the
        process in the middle of a compilation too. In the main thread only.
        """
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        thread = threading.Thread(target=self._watch, args=(reader,), daemon=True)
        thread.start()
        # The default would end the process before the thread has seen anything.
        handler = signal.signal(signal.SIGTERM, lambda *_: None)
        wakeup = signal.set_wakeup_fd(writer)
        try:
            yield
        finally:
            signal.set_wakeup_fd(wakeup)
            signal.signal(signal.SIGTERM, handler)
            os.close(writer)
            thread.join()
            os.close(reader)

    def _watch(self, reader: int) -> None:
        seen = False
        while number := os.read(reader, 1):
            if number[0] not in _SIGNALS:
                continue
            if seen:
                print("a second signal: not waiting any longer", file=sys.stderr, flush=True)
                os._exit(128 + number[0])
            seen = True
            if number[0] == signal.SIGTERM:
                self.requested = True
                print("SIGTERM: saving after this step", file=sys.stderr, flush=True)

    def before_anything(self) -> None:
        """Ends a run that has done nothing yet that could be saved.

        Several processes go on to their first step, where they agree.

        Raises:
            Stopped: it has been asked to stop.
        """
        if self.requested and jax.process_count() == 1:
            raise Stopped("stopped by SIGTERM before the first step; there is nothing to save")

    def agreed(self, mesh: Mesh) -> bool:
        """Whether every process stops now; all of them ask once for each update.

        Args:
            mesh: all devices.
        """
        if jax.process_count() == 1:
            return self.requested
        before, self._votes = self._votes, self._vote(mesh)
        return before is not None and bool(before)

    def _vote(self, mesh: Mesh) -> jax.Array:
        mine = np.full(jax.local_device_count(), self.requested, np.int32)
        everywhere = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
        votes = jax.make_array_from_process_local_data(everywhere, mine)
        return _adder(NamedSharding(mesh, PartitionSpec()))(votes)


def end_after(step: int, checkpoints: Checkpoints) -> NoReturn:
    """Ends a run that was asked to stop when its last save is complete.

    Args:
        step: that is being saved.
        checkpoints: of the run.

    Raises:
        Stopped: always.
        SaveError: it could not be written.
    """
    started = time.perf_counter()
    checkpoints.wait()
    raise Stopped(
        f"stopped by SIGTERM after step {step}, which is saved "
        f"({time.perf_counter() - started:.1f} s); the same command goes on from there"
    )


@functools.cache
def _adder(where: NamedSharding) -> Any:
    return jax.jit(jnp.sum, out_shardings=where)
