"""What the indexer's Hopper kernels do lane by lane, below the level of Pallas.

Every function has two bodies: the one that is compiled, on the registers of a warpgroup, and the
same arithmetic on whole arrays for interpret mode, which cannot run the first.

Scores lie in the layout of a wgmma accumulator: lane `4 r + c` of warp v holds rows `16 v + r` and
`16 v + r + 8`, and of every eight columns those numbered 2c and 2c + 1.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, memref, vector
from jax.extend.mlir.dialects import math as mlir_math

TILE_KEYS = 64
COLUMNS = 8
BLOCK = 8

_WGMMA = plgpu.Layout.WGMMA


def _i32(value: int):
    return mgpu.c(value, ir.IntegerType.get_signless(32))


def _element(register, position: int):
    index = ir.DenseI64ArrayAttr.get([position])
    return vector.extract(register, dynamic_position=[], static_position=index)


def _pair(values: list):
    return vector.from_elements(ir.VectorType.get((2,), ir.F32Type.get()), values)


def _lane_bit(bit: int):
    """Whether `bit` of the thread's index is set."""
    thread = mgpu.thread_idx()
    masked = arith.andi(thread, _i32(1 << bit))
    return arith.cmpi(arith.CmpIPredicate.ne, masked, _i32(0))


def _exchange(values: list, bit: int) -> list:
    """Half of the sums over two lanes that differ in `bit`: the lane without it keeps the first."""
    mine = _lane_bit(bit)
    half = len(values) // 2
    kept = []
    for low, high in zip(values[:half], values[half:], strict=True):
        sent = arith.select(mine, low, high)
        own = arith.select(mine, high, low)
        kept.append(arith.addf(own, mgpu_utils.shfl_bfly(sent, 1 << bit)))
    return kept


def head_sums(accumulator: jax.Array, w: jax.Array, heads: int, interpret: bool) -> jax.Array:
    """Each lane's part of the scores of 64 keys for the queries whose heads are the columns.

    Args:
        accumulator: f32 `[64, queries * heads]`, dot products; heads a multiple of 8, queries of 4.
        w: f32 `[queries * heads]`, in the accumulator's column layout.
        heads: Hi.
        interpret: run on whole arrays.

    Returns:
        f32 `[64, queries * 4]` in an accumulator's layout: at column 8 b + 2 c + i the sum of
        `w relu(dot)` over the heads of query 2 b + i that lane c holds.
    """
    columns = accumulator.shape[1]
    queries = columns // heads
    if interpret:
        parts = (jnp.maximum(accumulator, 0) * w).reshape(TILE_KEYS, queries, heads // 8, 4, 2)
        parts = parts.sum(axis=(2, 4)).reshape(TILE_KEYS, queries // 2, 2, 4)
        return parts.swapaxes(2, 3).reshape(TILE_KEYS, queries * 4)

    @plgpu.inline_mgpu(
        arg_types=(_WGMMA, _WGMMA.reduce(0)),
        return_type=plgpu.ShapeDtypeStruct((TILE_KEYS, queries * 4), jnp.float32, layout=_WGMMA),
    )
    def reduce(_, accumulator, w):
        f32 = ir.F32Type.get()
        dots = accumulator.registers.reshape(columns // 8, 2)
        # relu(x) = (x + |x|) / 2 exactly, and an addition issues at twice the rate of a maximum.
        weights = [
            [arith.mulf(_element(register, i), mgpu.c(0.5, f32)) for i in range(2)]
            for register in w.registers.reshape(-1)
        ]
        blocks = heads // 8
        layout = mgpu.WGMMA_LAYOUT
        out = np.empty(layout.registers_shape((TILE_KEYS, queries * 4)), dtype=object)
        flat = out.reshape(queries // 2, 2)
        for half in range(2):
            sums = []
            for query in range(queries):
                total = None
                for block in range(query * blocks, (query + 1) * blocks):
                    for i in range(2):
                        dot = _element(dots[block, half], i)
                        dot = arith.addf(dot, mlir_math.absf(dot))
                        if total is None:
                            total = arith.mulf(dot, weights[block][i])
                        else:
                            total = mlir_math.fma(dot, weights[block][i], total)
                sums.append(total)
            for pair in range(queries // 2):
                flat[pair, half] = _pair(sums[2 * pair : 2 * pair + 2])
        return mgpu.FragmentedArray(_registers=out, _layout=layout, _is_signed=None)

    return reduce(accumulator, w)


def scores_of(parts: jax.Array, interpret: bool) -> jax.Array:
    """Scores `[64, queries]` from the lanes' parts `[64, queries * 4]`, queries a multiple of 8."""
    queries = parts.shape[1] // 4
    if interpret:
        lanes = parts.reshape(TILE_KEYS, queries // 2, 4, 2)
        return lanes.sum(axis=2).reshape(TILE_KEYS, queries)

    @plgpu.inline_mgpu(
        arg_types=(_WGMMA,),
        return_type=plgpu.ShapeDtypeStruct((TILE_KEYS, queries), jnp.float32, layout=_WGMMA),
    )
    def combine(_, parts):
        registers = parts.registers.reshape(queries // 2, 2)
        layout = mgpu.WGMMA_LAYOUT
        out = np.empty(layout.registers_shape((TILE_KEYS, queries)), dtype=object)
        flat = out.reshape(queries // COLUMNS, 2)
        for group in range(queries // COLUMNS):
            for half in range(2):
                pairs = registers[4 * group : 4 * group + 4, half]
                sums = [_element(pair, i) for pair in pairs for i in range(2)]
                flat[group, half] = _pair(_exchange(_exchange(sums, 1), 0))
        return mgpu.FragmentedArray(_registers=out, _layout=layout, _is_signed=None)

    return combine(parts)


def join(parts: list[jax.Array], interpret: bool) -> jax.Array:
    """Concatenates arrays in an accumulator's layout along their columns."""
    if interpret:
        return jnp.concatenate(parts, axis=1)
    columns = sum(part.shape[1] for part in parts)

    @plgpu.inline_mgpu(
        arg_types=(_WGMMA,) * len(parts),
        return_type=plgpu.ShapeDtypeStruct((TILE_KEYS, columns), jnp.float32, layout=_WGMMA),
    )
    def concatenate(_, *parts):
        return mgpu.FragmentedArray(
            _registers=np.concatenate([part.registers for part in parts], axis=1),
            _layout=mgpu.WGMMA_LAYOUT,
            _is_signed=None,
        )

    return concatenate(*parts)


def store_transposed(scores: jax.Array, ref, interpret: bool) -> None:
    """Writes scores `[64, queries]` to `ref`, `[queries, 64]` in global memory."""
    if interpret:
        ref[...] = scores.T
        return

    @plgpu.inline_mgpu(arg_types=(_WGMMA, plgpu.RefType()))
    def store(_, scores, ref):
        scores.foreach(lambda value, at: memref.store(value, ref, [at[1], at[0]]))

    store(scores, ref)


def store_block_maxima(scores: jax.Array, ref, interpret: bool) -> None:
    """Writes the largest of every 8 rows of scores `[64, queries]` to `ref`, `[queries, 8]`."""
    if interpret:
        ref[...] = scores.reshape(TILE_KEYS // BLOCK, BLOCK, -1).max(axis=1).T
        return

    @plgpu.inline_mgpu(arg_types=(_WGMMA, plgpu.RefType()))
    def store(_, scores, ref):
        index = ir.IndexType.get()
        eight = mgpu.c(BLOCK, index)
        thread = mgpu.thread_idx()
        row = arith.andi(thread, _i32(0b11100))
        first = arith.cmpi(arith.CmpIPredicate.eq, row, _i32(0))

        def largest(value, at):
            for distance in (4, 8, 16):
                value = arith.maxnumf(value, mgpu_utils.shfl_bfly(value, distance))
            with mgpu.when(first):
                memref.store(value, ref, [at[1], arith.divui(at[0], eight)])

        scores.foreach(largest)

    store(scores, ref)


def store_column_sums(values: jax.Array, ref, interpret: bool) -> None:
    """Writes the sums over each warp's 16 rows of `[64, n]` to `ref`, `[4, n]` in global memory."""
    if interpret:
        ref[...] = values.reshape(4, 16, -1).sum(axis=1)
        return
    columns = values.shape[1]

    @plgpu.inline_mgpu(arg_types=(_WGMMA, plgpu.RefType()))
    def store(_, values, ref):
        index = ir.IndexType.get()
        thread = arith.remui(mgpu.thread_idx(), _i32(128))
        warp = arith.index_cast(index, arith.divui(thread, _i32(32)))
        column = arith.muli(arith.remui(thread, _i32(4)), _i32(2))
        row = arith.andi(thread, _i32(0b11100))
        first = arith.cmpi(arith.CmpIPredicate.eq, row, _i32(0))
        registers = values.registers.reshape(columns // 8, 2)
        for block in range(columns // 8):
            for i in range(2):
                total = arith.addf(*(_element(register, i) for register in registers[block]))
                for distance in (4, 8, 16):
                    total = arith.addf(total, mgpu_utils.shfl_bfly(total, distance))
                at = arith.index_cast(index, arith.addi(column, _i32(8 * block + i)))
                with mgpu.when(first):
                    memref.store(total, ref, [warp, at])

    store(values, ref)


def column_vector(ref, interpret: bool) -> jax.Array:
    """A vector of one value per column, each lane holding those of its own columns."""
    if interpret:
        return ref[...]
    return plgpu.load(ref, layout=_WGMMA.reduce(0), optimized=False)


def row_vector(ref, interpret: bool) -> jax.Array:
    """A vector of one value per row, each lane holding those of its own rows."""
    if interpret:
        return ref[...]
    return plgpu.load(ref, layout=_WGMMA.reduce(1), optimized=False)


def row_numbers(shape: tuple[int, int], interpret: bool) -> jax.Array:
    """i32 array of the row that each element is in."""
    if interpret:
        return jax.lax.broadcasted_iota(jnp.int32, shape, 0)
    return plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=_WGMMA)


def along_rows(vector: jax.Array, shape: tuple[int, int]) -> jax.Array:
    """`vector` of one value per row, broadcast over columns."""
    return jax.lax.broadcast_in_dim(vector, shape, (0,))


def along_columns(vector: jax.Array, shape: tuple[int, int]) -> jax.Array:
    """`vector` of one value per column, broadcast over rows."""
    return jax.lax.broadcast_in_dim(vector, shape, (1,))


def tile(ref, *indices):
    """`ref.at[indices]`, a pair (start, size) standing for a slice."""
    return ref.at[tuple(pl.ds(*i) if isinstance(i, tuple) else i for i in indices)]
