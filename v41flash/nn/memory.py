"""What layers read of the tokens before a step, and what the step adds to it: the serving side of
"rows come from the sequence itself, or from a cache".

A step reads the state of before it. Its window rows and compressor projections are collected, and
`v41flash.serving.state.commit` stores them once it is known how many of its tokens count
(speculative decoding takes some back). Entries of the global cache are written at once, because
the step's own queries may select them; beyond the sequence's length nothing can see them.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.indexer.reference import PACKED_FORMAT
from v41flash.cache import PAGE_TOKENS, CompressorState, GlobalCache, Groups, WindowCache


class Memory(NamedTuple):
    """Caches as the layers of one part (encoder, decoder) see them during a step of T tokens.

    Attributes:
        cache: the global cache; its lengths are those of before the step. Ahead of `first` during
            a replay, whose tokens have their entries already.
        windows: of the part; None where no layer of it runs.
        groups: tokens of incomplete groups, per KV source that pools several.
        first: int32 [B], position of the step's first token.
        new: int32 [B], tokens of the step that count.
        window_rows: [B, T, D] of each layer that has run, in order.
        projections: (kv, gate logits) [B, T, D] of each source in `groups` that has run.
    """

    cache: GlobalCache
    windows: WindowCache | None
    groups: dict[int, CompressorState]
    first: jax.Array
    new: jax.Array
    window_rows: tuple[jax.Array, ...] = ()
    projections: dict[int, tuple[jax.Array, jax.Array]] = {}

    def entries(self, ratio: int) -> int:
        """Entries that a sequence's pages can hold."""
        return self.cache.page_table.shape[1] * PAGE_TOKENS // ratio

    def with_window(self, layer: int, rows: jax.Array) -> tuple[jax.Array, Memory]:
        """([B, W + T, D] rows held and those of this step, as `WindowCache.ranges` counts them; the
        memory that has taken note of them)."""
        unrolled = self.windows.unroll(layer, rows)
        return unrolled, self._replace(window_rows=(*self.window_rows, rows))

    def complete(self, layer: int, kv: jax.Array, score: jax.Array | None) -> tuple[Groups, Memory]:
        """Groups that this step completes, from the projections of `Compressor.project`."""
        if score is None:
            return Groups(kv[:, :, None], None, self.first, self.new), self
        groups, _ = self.groups[layer].push(kv, score, self.first, self.new)
        return groups, self._replace(projections={**self.projections, layer: (kv, score)})

    def store(self, layer: int, main: jax.Array, keys: jax.Array, first: jax.Array) -> Memory:
        """Writes entries [B, G, .] from logical entry `first` int32 [B] on, but for those that are
        there already."""
        missing = jnp.maximum(self.first + self.new - self.cache.lengths, 0)
        return self._replace(cache=self.cache.append(layer, main, keys, missing, first))

    def index_keys(self, layer: int) -> jax.Array:
        """All index keys of a KV source as `indexer.select` takes them: [B, G, Di], packed where
        they are stored in its format."""
        rows = self.cache.index_keys(layer)
        entries = self.entries(self.cache.ratio(layer))
        return rows.read(0, entries, packed=rows.format.fmt == PACKED_FORMAT)

    def selected(self, layer: int, indices: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The selected entries of a KV source, as `sparse_attention` takes them.

        Args:
            layer: the KV source.
            indices: int32 [B, T, K] logical entries, -1 padded.

        Returns:
            (rows [B, X, D], int32 [B, T, K] places of the selected entries in them). Few queries
            gather what they selected, X = T K; many read everything there is, X = all entries.
        """
        rows = self.cache.main_rows(layer)
        batch, queries, count = indices.shape
        entries = self.entries(self.cache.ratio(layer))
        if queries * count >= entries:
            return rows.read(0, entries), indices
        own = rows.gather(indices).reshape(batch, queries * count, -1)
        places = jnp.arange(queries * count, dtype=jnp.int32).reshape(1, queries, count)
        return own, jnp.where(indices >= 0, places, -1)
