"""Gradients of hyper-connections' write and read on Hopper, in one pass over the streams.

With G_k the gradient of a new stream (its own, the mix's, the projection's and the square sum's),
those of the old streams are comb G, that of the output is post G, and those of pre, post and comb
are sums over the channels. New streams are computed again from the old. The gradient of the
projection is multiplied by fn on tensor cores, both in two bfloat16 parts.
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
from pallas_kernels.mhc.mosaic_gpu_forward import new_streams
from pallas_kernels.mhc.mosaic_gpu_tiles import CHANNELS, HALVES, PIECE, TOKENS, Tiling

PARTS = 2
# Rows after those of `mixing`.
_INVERSE, _FALL, _STRETCH = range(3)


# Jitted, so that all sublayers of a model share what the kernel was lowered to.
@functools.partial(jax.jit, static_argnames="interpret")
def gradients(
    streams: jax.Array,
    out: jax.Array,
    grad_new: jax.Array,
    grad_x: jax.Array,
    rows: jax.Array,
    grad_parts: jax.Array,
    fn_parts: jax.Array,
    norm_weight: jax.Array,
    *,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Gradients of all but fn.

    With m the mix of a token's new streams by pre, and r its inverse norm, the gradient of m is
    r grad_x norm_weight - r^2 mean(grad_x x) m.

    Args:
        streams: bfloat16[T, n * d], the old ones.
        out: bfloat16[T, d].
        grad_new: bfloat16[T, n * d], of the new streams.
        grad_x: bfloat16[T, d].
        rows: float32[K + 3, T]: `mixing` of the forward pass; r; -r^2 mean(grad_x x); what the
            gradient of the new streams takes of the new streams themselves.
        grad_parts: bfloat16[2, T, 32], whose sum is the gradient of the projection, K columns and
            zeros.
        fn_parts: bfloat16[2, n * d, 32], whose sum is fn in the same way.
        norm_weight: float32[d].
        interpret: parameters of interpret mode, or None.

    Returns:
        Gradients of streams and of out, bfloat16; of mixing float32[K, T]; of norm_weight
        float32[d].
    """
    tokens, d = out.shape
    n = streams.shape[1] // d
    count = (2 + n) * n
    tiling = Tiling(
        tokens=tokens,
        channels=d,
        wide=2 * n + 2,
        narrow=PARTS,
        rows=rows.shape[0],
        fixed=2 * PARTS * n * CHANNELS * PIECE + 4 * CHANNELS,
        interpret=interpret,
    )
    shape = jax.ShapeDtypeStruct

    grad_streams, grad_out, sums, norms = tiling.call(
        functools.partial(_kernel, tiling, n),
        "mhc_gradients",
        [
            shape(streams.shape, streams.dtype),
            shape(out.shape, out.dtype),
            shape((tiling.slices, count + n, tokens), jnp.float32),
            shape((tiling.runs, tiles.WARPGROUPS, TOKENS, d), jnp.float32),
        ],
        [streams, out, grad_new, grad_x, rows, grad_parts, fn_parts, norm_weight],
        dict(
            fn=tiles.tiled(PARTS, n, HALVES, PIECE, PIECE),
            weight=plgpu.SMEM((HALVES, PIECE), jnp.float32),
            ready=plgpu.Barrier(num_arrivals=(PARTS * n + 1) * HALVES),
        ),
    )
    sums = lax.optimization_barrier(sums.sum(axis=0))
    inverse = rows[count + _INVERSE]
    of_weighted, of_mixed, others = sums[:n], sums[n : 2 * n], sums[2 * n :]
    # Here the mean has to be exact: what is left of both terms may be far smaller than they are.
    mean = inverse * (rows[:n] * of_weighted).sum(axis=0) / d
    grad_pre = inverse * of_weighted - inverse * inverse * mean * of_mixed
    grad_mixing = jnp.concatenate([grad_pre, others])
    return grad_streams, grad_out, grad_mixing, norms.sum(axis=(0, 1, 2))


def _kernel(
    tiling,
    n,
    go,
    streams_ref,
    out_ref,
    grad_new_ref,
    grad_x_ref,
    rows_ref,
    grad_parts_ref,
    fn_parts_ref,
    norm_weight_ref,
    grad_streams_ref,
    grad_out_ref,
    sums_ref,
    norms_ref,
    *,
    wide,
    narrow,
    rows,
    fn,
    weight,
    ready,
):
    d, count = tiling.channels, tiling.rows - 3
    # Where the pieces of a place are from, and whose gradients it leaves with.
    sources = [(streams_ref, k) for k in range(n)] + [(out_ref, 0)]
    sources += [(grad_new_ref, k) for k in range(n)] + [(grad_x_ref, 0)]
    results = [(grad_streams_ref, k) for k in range(n)] + [(grad_out_ref, 0)]

    def own(half):
        return tiles.columns(0, d, half)

    def begin():
        @pl.loop(0, HALVES)
        def _(half):
            for part in range(PARTS):
                for k in range(n):
                    source = fn_parts_ref.at[part, tiles.columns(k, d, half)]
                    plgpu.copy_gmem_to_smem(source, fn.at[part, k, half], ready)
            plgpu.copy_gmem_to_smem(norm_weight_ref.at[own(half)], weight.at[half], ready)

    def fetch(token, at, barrier):
        here = pl.ds(token, TOKENS)
        tiles.fetch_pieces(sources, d, here, wide.at[at], barrier)
        for part in range(PARTS):
            plgpu.copy_gmem_to_smem(grad_parts_ref.at[part, here], narrow.at[at, part], barrier)
        plgpu.copy_gmem_to_smem(rows_ref.at[:, here], rows.at[at], barrier)

    def share(at, k, half):
        """What the gradient of a piece of a stream has from the projection."""

        def multiply(accumulator):
            for left, right in ((0, 1), (1, 0), (0, 0)):
                plgpu.wgmma(
                    accumulator, narrow.at[at, left], fn.at[right, k, half].transpose((1, 0))
                )
            return accumulator[...]

        return pl.run_scoped(multiply, plgpu.ACC((TOKENS, PIECE), jnp.float32))

    def work(token, at, norms):
        here = pl.ds(token, TOKENS)

        def row(number):
            return tiles.per_token(rows, at, number)

        def one_half(half, norms):
            def piece(number):
                return tiles.piece(wide.at[at, number, half])

            new = [x.astype(jnp.float32) for x in new_streams(rows, wide, at, n, half)]
            mixed = _mixed([row(k) for k in range(n)], new)
            grad, inverse = piece(2 * n + 1), row(count + _INVERSE)
            # The sum of this half is the first; after both halves all are where they were.
            norms = (*norms[1:], norms[0] + grad * (inverse * mixed))
            by = plgpu.load(weight.at[half], layout=plgpu.Layout.WGMMA.reduce(0), optimized=False)
            weighted = grad * lax.broadcast_in_dim(by, (TOKENS, PIECE), (1,))
            sums = [(x * value).sum(axis=1) for x in (weighted, mixed) for value in new]
            add_up(here, half, 0, sums)
            grad_mixed = inverse * weighted + row(count + _FALL) * mixed

            wholes = []
            for k in range(n):
                whole = piece(n + 1 + k) + row(k) * grad_mixed
                wholes.append(whole + row(count + _STRETCH) * new[k] + share(at, k, half))
            out = piece(n)
            sums = [(out * whole).sum(axis=1) for whole in wholes]
            weights = [row(n + k) for k in range(n)]
            wide[at, n, half] = _mixed(weights, wholes).astype(jnp.bfloat16)
            for j in range(n):
                old = piece(j)
                sums += [(old * whole).sum(axis=1) for whole in wholes]
                weights = [row((2 + j) * n + k) for k in range(n)]
                wide[at, j, half] = _mixed(weights, wholes).astype(jnp.bfloat16)
            add_up(here, half, 2 * n, sums)
            plgpu.commit_smem()
            return norms

        norms = lax.fori_loop(0, HALVES, one_half, norms)

        tiles.store_pieces(results, d, here, wide.at[at])
        return norms

    def add_up(here, half, first, values):
        """Stores sums over a half's channels, or adds them to what the half before left there."""
        block = lax.axis_index("slice")
        targets = [sums_ref.at[block, first + i, here] for i in range(len(values))]

        @pl.when(half == 0)
        def _():
            for target, value in zip(targets, values, strict=True):
                target[...] = value

        @pl.when(half > 0)
        def _():
            before = [plgpu.load(x, layout=tiles.BY_TOKEN, optimized=False) for x in targets]
            for target, value, other in zip(targets, values, before, strict=True):
                target[...] = value + other

    def carry():
        plgpu.barrier_wait(ready)
        zeros = jnp.zeros((TOKENS, PIECE), jnp.float32)
        return (plgpu.layout_cast(zeros, plgpu.Layout.WGMMA),) * HALVES

    def end(norms):
        for half in range(HALVES):
            target = norms_ref.at[lax.axis_index("run"), lax.axis_index("wg"), :, own(half)]
            target[...] = norms[half]

    go(begin, fetch, work, carry, end)


def _mixed(weights: list[jax.Array], values: list[jax.Array]) -> jax.Array:
    total = weights[0] * values[0]
    for weight, value in zip(weights[1:], values[1:], strict=True):
        total += weight * value
    return total
