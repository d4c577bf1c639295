"""Lists of the rows that groups of queries visit, in whole tiles: what kernels loop over.

A matrix product wants 64 rows on its query side. With fewer heads than that, consecutive queries
share one group of 64 (query, head) rows, and the group visits the union of their rows; each entry
of its list says which of them see it. Neighbours that select much the same rows then pay for a row
once; with nothing in common the union costs what padding the heads would.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

TILE = 64
MAX_MEMBERS = 4
MEMBER_BITS = 4


class Tiles(NamedTuple):
    """Entries of each group of queries.

    Attributes:
        words: i32 `[N, L]`, L a multiple of `TILE`. `row << MEMBER_BITS | members`: bit i says that
            the group's i-th query sees the row; no bit, no entry. A row that a query lists twice
            has two entries.
        counts: i32 `[N]`, tiles of the group, at least one; entries behind them are none.
    """

    words: jax.Array
    counts: jax.Array


def rows_of(words: jax.Array) -> jax.Array:
    """The row of each entry, -1 where there is none."""
    return jnp.where(words & (2**MEMBER_BITS - 1) != 0, words >> MEMBER_BITS, -1)


def tiles_of(
    window_lo: jax.Array,
    window_hi: jax.Array,
    indices: jax.Array,
    *,
    members: int,
    window: int,
    window_size: int,
    main_size: int,
) -> Tiles:
    """Lists of groups of consecutive queries, window rows first.

    Rows are those of `concatenate([window_rows, main_rows], axis=1)`, flattened over the batch.

    Args:
        window_lo: i32 `[B, T]`, as in `sparse_attention`.
        window_hi: i32 `[B, T]`, likewise.
        indices: i32 `[B, T, K]`, likewise.
        members: queries of a group, 1 to 4; the last group of a row may have fewer.
        window: bound of `window_hi - window_lo`.
        window_size: S, number of window rows.
        main_size: G, number of main rows.

    Returns:
        Tiles of `N = B * ceil(T / members)` groups.

    Raises:
        ValueError: more rows than an entry can name.
    """
    batch, queries, _ = indices.shape
    size = window_size + main_size
    if batch * size >= 2 ** (31 - MEMBER_BITS):
        raise ValueError(f"{batch} x {size} rows are more than {2 ** (31 - MEMBER_BITS) - 1}")

    def grouped(x, fill):
        missing = -queries % members
        x = jnp.pad(x, [(0, 0), (0, missing), *[(0, 0)] * (x.ndim - 2)], constant_values=fill)
        return x.reshape(batch, x.shape[1] // members, members, *x.shape[2:])

    valid = (indices >= 0) & (indices < main_size)
    indices = grouped(jnp.where(valid, indices, main_size), main_size)
    near = _window(grouped(window_lo, 0), grouped(window_hi, 0), window, window_size)
    far = _listed(indices, main_size) if members == 1 else _union(indices, main_size)
    words = jnp.concatenate([near, jnp.where(far != 0, far + (window_size << MEMBER_BITS), 0)], -1)
    offset = jnp.arange(batch, dtype=jnp.int32)[:, None, None] * (size << MEMBER_BITS)
    words = jnp.where(words != 0, words + offset, 0)
    words = words.reshape(-1, words.shape[-1])
    words = jnp.pad(words, [(0, 0), (0, -words.shape[-1] % TILE)])
    last = jnp.max(jnp.where(words != 0, jnp.arange(words.shape[-1], dtype=jnp.int32), 0), axis=-1)
    return Tiles(words, last // TILE + 1)


def _window(lo, hi, window, size):
    """Entries of consecutive rows that end where the group's last window does."""
    members = lo.shape[-1]
    length = window + members - 1 if window else 0
    end = jnp.where(lo < hi, hi, 0).max(axis=-1, keepdims=True)
    row = end - length + jnp.arange(length, dtype=jnp.int32)
    seen = (row[..., None, :] >= lo[..., None]) & (row[..., None, :] < hi[..., None])
    bits = jnp.sum(seen * _bits(members)[:, None], axis=-2, dtype=jnp.int32)
    bits = jnp.where((row >= 0) & (row < size), bits, 0)
    return jnp.where(bits != 0, (row << MEMBER_BITS) | bits, 0)


def _bits(members):
    return jnp.left_shift(1, jnp.arange(members, dtype=jnp.int32))


def _listed(indices, size):
    """One query's entries, where its list has them."""
    indices = indices[:, :, 0]
    return jnp.where(indices < size, (indices << MEMBER_BITS) | 1, 0)


def _union(indices, size):
    """Entries of all that members list: sorted, merged, moved to the front."""
    batch, groups, members, slots = indices.shape
    key = indices * members + jnp.arange(members, dtype=jnp.int32)[:, None]
    key = lax.sort(key.reshape(batch * groups, members * slots))
    row = key // members
    before = jnp.pad(key, [(0, 0), (1, 0)], constant_values=-members)[:, :-1]
    # A query's second mention of a row opens an entry of its own.
    first = (row != before // members) | (key == before)
    bits, joined = 0, jnp.ones_like(first)
    for ahead in range(members):
        reach = jnp.pad(key, [(0, 0), (0, ahead)])[:, ahead:]
        if ahead:
            joined &= ~jnp.pad(first, [(0, 0), (0, ahead)], constant_values=True)[:, ahead:]
        bits = bits | jnp.where(joined, 1 << (reach % members), 0)
    first &= row < size
    words = jnp.where(first, (row << MEMBER_BITS) | bits, 0)
    place = jnp.where(first, jnp.cumsum(first, axis=-1) - 1, words.shape[-1])
    group = jnp.arange(batch * groups)[:, None]
    # Places are distinct, so that the order of the writes does not matter.
    packed = jnp.zeros_like(words).at[group, place].set(words, mode="drop")
    return packed.reshape(batch, groups, members * slots)
