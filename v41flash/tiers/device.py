"""Which page of the device's pool holds what, and which may be given to a new sequence."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import NamedTuple


class Lease(NamedTuple):
    """Pages of one sequence.

    Attributes:
        pages: in the order of its tokens.
        shared: how many of the first ones hold its prefix already. They are read by others, too;
            nothing may be written to them.
    """

    pages: tuple[int, ...]
    shared: int


class DevicePages:
    """Pages of a pool, shared by sequences with a common prefix.

    A page that is used by no sequence keeps what it holds until it is needed; the least recently
    used one goes first. One thread alone may use an object of this class.
    """

    def __init__(self, pages: int):
        """A pool of `pages` pages that hold nothing."""
        self._free = list(range(pages))[::-1]
        self._users = [0] * pages
        self._keys: dict[int, bytes] = {}
        self._places: dict[bytes, int] = {}
        # Held, but used by no sequence; least recently used first.
        self._idle: collections.OrderedDict[int, None] = collections.OrderedDict()

    @property
    def available(self) -> int:
        """Pages that no sequence uses."""
        return len(self._free) + len(self._idle)

    def lease(self, keys: Sequence[bytes], count: int) -> Lease:
        """Takes pages for a sequence.

        Args:
            keys: of the full pages of its prompt.
            count: pages that it needs, at least as many as keys.

        Raises:
            RuntimeError: too few that no sequence uses.
        """
        shared = []
        for key in keys[:count]:
            if key not in self._places:
                break
            shared.append(self._places[key])
        wanted = count - len(shared)
        if wanted > self.available - sum(page in self._idle for page in shared):
            raise RuntimeError(f"{wanted} pages wanted, {self.available} are not in use")
        for page in shared:
            self._idle.pop(page, None)
        fresh = [self._take() for _ in range(wanted)]
        for page in (*shared, *fresh):
            self._users[page] += 1
        return Lease((*shared, *fresh), len(shared))

    def name(self, page: int, key: bytes) -> None:
        """Notes what a page holds from now on; where another page holds it, that one stays the one
        to be found."""
        if key not in self._places:
            self._keys[page], self._places[key] = key, page

    def release(self, lease: Lease) -> None:
        """Gives the pages of a sequence back."""
        # The first pages are used last, so that no page outlives those before it.
        for page in reversed(lease.pages):
            self._users[page] -= 1
            if self._users[page]:
                continue
            if page in self._keys:
                self._idle[page] = None
            else:
                self._free.append(page)

    def _take(self) -> int:
        if self._free:
            return self._free.pop()
        page, _ = self._idle.popitem(last=False)
        del self._places[self._keys.pop(page)]
        return page
