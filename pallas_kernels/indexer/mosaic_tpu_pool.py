"""Index scores of the candidates of a pool on a TPU: blocks of 8 keys, copied one by one.

A block of 8 consecutive keys is one tile of memory, so each is one asynchronous copy, of 2 KiB for
128 channels in bfloat16. A program has eight queries; their block ids lie in scalar memory. Units
of 64 blocks follow one another through four buffers, three of them being filled while the fourth is
scored: all heads of the query times 512 keys.

What is read does not depend on how many entries there are: 4 MiB a query for 2048 blocks. A query
whose pool is not full copies the units that it has.
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
from pallas_kernels.tpu import LANES, SUBLANES

# Entries of a block, blocks that are scored at a time, buffers for these.
BLOCK, _UNIT, _BUFFERS = 8, 64, 4


def pool_scores(
    q: jax.Array, w: jax.Array, k: jax.Array, blocks: jax.Array, *, interpret: Any = None
) -> jax.Array:
    """Scores of the entries of given blocks.

    Args:
        q: `[B, T, Hi, Di]`, float32 or bfloat16.
        w: `[B, T, Hi]`.
        k: `[B, G, Di]` of any float.
        blocks: i32 `[B, T, P]`, ascending, -1 at the end; block n holds entries 8 n to 8 n + 7.
        interpret: parameters of interpret mode, or None.

    Returns:
        f32 `[B, T, 8 P]`; arbitrary from a query's first -1 on, and for entries beyond G.
    """
    batch, length, heads, dim = q.shape
    count = blocks.shape[-1]
    k = jnp.pad(k.astype(q.dtype), [(0, 0), (0, -k.shape[1] % BLOCK), (0, 0)])
    each = k.shape[1] // BLOCK
    held = jnp.sum(blocks >= 0, axis=-1, dtype=jnp.int32)
    places = jnp.clip(blocks, 0, each - 1) + jnp.arange(batch)[:, None, None] * each
    places = jnp.pad(places, [(0, 0), (0, 0), (0, -count % _UNIT)])
    total, slots = batch * length, places.shape[-1]
    # The eight queries of the last program may be fewer; the others have nothing to copy.
    missing = [(0, -total % SUBLANES), (0, 0)]
    used = account(total, heads, dim, slots, q.dtype)

    def spec(*block, **where):
        return pl.BlockSpec((SUBLANES, *block), lambda n: (n, *(0 for _ in block)), **where)

    result = pl.pallas_call(
        functools.partial(_kernel, units=slots // _UNIT),
        grid=(pl.cdiv(total, SUBLANES),),
        in_specs=[
            spec(slots, memory_space=pltpu.SMEM),
            spec(1, memory_space=pltpu.SMEM),
            spec(heads, dim),
            spec(heads, 1),
            pl.BlockSpec(memory_space=pl.ANY),
        ],
        out_specs=spec(slots * BLOCK),
        out_shape=jax.ShapeDtypeStruct((total, slots * BLOCK), jnp.float32),
        scratch_shapes=[
            pltpu.VMEM((_BUFFERS, _UNIT, BLOCK, dim), q.dtype),
            pltpu.SemaphoreType.DMA((_BUFFERS,)),
        ],
        cost_estimate=tpu.stated("indexer_pool", used),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",), vmem_limit_bytes=tiles.vmem_limit(used)
        ),
        interpret=False if interpret is None else interpret,
    )(
        jnp.pad(places.reshape(total, slots), missing),
        jnp.pad(-(-held // _UNIT).reshape(total, 1), missing),
        q.reshape(total, heads, dim),
        w.astype(jnp.float32).reshape(total, heads, 1),
        k.reshape(batch * each, BLOCK, dim),
    )
    return result.reshape(batch, length, -1)[..., : count * BLOCK]


def account(queries: int, heads: int, dim: int, blocks: int, dtype: Any) -> tpu.Account:
    """What scoring full pools takes."""
    key = dim * jnp.dtype(dtype).itemsize
    passes = 6 if dtype == jnp.float32 else 1
    weights = heads * LANES * 4
    own = heads * key + weights + blocks * (BLOCK + 1) * 4
    return tpu.Account(
        vmem_bytes=_BUFFERS * _UNIT * BLOCK * key
        + 2 * SUBLANES * (heads * key + weights + 4 * BLOCK * blocks)
        + 3 * 4 * heads * _UNIT * BLOCK,
        hbm_bytes=queries * (own + blocks * BLOCK * key),
        flops=2 * passes * queries * heads * dim * blocks * BLOCK,
        copies=queries * blocks,
    )


def _kernel(places, held, q, w, k, out, buffers, arrived, *, units: int):
    """Scores of eight queries."""

    def copies(unit, act):
        """What is to be copied for one unit of a query, if it has as many."""
        query, here = unit // units, lax.rem(unit, units)
        buffer = lax.rem(unit, _BUFFERS)

        @pl.when(here < held[query, 0])
        def _():
            act(query, here, buffer)

    def start(query, here, buffer):
        def one(n, _):
            source = k.at[places[query, here * _UNIT + n]]
            pltpu.make_async_copy(source, buffers.at[buffer, n], arrived.at[buffer]).start()

        lax.fori_loop(0, _UNIT, one, None, unroll=8)

    def score(query, here, buffer):
        # One wait for the bytes of all copies into the buffer.
        pltpu.make_async_copy(k.at[pl.ds(0, _UNIT)], buffers.at[buffer], arrived.at[buffer]).wait()
        keys = buffers[buffer].reshape(_UNIT * BLOCK, -1)
        dots = tiles.product(q[query], keys, (1, 1))
        total = jnp.sum(w[query] * jnp.maximum(dots, 0.0), axis=0, keepdims=True)
        size = _UNIT * BLOCK
        slots = (slice(None), pl.ds(pl.multiple_of(here * size, size), size))
        own = lax.broadcasted_iota(jnp.int32, (SUBLANES, size), 0) == query
        out[slots] = jnp.where(own, total, out[slots])

    for unit in range(_BUFFERS - 1):
        copies(jnp.int32(unit), start)

    def step(unit, _):
        ahead = unit + _BUFFERS - 1

        @pl.when(ahead < SUBLANES * units)
        def _():
            copies(ahead, start)

        copies(unit, score)

    lax.fori_loop(0, SUBLANES * units, step, None)
