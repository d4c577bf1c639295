"""Write, square sums and projection of hyper-connections on Hopper, in one pass over the streams.

In a place lie a piece of every old stream and of the sublayer's output. The new streams take the
old ones' place, rounded; from there they go to main memory, and through the tensor cores: their
product with the three bfloat16 parts of fn, 3 K columns next to each other, is the projection in
float32. The parts of a block's channels stay in shared memory.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mhc import mosaic_gpu_tiles as tiles
from pallas_kernels.mhc.mosaic_gpu_tiles import CHANNELS, HALVES, PIECE, TOKENS, Tiling

PARTS = 3


# Jitted, so that all sublayers of a model share what the kernel was lowered to.
@functools.partial(jax.jit, static_argnames="interpret")
def write(
    streams: jax.Array,
    out: jax.Array,
    mixing: jax.Array,
    parts: jax.Array,
    *,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """New streams, and what the next read needs of them that takes sums over the channels.

    Args:
        streams: bfloat16[T, n * d].
        out: bfloat16[T, d].
        mixing: float32[K, T], rows [pre n | post n | comb n * n].
        parts: bfloat16[3 K, n * d], whose sum over the three is fn.
        interpret: parameters of interpret mode, or None.

    Returns:
        (new streams bfloat16[T, n * d]; projection float32[T, K]; float32[2, T]: sums of squares of
        the new streams, and of their mix by pre).
    """
    tokens, d = out.shape
    n = streams.shape[1] // d
    rows = mixing.shape[0]
    tiling = Tiling(
        tokens=tokens,
        channels=d,
        wide=n + 1,
        narrow=0,
        rows=rows,
        fixed=2 * PARTS * rows * n * CHANNELS,
        interpret=interpret,
    )
    shape = jax.ShapeDtypeStruct

    new, products, squares = tiling.call(
        functools.partial(_kernel, tiling, n),
        "mhc_write",
        [
            shape(streams.shape, streams.dtype),
            shape((tiling.slices, tokens, rows), jnp.float32),
            shape((tiling.slices, 2, tokens), jnp.float32),
        ],
        [streams, out, mixing, parts],
        dict(
            parts=tiles.tiled(n, HALVES, PARTS * rows, PIECE),
            ready=plgpu.Barrier(num_arrivals=n * HALVES),
        ),
    )
    return new, products.sum(axis=0), squares.sum(axis=0)


def _kernel(
    tiling,
    n,
    go,
    streams_ref,
    out_ref,
    mixing_ref,
    parts_ref,
    new_ref,
    product_ref,
    squares_ref,
    *,
    wide,
    rows,
    parts,
    ready,
):
    d, count = tiling.channels, tiling.rows
    pieces = [(k, half) for k in range(n) for half in range(HALVES)]
    sources = [(streams_ref, k) for k in range(n)] + [(out_ref, 0)]

    def begin():
        @pl.loop(0, HALVES)
        def _(half):
            for k in range(n):
                source = parts_ref.at[:, tiles.columns(k, d, half)]
                plgpu.copy_gmem_to_smem(source, parts.at[k, half], ready)

    def fetch(token, at, barrier):
        here = pl.ds(token, TOKENS)
        tiles.fetch_pieces(sources, d, here, wide.at[at], barrier)
        plgpu.copy_gmem_to_smem(mixing_ref.at[:, here], rows.at[at], barrier)

    def one_half(at, half, sums):
        squares, mixed_squares = sums
        new = new_streams(rows, wide, at, n, half)
        mixed = 0.0
        for k in range(n):
            wide[at, k, half] = new[k]
            value = new[k].astype(jnp.float32)
            squares += (value * value).sum(axis=1)
            mixed += tiles.per_token(rows, at, k) * value
        return squares, mixed_squares + (mixed * mixed).sum(axis=1)

    def work(token, at, state):
        here = pl.ds(token, TOKENS)
        block = lax.axis_index("slice")
        zeros = plgpu.layout_cast(jnp.zeros((TOKENS,), jnp.float32), tiles.BY_TOKEN)
        sums = lax.fori_loop(0, HALVES, functools.partial(one_half, at), (zeros, zeros))
        plgpu.commit_smem()

        tiles.store_pieces([(new_ref, k) for k in range(n)], d, here, wide.at[at])

        def multiply(accumulator):
            for k, half in pieces:
                plgpu.wgmma(accumulator, wide.at[at, k, half], parts.at[k, half].transpose((1, 0)))
            return accumulator[...]

        product = pl.run_scoped(multiply, plgpu.ACC((TOKENS, PARTS * count), jnp.float32))
        high, middle, low = (product[:, i * count : (i + 1) * count] for i in range(PARTS))
        product_ref[block, here] = low + middle + high
        for i, values in enumerate(sums):
            squares_ref[block, i, here] = values
        return state

    def carry():
        plgpu.barrier_wait(ready)
        return ()

    go(begin, fetch, work, carry, lambda state: None)


def new_streams(rows: Any, wide: Any, at: jax.Array, n: int, half: int) -> list[jax.Array]:
    """A piece of every new stream, bfloat16, from those of old ones and of the output (number n).

    Rows 0 .. K - 1 of the place are `mixing`.
    """
    old = [tiles.piece(wide.at[at, j, half]) for j in range(n)]
    out = tiles.piece(wide.at[at, n, half])
    result = []
    for k in range(n):
        total = tiles.per_token(rows, at, n + k) * out
        for j in range(n):
            total += tiles.per_token(rows, at, (2 + j) * n + k) * old[j]
        result.append(total.astype(jnp.bfloat16))
    return result
