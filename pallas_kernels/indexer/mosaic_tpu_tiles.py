"""How the indexer's TPU kernels cut queries and keys, and what they share in a tile.

Queries come head by head, `[B, Hi, T, Di]`: a head of a tile of queries times a tile of keys is one
product of the matrix unit, and nothing is summed across sublanes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import tpu
from pallas_kernels.fp4.reference import format_of
from pallas_kernels.indexer.reference import PACKED_FORMAT
from pallas_kernels.tpu import LANES, SUBLANES

TILE_QUERIES, TILE_KEYS = 128, 512
_BLOCK = format_of(PACKED_FORMAT).block


def round_up(value: int, multiple: int) -> int:
    """The next multiple."""
    return -(-value // multiple) * multiple


@dataclasses.dataclass(frozen=True)
class Tiling:
    """Tiles of one call.

    Attributes:
        batch, length, heads, dim: B, T, Hi, Di.
        entries: G.
        queries, keys: of a tile.
        dtype: of queries, and of products.
        packed: whether keys are.
    """

    batch: int
    length: int
    heads: int
    dim: int
    entries: int
    queries: int
    keys: int
    dtype: Any
    packed: bool

    @classmethod
    def of(cls, q: jax.Array, k: jax.Array) -> Tiling:
        """Of queries `[B, T, Hi, Di]` and keys `[B, G, .]`."""
        return cls(
            *q.shape,
            entries=k.shape[1],
            queries=min(TILE_QUERIES, round_up(q.shape[1], 2 * SUBLANES)),
            keys=min(TILE_KEYS, round_up(k.shape[1], LANES)),
            dtype=q.dtype,
            packed=k.dtype == jnp.uint8,
        )

    @property
    def row(self) -> int:
        """Elements of a row of the keys."""
        return self.dim // 2 + self.dim // _BLOCK if self.packed else self.dim

    @property
    def passes(self) -> int:
        """Of the matrix unit for one product."""
        return 6 if self.dtype == jnp.float32 else 1

    @property
    def grid(self) -> tuple[int, int, int]:
        """Batch rows, tiles of queries, tiles of keys."""
        return self.batch, pl.cdiv(self.length, self.queries), pl.cdiv(self.entries, self.keys)

    @property
    def query_bytes(self) -> int:
        """Of a query's heads, in whole lanes."""
        return self.heads * round_up(self.dim, LANES) * self.dtype.itemsize

    @property
    def key_bytes(self) -> int:
        """Of a key in memory."""
        return self.row if self.packed else round_up(self.dim, LANES) * self.dtype.itemsize

    @property
    def tile_bytes(self) -> int:
        """VMEM of one tile: queries, keys and weights twice, two products and their sum."""
        streams = self.queries * self.query_bytes + self.keys * self.key_bytes
        return 2 * (streams + 4 * self.queries * LANES) + 3 * 4 * self.queries * self.keys

    @property
    def product_flops(self) -> int:
        """Of one product of all queries with all keys."""
        pairs = self.batch * self.length * self.heads * self.entries
        return 2 * self.passes * pairs * self.dim

    def operands(self, q: jax.Array, w: jax.Array, k: jax.Array) -> tuple[jax.Array, ...]:
        """Queries head by head, weights in float32, and keys as `aligned` gives them."""
        q, k = aligned(q, k)
        return jnp.swapaxes(q, 1, 2), w.astype(jnp.float32), k

    def operand_specs(self) -> list[pl.BlockSpec]:
        """Of `operands`, over `grid` and with `spans` prefetched."""
        return [
            pl.BlockSpec(
                (1, self.heads, self.queries, self.dim), lambda b, i, j, spans: (b, 0, i, 0)
            ),
            self.query_spec(self.heads),
            self.key_spec(self.keys, self.fetched),
        ]

    def key_spec(self, keys: int, tile: Callable[..., Any]) -> pl.BlockSpec:
        """Of keys as `operands` gives them, `keys` at a time.

        Args:
            keys: of a tile.
            tile: which one, of the prefetched scalars and the indices of the grid, of which the
                first is the batch row.
        """
        if self.packed:
            return pl.BlockSpec((1, self.row, keys), lambda b, *at: (b, 0, tile(b, *at)))
        return pl.BlockSpec((1, keys, self.row), lambda b, *at: (b, tile(b, *at), 0))

    def query_spec(self, width: int) -> pl.BlockSpec:
        """Of `[B, T, width]` over `grid`, the same for all tiles of keys."""
        return pl.BlockSpec((1, self.queries, width), lambda b, i, j, spans: (b, i, 0))

    def spans(self, ranges: jax.Array) -> jax.Array:
        """First entry, and one past the last, that a tile of queries needs: i32, flat.

        Args:
            ranges: i32 `[B, T, 2]`, those of each query.
        """
        batch, tiles, _ = self.grid
        lo, hi = ranges[..., 0], ranges[..., 1]
        empty = hi <= lo
        missing = [(0, 0), (0, tiles * self.queries - self.length)]
        lo = jnp.pad(jnp.where(empty, self.entries, lo), missing, constant_values=self.entries)
        hi = jnp.pad(jnp.where(empty, 0, hi), missing)
        first = lo.reshape(batch, tiles, -1).min(axis=-1)
        last = hi.reshape(batch, tiles, -1).max(axis=-1)
        return jnp.stack([first, last], axis=-1).reshape(-1)

    def needed(self, spans: Any, b: Any, i: Any, j: Any) -> Any:
        """Whether tile j of the keys has anything for tile i of the queries."""
        at = 2 * (b * self.grid[1] + i)
        return (j * self.keys < spans[at + 1]) & ((j + 1) * self.keys > spans[at])

    def fetched(self, b: Any, i: Any, j: Any, spans: Any) -> Any:
        """The tile of keys that is in VMEM at step j; what is not needed is not fetched."""
        at = 2 * (b * self.grid[1] + i)
        newest = jnp.clip(spans[at + 1] - 1, 0, self.entries - 1) // self.keys
        return jnp.clip(j, jnp.minimum(spans[at] // self.keys, newest), newest)


def aligned(q: jax.Array, k: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Queries and keys as products take them.

    Keys in floats get the type of the queries. Packed ones are turned, `[B, Di / 2 + Di / 32, G]`,
    and the channels of queries put in the order of `decoded` keys: even ones, then odd ones.
    """
    if k.dtype != jnp.uint8:
        return q, k.astype(q.dtype)
    return jnp.concatenate([q[..., 0::2], q[..., 1::2]], axis=-1), jnp.swapaxes(k, 1, 2)


def key_product(q: jax.Array, keys: jax.Array, packed: bool) -> jax.Array:
    """Dot products `[N, M]` of queries `[N, Di]` with keys `[M, Di]`, or decoded ones `[Di, M]`."""
    return product(q, keys, (1, 0 if packed else 1))


def decoded(rows: jax.Array, dtype: Any) -> jax.Array:
    """Keys `[Di, N]` of packed ones, uint8 `[Di / 2 + Di / 32, N]`; channels as `aligned` says.

    Values on the grid are products of a number of two bits and a power of two: exact.
    """
    rows = rows.astype(jnp.int32)
    groups = rows.shape[0] * 2 // (_BLOCK + 2)
    count = groups * _BLOCK // 2  # bytes of elements
    shape = (_BLOCK // 2, rows.shape[1])
    scale = jnp.concatenate(
        [jnp.broadcast_to(rows[count + n : count + n + 1], shape) for n in range(groups)]
    )
    scale = jnp.where(scale == 255, jnp.nan, lax.bitcast_convert_type(scale << 23, jnp.float32))

    def values(code):
        magnitude = code & 7
        normal = lax.bitcast_convert_type((magnitude + 252) << 22, jnp.float32)
        value = jnp.where(magnitude < 2, magnitude.astype(jnp.float32) * 0.5, normal)
        return jnp.where(code >= 8, -value, value) * scale

    codes = rows[:count]
    return jnp.concatenate([values(codes & 15), values(codes >> 4)]).astype(dtype)


def column(x: jax.Array, index: Any) -> jax.Array:
    """Column `[N, 1]` of x `[N, M]`, at an index that may not be static."""
    here = lax.broadcasted_iota(jnp.int32, x.shape, 1) == index
    return jnp.sum(jnp.where(here, x, 0.0), axis=1, keepdims=True)


def product(a: jax.Array, b: jax.Array, contract: tuple[int, int]) -> jax.Array:
    """Product of two matrices of one type over one axis of each, in float32."""
    return lax.dot_general(
        a,
        b,
        (((contract[0],), (contract[1],)), ((), ())),
        precision=lax.Precision.HIGHEST if a.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )


def over_heads(heads: int, body: Any, initial: Any, at_a_time: int = 4) -> Any:
    """A loop over heads, some of them in one step for the compiler to overlap.

    Args:
        heads: Hi.
        body: takes a head's index and the carried value, and returns the latter.
        initial: the carried value.
        at_a_time: heads of a step; one, where they do not divide.
    """
    at_a_time = at_a_time if heads % at_a_time == 0 else 1

    def step(n, carry):
        for head in range(at_a_time):
            carry = body(n * at_a_time + head, carry)
        return carry

    return lax.fori_loop(0, heads // at_a_time, step, initial)


def visible(ranges: jax.Array, shape: tuple[int, int], start: Any) -> jax.Array:
    """Which entries of a tile `[queries, keys]`, from `start` on, lie in ranges `[queries, 2]`."""
    at = lax.broadcasted_iota(jnp.int32, shape, 1) + start
    return (at >= ranges[:, 0:1]) & (at < ranges[:, 1:2])


def vmem_limit(account: tpu.Account) -> int:
    """What a kernel asks for: its own, and room for what the compiler spills."""
    return account.vmem_bytes + tpu.DEFAULT_VMEM_BYTES
