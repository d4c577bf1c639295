"""Backward of `sparse_attention` on TPUs; its formulas are in `gradients`.

One kernel walks over blocks of queries as the forward does, with keys along sublanes: S^T = K Q^T.
What a query and a head know (lse and the like) is then a row of lanes, and the gradients of rows
are plain products. It gives dq, the gradients of each block's run of window rows, and what each
query adds to each row that it selected (bfloat16 where the queries are).

A second kernel adds those up, without an addition whose order could change: entries are sorted by
row once, and a grid step owns 128 rows. It fetches their entries 128 at a time and multiplies them
with the matrix that says which row each belongs to; products with 1 and 0 are exact, sums float32.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import tpu
from pallas_kernels.sparse_attention import gradients
from pallas_kernels.sparse_attention import mosaic_tpu_rows as rows
from pallas_kernels.sparse_attention.mosaic_tpu_rows import Call, Plan

# Contributions that are held at a time.
CONTRIBUTION_BYTES = 2**30
# Rows that a grid step of the sum owns, and entries that it adds at a time.
OWNED = 128
TOGETHER = 128
_LSE, _SHARE, _SCALED_SHARE, _SCALED_DELTA = range(4)


def _weights(plan, stats, keys, q, d_out, seen):
    """f P' and scale dS `[keys, (query,) heads]` in the dtype of products.

    Args:
        plan: of the call.
        stats: f32 `[4, M]`.
        keys: `[keys, D]`.
        q: `[M, D]`.
        d_out: `[M, D]`.
        seen: whether they see a key, broadcast to `[keys, M]`.
    """
    logits = rows.dot(keys, q, (1, 1)) * plan.scale
    weights = jnp.where(seen, jnp.exp(logits - stats[_LSE : _LSE + 1]), 0.0)
    share, delta = stats[_SCALED_SHARE : _SCALED_SHARE + 1], stats[_SCALED_DELTA:]
    slopes = weights * (rows.dot(keys, d_out, (1, 1)) * share - delta)
    weights = weights * stats[_SHARE : _SHARE + 1]
    return weights.astype(plan.dtype), slopes.astype(plan.dtype)


def _walk_body(plan: Plan, fetch: rows.Fetch, inputs, outputs, memory):
    q_ref, do_ref, stats_ref, run_stats_ref, seen_ref = inputs
    dq_ref, d_run_ref, added_ref = (*outputs, None, None)[:3]
    dq_sum, *out_memory = memory
    merged = plan.block * plan.heads, plan.dim
    if plan.length:
        run = fetch.window()[0]
        q, d_out = q_ref[...].reshape(merged), do_ref[...].reshape(merged)
        place = lax.broadcasted_iota(jnp.int32, (plan.length, merged[0]), 0)
        seen = jnp.logical_and(place >= seen_ref[0, 0:1], place < seen_ref[0, 1:2])
        weights, slopes = _weights(plan, run_stats_ref[0], run, q, d_out, seen)
        d_run_ref[0] = rows.dot(weights, d_out, (1, 0)) + rows.dot(slopes, q, (1, 0))
        dq_sum[...] = rows.dot(slopes, run, (0, 0)).reshape(dq_sum.shape)
    else:
        dq_sum[...] = jnp.zeros(dq_sum.shape, jnp.float32)
        added_ref = d_run_ref
    writer = _Writer(plan, added_ref, *out_memory) if plan.tiles else None

    def one_query(j, each_tile):
        q, d_out, stats = q_ref[j], do_ref[j], stats_ref[j]

        def one_tile(tile, keys, valid):
            valid = rows.as_column(valid.astype(jnp.float32)) > 0.0
            weights, slopes = _weights(plan, stats, keys, q, d_out, valid)
            dq_sum[j] += rows.dot(slopes, keys, (0, 0))
            added = rows.dot(weights, d_out, (1, 0)) + rows.dot(slopes, q, (1, 0))
            writer.write(j * plan.tiles + tile, added)

        each_tile(one_tile)
        dq_ref[j] = dq_sum[j].astype(plan.dtype)

    fetch.each_query(one_query)
    if writer is not None:
        writer.finish()


class _Writer:
    """Copies tiles of contributions out, two in flight."""

    def __init__(self, plan: Plan, out_ref, tiles, copied, count):
        self._plan, self._out, self._tiles, self._copied, self._count = (
            plan,
            out_ref,
            tiles,
            copied,
            count,
        )
        self._step = pl.program_id(1)
        block = pl.program_id(0) * plan.grid[1] + self._step
        self._first = block * (plan.block * plan.tiles)

        @pl.when(self._step == 0)
        def _():
            count[0] = 0

    def write(self, tile, added) -> None:
        """Sends `[tile, D]` to the block's tile."""
        slot = lax.rem(self._count[0], 2)
        pl.when(self._count[0] >= 2)(lambda: self._wait(slot))
        self._tiles[slot] = rows.as_table(added, self._tiles.dtype)
        start = pl.multiple_of((self._first + tile) * self._plan.tile, tpu.SUBLANES)
        pltpu.make_async_copy(
            self._tiles.at[slot],
            self._out.at[pl.ds(start, self._plan.tile)],
            self._copied.at[slot],
        ).start()
        self._count[0] += 1

    def finish(self) -> None:
        """Waits for all, at the end of the last step."""

        @pl.when(self._step == self._plan.grid[1] - 1)
        def _():
            for back in (1, 2):
                last = self._count[0] - back
                pl.when(last >= 0)(lambda last=last: self._wait(lax.rem(last, 2)))

    def _wait(self, slot):
        here = self._tiles.at[slot]
        pltpu.make_async_copy(here, here, self._copied.at[slot]).wait()


def _walk(plan: Plan, call: Call, q, d_out, stats):
    """dq `[N, H, D]`, f32 `[blocks, length, D]`, and contributions as a table `[N tiles tile, W]`.

    The last two are None where the plan has no window or no tiles.
    """
    count = plan.blocks * plan.block
    row = plan.block * plan.heads
    run_stats = stats.reshape(plan.blocks, plan.block, 4, plan.heads)
    run_stats = run_stats.swapaxes(1, 2).reshape(plan.blocks, 4, row)
    seen = jnp.repeat(call.visible.reshape(plan.blocks, plan.block, 2), plan.heads, axis=1)
    per_query = rows.block_of(plan, plan.heads, plan.dim)
    outputs = [(jax.ShapeDtypeStruct(q.shape, plan.dtype), per_query)]
    memory = [pltpu.VMEM((plan.block, plan.heads, plan.dim), jnp.float32)]
    written = 0
    if plan.length:
        shape = jax.ShapeDtypeStruct((plan.blocks, plan.length, plan.dim), jnp.float32)
        outputs.append((shape, rows.block_of(plan, *shape.shape[1:], each=1)))
    if plan.tiles:
        width, dtype = call.main[0].shape[-1], call.main[0].dtype
        shape = jax.ShapeDtypeStruct((count * plan.tiles * plan.tile, width), dtype)
        outputs.append((shape, pl.BlockSpec(memory_space=pl.ANY)))
        written = shape.size * dtype.itemsize
        memory += [
            pltpu.VMEM((2, plan.tile, width), dtype),
            pltpu.SemaphoreType.DMA((2,)),
            pltpu.SMEM((1,), jnp.int32),
        ]
    results = rows.run(
        plan,
        "sparse_attention_backward",
        _walk_body,
        call,
        [
            (q, per_query),
            (d_out, per_query),
            (stats, rows.block_of(plan, 4, plan.heads)),
            (run_stats, rows.block_of(plan, 4, row, each=1)),
            (seen.swapaxes(1, 2), rows.block_of(plan, 2, row, each=1)),
        ],
        outputs,
        memory,
        products=5,
        written=written,
    )
    dq, *rest = results
    d_run = rest.pop(0) if plan.length else None
    return dq, d_run, rest.pop(0) if plan.tiles else None


def _sum_body(starts_ref, places_ref, keys_ref, added_ref, out_ref, *memory):
    places, keys, listed, entries, arrived = memory
    tile = pl.program_id(0)
    begin, end = starts_ref[tile], starts_ref[tile + 1]
    first = begin // TOGETHER
    count = jnp.where(end > begin, pl.cdiv(end, TOGETHER) - first, 0)
    out_ref[...] = jnp.zeros(out_ref.shape, jnp.float32)

    def lists(chunk):
        slot = lax.rem(chunk, 3)
        return [
            pltpu.make_async_copy(source.at[first + chunk], target.at[slot], listed.at[slot, i])
            for i, (source, target) in enumerate(((places_ref, places), (keys_ref, keys)))
        ]

    def start_lists(chunk):
        for copy in lists(chunk):
            copy.start()

    def start_entries(chunk):
        for copy in lists(chunk):
            copy.wait()
        slot = lax.rem(chunk, 2)

        @pl.loop(0, TOGETHER)
        def _entry(i):
            place = places[lax.rem(chunk, 3), 0, i]
            pltpu.make_async_copy(
                added_ref.at[pl.ds(place, 1)], entries.at[slot, pl.ds(i, 1)], arrived.at[slot]
            ).start()

    for chunk in range(2):
        pl.when(chunk < count)(lambda chunk=chunk: start_lists(jnp.int32(chunk)))
    pl.when(count > 0)(lambda: start_entries(jnp.int32(0)))

    @pl.loop(0, count)
    def _chunk(chunk):
        pl.when(chunk + 2 < count)(lambda: start_lists(chunk + 2))
        pl.when(chunk + 1 < count)(lambda: start_entries(chunk + 1))
        here = entries.at[lax.rem(chunk, 2)]
        pltpu.make_async_copy(here, here, arrived.at[lax.rem(chunk, 2)]).wait()
        dtype = jnp.float32 if entries.dtype == jnp.float32 else jnp.bfloat16
        own = lax.broadcasted_iota(jnp.int32, (OWNED, TOGETHER), 0) + tile * OWNED
        chosen = (own == keys[lax.rem(chunk, 3)]).astype(jnp.float32).astype(dtype)
        out_ref[...] += rows.dot(chosen, rows.values_of(here[...], dtype), (1, 0))


def sum_by_row(added, keys, size: int, dim: int, *, interpret=None) -> jax.Array:
    """Adds up contributions by the row that they are to, in an order that the keys alone decide.

    Args:
        added: table `[M, W]` of contributions; what has no key is not looked at.
        keys: i32 `[M]`, rows; anything outside `[0, size)` is none.
        size: R, number of rows.
        dim: D.
        interpret: see `backward`.

    Returns:
        f32 `[R, D]`.
    """
    keys = jnp.where((keys >= 0) & (keys < size), keys, size)
    keys, places = lax.sort((keys, jnp.arange(keys.size, dtype=jnp.int32)), num_keys=1)
    # Products with zero are still taken: what has no key stands for an entry that has been written.
    places = jnp.where(keys < size, places, places[0])
    tiles = -(-size // OWNED)
    bounds = jnp.minimum(jnp.arange(tiles + 1, dtype=jnp.int32) * OWNED, size)
    starts = jnp.searchsorted(keys, bounds).astype(jnp.int32)
    short = (0, -keys.size % TOGETHER)
    keys = jnp.pad(keys, short, constant_values=size).reshape(-1, 1, TOGETHER)
    places = jnp.pad(places, short).reshape(-1, 1, TOGETHER)
    count, width = added.shape
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    passes = 6 if added.dtype == jnp.float32 else 1
    account = tpu.Account(
        vmem_bytes=2 * OWNED * dim * 4 + 2 * TOGETHER * width * 4 + 3 * 8 * TOGETHER * 4,
        hbm_bytes=count * (width * 4 + 8) + tiles * OWNED * dim * 4,
        flops=2 * OWNED * (count + tiles * TOGETHER) * dim * passes,
        copies=count,
    )
    result = pl.pallas_call(
        _sum_body,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(tiles,),
            in_specs=[anywhere] * 3,
            out_specs=pl.BlockSpec((OWNED, dim), lambda tile, starts: (tile, 0)),
            scratch_shapes=[
                pltpu.SMEM((3, 1, TOGETHER), jnp.int32),
                pltpu.VMEM((3, 1, TOGETHER), jnp.int32),
                pltpu.SemaphoreType.DMA((3, 2)),
                pltpu.VMEM((2, TOGETHER, width), added.dtype),
                pltpu.SemaphoreType.DMA((2,)),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct((tiles * OWNED, dim), jnp.float32),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
        cost_estimate=tpu.stated("sparse_attention_sum_by_row", account),
        interpret=interpret or False,
        name="sparse_attention_sum_by_row",
    )(starts, places, keys, added)
    return result[:size]


def _by_chunks(plan: Plan, call: Call, q, d_out, stats, size: int):
    """dq, f32 `[blocks, length, D]`, f32 `[R, D]` of R main rows; one or both of these None."""

    def one(plan, call, q, d_out, stats):
        dq, d_run, added = _walk(plan, call, q, d_out, stats)
        d_main = None
        if added is not None:
            keys = call.indices.reshape(-1)
            d_main = sum_by_row(added, keys, size, plan.dim, interpret=plan.interpret)
        return dq, d_run, d_main

    per_block = 0
    if plan.tiles:
        per_block = plan.block * plan.tiles * plan.tile * rows.row_bytes(call.main[0])
    chunks = min(max(1, -(-plan.blocks * per_block // CONTRIBUTION_BYTES)), plan.blocks)
    while plan.blocks % chunks:
        chunks += 1
    if chunks == 1:
        return one(plan, call, q, d_out, stats)
    part = dataclasses.replace(plan, batch=1, queries=plan.batch * plan.queries // chunks)
    cut = {"ahead": call.ahead, "start": call.start, "visible": call.visible}
    cut |= {"indices": call.indices, "q": q, "d_out": d_out, "stats": stats}
    cut = {name: x.reshape(chunks, -1, *x.shape[1:]) for name, x in cut.items()}

    def step(total, x):
        own = call._replace(**{name: x.pop(name) for name in list(x) if name in Call._fields})
        dq, d_run, d_main = one(part, own, **x)
        return total + d_main, (dq, d_run)

    total, parts = lax.scan(step, jnp.zeros((size, plan.dim), jnp.float32), cut)
    dq, d_run = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), parts)
    return dq, d_run, total


def _window_rows(plan: Plan, call: Call, d_run, size: int):
    """f32 `[B, S, D]`: runs added to the rows that they are of, in pieces of 8."""
    pieces = plan.length // tpu.SUBLANES
    piece = (tpu.SUBLANES, plan.dim)
    places = call.start.reshape(-1, 1) // tpu.SUBLANES + jnp.arange(pieces, dtype=jnp.int32)
    total = jnp.zeros((call.window.shape[0] // tpu.SUBLANES, *piece), jnp.float32)
    total = total.at[places.reshape(-1)].add(d_run.reshape(-1, *piece))
    return total.reshape(plan.batch, -1, plan.dim)[:, :size]


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

    Equal arguments give equal bits. Memory: up to `CONTRIBUTION_BYTES`, and a run of window rows in
    float32 for 8 queries, beside the gradients.

    Args:
        q: `[B, T, H, D]`, bfloat16 or float32.
        window_rows: `[B, S, D]`, as the arguments that follow as in `sparse_attention`.
        window_lo: likewise.
        window_hi: likewise.
        main_rows: likewise, None with `indices`.
        indices: likewise.
        sink: likewise.
        out: `[B, T, H, D]`, its result.
        lse: f32 `[B, T, H]`, its result.
        d_out: gradient of `out`.
        d_lse: gradient of `lse`; where `lse` is -inf it does not count.
        window: bound of `window_hi - window_lo`.
        scale: of the logits.
        interpret: parameters of Pallas's TPU interpret mode, in which it runs on any device.

    Returns:
        Gradients of q, window_rows, main_rows (None where that is None) and sink, in their dtypes.

    Raises:
        NotImplementedError: more heads or keys than vector memory holds.
    """
    plan = rows.plan_of(q, window, main_rows, indices, scale, interpret)
    call = rows.call_of(plan, window_rows, window_lo, window_hi, main_rows, indices)
    terms, d_sink = gradients.terms(sink, out, lse, d_out, d_lse)
    stats = terms.lse, terms.share, terms.share * scale, terms.delta * scale
    stats = jnp.stack([rows.padded(plan, x) for x in stats], axis=1)
    arguments = rows.padded(plan, q), rows.padded(plan, d_out.astype(q.dtype)), stats
    size = call.main[0].shape[0] if plan.tiles else 0
    dq, d_run, d_main = _by_chunks(plan, call, *arguments, size)
    d_window = jnp.zeros_like(window_rows)
    if d_run is not None:
        d_window = _window_rows(plan, call, d_run, window_rows.shape[1])
        d_window = d_window[..., : q.shape[-1]].astype(window_rows.dtype)
    if d_main is not None:
        d_main = d_main.reshape(*main_rows.shape[:2], -1)[..., : q.shape[-1]]
        d_main = d_main.astype(main_rows.dtype)
    elif main_rows is not None:
        d_main = jnp.zeros_like(main_rows)
    return rows.unpadded(plan, dq, q.shape), d_window, d_main, d_sink
