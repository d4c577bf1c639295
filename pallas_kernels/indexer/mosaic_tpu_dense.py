"""Index scores of many entries on a TPU: all of them, or the ones that each query lists.

Many queries: a program has a tile of queries and a tile of keys. The vector unit adds the weighted
ReLU of a head's product to the tile, three operations a dot product. Tiles outside of the ranges of
their queries are neither fetched nor computed.

Listed entries are scored with their whole tiles, from which they are picked lane by lane while the
tile is in VMEM: no score that nobody asked for is stored. A copy for each entry would move less and
take longer: issuing one takes a core some 20 cycles, in which it scores 300 entries for 32 heads.

Few queries (decoding) are bound by the bytes of the keys: all heads of all queries are the rows of
one product.

Keys may be packed ones ("mxfp4", uint8), which are decoded by shifts. They are taken with the keys
along the lanes, where rows of 68 bytes fill 72 and not 128, and the scale of 32 channels lies in a
sublane of its own.

VMEM, 32 heads x 128 in bfloat16: 2 x 1 MiB of queries, 2 x 128 KiB of keys, 2 x 256 KiB of scores,
and 256 KiB for each product that is under way. A query moves its own 8 KiB, 1/128 of the keys, and
4 bytes for each score; its FLOPs a byte, over 2000, keep the matrix unit busy on every generation.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import tpu
from pallas_kernels.indexer import mosaic_tpu_tiles as tiles
from pallas_kernels.indexer.mosaic_tpu_tiles import Tiling
from pallas_kernels.tpu import LANES

# Queries of a batch row up to which they are few, and keys that these read at a time.
FEW_QUERIES, _FEW_TILE_KEYS = 8, 1024


def dense_scores(
    q: jax.Array,
    w: jax.Array,
    k: jax.Array,
    lo: jax.Array,
    hi: jax.Array,
    *,
    interpret: Any = None,
) -> jax.Array:
    """Scores of all entries.

    Args:
        q: `[B, T, Hi, Di]`, float32 or bfloat16.
        w: `[B, T, Hi]`.
        k: `[B, G, Di]` of any float, or packed, uint8 `[B, G, Di / 2 + Di / 32]`; G at least 1.
        lo, hi: i32 `[B, T]`.
        interpret: parameters of interpret mode, or None.

    Returns:
        f32 `[B, T, G]`, -inf outside `lo <= j < hi`.
    """
    tiling = Tiling.of(q, k)
    ranges = jnp.stack([lo, jnp.minimum(hi, tiling.entries)], axis=-1)
    if tiling.length <= FEW_QUERIES:
        return _few_scores(tiling, q, w, k, ranges, interpret)
    used = dense_account(tiling)
    shape = (tiling.queries, tiling.keys)
    return pl.pallas_call(
        functools.partial(_dense_kernel, tiling=tiling),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=tiling.grid,
            in_specs=[*tiling.operand_specs(), tiling.query_spec(2)],
            out_specs=pl.BlockSpec((1, *shape), lambda b, i, j, spans: (b, i, j)),
        ),
        out_shape=jax.ShapeDtypeStruct((*q.shape[:2], tiling.entries), jnp.float32),
        cost_estimate=tpu.stated("indexer_dense", used),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"),
            vmem_limit_bytes=tiles.vmem_limit(used),
        ),
        interpret=False if interpret is None else interpret,
    )(tiling.spans(ranges), *tiling.operands(q, w, k), ranges)


def listed_scores(
    q: jax.Array, w: jax.Array, k: jax.Array, indices: jax.Array, *, interpret: Any = None
) -> jax.Array:
    """Scores of listed entries.

    Args:
        q, w, k, interpret: as for `dense_scores`.
        indices: i32 `[B, T, K]`; outside `[0, G)` is no entry.

    Returns:
        f32 `[B, T, K]`, 0 where there is no entry.
    """
    tiling = Tiling.of(q, k)
    count = indices.shape[-1]
    indices, ranges = listed(indices, tiling.entries)
    used = listed_account(tiling, indices.shape[-1])
    spec = tiling.query_spec(indices.shape[-1])
    result = pl.pallas_call(
        functools.partial(_listed_kernel, tiling=tiling),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=tiling.grid,
            in_specs=[*tiling.operand_specs(), spec],
            out_specs=spec,
        ),
        out_shape=jax.ShapeDtypeStruct(indices.shape, jnp.float32),
        cost_estimate=tpu.stated("indexer_listed", used),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"),
            vmem_limit_bytes=tiles.vmem_limit(used),
        ),
        interpret=False if interpret is None else interpret,
    )(tiling.spans(ranges), *tiling.operands(q, w, k), indices)
    return result[..., :count]


def listed(indices: jax.Array, entries: int) -> tuple[jax.Array, jax.Array]:
    """Listed entries in whole lanes, -1 for none, and the ranges i32 `[B, T, 2]` they lie in."""
    missing = [(0, 0), (0, 0), (0, -indices.shape[-1] % LANES)]
    indices = jnp.pad(indices.astype(jnp.int32), missing, constant_values=-1)
    valid = (indices >= 0) & (indices < entries)
    lo = jnp.min(jnp.where(valid, indices, entries), axis=-1)
    hi = jnp.max(jnp.where(valid, indices, -1), axis=-1) + 1
    return jnp.where(valid, indices, -1), jnp.stack([lo, hi], axis=-1)


def dense_account(tiling: Tiling) -> tpu.Account:
    """What scoring all entries takes, none of them outside of the ranges."""
    batch, rows, _ = tiling.grid
    reads = tiling.length * tiling.query_bytes + rows * tiling.entries * tiling.key_bytes
    return tpu.Account(
        vmem_bytes=tiling.tile_bytes + 2 * 4 * tiling.queries * tiling.keys,
        hbm_bytes=batch * (reads + 4 * tiling.length * tiling.entries),
        flops=tiling.product_flops,
    )


def listed_account(tiling: Tiling, count: int) -> tpu.Account:
    """What scoring `count` listed entries a query takes."""
    batch, rows, _ = tiling.grid
    reads = tiling.length * tiling.query_bytes + rows * tiling.entries * tiling.key_bytes
    return tpu.Account(
        vmem_bytes=tiling.tile_bytes + 4 * 4 * tiling.queries * count,
        hbm_bytes=batch * (reads + 8 * tiling.length * count),
        flops=tiling.product_flops,
    )


def few_account(tiling: Tiling) -> tpu.Account:
    """What few queries take."""
    rows = tiling.length * tiling.heads
    return tpu.Account(
        vmem_bytes=2 * _FEW_TILE_KEYS * tiling.key_bytes + 3 * 4 * rows * _FEW_TILE_KEYS,
        hbm_bytes=tiling.batch
        * (tiling.entries * tiling.key_bytes + tiling.length * (4 * tiling.entries)),
        flops=tiling.product_flops,
    )


def _tile_scores(q, w, k, tiling: Tiling):
    """Scores `[queries, keys]` of one tile."""
    keys = tiles.decoded(k[0], tiling.dtype) if tiling.packed else k[0]

    def add(head, total):
        dots = tiles.key_product(q[0, head], keys, tiling.packed)
        return total + tiles.column(w[0], head) * jnp.maximum(dots, 0.0)

    zeros = jnp.zeros((tiling.queries, tiling.keys), jnp.float32)
    return tiles.over_heads(tiling.heads, add, zeros)


def _dense_kernel(spans, q, w, k, ranges, out, *, tiling: Tiling):
    needed = tiling.needed(spans, *(pl.program_id(n) for n in range(3)))
    start = pl.program_id(2) * tiling.keys

    @pl.when(needed)
    def _():
        scores = _tile_scores(q, w, k, tiling)
        out[0] = jnp.where(tiles.visible(ranges[0], scores.shape, start), scores, -jnp.inf)

    @pl.when(jnp.logical_not(needed))
    def _():
        out[...] = jnp.full_like(out, -jnp.inf)


def _listed_kernel(spans, q, w, k, indices, out, *, tiling: Tiling):
    needed = tiling.needed(spans, *(pl.program_id(n) for n in range(3)))
    first = pl.program_id(2) * (tiling.keys // LANES)

    @pl.when(pl.program_id(2) == 0)
    def _():
        out[...] = jnp.zeros_like(out)

    @pl.when(needed)
    def _():
        scores = _tile_scores(q, w, k, tiling)
        for start in range(0, indices.shape[-1], LANES):
            slots = (0, slice(None), slice(start, start + LANES))
            entry = indices[slots]
            picked = out[slots]
            for n in range(tiling.keys // LANES):
                part = scores[:, n * LANES : (n + 1) * LANES]
                here = jnp.take_along_axis(part, entry & (LANES - 1), axis=1)
                # -1 >> 7 is -1, which is no block.
                picked = jnp.where(entry >> 7 == first + n, here, picked)
            out[slots] = picked


def _few_scores(tiling: Tiling, q, w, k, ranges, interpret):
    batch, length, heads, dim = q.shape
    keys = min(_FEW_TILE_KEYS, tiles.round_up(tiling.entries, LANES))
    q, k = tiles.aligned(q, k)
    used = few_account(tiling)
    rows = length * heads
    return pl.pallas_call(
        functools.partial(_few_kernel, tiling=tiling),
        grid=(batch, pl.cdiv(tiling.entries, keys)),
        in_specs=[
            pl.BlockSpec((1, rows, dim), lambda b, j: (b, 0, 0)),
            pl.BlockSpec((1, rows, 1), lambda b, j: (b, 0, 0)),
            tiling.key_spec(keys, lambda b, j: j),
            pl.BlockSpec((1, length, 2), lambda b, j: (b, 0, 0)),
        ],
        out_specs=pl.BlockSpec((1, length, keys), lambda b, j: (b, 0, j)),
        out_shape=jax.ShapeDtypeStruct((batch, length, tiling.entries), jnp.float32),
        cost_estimate=tpu.stated("indexer_few", used),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel"), vmem_limit_bytes=tiles.vmem_limit(used)
        ),
        interpret=False if interpret is None else interpret,
    )(
        q.reshape(batch, rows, dim),
        w.astype(jnp.float32).reshape(batch, rows, 1),
        k,
        ranges,
    )


def _few_kernel(q, w, k, ranges, out, *, tiling: Tiling):
    keys = tiles.decoded(k[0], tiling.dtype) if tiling.packed else k[0]
    parts = w[0] * jnp.maximum(tiles.key_product(q[0], keys, tiling.packed), 0.0)
    start = pl.program_id(1) * out.shape[2]
    for query in range(tiling.length):
        own = parts[query * tiling.heads : (query + 1) * tiling.heads]
        total = jnp.sum(own, axis=0, keepdims=True)
        here = tiles.visible(ranges[0, query : query + 1], total.shape, start)
        out[0, query : query + 1, :] = jnp.where(here, total, -jnp.inf)
