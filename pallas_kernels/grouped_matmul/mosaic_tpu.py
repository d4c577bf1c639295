"""The grouped matmul on a TPU: megablox, the kernel that jax maintains, under this op's contract.

What is added here: rows beyond the groups are one more group, which has no weight, so that megablox
writes zeros there; float32 is multiplied at the highest precision; the gradient of a weight is the
float32 sum, whatever the rows' dtype; rows are padded to whole tiles; and the tiles.

A tile holds all of K where that fits, so that an expert's weight stays in vector memory while its
rows pass, and crosses from main memory once. The price of unequal groups is that a tile of rows is
multiplied once for every expert with a row in it; it is therefore not much longer than a group.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm, tgmm

from pallas_kernels import tpu
from pallas_kernels.grouped_matmul import reference

# Vector memory for the tiles, of the 16 MiB that a kernel has without asking for more.
_TILE_BYTES = 12 * 2**20
_Tiles = tuple[int, int, int]


def grouped_matmul(
    x: jax.Array,
    w: jax.Array,
    group_sizes: jax.Array,
    scales: jax.Array | None = None,
    *,
    interpret: Any = None,
) -> jax.Array:
    """See `pallas_kernels.grouped_matmul.grouped_matmul`.

    Raises:
        NotImplementedError: not on a TPU, packed weights, K or N no multiples of 128, or a dtype
            other than float32 and bfloat16.
    """
    tpu.require("grouped_matmul", interpret)
    if scales is not None:
        raise NotImplementedError("grouped_matmul: packed weights")
    reference.check(x, w, group_sizes)
    if w.shape[1] % tpu.LANES or w.shape[2] % tpu.LANES:
        raise NotImplementedError(
            f"grouped_matmul: weights of {w.shape[1]} x {w.shape[2]}; takes multiples of 128"
        )
    if x.dtype not in (jnp.float32, jnp.bfloat16):
        raise NotImplementedError(f"grouped_matmul: rows of {x.dtype}")
    if not x.shape[0]:
        return jnp.zeros((0, w.shape[2]), x.dtype)
    return _grouped_matmul(interpret, x, w, group_sizes.astype(jnp.int32))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _grouped_matmul(interpret: Any, x: jax.Array, w: jax.Array, sizes: jax.Array) -> jax.Array:
    return _rows(interpret, x, w.astype(x.dtype), sizes, transposed=False)


def _forward(interpret, x, w, sizes):
    return _grouped_matmul(interpret, x, w, sizes), (x, w, sizes)


def _backward(interpret, residuals, grad):
    x, w, sizes = residuals
    grad_x = _rows(interpret, grad, w.astype(x.dtype), sizes, transposed=True)
    return grad_x, _weights(interpret, x, grad, sizes, w.shape[0]).astype(w.dtype), None


_grouped_matmul.defvjp(_forward, _backward)


def _rows(interpret: Any, x: jax.Array, w: jax.Array, sizes: jax.Array, *, transposed: bool):
    """[M, N] of rows times their expert's weight, which is [E, N, K] where transposed."""
    inner, outer = (w.shape[2], w.shape[1]) if transposed else w.shape[1:]
    size = x.dtype.itemsize
    tile = rows_of_tile(x.shape[0], w.shape[0])
    depth, columns = inner, _divisor(outer, 1024)
    # Rows, weight and result twice each, and a float32 sum.
    while size * 2 * depth * (tile + columns) + (2 * size + 4) * tile * columns > _TILE_BYTES:
        if columns > 256:
            columns = _divisor(outer, columns - 1)
        else:
            depth = _divisor(inner, depth - 1)
    tiles = (tile, depth, columns)
    padded, all_sizes = _padded(x, sizes, tile)
    _state("rows", padded, w.shape[0], tiles, inner, outer, x.dtype)
    with _precision(x):
        out = gmm(
            padded,
            w,
            all_sizes,
            x.dtype,
            tiles,
            jnp.int32(0),
            transpose_rhs=transposed,
            interpret=False if interpret is None else interpret,
        )
    return out[: x.shape[0]]


def _weights(interpret: Any, x: jax.Array, grad: jax.Array, sizes: jax.Array, experts: int):
    """float32[E, K, N]: the sum over an expert's rows of x times grad."""
    tile = rows_of_tile(x.shape[0], experts)
    tiles = (tile, _divisor(x.shape[1], 1024), _divisor(grad.shape[1], 512))
    padded_x, all_sizes = _padded(x, sizes, tile)
    padded_grad, _ = _padded(grad, sizes, tile)
    _state("weights", padded_x, experts, tiles, x.shape[1], grad.shape[1], x.dtype)
    with _precision(x):
        return tgmm(
            padded_x.T,
            padded_grad,
            all_sizes,
            jnp.float32,
            tiles,
            jnp.int32(0),
            experts,
            interpret=False if interpret is None else interpret,
        )


def _state(
    what: str, x: jax.Array, experts: int, tiles: _Tiles, inner: int, outer: int, dtype: Any
) -> None:
    """States a call: every group is taken to begin and end inside of a tile."""
    tile, depth, columns = tiles
    size, count = dtype.itemsize, x.shape[0] + experts * tile
    passes = 1 if dtype == jnp.bfloat16 else 6
    if what == "rows":
        held = 2 * size * (tile * depth + depth * columns + tile * columns) + 4 * tile * columns
        moved = size * (count * inner * (outer // columns) + experts * inner * outer)
        moved += size * x.shape[0] * outer
    else:
        held = 2 * size * tile * (depth + columns) + 12 * depth * columns
        moved = size * count * (inner * (outer // columns) + outer * (inner // depth))
        moved += 4 * experts * inner * outer
    tpu.stated(what, tpu.Account(held, moved, flops=2 * passes * count * inner * outer))


def rows_of_tile(rows: int, groups: int) -> int:
    """Rows of a tile: about those of a mean group, a power of two within 128..512."""
    mean = max(rows // groups, 1)
    return min(max(1 << (mean.bit_length() - 1), tpu.LANES), 512)


def _divisor(size: int, most: int) -> int:
    """The largest multiple of 128 that divides `size` and is at most `most`."""
    lanes = size // tpu.LANES
    return tpu.LANES * next(n for n in range(most // tpu.LANES, 0, -1) if lanes % n == 0)


def _padded(x: jax.Array, sizes: jax.Array, tile: int) -> tuple[jax.Array, jax.Array]:
    """Whole tiles of rows, and the sizes with one more group for those that have no expert."""
    x = jnp.pad(x, ((0, -x.shape[0] % tile), (0, 0)))
    return x, jnp.concatenate([sizes, (x.shape[0] - sizes.sum())[None]]).astype(jnp.int32)


def _precision(x: jax.Array):
    return jax.default_matmul_precision("highest" if x.dtype == jnp.float32 else "default")
