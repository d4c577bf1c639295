"""The grouped matmul on Hopper: rows by their expert's weight, forward and for the rows' gradient.

Work is cut into tiles of 128 rows and up to 256 columns. A group's first tile begins at its first
row, or up to seven before, as copies of rows begin at multiples of 8; so there are hardly more than
M / 128 + E tiles whatever the sizes are. What a tile has of other groups is multiplied, and not
stored. Which tiles there are is worked out by XLA beforehand. One block a multiprocessor goes
through them: a warpgroup copies, two multiply 64 rows each.

The gradient of the weights is in `mosaic_gpu_weights.py`.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import hopper
from pallas_kernels.grouped_matmul import mosaic_gpu_tile as tile
from pallas_kernels.grouped_matmul import reference
from pallas_kernels.grouped_matmul.mosaic_gpu_weights import weight_gradient


def grouped_matmul(
    x: jax.Array,
    w: jax.Array,
    group_sizes: jax.Array,
    scales: jax.Array | None = None,
    *,
    interpret: Any = None,
) -> jax.Array:
    """See `pallas_kernels.grouped_matmul.grouped_matmul`; under `jax.vmap` one call after another.

    Args:
        x, w, group_sizes, scales: as there.
        interpret: parameters of Pallas's interpret mode, in which it runs on any device.

    Raises:
        NotImplementedError: not a Hopper GPU; rows that are not bfloat16; packed weights; K or N no
            multiples of 64; so few rows that they are multiplied one by one.
    """
    if interpret is None:
        hopper.require("grouped_matmul", jax_release=(0, 11))
    if scales is not None:
        raise NotImplementedError("grouped_matmul: packed weights")
    reference.check(x, w, group_sizes)
    if x.dtype != jnp.bfloat16:
        raise NotImplementedError(f"grouped_matmul: rows of {x.dtype}; the kernel has bfloat16")
    if w.shape[1] % tile.DEPTH or w.shape[2] % tile.DEPTH:
        raise NotImplementedError(
            f"grouped_matmul: weights of {w.shape[1]} x {w.shape[2]}; takes multiples of 64"
        )
    if reference.few(x.shape[0], w.shape[0]):
        raise NotImplementedError(
            f"grouped_matmul: {x.shape[0]} rows; one by one they are read less"
        )
    return _grouped_matmul(interpret, x, w, group_sizes.astype(jnp.int32))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _grouped_matmul(interpret: Any, x: jax.Array, w: jax.Array, sizes: jax.Array) -> jax.Array:
    return rows_by_weights(x, w.astype(x.dtype), sizes, transposed=False, interpret=interpret)


def _forward(interpret, x, w, sizes):
    return _grouped_matmul(interpret, x, w, sizes), (x, w, sizes)


def _backward(interpret, residuals, grad):
    x, w, sizes = residuals
    grad_x = rows_by_weights(grad, w.astype(x.dtype), sizes, transposed=True, interpret=interpret)
    return grad_x, weight_gradient(x, grad, sizes, w.dtype, interpret=interpret), None


_grouped_matmul.defvjp(_forward, _backward)


def rows_by_weights(
    x: jax.Array,
    w: jax.Array,
    sizes: jax.Array,
    *,
    transposed: bool,
    config: tile.TuningConfig | None = None,
    interpret: Any = None,
) -> jax.Array:
    """The product itself.

    Args:
        x: bfloat16[M, K], sorted by group.
        w: bfloat16[E, K, N], or [E, N, K] where `transposed`.
        sizes: int32[E].
        transposed: see w.
        config: how the work is cut; looked up in the table when None.
        interpret: see `grouped_matmul`.

    Returns:
        bfloat16[M, N]; rows beyond the groups are 0.
    """
    config = config or tile.TABLE.lookup("rows", tile.TuningConfig())
    static = dict(transposed=transposed, config=config, interpret=interpret)

    @jax.custom_batching.sequential_vmap
    def run(x, w, sizes):
        return _product(x, w, sizes, **static)

    return run(x, w, sizes)


def _plan(sizes: jax.Array, rows: int) -> tuple[jax.Array, jax.Array]:
    """(tiles int32[P, 4], how many of them there are int32[1]).

    A tile is its group (-1: rows beyond the groups), the row that it begins at, and the first and
    last + 1 of its own 128 rows that are of the group.
    """
    groups = sizes.shape[0] + 1
    sizes = jnp.concatenate([sizes, rows - jnp.sum(sizes, keepdims=True)])
    ends = jnp.cumsum(sizes)
    starts = tile.aligned(ends - sizes)
    counts = jnp.where(sizes > 0, -(-(ends - starts) // tile.ROWS), 0)
    tile_ends = jnp.cumsum(counts)
    number = jnp.arange((rows + groups * (tile.ALIGNMENT - 1)) // tile.ROWS + groups)
    group = jnp.searchsorted(tile_ends, number, side="right", method="compare_all")
    group = jnp.minimum(group, groups - 1)
    begin = starts[group] + (number - (tile_ends - counts)[group]) * tile.ROWS
    first = jnp.minimum(begin, rows - tile.ROWS)
    own = jnp.maximum((ends - sizes)[group], begin) - first
    end = jnp.minimum(ends[group], begin + tile.ROWS) - first
    expert = jnp.where(group == groups - 1, -1, group)
    plan = jnp.stack([expert, first, own, end], axis=1)
    return plan.astype(jnp.int32), tile_ends[-1:].astype(jnp.int32)


@functools.partial(jax.jit, static_argnames=("transposed", "config", "interpret"))
def _product(x, w, sizes, *, transposed, config, interpret):
    rows, inner = x.shape
    outer = w.shape[1] if transposed else w.shape[2]
    x = tile.padded(x, tile.ROWS)
    plan, count = _plan(sizes, x.shape[0])
    columns = tile.columns_of(outer)
    w_tile = (columns, tile.DEPTH) if transposed else (tile.DEPTH, columns)
    kernel = plgpu.kernel(
        functools.partial(
            _kernel,
            columns=columns,
            config=config,
            transposed=transposed,
            interpret=interpret is not None,
        ),
        out_type=jax.ShapeDtypeStruct((x.shape[0], outer), x.dtype),
        interpret=interpret,
        kernel_name="grouped_matmul_rows",
        **tile.launch(config, (tile.ROWS, tile.DEPTH), w_tile, x.dtype),
    )
    return kernel(plan, count, x, w)[:rows]


def _kernel(
    plan_ref,
    count_ref,
    x_ref,
    w_ref,
    out_ref,
    *,
    columns,
    config,
    transposed,
    interpret,
    **memory,
):
    pipeline = tile.Pipeline(**memory, config=config, interpret=interpret)
    inner, outer = x_ref.shape[1], out_ref.shape[1]
    across = outer // columns

    def place(item):
        """(group, first row, first and last own row, column) of a tile."""
        at = lax.div(item, across)
        return *(plan_ref[at, i] for i in range(4)), lax.rem(item, across) * columns

    def steps(expert):
        return jnp.where(expert < 0, 0, inner // tile.DEPTH)

    def sources(item):
        expert, row, _, _, column = place(item)
        group = jnp.maximum(expert, 0)

        def at(k):
            depth = pl.ds(k * tile.DEPTH, tile.DEPTH)
            out = pl.ds(column, columns)
            side = (group, out, depth) if transposed else (group, depth, out)
            return x_ref.at[pl.ds(pl.multiple_of(row, tile.ALIGNMENT), tile.ROWS), depth], w_ref.at[
                side
            ]

        return steps(expert), at

    def operands(x, w, half):
        return x.at[pl.ds(tile.start_of(half), tile.HALF)], w.T if transposed else w

    def store(item, half, value):
        _, row, first, last, column = place(item)
        first, last = first - tile.start_of(half), last - tile.start_of(half)
        begin = pl.multiple_of(row + tile.start_of(half), tile.ALIGNMENT)
        target = out_ref.at[pl.ds(begin, tile.HALF), pl.ds(column, columns)]
        whole = (first <= 0) & (last >= tile.HALF)

        @pl.when(whole)
        def _():
            pipeline.store_whole(value, target, half)

        @pl.when(~whole & (last > 0) & (first < tile.HALF))
        def _():
            tile.store_rows(value.astype(out_ref.dtype), target, first, last, interpret)

    pipeline.run(count_ref[0] * across, columns, sources, operands, store)
