"""The gradient of the grouped matmul's weights on Hopper: x^T g over the rows of each group.

The sum goes over rows, 64 at a time from the group's first, or up to seven before it. In the pieces
that a group begins and ends with, rows of its neighbours are made zero in shared memory, in both
operands: they may hold anything.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.grouped_matmul import mosaic_gpu_tile as tile


def weight_gradient(
    x: jax.Array,
    grad: jax.Array,
    sizes: jax.Array,
    dtype: Any,
    *,
    config: tile.TuningConfig | None = None,
    interpret: Any = None,
) -> jax.Array:
    """[E, K, N] in `dtype` (float32 sums), from bfloat16 [M, K], [M, N] and int32[E].

    `config` is looked up where it is None; `interpret` is as for `grouped_matmul`.
    """
    config = config or tile.TABLE.lookup("weights", tile.TuningConfig())
    static = dict(dtype=jnp.dtype(dtype), config=config, interpret=interpret)

    @jax.custom_batching.sequential_vmap
    def run(x, grad, sizes):
        return _product(x, grad, sizes, **static)

    return run(x, grad, sizes)


@functools.partial(jax.jit, static_argnames=("dtype", "config", "interpret"))
def _product(x, grad, sizes, *, dtype, config, interpret):
    inner = x.shape[1]
    x, grad = (tile.padded(a, tile.DEPTH) for a in (x, grad))
    # A tile has 128 rows of the result, that is, columns of x.
    if inner % tile.ROWS:
        x = jnp.pad(x, ((0, 0), (0, tile.DEPTH)))
    ends = jnp.cumsum(sizes)
    columns = tile.columns_of(grad.shape[1])
    kernel = plgpu.kernel(
        functools.partial(_kernel, columns=columns, config=config, interpret=interpret is not None),
        out_type=jax.ShapeDtypeStruct((sizes.shape[0], x.shape[1], grad.shape[1]), dtype),
        interpret=interpret,
        kernel_name="grouped_matmul_weights",
        **tile.launch(config, (tile.DEPTH, tile.ROWS), (tile.DEPTH, columns), dtype),
    )
    return kernel((ends - sizes).astype(jnp.int32), ends.astype(jnp.int32), x, grad)[:, :inner]


def _kernel(start_ref, end_ref, x_ref, grad_ref, out_ref, *, columns, config, interpret, **memory):
    pipeline = tile.Pipeline(**memory, config=config, interpret=interpret)
    experts, inner, outer = out_ref.shape
    down, across = inner // tile.ROWS, outer // columns

    def place(item):
        """(expert, row and column of the result) of a tile."""
        expert, rest = lax.div(item, down * across), lax.rem(item, down * across)
        return expert, lax.div(rest, across) * tile.ROWS, lax.rem(rest, across) * columns

    def piece(expert, k):
        """(row that a piece begins at, first and last + 1 of its 64 rows that are the group's)."""
        start = start_ref[expert]
        begin = tile.aligned(start) + k * tile.DEPTH
        first = jnp.minimum(begin, x_ref.shape[0] - tile.DEPTH)
        own = jnp.maximum(start, begin) - first
        last = jnp.minimum(end_ref[expert], begin + tile.DEPTH) - first
        return pl.multiple_of(first, tile.ALIGNMENT), own, last

    def sources(item):
        expert, row, column = place(item)

        def at(k):
            rows = pl.ds(piece(expert, k)[0], tile.DEPTH)
            return x_ref.at[rows, pl.ds(row, tile.ROWS)], grad_ref.at[rows, pl.ds(column, columns)]

        start, end = start_ref[expert], end_ref[expert]
        pieces = lax.div(end - tile.aligned(start) + tile.DEPTH - 1, tile.DEPTH)
        return jnp.where(end > start, pieces, 0), at

    def mend(item, k, x, grad, half):
        _, first, last = piece(place(item)[0], k)

        @pl.when((first > 0) | (last < tile.DEPTH))
        def _():
            for ref in (x, grad):
                for number in range(ref.shape[1] // tile.DEPTH):
                    part = ref.at[:, slice(number * tile.DEPTH, (number + 1) * tile.DEPTH)]
                    mine = half == number % tile.CONSUMERS
                    pl.when(mine)(functools.partial(pipeline.zero_rows, part, first, last))
            plgpu.commit_smem()
            plgpu.barrier_arrive(pipeline.masked)
            plgpu.barrier_wait(pipeline.masked)

    def operands(x, grad, half):
        return x.at[:, pl.ds(tile.start_of(half), tile.HALF)].T, grad

    def store(item, half, value):
        expert, row, column = place(item)
        rows = pl.ds(row + tile.start_of(half), tile.HALF)
        pipeline.store_whole(value, out_ref.at[expert, rows, pl.ds(column, columns)], half)

    pipeline.run(experts * down * across, columns, sources, operands, store, mend)
