"""The pool on the host: short-lived state of prompts, under a byte budget and a time to live."""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from v41flash.errors import InputError

DEFAULT_BYTES = 1 << 30
DEFAULT_TTL = 600.0


class Held(NamedTuple):
    """One entry.

    Attributes:
        value: what was put in.
        size: bytes that it counts for.
        expires: moment from which it is no more.
    """

    value: Any
    size: int
    expires: float


class HostPool:
    """State at the end of token sequences: found by the key of their full pages and the tokens
    behind those.

    Several threads may use it. An entry lives for `ttl` seconds after its last use; where room is
    short the least recently used ones go first.

    Attributes:
        budget: bytes of all entries at most.
        ttl: seconds.
    """

    def __init__(
        self, budget: int, ttl: float = DEFAULT_TTL, clock: Callable[[], float] = time.monotonic
    ):
        """An empty pool.

        Args:
            budget: bytes.
            ttl: seconds.
            clock: the time, in seconds.

        Raises:
            InputError: a negative budget, or a time to live that is not positive.
        """
        if budget < 0 or not ttl > 0:
            raise InputError(
                f"host pool: budget {budget} must be 0 or more, ttl {ttl} above 0 seconds"
            )
        self.budget, self.ttl = budget, ttl
        self._clock, self._lock, self._bytes = clock, threading.Lock(), 0
        # Least recently used first, which is the order in which they expire.
        self._entries: collections.OrderedDict[tuple[bytes, bytes], Held] = (
            collections.OrderedDict()
        )
        self._tails: dict[bytes, set[bytes]] = {}

    def __len__(self) -> int:
        """Entries that are there."""
        with self._lock:
            self._expire()
            return len(self._entries)

    @property
    def bytes(self) -> int:
        """Bytes of all entries."""
        with self._lock:
            self._expire()
            return self._bytes

    def tails(self, anchor: bytes) -> list[bytes]:
        """What follows the pages `anchor` in the sequences that have an entry."""
        with self._lock:
            self._expire()
            return sorted(self._tails.get(anchor, ()))

    def get(self, anchor: bytes, tail: bytes) -> Any:
        """The value of an entry, or None."""
        with self._lock:
            self._expire()
            held = self._entries.pop((anchor, tail), None)
            if held is None:
                return None
            self._entries[anchor, tail] = held._replace(expires=self._clock() + self.ttl)
            return held.value

    def put(self, anchor: bytes, tail: bytes, value: Any, size: int) -> bool:
        """Takes a value of `size` bytes, in place of what the key had; False: larger than the
        budget."""
        with self._lock:
            self._expire()
            self._drop((anchor, tail))
            if size > self.budget:
                return False
            while self._bytes + size > self.budget:
                self._drop(next(iter(self._entries)))
            self._entries[anchor, tail] = Held(value, size, self._clock() + self.ttl)
            self._tails.setdefault(anchor, set()).add(tail)
            self._bytes += size
            return True

    def _expire(self) -> None:
        now = self._clock()
        while self._entries:
            key, held = next(iter(self._entries.items()))
            if held.expires > now:
                return
            self._drop(key)

    def _drop(self, key: tuple[bytes, bytes]) -> None:
        held = self._entries.pop(key, None)
        if held is None:
            return
        self._bytes -= held.size
        anchor, tail = key
        self._tails[anchor].discard(tail)
        if not self._tails[anchor]:
            del self._tails[anchor]
