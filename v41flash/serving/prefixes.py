"""Prefixes that need no prefill: global cache from disk, encoder windows from the host.

A `PrefixStore` holds the tiers below the device and may serve several models; `Prefixes` is one
model's view of it. For every sequence of a batch

    trails = [prefixes.trail(prompt) for prompt in prompts]
    state, found = prefixes.restore(state, trails)         # then prefill from found.starts on
    prefixes.keep(state, slot, trail)                      # whenever pages may have become full
    prefixes.remember(state, slot, trail)                  # at the end of prompt and output

A page is found by the hash of the model and of all tokens up to its end. What is found in the store
ends on a page boundary. The window rows of the encoder come from the host's pool where it has them
at a position far enough from the prompt's end to leave the decoder its replay; else the encoder
goes over the last R tokens of what was found again (bounded replay: an approximation, see
`v41flash.serving.replay`). Pages made after such a replay inherit it, so R is part of the model's
identity here, and pages of the exact mode, whose replays are long enough to be exact, are kept
apart from all others.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from v41flash.cache import PAGE_TOKENS, GlobalCache
from v41flash.config import ModelConfig
from v41flash.serving.programs import Programs
from v41flash.serving.replay import Captured, tokens_before
from v41flash.serving.state import State
from v41flash.serving.weights import Weights
from v41flash.tiers.disk import DEFAULT_BUDGET, DEFAULT_LIFETIME, DiskStore
from v41flash.tiers.host import DEFAULT_BYTES, DEFAULT_TTL, HostPool
from v41flash.tiers.keys import KeyChain, digest

# Pages that move between host and device in one call.
_PAGES = 8
# Window rows of a position more than so many replays back are left: going over all tokens since
# then would cost more than the replay that they save.
_REACH = 4


@dataclasses.dataclass(frozen=True)
class PrefixStore:
    """The tiers below the device.

    Attributes:
        disk: global cache.
        host: window rows of encoders.
    """

    disk: DiskStore
    host: HostPool

    @classmethod
    def open(
        cls,
        folder: str | Path,
        *,
        budget: int = DEFAULT_BUDGET,
        min_lifetime: float = DEFAULT_LIFETIME,
        host_budget: int = DEFAULT_BYTES,
        host_ttl: float = DEFAULT_TTL,
    ) -> PrefixStore:
        """The store in a folder, with an empty pool on the host.

        Args:
            folder: shared by any number of processes and models.
            budget: bytes on disk.
            min_lifetime: seconds for which an unused page is kept.
            host_budget: bytes on the host; 0: no pool.
            host_ttl: seconds for which its entries live unused.

        Raises:
            InputError: a folder or number that cannot be used.
        """
        disk = DiskStore(folder, budget=budget, min_lifetime=min_lifetime)
        return cls(disk, HostPool(host_budget, host_ttl))


@dataclasses.dataclass
class Trail:
    """What the tiers know of one sequence.

    Attributes:
        chain: its tokens and the keys of its pages.
        full: pages that are full on the device.
        stored: of them, those that the store has had.
        cut: one could not be stored; without it, nobody would find those behind it.
    """

    chain: KeyChain
    full: int = 0
    stored: int = 0
    cut: bool = False

    def extend(self, tokens: np.ndarray) -> None:
        """Takes int [n] tokens that follow."""
        self.chain.extend(tokens)


class Found(NamedTuple):
    """What was restored of every sequence.

    Attributes:
        starts: int [B], position from which to prefill.
        cached: int [B], tokens whose global cache is there; at least `starts`.
    """

    starts: np.ndarray
    cached: np.ndarray


class _Remembered(NamedTuple):
    """An entry of the host's pool: the page that is not full, as bytes, and the rest."""

    page: bytes
    captured: Captured


def model_identity(
    config: ModelConfig, params: Any, token_map: np.ndarray | None, way: str
) -> bytes:
    """A digest of everything that the contents of a page follow from, beside the tokens.

    Args:
        config: the model.
        params: its parameters; all of their bytes are read.
        token_map: canonical ids, or None.
        way: how rows were made, where that changes them.
    """
    parts = [way.encode(), json.dumps(config.to_dict(), sort_keys=True).encode()]
    leaves = jax.tree_util.tree_leaves_with_path(params)
    named = [(jax.tree_util.keystr(path), leaf) for path, leaf in leaves]
    if token_map is not None:
        named.append(("token_map", token_map))
    for name, leaf in named:
        array = np.ascontiguousarray(leaf)
        kind = f"{name} {array.dtype} {array.shape}"
        parts.append(digest(kind.encode(), array.reshape(-1).view(np.uint8).data))
    return digest(*parts)


class Prefixes:
    """One model's prefixes in a store.

    Attributes:
        store: the tiers.
        exact: nothing approximate is restored.
    """

    def __init__(
        self,
        programs: Programs,
        weights: Weights,
        store: PrefixStore,
        params: Any,
        token_map: np.ndarray | None,
        *,
        replay: int | None = None,
        exact: bool = False,
    ):
        """Reads all parameters once, for the model's identity.

        Args:
            programs: compiled steps of the model.
            weights: of it.
            store: the tiers.
            params: what `weights` were made of. Another model needs another object.
            token_map: likewise.
            replay: R, tokens that a replay goes over; `sliding_window` when None.
            exact: replay what it takes to be exact instead.
        """
        config = programs.model.config
        self.store, self.exact = store, exact
        self._programs, self._weights, self._config = programs, weights, config
        tail = config.sliding_window if replay is None else replay
        # What the decoder's replay needs behind the restored position.
        self._tail = tail
        # The group in which a replay starts must be in the cache as a whole.
        self._replay = max(tail, *config.ratios_in_use, 1)
        if exact:
            self._replay = config.num_hidden_layers * config.sliding_window
        way = "exact" if exact else f"replay {self._replay}"
        self._identity = model_identity(config, params, token_map, way)

    def trail(self, prompt: np.ndarray) -> Trail:
        """The trail of a sequence that begins with the tokens int [n]."""
        trail = Trail(KeyChain(self._identity, PAGE_TOKENS))
        trail.extend(prompt)
        return trail

    def restore(
        self, state: State, trails: Sequence[Trail], held: Sequence[int] | None = None
    ) -> tuple[State, Found]:
        """Gives sequences what is known of their prompts.

        Args:
            state: empty sequences, on pages of their own. Its buffers are given up.
            trails: of the prompts, one a sequence.
            held: full pages of each that its page table names already.

        Returns:
            (state, what it holds now): at least one token of each prompt is left to prefill.
        """
        batch = len(trails)
        full = np.zeros(batch, np.int64) if held is None else np.array(held)
        # A copy: the buffer is given up before the table is read to its end.
        table = np.array(state.cache.page_table)
        remembered: dict[int, tuple[int, _Remembered]] = {}
        loader = _Loader(self._programs, state.cache)
        for slot, trail in enumerate(trails):
            chain = trail.chain
            while full[slot] < len(chain.keys):
                payload = self.store.disk.get(chain.keys[full[slot]], state.cache.page_bytes)
                if payload is None:
                    break
                loader.add(table[slot, full[slot]], payload)
                full[slot] += 1
            trail.full = trail.stored = int(full[slot])
            self.store.disk.touch(chain.keys[: trail.stored])
            entry = self._find(chain, trail.stored)
            if entry is not None:
                remembered[slot] = entry
                position, (page, _) = entry
                if position > trail.stored * PAGE_TOKENS:
                    loader.add(table[slot, position // PAGE_TOKENS], page)
        state = dataclasses.replace(state, cache=loader.finish())
        cached = full * PAGE_TOKENS
        for slot, (position, _) in remembered.items():
            cached[slot] = max(cached[slot], position)
        starts = np.maximum(cached - self._replay, 0)
        for slot, (position, _) in remembered.items():
            starts[slot] = position
        if cached.any():
            state = self._recall(state, trails, starts, cached, remembered)
        return state, Found(starts, cached)

    def keep(self, state: State, slot: int, trail: Trail) -> None:
        """Stores the pages of a sequence that have become full since the last call.

        Args:
            state: it is the sequence `slot` of it.
            slot: see `state`.
            trail: its own, at least as long as what the state holds.
        """
        full = int(np.asarray(state.positions)[slot]) // PAGE_TOKENS
        # A replay goes over pages that are full already.
        trail.full = max(trail.full, full)
        if trail.cut or full <= trail.stored:
            return
        table = np.asarray(state.cache.page_table)[slot]
        for first in range(trail.stored, full, _PAGES):
            numbers = range(first, min(first + _PAGES, full))
            payloads = self._read(state.cache, table[list(numbers)])
            for number, payload in zip(numbers, payloads, strict=True):
                if not self.store.disk.put(trail.chain.keys[number], payload):
                    trail.cut = True
                    return
        trail.stored = full

    def remember(self, state: State, slot: int, trail: Trail) -> None:
        """Takes the window rows of a sequence into the host's pool, and notes that its pages were
        used until now; arguments as for `keep`."""
        self.store.disk.touch(trail.chain.keys[: trail.stored])
        if self.exact or state.encoder is None or not self.store.host.budget:
            return
        position = int(np.asarray(state.positions)[slot])
        page = b""
        if position % PAGE_TOKENS:
            table = np.asarray(state.cache.page_table)[slot]
            (page,) = self._read(state.cache, table[[position // PAGE_TOKENS]])
        captured = jax.tree.map(np.asarray, self._programs.capture(state, slot))
        size = len(page) + sum(leaf.nbytes for leaf in jax.tree.leaves(captured))
        self.store.host.put(*trail.chain.place(position), _Remembered(page, captured), size)

    def _find(self, chain: KeyChain, full: int) -> tuple[int, _Remembered] | None:
        """(position, entry) of the newest window rows from which to go on, `full` pages being
        there."""
        if self.exact:
            return None
        last = len(chain.tokens) - self._tail
        first = max(full * PAGE_TOKENS - _REACH * self._replay, 1)
        for pages in range(min(full, last // PAGE_TOKENS), first // PAGE_TOKENS - 1, -1):
            anchor = chain.anchor(pages)
            for tail in sorted(self.store.host.tails(anchor), key=len, reverse=True):
                position = pages * PAGE_TOKENS + len(tail) // 4
                if first <= position <= last and chain.place(position) == (anchor, tail):
                    entry = self.store.host.get(anchor, tail)
                    if entry is not None:
                        return position, entry
        return None

    def _recall(
        self,
        state: State,
        trails: Sequence[Trail],
        starts: np.ndarray,
        cached: np.ndarray,
        remembered: dict[int, tuple[int, _Remembered]],
    ) -> State:
        tokens = [trail.chain.tokens for trail in trails]
        before = tokens_before(self._config.engram_max_ngram_size, tokens, starts)
        places = starts.astype(np.int32), cached.astype(np.int32)
        state = self._programs.recall(self._weights, state, *places, before)
        if not remembered:
            return state
        # Any entry does for the others: it is not looked at.
        other = next(iter(remembered.values()))
        entries = [remembered.get(slot, other)[1].captured for slot in range(len(trails))]
        rest = jax.tree.map(lambda *own: np.stack(own), *(e._replace(rows=None) for e in entries))
        captured = rest._replace(rows=np.stack([entry.rows for entry in entries], axis=1))
        held = np.isin(np.arange(len(trails)), list(remembered))
        return self._programs.resume(state, held, captured)

    def _read(self, cache: GlobalCache, pages: np.ndarray) -> list[bytes]:
        """Pages of the device, at most `_PAGES`, as they are stored."""
        padded = np.full(_PAGES, cache.num_pages, np.int32)
        padded[: len(pages)] = pages
        arrays = [np.asarray(array) for array in self._programs.read_pages(cache, padded)]
        return [b"".join(array[i].tobytes() for array in arrays) for i in range(len(pages))]


class _Loader:
    """Writes pages to the device, several in one call."""

    def __init__(self, programs: Programs, cache: GlobalCache):
        self._programs, self._cache = programs, cache
        self._pages: list[int] = []
        self._payloads: list[bytes] = []

    def add(self, page: int, payload: bytes) -> None:
        """Takes the contents of a page."""
        self._pages.append(int(page))
        self._payloads.append(payload)
        if len(self._pages) == _PAGES:
            self.finish()

    def finish(self) -> GlobalCache:
        """The cache with everything that was added."""
        if self._pages:
            pages = np.full(_PAGES, self._cache.num_pages, np.int32)
            pages[: len(self._pages)] = self._pages
            blank = bytes(len(self._payloads[0]))
            payloads = self._payloads + [blank] * (_PAGES - len(self._pages))
            rows = self._split(np.frombuffer(b"".join(payloads), np.uint8).reshape(_PAGES, -1))
            self._cache = self._programs.write_pages(self._cache, pages, rows)
            self._pages, self._payloads = [], []
        return self._cache

    def _split(self, payloads: np.ndarray) -> tuple[jax.Array, ...]:
        """The arrays of `GlobalCache.read_pages` out of uint8 [N, page bytes]."""
        arrays, begin = [], 0
        pairs = zip(self._cache.main, self._cache.keys, strict=True)
        for like in (array for pair in pairs for array in pair):
            end = begin + like[0].size * like.dtype.itemsize
            part = np.ascontiguousarray(payloads[:, begin:end]).view(like.dtype)
            arrays.append(jnp.asarray(part.reshape(len(payloads), *like.shape[1:])))
            begin = end
        return tuple(arrays)
