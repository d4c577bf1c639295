"""Backward of `sparse_attention` on Hopper GPUs, in Pallas Mosaic GPU.

Per query and head, with `f = sigmoid(lse - sink)` the share of the keys in the denominator,

    P'_k = exp(s_k - lse),  dP_k = dout . row_k,  delta = f dout . out - dlse,
    dS_k = P'_k (f dP_k - delta),  dq = scale sum_k dS_k row_k,
    drow_k = sum over queries and heads of (f P'_k dout + scale dS_k q),
    dsink = -sum over queries of (1 - f) dout . out.

These are finite for every sink, infinite ones among them, and right for every `d_lse`.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, memref
from jax.extend.mlir.dialects import vector as vector_dialect

from pallas_kernels._compat import llvm, nvvm

HEADS = 64
KEYS = 64
DIM = 512
_TRANSFORMS = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
_CONSUMERS = 2
_HALF = DIM // _CONSUMERS
_PIECE = 128
PIECE_ROWS = 128
LOG2E = math.log2(math.e)


def _load_slots(slots_ref):
    """Slot indices of one tile, i32[128]: lanes of warp w hold those of rows 16 w + lane % 16."""

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(),),
        return_type=plgpu.ShapeDtypeStruct(
            (128,), jnp.int32, layout=plgpu.Layout.WG_STRIDED((128,), vec_size=1)
        ),
    )
    def load(ctx, ref):
        del ctx
        i32 = ir.IntegerType.get_signless(32)
        index = ir.IndexType.get()
        thread = arith.remui(mgpu_utils.thread_idx(), mgpu_utils.c(128, i32))
        warp = arith.shrui(thread, mgpu_utils.c(5, i32))
        row = arith.addi(
            arith.shli(warp, mgpu_utils.c(4, i32)), arith.andi(thread, mgpu_utils.c(15, i32))
        )
        value = memref.load(ref, [arith.index_cast(index, row)])
        vector = ir.VectorType.get((1,), i32)
        layout = mgpu.WGStridedFragLayout((128,), 1)
        registers = np.array([vector_dialect.broadcast(vector, value)], dtype=object)
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=True)

    return load(slots_ref)


def _gather(rows_ref, slots, k_smem):
    """Copies 64 rows of 512 bfloat16 into a tiled, swizzled buffer; zeros where a slot is < 0."""

    @plgpu.inline_mgpu(
        arg_types=(
            plgpu.RefType(),
            plgpu.Layout.WG_STRIDED((128,), vec_size=1),
            plgpu.RefType(_TRANSFORMS),
        )
    )
    def gather(ctx, rows, slots, buffer):
        del ctx
        i32, i64 = (ir.IntegerType.get_signless(n) for n in (32, 64))

        def c(value, kind=i32):
            return mgpu_utils.c(value, kind)

        thread = arith.remui(mgpu_utils.thread_idx(), c(128))
        warp = arith.shrui(thread, c(5))
        lane = arith.andi(thread, c(31))
        source = llvm.ptrtoint(i64, mgpu_utils.memref_ptr(rows))
        source = arith.addi(source, arith.extui(i64, arith.shli(lane, c(4))))
        target = llvm.ptrtoint(i32, mgpu_utils.memref_ptr(buffer))
        target = arith.addi(target, arith.shli(warp, c(14)))
        target = arith.addi(target, arith.shli(arith.shrui(lane, c(3)), c(10)))
        chunk = arith.andi(lane, c(7))
        [register] = slots.registers.flat
        slot = vector_dialect.extract(register, dynamic_position=[], static_position=[0])
        swizzled = [
            arith.addi(target, arith.shli(arith.xori(chunk, c(r)), c(4))) for r in range(8)
        ]
        for r in range(16):
            mine = nvvm.shfl_sync(c(-1), slot, c(r), c(31), nvvm.ShflKind.idx)
            valid = arith.cmpi(arith.CmpIPredicate.sge, mine, c(0))
            size = arith.select(valid, c(16), c(0))
            row = arith.extui(i64, arith.maxsi(mine, c(0)))
            address = arith.addi(source, arith.shli(row, c(10, i64)))
            for half in range(2):
                offset = (r // 8) * 8192 + (r % 8) * 128 + half * 4096
                mgpu_utils.inline_ptx(
                    "cp.async.cg.shared.global.L2::256B [$0], [$1], 16, $2;",
                    arith.addi(swizzled[r % 8], c(offset)),
                    arith.addi(address, c(half * 512, i64)),
                    size,
                    has_side_effects=True,
                )
        mgpu_utils.inline_ptx("cp.async.wait_all;", has_side_effects=True)
        mgpu_utils.inline_ptx("fence.proxy.async.shared::cta;", has_side_effects=True)

    gather(rows_ref, slots, k_smem)


def _store_rows(values, target, *, in_order):
    """Stores an accumulator f32 [64, n] as bfloat16, each thread 16 bytes at a time.

    A thread holds columns 8 b + 2 q + {0, 1} of every 8-column block b (q: its number within four).
    With `in_order`, four threads exchange what they have of four blocks, so that each stores one
    block's row. Otherwise each stores its own: within 32 columns, memory then has the order (q, b),
    which `_in_order` undoes. Through shared memory it would cost the memory, writing and reading
    all of it there, and waiting for it to be free.
    """
    blocks = values.shape[1] // 8

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA, plgpu.RefType()))
    def store(ctx, fragments, ref):
        del ctx
        i32, i64 = (ir.IntegerType.get_signless(n) for n in (32, 64))
        pair = ir.VectorType.get((2,), ir.BF16Type.get())

        def c(value, kind=i32):
            return mgpu_utils.c(value, kind)

        thread = arith.remui(mgpu_utils.thread_idx(), c(128))
        warp, lane = arith.shrui(thread, c(5)), arith.andi(thread, c(31))
        row = arith.addi(arith.shli(warp, c(4)), arith.shrui(lane, c(2)))
        offset = arith.addi(
            arith.muli(row, c(2 * DIM)), arith.shli(arith.andi(lane, c(3)), c(4))
        )
        address = llvm.ptrtoint(i64, mgpu_utils.memref_ptr(ref))
        address = arith.addi(address, arith.extui(i64, offset))

        def exchange(a, b, distance):
            upper = arith.cmpi(
                arith.CmpIPredicate.ne, arith.andi(lane, c(distance)), c(0)
            )
            other = mgpu_utils.shfl_bfly(arith.select(upper, a, b), distance)
            return arith.select(upper, other, a), arith.select(upper, b, other)

        registers = fragments.registers.reshape(blocks, 2)
        for lower in range(2):
            for group in range(blocks // 4):
                words = [
                    mgpu_utils.bitcast(arith.truncf(pair, register), i32)
                    for register in registers[4 * group : 4 * group + 4, lower]
                ]
                if in_order:
                    words[0], words[1] = exchange(words[0], words[1], 1)
                    words[2], words[3] = exchange(words[2], words[3], 1)
                    words[0], words[2] = exchange(words[0], words[2], 2)
                    words[1], words[3] = exchange(words[1], words[3], 2)
                mgpu_utils.inline_ptx(
                    "st.global.L1::no_allocate.v4.b32 [$0], {$1, $2, $3, $4};",
                    arith.addi(address, c(lower * 8 * 2 * DIM + group * 64, i64)),
                    *words,
                    has_side_effects=True,
                )
        # Or the next product would start before its registers are free, and cost spills.
        mgpu_utils.warpgroup_barrier()

    store(values, target)


def _in_order(x):
    """Columns as `_store_rows` left them, in their own order."""
    cut = x.reshape(*x.shape[:-1], -1, 4, 4, 2)
    return jnp.swapaxes(cut, -2, -3).reshape(x.shape)


def _opaque_zero():
    """0 that the compiler does not know: what is addressed with it is not hoisted out of loops.

    The descriptors of all matrix products of a tile would be, and spilled for want of registers.
    """

    @plgpu.inline_mgpu(
        return_type=plgpu.ShapeDtypeStruct((), jnp.int32, layout=plgpu.Layout.WG_SPLAT(()))
    )
    def zero(ctx):
        del ctx
        i32 = ir.IntegerType.get_signless(32)
        value = mgpu_utils.inline_ptx("mov.u32 $0, 0;", result_types=i32, has_side_effects=True)
        return mgpu.FragmentedArray.splat(value, (), is_signed=True)

    return zero()


def _contributions(q, d_out, stats, rows, slots, *, ctas, groups, scale, interpret):
    """dq, and what every query adds to each row that it sees.

    Args:
        q: bf16 `[N, 64, 512]`.
        d_out: bf16 `[N, 64, 512]`.
        stats: f32 `[N, 4, 64]`: lse log2(e), f, f scale, delta scale.
        rows: bf16 `[R, 512]`.
        slots: i32 `[N / groups, L]`, L a multiple of 64, rows or -1.

    Returns:
        dq bf16 `[N, 64, 512]`, contributions bf16 `[groups, N / groups, L, 512]`.
    """
    queries = q.shape[0]
    slot_count = slots.shape[1]
    tiles = slot_count // KEYS
    bf16, f32 = jnp.bfloat16, jnp.float32
    layout, by_row = plgpu.Layout.WGMMA, plgpu.Layout.WGMMA.reduce(1)
    exp_scale = scale * LOG2E

    def body(
        q_ref, do_ref, stats_ref, rows_ref, slots_ref, dq_ref, out_ref,
        tiles_smem, stats_smem,
        qdo_full, qdo_free, k_full, k_free, e_full, ds_full, done,
    ):
        thread = lax.axis_index("wg")
        cta = lax.axis_index("cta")
        count = pl.cdiv(queries - cta, ctas)

        def buffers():
            zero = 0 if interpret else _opaque_zero()
            whole = [ref.at[zero] for ref in tiles_smem[:3]]
            return (*whole, *tiles_smem[3:])

        def store(value, target, in_order):
            if interpret:
                target[...] = value.astype(bf16)
            else:
                _store_rows(value, target, in_order=in_order)

        def row_stat(i):
            return plgpu.load(stats_smem.at[i], layout=by_row)

        def spread(x):
            return lax.broadcast_in_dim(x, (HEADS, KEYS), [0])

        def product(a_smem, b_smem):
            def multiply(acc):
                plgpu.wgmma(acc, a_smem, b_smem.transpose((1, 0)))
                return acc[...]

            return pl.run_scoped(multiply, plgpu.ACC((HEADS, KEYS), f32))

        def gradients(me, n, tile, turn, dq):
            q_smem, do_smem, k_smem, p_smem, ds_smem = buffers()
            p_smem, ds_smem = p_smem.at[turn], ds_smem.at[turn]
            # A loop whose length the compiler does not know: unrolled, it would keep the zeros that
            # each product starts from in registers of their own, and spill.
            pieces = _HALF // _PIECE + (0 if interpret else _opaque_zero())
            plgpu.wgmma(dq, ds_smem, k_smem.at[:, pl.ds(me * _HALF, _HALF)])

            @pl.loop(0, pieces)
            def _piece(piece):
                columns = pl.ds(me * _HALF + piece * _PIECE, _PIECE)

                def multiply(acc):
                    plgpu.wgmma(acc, p_smem.transpose((1, 0)), do_smem.at[:, columns])
                    plgpu.wgmma(acc, ds_smem.transpose((1, 0)), q_smem.at[:, columns])
                    plgpu.wgmma_wait(2)

                    @pl.when(piece == 0)
                    def _():
                        plgpu.barrier_arrive(k_free)

                    return acc[...]

                added = pl.run_scoped(multiply, plgpu.ACC((KEYS, _PIECE), f32))
                target = out_ref.at[
                    lax.rem(n, groups), n // groups, pl.ds(tile * KEYS, KEYS), columns
                ]
                store(added, target, in_order=False)

            plgpu.barrier_arrive(done.at[2 * me + turn])

        def consume(me, scores):
            plgpu.set_max_registers(240, action="increase")
            for barrier in (k_free, qdo_free, done.at[2 * me], done.at[2 * me + 1]):
                plgpu.barrier_arrive(barrier)

            @pl.loop(0, count)
            def _query(i):
                n = cta + i * ctas
                plgpu.barrier_wait(qdo_full)

                def over_tiles(dq):
                    @pl.loop(0, tiles)
                    def _tile(tile):
                        turn = lax.rem(i * tiles + tile, 2)
                        plgpu.barrier_wait(k_full)
                        scores(turn)
                        gradients(me, n, tile, turn, dq)

                    return dq[...]

                dq = pl.run_scoped(over_tiles, plgpu.ACC((HEADS, _HALF), f32))
                plgpu.barrier_arrive(qdo_free)
                store(dq, dq_ref.at[n, :, pl.ds(me * _HALF, _HALF)], in_order=True)

            for turn in range(2):
                plgpu.barrier_wait(done.at[2 * (1 - me) + turn])

        @pl.when(thread == 0)
        def _probabilities():
            def scores(turn):
                q_smem, _, k_smem, p_smem, ds_smem = buffers()
                s = product(q_smem, k_smem)
                p = jnp.exp2(jnp.minimum(s * exp_scale - spread(row_stat(0)), 0.0))
                plgpu.barrier_wait(done.at[2 + turn])
                p_smem[turn] = (p * spread(row_stat(1))).astype(bf16)
                plgpu.barrier_wait(e_full)
                e = plgpu.load(ds_smem.at[turn], layout=layout).astype(f32)
                ds_smem[turn] = (p * e).astype(bf16)
                plgpu.commit_smem()
                plgpu.barrier_arrive(ds_full)

            consume(0, scores)

        @pl.when(thread == 1)
        def _differences():
            def scores(turn):
                _, do_smem, k_smem, _, ds_smem = buffers()
                dp = product(do_smem, k_smem)
                e = dp * spread(row_stat(2)) - spread(row_stat(3))
                plgpu.barrier_wait(done.at[turn])
                ds_smem[turn] = e.astype(bf16)
                plgpu.barrier_arrive(e_full)
                plgpu.barrier_wait(ds_full)

            consume(1, scores)

        @pl.when(thread == 2)
        def _fetch():
            plgpu.set_max_registers(40, action="decrease")
            q_smem, do_smem, k_smem = (ref.at[0] for ref in tiles_smem[:3])

            @pl.loop(0, count)
            def _query(i):
                n = cta + i * ctas

                @pl.loop(0, tiles)
                def _tile(tile):
                    here = pl.ds(tile * KEYS, KEYS)
                    if not interpret:
                        chosen = _load_slots(slots_ref.at[n // groups, here])
                    plgpu.barrier_wait(k_free)
                    if interpret:

                        @pl.loop(0, KEYS)
                        def _row(r):
                            slot = slots_ref[n // groups, tile * KEYS + r]
                            row = rows_ref[jnp.maximum(slot, 0)]
                            k_smem[r] = jnp.where(slot >= 0, row, jnp.zeros_like(row))

                        plgpu.commit_smem()
                    else:
                        _gather(rows_ref, chosen, k_smem)
                    plgpu.barrier_arrive(k_full)

                    @pl.when(tile == 0)
                    def _():
                        plgpu.barrier_wait(qdo_free)
                        plgpu.copy_gmem_to_smem(q_ref.at[n], q_smem, qdo_full)
                        plgpu.copy_gmem_to_smem(do_ref.at[n], do_smem, qdo_full)
                        plgpu.copy_gmem_to_smem(stats_ref.at[n], stats_smem, qdo_full)

            plgpu.barrier_wait(k_free)
            plgpu.barrier_wait(qdo_free)

    def tiled(*shape):
        return plgpu.SMEM(shape, bf16, transforms=_TRANSFORMS)

    return plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct(q.shape, bf16),
            jax.ShapeDtypeStruct((groups, queries // groups, slot_count, DIM), bf16),
        ),
        scratch_types=(
            [tiled(1, HEADS, DIM)] * 2 + [tiled(1, KEYS, DIM)] + [tiled(2, HEADS, KEYS)] * 2,
            plgpu.SMEM((4, HEADS), f32),
            plgpu.Barrier(num_arrivals=3),
            plgpu.Barrier(num_arrivals=_CONSUMERS),
            plgpu.Barrier(),
            plgpu.Barrier(num_arrivals=_CONSUMERS),
            plgpu.Barrier(),
            plgpu.Barrier(),
            plgpu.Barrier(num_barriers=2 * _CONSUMERS),
        ),
        grid=(ctas,),
        grid_names=("cta",),
        num_threads=_CONSUMERS + 1,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret or None,
    )(q, d_out, stats, rows, slots)


def _segment_sum(values, order, starts, *, interpret):
    """Sums rows of `values` by segments, each in its listed order, in float32.

    Args:
        values: `[C, M, 512]`; row m stands for the sum of its C copies.
        order: i32 `[M]`, rows of `values` in the order of segments.
        starts: i32 `[S + 1]`, where each segment begins in `order`.

    Returns:
        f32 `[S, 512]`.
    """
    copies = values.shape[0]
    segments = starts.shape[0] - 1
    f32 = jnp.float32
    layout = plgpu.Layout.WG_STRIDED((DIM,), vec_size=4)
    together = 8

    def body(values_ref, order_ref, starts_ref, out_ref):
        segment = lax.axis_index("segment")
        begin, end = starts_ref[segment], starts_ref[segment + 1]

        def add(step, total):
            first = begin + step * together
            at = [jnp.minimum(first + i, end - 1) for i in range(together)]
            rows = [order_ref[a] for a in at]
            loaded = [
                plgpu.load(values_ref.at[c, row], layout=layout, optimized=False).astype(f32)
                for row in rows
                for c in range(copies)
            ]
            for i, value in enumerate(loaded):
                inside = first + i // copies < end
                total = total + value * jnp.where(inside, 1.0, 0.0)
            return total

        zeros = plgpu.layout_cast(jnp.zeros((DIM,), f32), layout)
        total = lax.fori_loop(0, pl.cdiv(end - begin, together), add, zeros)
        out_ref[segment] = total

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((segments, DIM), f32),
        grid=(segments,),
        grid_names=("segment",),
        num_threads=1,
        thread_name="wg",
        interpret=interpret or None,
    )(values, order, starts)


def _inverse(slots, rows: int, piece: int):
    """Positions of `slots` (i32 [M], -1 for none) by the row that they name, cut into pieces.

    Returns:
        order i32 `[M]`; starts of pieces i32 `[P + 1]`; starts of rows in pieces i32 `[rows + 1]`.
    """
    keys = jnp.where(slots >= 0, slots, rows).astype(jnp.uint32)
    positions = jnp.arange(slots.size, dtype=jnp.int32)
    _, order = lax.sort((keys, positions), num_keys=1, is_stable=True)
    counts = jnp.zeros(rows + 1, jnp.int32).at[keys].add(1)[:rows]
    ends = jnp.cumsum(counts)
    pieces = -(-counts // piece)
    piece_ends = jnp.cumsum(pieces)
    total = rows + slots.size // piece
    number = jnp.arange(total, dtype=jnp.int32)
    row = jnp.repeat(jnp.arange(rows, dtype=jnp.int32), pieces, total_repeat_length=total)
    within = number - (piece_ends - pieces)[row]
    begin = jnp.minimum((ends - counts)[row] + within * piece, ends[-1])
    begin = jnp.where(number < piece_ends[-1], begin, ends[-1])
    zero = jnp.zeros(1, jnp.int32)
    return order, jnp.append(begin, ends[-1:]), jnp.concatenate([zero, piece_ends])


def _segments_of(contributions, slots, rows: int, *, interpret):
    order, piece_starts, row_starts = _inverse(slots.reshape(-1), rows, PIECE_ROWS)
    copies, _, _, dim = contributions.shape
    partial = _segment_sum(
        contributions.reshape(copies, -1, dim), order, piece_starts, interpret=interpret
    )
    every = jnp.arange(partial.shape[0], dtype=jnp.int32)
    return _segment_sum(partial[None], every, row_starts, interpret=interpret)


def backward(
    q,
    window_rows,
    window_lo,
    window_hi,
    main_rows,
    indices,
    sink,
    out,
    lse,
    d_out,
    d_lse,
    *,
    window,
    scale,
    interpret=None,
):
    """Gradients of `sparse_attention`."""
    batch, queries, heads, dim = q.shape
    f32, bf16 = jnp.float32, jnp.bfloat16
    groups = -(-heads // HEADS)

    keys_share = jnp.where(lse > -jnp.inf, jax.nn.sigmoid(lse - sink.astype(f32)), 0.0)
    dot = jnp.sum(d_out.astype(f32) * out.astype(f32), axis=-1)
    d_sink = -jnp.sum((1 - keys_share) * dot, axis=(0, 1))
    delta = keys_share * dot - jnp.where(lse > -jnp.inf, d_lse, 0.0)
    lse = jnp.where(lse > -jnp.inf, lse, 0.0)
    stats = jnp.stack([lse * LOG2E, keys_share, keys_share * scale, delta * scale], axis=2)

    def by_group(x):
        x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, groups * HEADS - heads)])
        return x.reshape(*x.shape[:-1], groups, HEADS)

    stats = jnp.moveaxis(by_group(stats), 2, 3).reshape(-1, 4, HEADS)

    def heads_in(x):
        x = jnp.pad(x.astype(bf16), [(0, 0), (0, 0), (0, groups * HEADS - heads), (0, 0)])
        return x.reshape(-1, HEADS, dim)

    per_row = window_rows.shape[1] + main_rows.shape[1]
    rows = jnp.concatenate([window_rows, main_rows], axis=1).astype(bf16).reshape(-1, dim)
    slots = _slots(window_lo, window_hi, indices, window, window_rows.shape[1], main_rows.shape[1])
    offset = jnp.arange(batch, dtype=jnp.int32)[:, None, None] * per_row
    slots = jnp.where(slots >= 0, slots + offset, -1).reshape(batch * queries, -1)

    ctas = min(132, batch * queries * groups)
    dq, contributions = _contributions(
        heads_in(q), heads_in(d_out), stats, rows, slots,
        ctas=ctas, groups=groups, scale=scale, interpret=interpret,
    )
    d_rows = _segments_of(contributions, slots, rows.shape[0], interpret=interpret)
    if not interpret:
        d_rows = _in_order(d_rows)
    d_rows = d_rows.reshape(batch, per_row, dim)
    dq = dq.reshape(batch, queries, groups * HEADS, dim)[:, :, :heads]
    d_window, d_main = jnp.split(d_rows, [window_rows.shape[1]], axis=1)
    return dq, d_window.astype(window_rows.dtype), d_main.astype(main_rows.dtype), d_sink


def _slots(window_lo, window_hi, indices, window, window_size, main_size):
    """Rows of window and main rows joined, i32 [B, T, L], -1 for none, each part in whole tiles."""

    def whole_tiles(x):
        missing = -x.shape[-1] % KEYS
        return jnp.pad(x, [(0, 0), (0, 0), (0, missing)], constant_values=-1)

    near = window_lo[..., None] + jnp.arange(window, dtype=jnp.int32)
    near = jnp.where((near < window_hi[..., None]) & (near >= 0) & (near < window_size), near, -1)
    far = jnp.where((indices >= 0) & (indices < main_size), indices + window_size, -1)
    return jnp.concatenate([whole_tiles(near), whole_tiles(far)], axis=-1)
