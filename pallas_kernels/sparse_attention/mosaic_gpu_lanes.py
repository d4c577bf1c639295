"""What the Hopper kernels of this folder do a thread at a time: rows in and out of registers.

Each function is called by one warpgroup (128 threads). Rows are bfloat16 of 512 channels.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, memref, vector

from pallas_kernels._compat import llvm, nvvm
from pallas_kernels.sparse_attention.tiles import MEMBER_BITS, TILE

DIM = 512
TRANSFORMS = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
_ROW_BYTES = 2 * DIM
_WORD_A_THREAD = plgpu.Layout.WG_STRIDED((128,), vec_size=1)


def _i32() -> ir.Type:
    return ir.IntegerType.get_signless(32)


def _i64() -> ir.Type:
    return ir.IntegerType.get_signless(64)


def _c(value: int, kind: ir.Type | None = None) -> ir.Value:
    return utils.c(value, _i32() if kind is None else kind)


def _warp_and_lane() -> tuple[ir.Value, ir.Value]:
    thread = arith.remui(utils.thread_idx(), _c(128))
    return arith.shrui(thread, _c(5)), arith.andi(thread, _c(31))


def opaque_zero():
    """0 that the compiler does not know: what is addressed with it is not hoisted out of loops.

    The descriptors of all matrix products of a tile would be, and spilled for want of registers.
    """

    @plgpu.inline_mgpu(
        return_type=plgpu.ShapeDtypeStruct((), jnp.int32, layout=plgpu.Layout.WG_SPLAT(()))
    )
    def zero(ctx):
        del ctx
        value = utils.inline_ptx("mov.u32 $0, 0;", result_types=_i32(), has_side_effects=True)
        return mgpu.FragmentedArray.splat(value, (), is_signed=True)

    return zero()


def load_words(words_ref):
    """The words of one tile, i32[128]: lane l of warp w holds that of row 16 w + l % 16."""

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(),),
        return_type=plgpu.ShapeDtypeStruct((128,), jnp.int32, layout=_WORD_A_THREAD),
    )
    def load(ctx, ref):
        del ctx
        warp, lane = _warp_and_lane()
        row = arith.addi(arith.shli(warp, _c(4)), arith.andi(lane, _c(15)))
        word = memref.load(ref, [arith.index_cast(ir.IndexType.get(), row)])
        register = vector.broadcast(ir.VectorType.get((1,), _i32()), word)
        return mgpu.FragmentedArray(
            _registers=np.array([register], dtype=object),
            _layout=mgpu.WGStridedFragLayout((128,), 1),
            _is_signed=True,
        )

    return load(words_ref)


def start_gather(rows_ref, words, half: int, buffer, words_smem):
    """Starts copying half the channels of a tile's rows into a tiled, swizzled buffer.

    The copies of one call are one group, of which `end_gather` awaits.

    Args:
        rows_ref: bf16 `[R, 512]`, device memory.
        words: what `load_words` gave; `row << MEMBER_BITS | members`. Without members: zeros.
        half: which 256 channels.
        buffer: bf16 `[64, 256]` with `TRANSFORMS`, shared memory.
        words_smem: i32 `[64]`, shared memory, where the words go.
    """

    @plgpu.inline_mgpu(
        arg_types=(
            plgpu.RefType(),
            _WORD_A_THREAD,
            plgpu.RefType(TRANSFORMS),
            plgpu.RefType(),
        )
    )
    def copy(ctx, rows, words, target, words_target):
        del ctx
        warp, lane = _warp_and_lane()
        [register] = words.registers.flat
        word = vector.extract(register, dynamic_position=[], static_position=[0])
        row = arith.addi(arith.shli(warp, _c(4)), arith.andi(lane, _c(15)))
        memref.store(word, words_target, [arith.index_cast(ir.IndexType.get(), row)])

        source = llvm.ptrtoint(_i64(), utils.memref_ptr(rows))
        offset = arith.addi(arith.shli(lane, _c(4)), _c(half * _ROW_BYTES // 2))
        source = arith.addi(source, arith.extui(_i64(), offset))
        # Tile (r / 8, c / 64) of 1 KiB at 4 (r / 8) + c / 64; in it, row r % 8 has 128 bytes whose
        # 16-byte chunks are permuted by an exclusive or with r % 8.
        base = llvm.ptrtoint(_i32(), utils.memref_ptr(target))
        base = arith.addi(base, arith.shli(warp, _c(13)))
        base = arith.addi(base, arith.shli(arith.shrui(lane, _c(3)), _c(10)))
        chunk = arith.andi(lane, _c(7))
        swizzled = [arith.addi(base, arith.shli(arith.xori(chunk, _c(r)), _c(4))) for r in range(8)]
        for r in range(16):
            one = nvvm.shfl_sync(_c(-1), word, _c(r), _c(31), nvvm.ShflKind.idx)
            members = arith.andi(one, _c(2**MEMBER_BITS - 1))
            there = arith.cmpi(arith.CmpIPredicate.ne, members, _c(0))
            # The hardware fills up with zeros what a copy is short of 16 bytes.
            size = arith.select(there, _c(16), _c(0))
            number = arith.extui(_i64(), arith.shrui(one, _c(MEMBER_BITS)))
            utils.inline_ptx(
                "cp.async.cg.shared.global.L2::256B [$0], [$1], 16, $2;",
                arith.addi(swizzled[r % 8], _c((r // 8) * 4096 + (r % 8) * 128)),
                arith.addi(source, arith.muli(number, _c(_ROW_BYTES, _i64()))),
                size,
                has_side_effects=True,
            )
        utils.inline_ptx("cp.async.commit_group;", has_side_effects=True)

    copy(rows_ref, words, buffer, words_smem)


def end_gather(pending: int):
    """Waits until at most `pending` groups of copies are under way.

    The others are ready for matrix products after a barrier that this warpgroup arrives at.
    """

    @plgpu.inline_mgpu()
    def wait(ctx):
        del ctx
        utils.inline_ptx(f"cp.async.wait_group {pending};", has_side_effects=True)
        utils.inline_ptx("fence.proxy.async.shared::cta;", has_side_effects=True)

    wait()


def seen(words_smem, members: int):
    """1 where the query of an accumulator's row sees the key of its column, else 0.

    Args:
        words_smem: i32 `[64]`, shared memory, one word a key.
        members: 1, 2 or 4 queries that share the 64 rows, one after another.

    Returns:
        f32 `[64, 64]`.
    """

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(),),
        return_type=plgpu.ShapeDtypeStruct((TILE, TILE), jnp.float32, layout=plgpu.Layout.WGMMA),
    )
    def load(ctx, ref):
        del ctx
        # Warp w has rows 16 w to 16 w + 15, and so one query.
        warp, lane = _warp_and_lane()
        member = arith.shrui(warp, _c({1: 2, 2: 1, 4: 0}[members]))
        first = arith.shli(arith.andi(lane, _c(3)), _c(1))
        index, pair = ir.IndexType.get(), ir.VectorType.get((2,), ir.F32Type.get())
        layout = mgpu.WGMMA_LAYOUT
        registers = np.empty(layout.registers_shape((TILE, TILE)), dtype=object)
        by_block = registers.reshape(TILE // 8, 2)
        for block in range(TILE // 8):
            values = []
            for column in range(2):
                at = arith.index_cast(index, arith.addi(first, _c(8 * block + column)))
                bit = arith.andi(arith.shrui(memref.load(ref, [at]), member), _c(1))
                values.append(arith.uitofp(ir.F32Type.get(), bit))
            by_block[block, :] = vector.from_elements(pair, values)
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)

    return load(words_smem)


def store_rows(values, target, *, in_order: bool):
    """Stores an accumulator as bfloat16, each thread 16 bytes at a time.

    A thread holds columns 8 b + 2 q + {0, 1} of every 8-column block b (q: its number within four).
    With `in_order`, four threads exchange what they have of four blocks, so that each stores one
    block's row. Otherwise each stores its own: within 32 columns, memory then has the order (q, b),
    which `ordered` undoes. Through shared memory it would cost the memory, writing and reading all
    of it there, and waiting for it to be free.

    Args:
        values: f32 `[64, n]`, n a multiple of 32.
        target: bf16 `[64, n]` of `[..., 512]`, device memory.
        in_order: see above.
    """
    blocks = values.shape[1] // 8

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA, plgpu.RefType()))
    def store(ctx, fragments, ref):
        del ctx
        pair = ir.VectorType.get((2,), ir.BF16Type.get())
        warp, lane = _warp_and_lane()
        row = arith.addi(arith.shli(warp, _c(4)), arith.shrui(lane, _c(2)))
        offset = arith.addi(
            arith.muli(row, _c(_ROW_BYTES)), arith.shli(arith.andi(lane, _c(3)), _c(4))
        )
        address = llvm.ptrtoint(_i64(), utils.memref_ptr(ref))
        address = arith.addi(address, arith.extui(_i64(), offset))

        def exchange(words, a, b, distance):
            upper = arith.cmpi(arith.CmpIPredicate.ne, arith.andi(lane, _c(distance)), _c(0))
            other = utils.shfl_bfly(arith.select(upper, words[a], words[b]), distance)
            words[a], words[b] = (
                arith.select(upper, other, words[a]),
                arith.select(upper, words[b], other),
            )

        registers = fragments.registers.reshape(blocks, 2)
        for lower in range(2):
            for group in range(blocks // 4):
                words = [
                    utils.bitcast(arith.truncf(pair, register), _i32())
                    for register in registers[4 * group : 4 * group + 4, lower]
                ]
                if in_order:
                    for a, b, distance in ((0, 1, 1), (2, 3, 1), (0, 2, 2), (1, 3, 2)):
                        exchange(words, a, b, distance)
                utils.inline_ptx(
                    "st.global.L1::no_allocate.v4.b32 [$0], {$1, $2, $3, $4};",
                    arith.addi(address, _c(lower * 8 * _ROW_BYTES + group * 64, _i64())),
                    *words,
                    has_side_effects=True,
                )
        # Or the next product would start before its registers are free, and cost spills.
        utils.warpgroup_barrier()

    store(values, target)


def ordered(x: jax.Array) -> jax.Array:
    """Columns that `store_rows` left in its own order, `[..., n]`, in order."""
    cut = x.reshape(*x.shape[:-1], -1, 4, 4, 2)
    return jnp.swapaxes(cut, -2, -3).reshape(x.shape)
