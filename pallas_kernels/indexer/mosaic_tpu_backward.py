"""Gradients of index scores on a TPU, from a gradient for every pair of a query and an entry.

Of a score `sum_h w_h relu(x_h)`, x_h = q_h . k, with gradient g, two kernels make everything:

* queries and weights, one tile of queries against all keys: x again, S = g w_h [x > 0] times the
  keys for dq, and the sum of g relu(x) for dw;
* keys, one tile of keys against all queries: x transposed, S transposed times the queries for dk.

Each gradient is added up in float32 in VMEM, in a fixed order: a call repeats to the last bit, and
four products are computed where three would do if gradients of keys could be added in memory.

Gradients of listed entries are spread first, over rows of all entries: an entry's block of 128 and
its lane are two one-hot matrices, whose product over the list is the row. Three parts of g in
bfloat16 add up to its float32.

VMEM, 32 heads x 128 in bfloat16: 2 x 1 MiB of queries, 2 x 2 MiB of dq, 2 x 256 KiB of g, 256 KiB
for each product that is under way.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import tpu
from pallas_kernels.indexer import mosaic_tpu_tiles as tiles
from pallas_kernels.indexer.mosaic_tpu_tiles import Tiling
from pallas_kernels.tpu import LANES, SUBLANES


def dense_gradients(
    q: jax.Array,
    w: jax.Array,
    k: jax.Array,
    ranges: jax.Array,
    g: jax.Array,
    *,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients of scores in all that they come from.

    Args:
        q: `[B, T, Hi, Di]`, float32 or bfloat16.
        w: `[B, T, Hi]`.
        k: `[B, G, Di]` of any float.
        ranges: i32 `[B, T, 2]`: entries `lo <= j < hi` count, `hi` at most G.
        g: f32 `[B, T, G]`, or wider: gradients of the scores, arbitrary elsewhere.
        interpret: parameters of interpret mode, or None.

    Returns:
        dq, dw, dk in float32, of the shapes of q, w, k.
    """
    tiling = Tiling.of(q, k)
    _, across, down = tiling.grid
    # Rows beyond the last add nothing where they are zeros.
    missing = across * tiling.queries - tiling.length
    q = jnp.pad(q, [(0, 0), (0, missing), (0, 0), (0, 0)])
    w = jnp.pad(w, [(0, 0), (0, missing), (0, 0)])
    k = jnp.pad(k, [(0, 0), (0, down * tiling.keys - tiling.entries), (0, 0)])
    q, w, k = tiling.operands(q, w, k)
    spans = tiling.spans(ranges)
    dq, dw = _query_gradients(tiling, spans, q, w, k, ranges, g, interpret)
    dk = _key_gradients(tiling, spans, q, jnp.swapaxes(w, 1, 2), k, ranges, g, interpret)
    dq = jnp.swapaxes(dq, 1, 2)[:, : tiling.length]
    return dq, dw, dk[:, : tiling.entries]


def query_account(tiling: Tiling) -> tpu.Account:
    """What gradients of queries and weights take."""
    batch, across, down = tiling.grid
    tile = 4 * tiling.queries * tiling.heads * tiles.round_up(tiling.dim, LANES)
    reads = tiling.length * tiling.query_bytes + across * tiling.entries * tiling.key_bytes
    pairs = 4 * tiling.length * tiling.entries
    return tpu.Account(
        vmem_bytes=tiling.tile_bytes + 2 * tile + 2 * 4 * tiling.queries * tiling.keys,
        hbm_bytes=batch * (reads + pairs + across * tile),
        flops=2 * tiling.product_flops,
    )


def key_account(tiling: Tiling) -> tpu.Account:
    """What gradients of keys take."""
    batch, across, down = tiling.grid
    tile = 4 * tiling.keys * tiles.round_up(tiling.dim, LANES)
    reads = down * tiling.length * tiling.query_bytes + tiling.entries * tiling.key_bytes
    pairs = 4 * tiling.length * tiling.entries
    return tpu.Account(
        vmem_bytes=tiling.tile_bytes + 2 * tile + 3 * 4 * tiling.queries * tiling.keys,
        hbm_bytes=batch * (reads + pairs + down * tile),
        flops=2 * tiling.product_flops,
    )


def _query_gradients(tiling: Tiling, spans, q, w, k, ranges, g, interpret):
    batch, heads, padded, dim = q.shape
    used = query_account(tiling)
    operands = tiling.operand_specs()
    return pl.pallas_call(
        functools.partial(_query_kernel, tiling=tiling),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=tiling.grid,
            in_specs=[
                *operands,
                tiling.query_spec(2),
                pl.BlockSpec(
                    (1, tiling.queries, tiling.keys),
                    lambda b, i, j, spans: (b, i, tiling.fetched(b, i, j, spans)),
                ),
            ],
            out_specs=operands[:2],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((batch, heads, padded, dim), jnp.float32),
            jax.ShapeDtypeStruct((batch, tiling.length, heads), jnp.float32),
        ],
        cost_estimate=tpu.stated("indexer_query_gradients", used),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"),
            vmem_limit_bytes=tiles.vmem_limit(used),
        ),
        interpret=False if interpret is None else interpret,
    )(spans, q, w, k, ranges, g)


def _query_kernel(spans, q, w, k, ranges, g, dq, dw, *, tiling: Tiling):
    needed = tiling.needed(spans, *(pl.program_id(n) for n in range(3)))
    start = pl.program_id(2) * tiling.keys

    @pl.when(pl.program_id(2) == 0)
    def _():
        dq[...] = jnp.zeros_like(dq)
        dw[...] = jnp.zeros_like(dw)

    @pl.when(needed)
    def _():
        keys = k[0]
        inside = tiles.visible(ranges[0], (tiling.queries, tiling.keys), start)
        gradient = jnp.where(inside, g[0], 0.0)
        place = lax.broadcasted_iota(jnp.int32, (tiling.queries, tiling.heads), 1)

        def add(head, weights):
            dots = tiles.product(q[0, head], keys, (1, 1))
            active = jnp.where(dots > 0, gradient, 0.0)
            own = jnp.sum(active * jnp.maximum(dots, 0.0), axis=1, keepdims=True)
            scaled = (active * tiles.column(w[0], head)).astype(keys.dtype)
            dq[0, head] += tiles.product(scaled, keys, (1, 0))
            return weights + jnp.where(place == head, own, 0.0)

        zeros = jnp.zeros((tiling.queries, tiling.heads), jnp.float32)
        dw[0] += tiles.over_heads(tiling.heads, add, zeros)


def _key_gradients(tiling: Tiling, spans, q, w, k, ranges, g, interpret):
    batch, heads, _, dim = q.shape
    used = key_account(tiling)
    _, across, down = tiling.grid

    def queries(b, j, i, spans):
        """The tile of queries in VMEM: none is fetched that has nothing for the keys."""
        return jnp.where(tiling.needed(spans, b, i, j), i, 0)

    return pl.pallas_call(
        functools.partial(_key_kernel, tiling=tiling),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(batch, down, across),
            in_specs=[
                pl.BlockSpec(
                    (1, heads, tiling.queries, dim),
                    lambda b, j, i, s: (b, 0, queries(b, j, i, s), 0),
                ),
                pl.BlockSpec(
                    (1, heads, tiling.queries), lambda b, j, i, s: (b, 0, queries(b, j, i, s))
                ),
                pl.BlockSpec((1, tiling.keys, dim), lambda b, j, i, s: (b, j, 0)),
                pl.BlockSpec(
                    (1, tiling.queries, 2), lambda b, j, i, s: (b, queries(b, j, i, s), 0)
                ),
                pl.BlockSpec(
                    (1, tiling.queries, tiling.keys),
                    lambda b, j, i, s: (b, queries(b, j, i, s), j),
                ),
            ],
            out_specs=pl.BlockSpec((1, tiling.keys, dim), lambda b, j, i, s: (b, j, 0)),
        ),
        out_shape=jax.ShapeDtypeStruct((batch, down * tiling.keys, dim), jnp.float32),
        cost_estimate=tpu.stated("indexer_key_gradients", used),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"),
            vmem_limit_bytes=tiles.vmem_limit(used),
        ),
        interpret=False if interpret is None else interpret,
    )(spans, q, w, k, ranges, g)


def _key_kernel(spans, q, w, k, ranges, g, dk, *, tiling: Tiling):
    b, j, i = (pl.program_id(n) for n in range(3))

    @pl.when(i == 0)
    def _():
        dk[...] = jnp.zeros_like(dk)

    @pl.when(tiling.needed(spans, b, i, j))
    def _():
        keys = k[0]
        inside = tiles.visible(ranges[0], (tiling.queries, tiling.keys), j * tiling.keys)
        gradient = jnp.where(inside, g[0], 0.0).T

        def add(head, total):
            own = q[0, head]
            dots = tiles.product(keys, own, (1, 1))
            active = jnp.where(dots > 0, gradient, 0.0)
            scaled = (active * w[0, pl.ds(head, 1), :]).astype(keys.dtype)
            return total + tiles.product(scaled, own, (1, 0))

        zeros = jnp.zeros((tiling.keys, tiling.dim), jnp.float32)
        dk[0] += tiles.over_heads(tiling.heads, add, zeros)


def spread_account(rows: int, count: int, entries: int) -> tpu.Account:
    """What spreading `count` gradients a row over `entries` takes."""
    width = tiles.round_up(entries, LANES)
    return tpu.Account(
        vmem_bytes=SUBLANES * (4 * 4 * count + 3 * 4 * width)
        + (4 + 2) * count * (LANES + 3 * width // LANES),
        hbm_bytes=4 * rows * (2 * count + width),
        flops=3 * 2 * rows * count * width,
    )


def spread(indices: jax.Array, g: jax.Array, entries: int, *, interpret: Any = None) -> jax.Array:
    """Rows of all entries that hold the gradients of listed ones.

    Args:
        indices: i32 `[B, T, K]`, K a multiple of 128; -1 is no entry. Gradients of an entry that is
            listed more than once add up.
        g: f32 `[B, T, K]`.
        entries: G.
        interpret: parameters of interpret mode, or None.

    Returns:
        f32 `[B, T, G]`, G rounded up to a multiple of 128.
    """
    batch, length, count = indices.shape
    width = tiles.round_up(entries, LANES)
    used = spread_account(batch * length, count, entries)
    rows = pl.BlockSpec((1, SUBLANES, count), lambda b, i: (b, i, 0))
    return pl.pallas_call(
        functools.partial(_spread_kernel, blocks=width // LANES),
        grid=(batch, pl.cdiv(length, SUBLANES)),
        in_specs=[rows, rows],
        out_specs=pl.BlockSpec((1, SUBLANES, width), lambda b, i: (b, i, 0)),
        out_shape=jax.ShapeDtypeStruct((batch, length, width), jnp.float32),
        scratch_shapes=[pltpu.VMEM((width // LANES * SUBLANES, LANES), jnp.float32)],
        cost_estimate=tpu.stated("indexer_spread", used),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel"), vmem_limit_bytes=tiles.vmem_limit(used)
        ),
        interpret=False if interpret is None else interpret,
    )(indices, g.astype(jnp.float32))


def _spread_kernel(indices, g, out, rows, *, blocks: int):
    count = indices.shape[2]

    def row(n, _):
        here = (0, pl.ds(n, 1), slice(None))
        entry, gradient = indices[here], g[here]
        block = lax.broadcasted_iota(jnp.int32, (blocks, count), 0) == entry >> 7
        lane = lax.broadcasted_iota(jnp.int32, (LANES, count), 0) == entry & (LANES - 1)
        lane = jnp.where(lane, 1.0, 0.0).astype(jnp.bfloat16)
        total = jnp.zeros((blocks, LANES), jnp.float32)
        for _ in range(3):
            part = gradient.astype(jnp.bfloat16).astype(jnp.float32)
            gradient = gradient - part
            held = jnp.where(block, part, 0.0).astype(jnp.bfloat16)
            total += tiles.product(held, lane, (1, 1))
        rows[pl.ds(n, blocks, stride=SUBLANES), :] = total

    lax.fori_loop(0, SUBLANES, row, None)
    for block in range(blocks):
        out[0, :, block * LANES : (block + 1) * LANES] = rows[
            block * SUBLANES : (block + 1) * SUBLANES
        ]
