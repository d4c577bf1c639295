"""What the grouped matmul's Hopper kernels share: a block's way through its tiles.

A tile of 128 rows is multiplied by two warpgroups, 64 rows each, from shared memory that a third
fills, a number of stages ahead and on into the next tile.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, vector

from pallas_kernels.tuning import Table

ROWS, HALF, DEPTH = 128, 64, 64
# Copies of rows begin at multiples of this.
ALIGNMENT = 8
CONSUMERS = 2
_SWIZZLE = 128
_WGMMA = plgpu.Layout.WGMMA
# Results leave through two pieces of shared memory of this many bytes a row.
_PIECE_BYTES = 128


@dataclasses.dataclass(frozen=True)
class TuningConfig:
    """How the work is cut.

    Attributes:
        stages: pieces of 64 along the sum that are on their way at once.
        blocks: of the grid.
    """

    stages: int = 4
    blocks: int = 132


TABLE = Table(pathlib.Path(__file__).with_name("tuned.json"), TuningConfig)


def columns_of(size: int) -> int:
    """Columns of a tile of a result with `size` of them, a multiple of 64."""
    return next(columns for columns in (256, 192, 128, 64) if size % columns == 0)


def aligned(row: jax.Array) -> jax.Array:
    """The last row, up to `row`, at which a copy may begin."""
    return lax.div(row, ALIGNMENT) * ALIGNMENT


def padded(x: jax.Array, least: int) -> jax.Array:
    """`x` with as many rows as copies want: at least so many, and a multiple of 8."""
    rows = x.shape[0]
    missing = max(least, -(-rows // ALIGNMENT) * ALIGNMENT) - rows
    return jnp.pad(x, ((0, missing), (0, 0))) if missing else x


def start_of(half: jax.Array) -> jax.Array:
    """The first row or column of a warpgroup's part, a multiple as the compiler has to know."""
    return pl.multiple_of(half * HALF, HALF)


def _transforms(dtype: Any) -> tuple[Any, ...]:
    elements = _SWIZZLE // jnp.dtype(dtype).itemsize
    return plgpu.TilingTransform((8, elements)), plgpu.SwizzleTransform(_SWIZZLE)


def launch(
    config: TuningConfig, left: tuple[int, int], right: tuple[int, int], out_dtype: Any
) -> dict[str, Any]:
    """Arguments of `plgpu.kernel`: blocks, threads, and shared memory for `Pipeline`.

    Args:
        config: how the work is cut.
        left: shape of a stage's piece of the first operand, bfloat16.
        right: of the second.
        out_dtype: of the result.
    """
    piece = _PIECE_BYTES // jnp.dtype(out_dtype).itemsize
    operands = _transforms(jnp.bfloat16)
    return dict(
        grid=(config.blocks,),
        grid_names=("block",),
        num_threads=CONSUMERS + 1,
        thread_name="wg",
        scratch_types=dict(
            left=plgpu.SMEM((config.stages, *left), jnp.bfloat16, transforms=operands),
            right=plgpu.SMEM((config.stages, *right), jnp.bfloat16, transforms=operands),
            out=plgpu.SMEM(
                (CONSUMERS, 2, HALF, piece), out_dtype, transforms=_transforms(out_dtype)
            ),
            full=plgpu.Barrier(num_arrivals=2, num_barriers=config.stages),
            free=plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=config.stages),
            masked=plgpu.Barrier(num_arrivals=CONSUMERS),
        ),
    )


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """Shared memory and barriers of `launch`.

    Attributes:
        left: bfloat16[stages, ...].
        right: bfloat16[stages, ...].
        out: [consumers, 2, 64, piece].
        full: a stage has both of its operands.
        free: both warpgroups are done with a stage.
        masked: both are done with what they had to change of a stage.
        config: how the work is cut.
        interpret: whether the kernel runs in interpret mode.
    """

    left: Any
    right: Any
    out: Any
    full: Any
    free: Any
    masked: Any
    config: TuningConfig
    interpret: bool

    def run(
        self,
        items: jax.Array | int,
        columns: int,
        sources: Callable[[jax.Array], tuple[jax.Array, Callable[[jax.Array], tuple[Any, Any]]]],
        operands: Callable[[Any, Any, jax.Array], tuple[Any, Any]],
        store: Callable[[jax.Array, jax.Array, jax.Array], None],
        mend: Callable[[jax.Array, jax.Array, Any, Any, jax.Array], None] | None = None,
    ) -> None:
        """Goes through the tiles of this block.

        Args:
            items: tiles there are, of all blocks.
            columns: of a tile.
            sources: tile -> (steps of 64 along the sum, step -> both operands in global memory).
            operands: (left, right of a stage, number of the warpgroup) -> what it multiplies.
            store: (tile, number of the warpgroup, float32[64, columns]) -> written.
            mend: (tile, step, left, right of a stage, number of the warpgroup): changes a stage
                before it is multiplied.
        """
        warpgroup = lax.axis_index("wg")
        block = lax.axis_index("block")
        turns = jnp.maximum(lax.div(items - block + self.config.blocks - 1, self.config.blocks), 0)

        @pl.when(warpgroup == CONSUMERS)
        def _():
            plgpu.set_max_registers(40, action="decrease")

            def fill(turn, done):
                steps, at = sources(block + turn * self.config.blocks)

                @pl.loop(0, steps)
                def _(k):
                    slot = lax.rem(done + k, self.config.stages)

                    @pl.when(done + k >= self.config.stages)
                    def _():
                        plgpu.barrier_wait(self.free.at[slot])

                    left, right = at(k)
                    plgpu.copy_gmem_to_smem(left, self.left.at[slot], self.full.at[slot])
                    plgpu.copy_gmem_to_smem(right, self.right.at[slot], self.full.at[slot])

                return done + steps

            done = lax.fori_loop(0, turns, fill, jnp.int32(0))

            @pl.loop(jnp.maximum(done - self.config.stages, 0), done)
            def _(step):
                plgpu.barrier_wait(self.free.at[lax.rem(step, self.config.stages)])

        @pl.when(warpgroup < CONSUMERS)
        def _():
            plgpu.set_max_registers(232, action="increase")

            def multiply(turn, done):
                item = block + turn * self.config.blocks
                steps, _ = sources(item)

                def product(accumulator):
                    @pl.loop(0, steps)
                    def _(k):
                        slot = lax.rem(done + k, self.config.stages)
                        plgpu.barrier_wait(self.full.at[slot])
                        stage = self.left.at[slot], self.right.at[slot]
                        if mend is not None:
                            mend(item, k, *stage, warpgroup)
                        plgpu.wgmma(accumulator, *operands(*stage, warpgroup))
                        # With one product pending the one before is done.
                        plgpu.wgmma_wait(1)

                        @pl.when(k > 0)
                        def _():
                            plgpu.barrier_arrive(
                                self.free.at[lax.rem(done + k - 1, self.config.stages)]
                            )

                    value = accumulator[...]

                    @pl.when(steps > 0)
                    def _():
                        last = lax.rem(done + steps - 1, self.config.stages)
                        plgpu.barrier_arrive(self.free.at[last])

                    return value

                value = pl.run_scoped(product, plgpu.ACC((HALF, columns), jnp.float32))
                store(item, warpgroup, value)
                return done + steps

            lax.fori_loop(0, turns, multiply, jnp.int32(0))
            plgpu.wait_smem_to_gmem(0)

    def store_whole(self, value: jax.Array, target: Any, half: jax.Array) -> None:
        """Writes float32[64, columns] to global memory, piece by piece."""
        piece = self.out.shape[-1]
        pieces = value.shape[1] // piece
        for number in range(pieces):
            slot = self.out.at[half, number % 2]
            columns = slice(number * piece, (number + 1) * piece)
            # Copies end in order. After an odd number of pieces the last one reads the first slot.
            pending = 0 if number == 0 and pieces % 2 else 1
            plgpu.wait_smem_to_gmem(pending, wait_read_only=True)
            slot[...] = value[:, columns].astype(self.out.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(slot, target.at[:, columns])

    def zero_rows(self, ref: Any, first: jax.Array, last: jax.Array) -> None:
        """Makes rows outside [first, last) of a stage's [64, n] zero."""
        shape = ref.shape
        if self.interpret:
            rows = lax.broadcasted_iota(jnp.int32, shape, 0)
            value = ref[...]
        else:
            rows = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=_WGMMA)
            value = plgpu.load(ref, layout=_WGMMA)
        ref[...] = jnp.where((rows >= first) & (rows < last), value, jnp.zeros_like(value))


def store_rows(
    value: jax.Array, ref: Any, first: jax.Array, last: jax.Array, interpret: bool
) -> None:
    """Writes rows [first, last) of [64, columns], in an accumulator's layout, to global memory."""
    if interpret:

        @pl.loop(jnp.maximum(first, 0), jnp.minimum(last, HALF))
        def _(row):
            ref[pl.ds(row, 1)] = lax.dynamic_slice_in_dim(value, row, 1)

        return
    scalar = plgpu.Layout.WG_SPLAT(())

    @plgpu.inline_mgpu(arg_types=(_WGMMA, plgpu.RefType(), scalar, scalar))
    def store(_, value, ref, first, last):
        index = ir.IndexType.get()
        first, last = (arith.index_cast(index, x.registers.item()) for x in (first, last))
        places = value.layout.thread_idxs(value.shape)
        less, at_least = arith.CmpIPredicate.slt, arith.CmpIPredicate.sge
        for (row, column), register in zip(places, value.registers.flat, strict=True):
            wanted = arith.andi(arith.cmpi(at_least, row, first), arith.cmpi(less, row, last))
            with mgpu.when(wanted):
                vector.store(register, ref, [row, column])

    store(value, ref, first, last)
