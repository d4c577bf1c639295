"""Backward of `sparse_attention` on Hopper GPUs, in Pallas Mosaic GPU.

The formulas are those of `gradients`.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.sparse_attention import mosaic_gpu_lanes as lanes
from pallas_kernels.sparse_attention.gradients import terms
from pallas_kernels.sparse_attention.tiles import (
    MAX_MEMBERS,
    MEMBER_BITS,
    TILE,
    Tiles,
    rows_of,
    tiles_of,
)

HEADS = 64
DIM = lanes.DIM
# Streaming multiprocessors of an H100 or H200: the kernel takes all shared memory of each.
CTAS = 132
# Contributions that are held at a time, and the most that one warpgroup adds up alone.
CONTRIBUTION_BYTES = 4 * 2**30
PIECE_ROWS = 128
LOG2E = math.log2(math.e)
_CONSUMERS = 2
_HALF = DIM // _CONSUMERS
_PIECE = 128


def _contributions(q, d_out, stats, rows, tiles, first, *, members, splits, scale, interpret):
    """dq, and what every group of queries adds to each row that it visits.

    Args:
        q: bf16 `[N, 64, 512]`, 64 (query, head) rows a group.
        d_out: bf16 `[N, 64, 512]`.
        stats: f32 `[N, 4, 64]`: lse log2(e), f, f scale, delta scale.
        rows: bf16 `[R, 512]`.
        tiles: C lists; `splits` consecutive groups share one.
        first: i32 `[1]`, the group that they start with; lists beyond the last group are idle.

    Returns:
        dq bf16 `[C splits, 64, 512]`, contributions bf16 `[splits, C, L, 512]`.
    """
    lists, slots = tiles.words.shape
    groups = lists * splits
    ctas = min(CTAS, groups)
    bf16, f32 = jnp.bfloat16, jnp.float32
    layout, by_row = plgpu.Layout.WGMMA, plgpu.Layout.WGMMA.reduce(1)
    exp_scale = scale * LOG2E

    def body(
        q_ref,
        do_ref,
        stats_ref,
        rows_ref,
        words_ref,
        counts_ref,
        first_ref,
        dq_ref,
        out_ref,
        tiles_smem,
        stats_smem,
        words_smem,
        qdo_full,
        qdo_free,
        k_full,
        k_free,
        p_full,
        e_full,
        ds_full,
        done,
    ):
        thread = lax.axis_index("wg")
        cta = lax.axis_index("cta")
        first = first_ref[0]
        count = pl.cdiv(jnp.minimum(groups, q.shape[0] - first) - cta, ctas)

        def laid(x, layout):
            return x if interpret else plgpu.layout_cast(x, layout)

        def buffers():
            zero = 0 if interpret else lanes.opaque_zero()
            whole = [ref.at[zero] for ref in tiles_smem[:3]]
            return (*whole, *tiles_smem[3:])

        def store(value, target, in_order):
            if interpret:
                target[...] = value.astype(bf16)
            else:
                lanes.store_rows(value, target, in_order=in_order)

        def row_stat(i):
            return laid(stats_smem[i], by_row)

        def spread(x):
            return lax.broadcast_in_dim(x, (HEADS, TILE), [0])

        def seen():
            if interpret:
                shifts = jnp.arange(HEADS, dtype=jnp.int32) // (HEADS // members)
                return ((words_smem[...][None] >> shifts[:, None]) & 1).astype(f32)
            return lanes.seen(words_smem, members)

        def product(a_smem, k_smem):
            def multiply(acc):
                for half in range(_CONSUMERS):
                    plgpu.barrier_wait(k_full.at[half])
                    columns = pl.ds(half * _HALF, _HALF)
                    b_smem = k_smem.at[half].transpose((1, 0))
                    plgpu.wgmma(acc, a_smem.at[:, columns], b_smem)
                return acc[...]

            return pl.run_scoped(multiply, plgpu.ACC((HEADS, TILE), f32))

        def gradients(me, n, tile, turn, dq):
            q_smem, do_smem, k_smem, p_smem, ds_smem = buffers()
            p_smem, ds_smem = p_smem.at[turn], ds_smem.at[turn]

            def add_rows(piece, between):
                columns = pl.ds(me * _HALF + piece * _PIECE, _PIECE)

                def multiply(acc):
                    def add_dq():
                        plgpu.wgmma(dq, ds_smem, k_smem.at[me])

                    if between and me == 0:
                        add_dq()
                    plgpu.wgmma(acc, p_smem.transpose((1, 0)), do_smem.at[:, columns])
                    if between and me == 1:
                        plgpu.barrier_wait(ds_full)
                        add_dq()
                    plgpu.wgmma(acc, ds_smem.transpose((1, 0)), q_smem.at[:, columns])
                    if between:
                        plgpu.wgmma_wait(2 - me)
                        plgpu.barrier_arrive(k_free.at[me])
                    return acc[...]

                added = pl.run_scoped(multiply, plgpu.ACC((TILE, _PIECE), f32))
                target = out_ref.at[
                    lax.rem(n, splits), n // splits, pl.ds(tile * TILE, TILE), columns
                ]
                store(added, target, in_order=False)

            add_rows(0, True)
            # A loop whose length the compiler does not know: unrolled, it would keep the zeros that
            # each product starts from in registers of their own, and spill.
            pieces = _HALF // _PIECE + (0 if interpret else lanes.opaque_zero())

            @pl.loop(1, pieces)
            def _piece(piece):
                add_rows(piece, False)

            plgpu.barrier_arrive(done.at[2 * me + turn])

        def consume(me, scores):
            plgpu.set_max_registers(232, action="increase")
            for barrier in (k_free.at[me], qdo_free, done.at[2 * me], done.at[2 * me + 1]):
                plgpu.barrier_arrive(barrier)

            def one_group(i, before):
                n = cta + i * ctas
                length = counts_ref[n // splits]
                plgpu.barrier_wait(qdo_full)

                def over_tiles(dq):
                    @pl.loop(0, length)
                    def _tile(tile):
                        turn = lax.rem(before + tile, 2)
                        scores(turn)
                        gradients(me, n, tile, turn, dq)

                    return dq[...]

                dq = pl.run_scoped(over_tiles, plgpu.ACC((HEADS, _HALF), f32))
                plgpu.barrier_arrive(qdo_free)
                store(dq, dq_ref.at[n, :, pl.ds(me * _HALF, _HALF)], in_order=True)
                return before + length

            lax.fori_loop(0, count, one_group, 0)
            for turn in range(2):
                plgpu.barrier_wait(done.at[2 * (1 - me) + turn])

        @pl.when(thread == 0)
        def _probabilities():
            def scores(turn):
                q_smem, _, k_smem, p_smem, ds_smem = buffers()
                s = product(q_smem, k_smem)
                # An absent key is a row of zeros: its exponent may be anything, but for infinity.
                p = jnp.exp2(jnp.minimum(s * exp_scale - spread(row_stat(0)), 0.0))
                if members > 1:
                    p = p * seen()
                plgpu.barrier_wait(done.at[2 + turn])
                p_smem[turn] = (p * spread(row_stat(1))).astype(bf16)
                plgpu.commit_smem()
                plgpu.barrier_arrive(p_full)
                plgpu.barrier_wait(e_full)
                e = laid(ds_smem[turn], layout).astype(f32)
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
                plgpu.barrier_wait(p_full)

            consume(1, scores)

        @pl.when(thread == 2)
        def _fetch():
            plgpu.set_max_registers(40, action="decrease")
            q_smem, do_smem, k_smem = (ref.at[0] for ref in tiles_smem[:3])

            @pl.loop(0, count)
            def _group(i):
                n = cta + i * ctas
                mine = words_ref.at[n // splits]

                @pl.loop(0, counts_ref[n // splits])
                def _tile(tile):
                    if not interpret:
                        words = lanes.load_words(mine.at[pl.ds(tile * TILE, TILE)])
                    for half in range(_CONSUMERS):
                        plgpu.barrier_wait(k_free.at[half])
                        part = k_smem.at[half]
                        if interpret:
                            _gather_slowly(rows_ref, mine, tile * TILE, half, part, words_smem)
                            plgpu.commit_smem()
                        else:
                            lanes.start_gather(rows_ref, words, half, part, words_smem)
                    for half in range(_CONSUMERS):
                        if not interpret:
                            lanes.end_gather(_CONSUMERS - 1 - half)
                        plgpu.barrier_arrive(k_full.at[half])

                    @pl.when(tile == 0)
                    def _():
                        plgpu.barrier_wait(qdo_free)
                        plgpu.copy_gmem_to_smem(q_ref.at[first + n], q_smem, qdo_full)
                        plgpu.copy_gmem_to_smem(do_ref.at[first + n], do_smem, qdo_full)
                        plgpu.copy_gmem_to_smem(stats_ref.at[first + n], stats_smem, qdo_full)

            for half in range(_CONSUMERS):
                plgpu.barrier_wait(k_free.at[half])
            plgpu.barrier_wait(qdo_free)

    def tiled(*shape):
        return plgpu.SMEM(shape, bf16, transforms=lanes.TRANSFORMS)

    return plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((groups, HEADS, DIM), bf16),
            jax.ShapeDtypeStruct((splits, lists, slots, DIM), bf16),
        ),
        scratch_types=(
            [tiled(1, HEADS, DIM)] * 2
            + [tiled(1, _CONSUMERS, TILE, _HALF)]
            + [tiled(2, HEADS, TILE)] * 2,
            plgpu.SMEM((4, HEADS), f32),
            plgpu.SMEM((TILE,), jnp.int32),
            plgpu.Barrier(num_arrivals=3),
            plgpu.Barrier(num_arrivals=_CONSUMERS),
            plgpu.Barrier(num_barriers=_CONSUMERS),
            plgpu.Barrier(num_barriers=_CONSUMERS),
            plgpu.Barrier(),
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
    )(q, d_out, stats, rows, *tiles, first)


def _gather_slowly(rows_ref, words_ref, start, half, buffer, words_smem):
    """`lanes.start_gather` in terms that interpret mode knows."""

    @pl.loop(0, TILE)
    def _row(r):
        word = words_ref[start + r]
        row = rows_ref[lax.shift_right_logical(word, MEMBER_BITS), pl.ds(half * _HALF, _HALF)]
        there = (word & (2**MEMBER_BITS - 1)) != 0
        buffer[r] = jnp.where(there, row, jnp.zeros_like(row))
        words_smem[r] = word


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

    def laid(x, layout):
        return x if interpret else plgpu.layout_cast(x, layout)

    def body(values_ref, order_ref, starts_ref, out_ref):
        segment = lax.axis_index("segment")
        begin, end = starts_ref[segment], starts_ref[segment + 1]

        def add(step, total):
            first = begin + step * together
            at = [jnp.minimum(first + i, end - 1) for i in range(together)]
            rows = [order_ref[a] for a in at]
            loaded = [
                laid(values_ref[c, row], layout).astype(f32) for row in rows for c in range(copies)
            ]
            for i, value in enumerate(loaded):
                inside = first + i // copies < end
                total = total + value * jnp.where(inside, 1.0, 0.0)
            return total

        zeros = laid(jnp.zeros((DIM,), f32), layout)
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


def _inverse(words, rows: int, piece: int):
    """Positions of entries by the row that they name, cut into pieces.

    Args:
        words: i32 `[M]`, as in `Tiles`.
        rows: R, number of rows.
        piece: most entries of a piece.

    Returns:
        order i32 `[M]`, positions in the order of rows (those of no row last); starts of pieces in
        it i32 `[P + 1]`; starts of rows in pieces i32 `[R + 1]`.
    """
    keys = rows_of(words)
    keys = jnp.where(keys < 0, rows, keys).astype(jnp.uint32)
    positions = jnp.arange(words.size, dtype=jnp.int32)
    _, order = lax.sort((keys, positions), num_keys=1, is_stable=True)
    counts = jnp.zeros(rows + 1, jnp.int32).at[keys].add(1)[:rows]
    ends = jnp.cumsum(counts)
    pieces = -(-counts // piece)
    piece_ends = jnp.cumsum(pieces)
    total = rows + words.size // piece
    number = jnp.arange(total, dtype=jnp.int32)
    row = jnp.repeat(jnp.arange(rows, dtype=jnp.int32), pieces, total_repeat_length=total)
    within = number - (piece_ends - pieces)[row]
    begin = jnp.minimum((ends - counts)[row] + within * piece, ends[-1])
    begin = jnp.where(number < piece_ends[-1], begin, ends[-1])
    zero = jnp.zeros(1, jnp.int32)
    return order, jnp.append(begin, ends[-1:]), jnp.concatenate([zero, piece_ends])


def _sum_by_row(contributions, words, rows: int, *, interpret):
    """f32 `[R, 512]`: contributions `[C, N, L, 512]` added up in a fixed order."""
    order, piece_starts, row_starts = _inverse(words.reshape(-1), rows, PIECE_ROWS)
    copies = contributions.shape[0]
    partial = _segment_sum(
        contributions.reshape(copies, -1, DIM), order, piece_starts, interpret=interpret
    )
    every = jnp.arange(partial.shape[0], dtype=jnp.int32)
    return _segment_sum(partial[None], every, row_starts, interpret=interpret)


def _by_chunks(q, d_out, stats, rows, tiles, *, splits, interpret, **options):
    """dq bf16 `[N, 64, 512]` and f32 `[R, 512]`, with a bounded number of contributions at a time.

    Arguments are those of `_contributions`.
    """
    lists, slots = tiles.words.shape
    chunks = -(-lists * splits * slots * 2 * DIM // CONTRIBUTION_BYTES)
    chunk = -(-lists // chunks)

    def one(total, part):
        first, tiles = part
        dq, contributions = _contributions(
            q, d_out, stats, rows, tiles, first, splits=splits, interpret=interpret, **options
        )
        added = _sum_by_row(contributions, tiles.words, rows.shape[0], interpret=interpret)
        return added if total is None else total + added, dq

    firsts = jnp.arange(chunks, dtype=jnp.int32)[:, None] * (chunk * splits)
    if chunks == 1:
        d_rows, dq = one(None, (firsts[0], tiles))
        return dq, d_rows
    missing = chunks * chunk - lists
    words = jnp.pad(tiles.words, [(0, missing), (0, 0)]).reshape(chunks, chunk, slots)
    counts = jnp.pad(tiles.counts, (0, missing), constant_values=1).reshape(chunks, chunk)
    zeros = jnp.zeros(rows.shape, jnp.float32)
    d_rows, dq = lax.scan(one, zeros, (firsts, Tiles(words, counts)))
    return dq.reshape(-1, HEADS, DIM)[: lists * splits], d_rows


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
    """Gradients of `sparse_attention`.

    Rows are gathered per group of 64 (query, head) rows, and what a group adds to each of them is
    stored in bfloat16 and added up in float32 in an order that depends on the indices alone: equal
    arguments give equal bits. Memory: up to `CONTRIBUTION_BYTES` beside the gradients.

    Args:
        q: as in `sparse_attention`, like the arguments that follow.
        window_rows: likewise.
        window_lo: likewise.
        window_hi: likewise.
        main_rows: likewise, None among it.
        indices: likewise, but None only with `main_rows`.
        sink: likewise.
        out: `[B, T, H, D]`, its result.
        lse: f32 `[B, T, H]`, its result.
        d_out: gradient of `out`.
        d_lse: gradient of `lse`; where `lse` is -inf it does not count.
        window: as in `sparse_attention`.
        scale: of the logits, a number.
        interpret: run on the CPU by this interpreter, where the order of summation is another.

    Returns:
        Gradients of q, window_rows, main_rows (None where that is None) and sink, in their dtypes.

    Raises:
        NotImplementedError: see `check`.
    """
    check(q, window_rows, main_rows, indices)
    batch, queries, heads, dim = q.shape
    bf16 = jnp.bfloat16
    only_window = main_rows is None
    if only_window:
        main_rows = jnp.zeros((batch, 0, dim), bf16)
        indices = jnp.zeros((batch, queries, 0), jnp.int32)
    members, splits = _grouping(heads)
    padded_heads = HEADS * splits // members
    padded_queries = -(-queries // members) * members

    def padded(x):
        widths = [(0, 0), (0, padded_queries - queries), (0, padded_heads - heads)]
        return jnp.pad(x, widths + [(0, 0)] * (x.ndim - 3))

    (lse, keys_share, delta), d_sink = terms(sink, out, lse, d_out, d_lse)
    stats = [lse * LOG2E, keys_share, keys_share * scale, delta * scale]
    stats = jnp.stack([padded(x).reshape(-1, HEADS) for x in stats], axis=1)

    rows = jnp.concatenate([window_rows, main_rows], axis=1).astype(bf16)
    per_batch = rows.shape[1]
    rows = rows.reshape(-1, dim)
    tiles = tiles_of(
        window_lo,
        window_hi,
        indices,
        members=members,
        window=window,
        window_size=window_rows.shape[1],
        main_size=main_rows.shape[1],
    )
    dq, d_rows = _by_chunks(
        padded(q.astype(bf16)).reshape(-1, HEADS, dim),
        padded(d_out.astype(bf16)).reshape(-1, HEADS, dim),
        stats,
        rows,
        tiles,
        members=members,
        splits=splits,
        scale=scale,
        interpret=interpret,
    )
    if not interpret:
        d_rows = lanes.ordered(d_rows)
    d_window, d_main = jnp.split(
        d_rows.reshape(batch, per_batch, dim), [window_rows.shape[1]], axis=1
    )
    dq = dq.reshape(batch, padded_queries, padded_heads, dim)[:, :queries, :heads]
    return (
        dq.astype(q.dtype),
        d_window.astype(window_rows.dtype),
        None if only_window else d_main.astype(main_rows.dtype),
        d_sink,
    )


def check(q, window_rows, main_rows, indices) -> None:
    """Raises NotImplementedError, saying why, for arguments that `backward` does not take."""
    if q.dtype != jnp.bfloat16:
        raise NotImplementedError(f"the backward takes bfloat16 queries, not {q.dtype}")
    if q.shape[-1] != DIM:
        raise NotImplementedError(f"the backward takes head_dim {DIM}, not {q.shape[-1]}")
    for name, x in (("window_rows", window_rows), ("main_rows", main_rows)):
        if x is not None and not jnp.issubdtype(x.dtype, jnp.floating):
            raise NotImplementedError(f"{name} of dtype {x.dtype} have no gradient")
    if main_rows is not None and indices is None:
        raise NotImplementedError("the backward takes main rows by indices alone")


def _grouping(heads: int) -> tuple[int, int]:
    """Queries that share 64 rows, and groups of 64 heads that share a query; one of them is 1."""
    members = MAX_MEMBERS
    while members > 1 and heads * members > HEADS:
        members //= 2
    return members, -(-heads * members // HEADS)
