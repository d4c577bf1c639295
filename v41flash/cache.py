"""Serving state in arrays of exactly the published size: global cache, window cache.

`GlobalCache` holds, for every KV source, packed main rows and packed index keys in pages of 128
tokens. At the published widths a page takes 128 x 890 bytes. Sequences share one pool of pages;
each has a row of the page table, and every index that leaves this module is logical (entry j of a
sequence covers its tokens j m .. j m + m - 1). `WindowCache` holds the last W sliding-window rows
of every layer, and `CompressorState` the tokens of a group that is not complete yet.

Everything is pure and works under jit. A step of `new[b] <= T` tokens per sequence goes

    layer by layer:  cache = cache.append(layer, ...);  window = window.append(layer, ...)
    at its end:      cache = cache.advance(new);        window = window.advance(new)

where `append` and the reads see the lengths from before the step, and what lies in a chunk beyond
`new[b]` is padding that is never stored.

Writes that have no page are dropped, because a compiled program cannot raise. What shapes alone
show to be impossible is a ValueError at once; before a step whose lengths are known on the host
call `check_room`, and inside a compiled loop stop the sequences whose `room` is used up.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import fp4
from v41flash.config import ModelConfig
from v41flash.nn.context import Ranges

PAGE_TOKENS = 128


@dataclasses.dataclass(frozen=True)
class RowFormat:
    """How vectors are stored.

    Attributes:
        fmt: a format of `pallas_kernels.fp4` (canonical packed rows, uint8), or "none" (as they
            are, in `dtype`).
        channels: D.
        dtype: of the values that are read back, "bfloat16" or "float32".
    """

    fmt: str
    channels: int
    dtype: str

    @property
    def width(self) -> int:
        """Elements of a stored row."""
        return self.channels if self.fmt == "none" else fp4.row_bytes(self.fmt, self.channels)

    @property
    def storage(self) -> str:
        """dtype of a stored row."""
        return self.dtype if self.fmt == "none" else "uint8"

    def pack(self, values: jax.Array) -> jax.Array:
        """Stored rows [..., width] of values [..., D] that the model has already rounded.

        `unpack` gives back exactly such values. Values that were never rounded are rounded as
        `fp4.pack` does, except for FP4 blocks whose largest magnitude is 2^-6 to the bit.
        """
        if self.fmt == "none":
            return values.astype(self.dtype)
        if self.fmt == "fp4":
            # Rounding twice differs from rounding once in one case. In units of 2^-9, an amax of 9
            # to 10 gets the scale 2 and is rounded to 4 * 2 = 8; an amax of 8 gets the scale 1,
            # which ends at 6. No other rounded block has amax 8, and 9/8 of its values round to
            # the same codes under the scale 2 again.
            block = fp4.FORMATS[self.fmt].block
            blocks = values.astype(jnp.float32).reshape(*values.shape[:-1], -1, block)
            amax = jnp.max(jnp.abs(blocks), axis=-1, keepdims=True)
            values = jnp.where(amax == 2.0**-6, blocks * 1.125, blocks).reshape(values.shape)
        return fp4.pack(values, self.fmt)

    def unpack(self, rows: jax.Array) -> jax.Array:
        """Values [..., D] of stored rows."""
        return rows if self.fmt == "none" else fp4.unpack(rows, self.fmt, self.dtype)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["pages", "page_table"],
    meta_fields=["format"],
)
@dataclasses.dataclass(frozen=True)
class PagedRows:
    """One kind of rows of one KV source, as all sequences of a batch see it.

    Attributes:
        pages: [P, E, width] stored rows, E = 128 / m entries a page.
        page_table: int32 [B, N], page of each logical page; outside [0, P) where there is none.
        format: how rows are stored.
    """

    pages: jax.Array
    page_table: jax.Array
    format: RowFormat

    def gather(self, indices: jax.Array, *, packed: bool = False) -> jax.Array:
        """Entries by logical index.

        Args:
            indices: int32 [B, T, K]; -1 and any other index without a page is no entry.
            packed: leave them as they are stored.

        Returns:
            [B, T, K, D] in the format's dtype (or [B, T, K, width] as stored), zeros where there is
            no entry.
        """
        size = self.pages.shape[1]
        flat = indices.reshape(indices.shape[0], -1)
        page = self._lookup(flat // size)
        # A packed row of zero bytes is a row of zeros in every format.
        rows = self.pages.at[page, flat % size].get(mode="fill", fill_value=0)
        rows = rows.reshape(*indices.shape, -1)
        return rows if packed else self.format.unpack(rows)

    def read(self, start: int | jax.Array, count: int, *, packed: bool = False) -> jax.Array:
        """Consecutive entries, page by page.

        Args:
            start: first logical entry, one for all (a page boundary known in Python is cheapest)
                or int32 [B].
            count: entries to read.
            packed: leave them as they are stored.

        Returns:
            [B, count, D] in the format's dtype (or [B, count, width] as stored), zeros where there
            is no page.
        """
        batch, size = self.page_table.shape[0], self.pages.shape[1]
        aligned = isinstance(start, int) and start % size == 0
        wanted = -(-count // size) + (not aligned)
        first = jnp.broadcast_to(jnp.asarray(start, jnp.int32), (batch,))
        page = self._lookup(first[:, None] // size + jnp.arange(wanted, dtype=jnp.int32))
        rows = self.pages.at[page].get(mode="fill", fill_value=0)
        rows = rows.reshape(batch, wanted * size, -1)
        if aligned:
            rows = rows[:, :count]
        else:
            cut = functools.partial(jax.lax.dynamic_slice_in_dim, slice_size=count)
            rows = jax.vmap(cut)(rows, first % size)
        return rows if packed else self.format.unpack(rows)

    def write(self, values: jax.Array, first: jax.Array, lo: jax.Array, hi: jax.Array) -> jax.Array:
        """New `pages` in which the logical entries lo <= j < hi are rows j - first of `values`.

        Args:
            values: [B, G, D], or uint8 [B, G, width] rows that are packed already.
            first: int32 [B], logical entry of row 0.
            lo: int32 [B].
            hi: int32 [B].

        Returns:
            [P, E, width]. Entries without a page are dropped.
        """
        packed = values if values.dtype == jnp.uint8 else self.format.pack(values)
        entry = first[:, None] + jnp.arange(values.shape[1], dtype=jnp.int32)
        kept = (entry >= lo[:, None]) & (entry < hi[:, None])
        size = self.pages.shape[1]
        page = jnp.where(kept, self._lookup(entry // size), self.pages.shape[0])
        return self.pages.at[page, entry % size].set(packed, mode="drop")

    def _lookup(self, logical: jax.Array) -> jax.Array:
        """Pages [B, X] of logical pages [B, X]; P, which no array has, where there is none."""
        none, known = self.pages.shape[0], self.page_table.shape[1]
        page = jnp.take_along_axis(self.page_table, jnp.clip(logical, 0, known - 1), axis=1)
        exists = (logical >= 0) & (logical < known) & (page >= 0) & (page < none)
        return jnp.where(exists, page, none)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["main", "keys", "page_table", "lengths"],
    meta_fields=["sources", "main_format", "key_format"],
)
@dataclasses.dataclass(frozen=True)
class GlobalCache:
    """Main rows and index keys of every KV source, in pages that sequences share.

    One page number stands for the same 128 tokens in every array. Sequences with a common prefix
    may name the same pages: appending only touches entries from a sequence's length on, so it
    leaves shared pages alone as long as the common prefix ends on a page boundary.

    Attributes:
        main: per source, [P, 128 // m, row bytes].
        keys: per source, [P, 128 // m, row bytes].
        page_table: int32 [B, N], -1 where a sequence has no page.
        lengths: int32 [B], tokens in the cache.
        sources: KV source layers, ascending.
        main_format: of `main`.
        key_format: of `keys`.
    """

    main: tuple[jax.Array, ...]
    keys: tuple[jax.Array, ...]
    page_table: jax.Array
    lengths: jax.Array
    sources: tuple[int, ...]
    main_format: RowFormat
    key_format: RowFormat

    @classmethod
    def create(
        cls, config: ModelConfig, num_pages: int, page_table: np.ndarray | jax.Array
    ) -> GlobalCache:
        """An empty cache.

        Args:
            config: the model; formats are its `main_kv_format` and `index_format`. "none" stores
                rows in `config.dtype`.
            num_pages: P, pages of 128 tokens in the pool.
            page_table: int [B, N], distinct pages for everything that is going to be written, -1
                for none. `dataclasses.replace` exchanges it later.

        Returns:
            The cache, all sequences of length 0.

        Raises:
            ValueError: no pages, or a table that is not [B, N] or (where its values are known)
                names pages that the pool does not have.
        """
        if num_pages < 1:
            raise ValueError(f"num_pages = {num_pages}: must be at least 1")
        if np.ndim(page_table) != 2 or 0 in np.shape(page_table):
            raise ValueError(f"page_table is {list(np.shape(page_table))}: must be [B, N]")
        if not isinstance(page_table, jax.core.Tracer):
            worst = int(np.max(page_table))
            if worst >= num_pages:
                raise ValueError(f"page_table names page {worst}; must be below {num_pages}")
        main_format = RowFormat(config.main_kv_format, config.head_dim, config.dtype)
        key_format = RowFormat(config.index_format, config.index_head_dim, config.dtype)
        entries = [PAGE_TOKENS // config.layers[i].ratio for i in config.kv_source_layer_ids]

        def pages(rows: RowFormat) -> tuple[jax.Array, ...]:
            return tuple(jnp.zeros((num_pages, n, rows.width), rows.storage) for n in entries)

        return cls(
            main=pages(main_format),
            keys=pages(key_format),
            page_table=jnp.asarray(page_table, jnp.int32),
            lengths=jnp.zeros(np.shape(page_table)[0], jnp.int32),
            sources=config.kv_source_layer_ids,
            main_format=main_format,
            key_format=key_format,
        )

    @property
    def page_bytes(self) -> int:
        """Bytes of one page: what the arrays allocate for 128 tokens."""
        return sum(a.size * a.dtype.itemsize for a in self.main + self.keys) // self.num_pages

    @property
    def bytes_per_token(self) -> float:
        """Bytes that the arrays allocate per token; 890 at the published widths."""
        return self.page_bytes / PAGE_TOKENS

    @property
    def num_pages(self) -> int:
        """P."""
        return self.main[0].shape[0]

    def ratio(self, layer: int) -> int:
        """Tokens per entry of a KV source."""
        return PAGE_TOKENS // self.main[self._source(layer)].shape[1]

    def main_rows(self, layer: int) -> PagedRows:
        """Main rows of a KV source (`LayerSpec.kv_source`)."""
        return PagedRows(self.main[self._source(layer)], self.page_table, self.main_format)

    def index_keys(self, layer: int) -> PagedRows:
        """Index keys of a KV source."""
        return PagedRows(self.keys[self._source(layer)], self.page_table, self.key_format)

    def append(
        self,
        layer: int,
        main: jax.Array,
        keys: jax.Array,
        new: jax.Array,
        first: jax.Array | None = None,
    ) -> GlobalCache:
        """Stores the entries that `new` more tokens complete; `advance` makes them count.

        Args:
            layer: the KV source that made them.
            main: [B, G, D] main rows, rounded by the model, or uint8 packed ones.
            keys: [B, G, Di], likewise.
            new: int32 [B], tokens of this step.
            first: int32 [B], logical entry of row 0; the first one that is not stored yet when
                None. Rows before that one are dropped: a replay that recomputes a cached prefix
                does not overwrite it.

        Returns:
            The cache with the entries `length // m .. (length + new) // m - 1` written, as far as
            the sequence has pages.

        Raises:
            ValueError: shapes that do not fit, or more rows than the page table could ever hold.
        """
        source, m = self._source(layer), self.ratio(layer)
        batch, known = self.page_table.shape
        for name, rows, fmt in (("main", main, self.main_format), ("keys", keys, self.key_format)):
            width = fmt.width if rows.dtype == jnp.uint8 else fmt.channels
            expected = (batch, main.shape[1], width)
            if rows.shape != expected:
                raise ValueError(f"{name} is {list(rows.shape)}: must be {list(expected)}")
        if main.shape[1] * m > known * PAGE_TOKENS:
            raise ValueError(
                f"{main.shape[1]} entries of layer {layer} ({m} tokens each) exceed the"
                f" {known} pages of {PAGE_TOKENS} tokens that a sequence can have"
            )
        lo, hi = self.lengths // m, (self.lengths + new) // m
        first = lo if first is None else first
        written = self.main_rows(layer).write(main, first, lo, hi)
        written_keys = self.index_keys(layer).write(keys, first, lo, hi)
        return dataclasses.replace(
            self,
            main=(*self.main[:source], written, *self.main[source + 1 :]),
            keys=(*self.keys[:source], written_keys, *self.keys[source + 1 :]),
        )

    def read_pages(self, pages: jax.Array) -> tuple[jax.Array, ...]:
        """Whole pages as they are stored: per source its main rows and its keys, each
        [N, 128 // m, row bytes] of `pages` int32 [N]. Joined, the N-th of each are `page_bytes`."""
        arrays = (a for pair in zip(self.main, self.keys, strict=True) for a in pair)
        return tuple(a.at[pages].get(mode="fill", fill_value=0) for a in arrays)

    def write_pages(self, pages: jax.Array, rows: tuple[jax.Array, ...]) -> GlobalCache:
        """The cache in which `pages` int32 [N] are `rows`, as `read_pages` gives them; a page that
        there is not, such as P, is dropped."""
        main, keys = (
            tuple(a.at[pages].set(new, mode="drop") for a, new in zip(arrays, own, strict=True))
            for arrays, own in ((self.main, rows[::2]), (self.keys, rows[1::2]))
        )
        return dataclasses.replace(self, main=main, keys=keys)

    def advance(self, new: jax.Array) -> GlobalCache:
        """The cache after a step of `new` int32 [B] tokens, once every source has appended."""
        return dataclasses.replace(self, lengths=self.lengths + new)

    def room(self) -> jax.Array:
        """int32 [B]: tokens that each sequence's pages can still take."""
        exists = (self.page_table >= 0) & (self.page_table < self.num_pages)
        unbroken = jnp.cumprod(exists.astype(jnp.int32), axis=1)
        return jnp.sum(unbroken, axis=1) * PAGE_TOKENS - self.lengths

    def check_room(self, new: np.ndarray) -> None:
        """Raises ValueError where `new` int [B] more tokens would not find pages (host only)."""
        room = np.asarray(self.room())
        for b in np.flatnonzero(np.asarray(new) > room):
            raise ValueError(
                f"sequence {b}: {int(new[b])} more tokens after {int(self.lengths[b])}, but its"
                f" pages have room for {int(room[b])}; give it more pages"
            )

    def _source(self, layer: int) -> int:
        if layer not in self.sources:
            raise ValueError(f"layer {layer} is no KV source; must be one of {self.sources}")
        return self.sources.index(layer)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["rows", "starts", "lengths"],
    meta_fields=["first_layer", "format"],
)
@dataclasses.dataclass(frozen=True)
class WindowCache:
    """The last W sliding-window rows of consecutive layers: a ring in which position p has slot
    p mod W.

    Attributes:
        rows: [L, B, W, row bytes].
        starts: int32 [B], first position that counts; above 0 after a bounded replay.
        lengths: int32 [B], one past the last position.
        first_layer: the layer of rows[0].
        format: of `rows`.
    """

    rows: jax.Array
    starts: jax.Array
    lengths: jax.Array
    first_layer: int
    format: RowFormat

    @classmethod
    def create(cls, config: ModelConfig, batch: int, layers: range | None = None) -> WindowCache:
        """An empty cache.

        Args:
            config: the model; the format is its `window_kv_format`.
            batch: B.
            layers: consecutive layers to hold, all when None. Encoder and decoder need a cache each
                where they run over different tokens.

        Returns:
            The cache, all sequences at position 0.

        Raises:
            ValueError: layers that the model does not have, or that are not consecutive.
        """
        layers = range(config.num_hidden_layers) if layers is None else layers
        if not layers or layers.step != 1 or not 0 <= layers[0] <= layers[-1] < len(config.layers):
            raise ValueError(f"{layers}: must be consecutive layers of {len(config.layers)}")
        row = RowFormat(config.window_kv_format, config.head_dim, config.dtype)
        shape = (len(layers), batch, config.sliding_window, row.width)
        # Arrays of their own, so that a step may be given all of them to overwrite.
        starts, lengths = jnp.zeros(batch, jnp.int32), jnp.zeros(batch, jnp.int32)
        return cls(jnp.zeros(shape, row.storage), starts, lengths, layers[0], row)

    @property
    def bytes_per_sequence(self) -> int:
        """Bytes that the rows of one sequence allocate."""
        return self.rows.size * self.rows.dtype.itemsize // self.rows.shape[1]

    @property
    def window(self) -> int:
        """W."""
        return self.rows.shape[2]

    def restart(self, positions: jax.Array) -> WindowCache:
        """Forgets all rows; the next token is at `positions` int32 [B], where a replay begins."""
        positions = jnp.asarray(positions, jnp.int32)
        return dataclasses.replace(self, starts=positions, lengths=positions)

    def ranges(self, tokens: int, new: jax.Array) -> Ranges:
        """What the queries of a step see of the rows that `unroll` returns.

        Args:
            tokens: T, length of the chunk.
            new: int32 [B], tokens of it that count.

        Returns:
            Ranges int32 [B, T] on the W + T rows: the query at position p sees the rows of
            [max(start, p - W + 1), p]; empty for padding.
        """
        step = jnp.arange(tokens, dtype=jnp.int32)[None]
        hi = jnp.broadcast_to(self.window + 1 + step, (new.shape[0], tokens))
        oldest = self.window + self.starts - self.lengths
        lo = jnp.maximum(hi - self.window, oldest[:, None])
        return Ranges(jnp.where(step < new[:, None], lo, hi), hi)

    def unroll(self, layer: int | jax.Array, values: jax.Array) -> jax.Array:
        """Window rows of a step in the order of their positions.

        Args:
            layer: the layer; may be traced.
            values: [B, T, D], rows of this step, rounded by the model.

        Returns:
            [B, W + T, D]: positions length - W .. length - 1 out of the ring, then `values`.
            Rows before `starts` are finite and mean nothing.
        """
        return jnp.concatenate([self.held(layer).astype(values.dtype), values], axis=1)

    def held(self, layer: int | jax.Array) -> jax.Array:
        """Rows [B, W, D] of positions length - W .. length - 1; those before `starts` are finite
        and mean nothing."""
        slot = (self.lengths[:, None] + jnp.arange(self.window, dtype=jnp.int32)) % self.window
        # Position length - W + s shares its slot with length + s.
        ring = self.rows.at[self._place(layer), jnp.arange(len(slot))[:, None], slot]
        return self.format.unpack(ring.get(mode="promise_in_bounds"))

    def append(self, layer: int | jax.Array, values: jax.Array, new: jax.Array) -> WindowCache:
        """Stores the rows of a step; `advance` makes them count.

        Args:
            layer: the layer; may be traced.
            values: [B, T, D], rounded by the model; any T, of which the last W that count are kept.
            new: int32 [B], rows that count.

        Returns:
            The cache with the rows written.
        """
        batch, tokens, channels = values.shape
        if channels != self.format.channels or batch != self.rows.shape[1]:
            raise ValueError(
                f"values are {list(values.shape)}: must be [{self.rows.shape[1]}, T,"
                f" {self.format.channels}]"
            )
        step = jnp.broadcast_to(jnp.arange(tokens, dtype=jnp.int32), (batch, tokens))
        if tokens > self.window:
            # Slots would repeat within one step.
            step = jnp.maximum(new - self.window, 0)[:, None] + step[:, : self.window]
            values = jnp.take_along_axis(values, step[..., None], axis=1)
        slot = (self.lengths[:, None] + step) % self.window
        slot = jnp.where(step < new[:, None], slot, self.window)
        place = self.rows.at[self._place(layer), jnp.arange(batch)[:, None], slot]
        return dataclasses.replace(self, rows=place.set(self.format.pack(values), mode="drop"))

    def advance(self, new: jax.Array) -> WindowCache:
        """The cache after a step of `new` int32 [B] tokens, once every layer has appended."""
        return dataclasses.replace(self, lengths=self.lengths + new)

    def _place(self, layer: int | jax.Array) -> int | jax.Array:
        place = layer - self.first_layer
        if isinstance(place, int) and not 0 <= place < self.rows.shape[0]:
            last = self.first_layer + self.rows.shape[0] - 1
            raise ValueError(f"layer {layer}: this cache holds {self.first_layer} to {last}")
        return place


class Groups(NamedTuple):
    """Complete compression groups of a step.

    Attributes:
        kv: [B, G, m, D], G = (T + m - 1) // m; what lies beyond `count` means nothing.
        score: [B, G, m, D].
        first: int32 [B], logical entry of group 0; it begins at position first * m.
        count: int32 [B], complete groups.
    """

    kv: jax.Array
    score: jax.Array
    first: jax.Array
    count: jax.Array


class CompressorState(NamedTuple):
    """Tokens of a group that is not complete: `length % m` of them, in order, zeros behind.

    Attributes:
        kv: float32 [B, m - 1, D], projections of the compressor.
        score: float32 [B, m - 1, D], its gate logits.
    """

    kv: jax.Array
    score: jax.Array

    @classmethod
    def create(cls, config: ModelConfig, batch: int) -> dict[int, CompressorState]:
        """Empty states, one for every KV source that pools more than one token."""
        ratios = {i: config.layers[i].ratio for i in config.kv_source_layer_ids}
        return {
            i: cls(*(jnp.zeros((batch, m - 1, config.head_dim), jnp.float32) for _ in range(2)))
            for i, m in ratios.items()
            if m > 1
        }

    def push(
        self, kv: jax.Array, score: jax.Array, lengths: jax.Array, new: jax.Array
    ) -> tuple[Groups, CompressorState]:
        """Forms groups out of the tokens held and those of a step.

        Args:
            kv: [B, T, D].
            score: [B, T, D].
            lengths: int32 [B], tokens before this step.
            new: int32 [B], tokens of it that count.

        Returns:
            (groups that are complete now, what is left over).
        """
        m = self.kv.shape[1] + 1
        held = (lengths % m)[:, None]
        total = held + new[:, None]
        left = total % m

        def pick(state: jax.Array, step: jax.Array, order: jax.Array) -> jax.Array:
            """Tokens [B, X, D] number `order` [B, X], counted from the oldest one held."""
            both = jnp.concatenate([state, step.astype(state.dtype)], axis=1)
            place = jnp.where(order < held, order, order - held + m - 1)
            return jnp.take_along_axis(both, place[..., None], axis=1, mode="clip")

        count = (kv.shape[1] + m - 1) // m
        order = jnp.broadcast_to(jnp.arange(count * m), (kv.shape[0], count * m))
        rest = total - left + jnp.arange(m - 1)
        inside = (rest < total)[..., None]
        grouped, kept = [], []
        for state, step in zip(self, (kv, score), strict=True):
            grouped.append(pick(state, step, order).reshape(kv.shape[0], count, m, -1))
            kept.append(jnp.where(inside, pick(state, step, rest), 0))
        groups = Groups(*grouped, first=lengths // m, count=(total // m)[:, 0])
        return groups, CompressorState(*kept)
