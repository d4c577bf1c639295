"""Index scores of every visible entry on Hopper.

One CTA takes the 256 columns (queries x heads) that a wgmma can have and streams keys past them:
keys are the rows of the product, so the sum over heads runs along a row, inside of a lane's own
registers but for its last two steps. Two warpgroups take alternate tiles of 64 keys, one in its
epilogue (ReLU, weights, sum over heads) while the other has the tensor cores.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.indexer import mosaic_gpu_lanes as lanes
from pallas_kernels.indexer.mosaic_gpu_lanes import BLOCK, TILE_KEYS
from pallas_kernels.tuning import Table

COLUMNS = 256
CONSUMERS = 2


@dataclasses.dataclass(frozen=True)
class TuningConfig:
    """How the dense kernel is cut.

    Attributes:
        stages: tiles of 64 keys that are in shared memory at a time.
        take_turns: let a warpgroup begin its product only when the other's is done. Left alone, the
            tensor cores work on both at once, both end together, and nothing is left to run beside
            the epilogues.
        early: columns, 0 or 64 or 128, whose product may still run when the turn is passed on.
    """

    stages: int = 6
    take_turns: bool = True
    early: int = 0


TABLE = Table(pathlib.Path(__file__).parent / "tuned.json", TuningConfig)


def shape_class(dtype: jax.typing.DTypeLike, full: bool) -> str:
    """What calls share a configuration: keys of the same dtype, scores stored or maxima alone."""
    return f"dense {'scores' if full else 'maxima'}, {jnp.dtype(dtype).name}"


def queries_per_group(heads: int) -> int:
    """Queries that one CTA scores together."""
    return COLUMNS // heads


def dense_scores(
    q: jax.Array,
    w: jax.Array,
    k: jax.Array,
    lo: jax.Array,
    hi: jax.Array,
    *,
    scales: jax.Array | None = None,
    full: bool = True,
    maxima: bool = False,
    fill: bool = True,
    config: TuningConfig | None = None,
    interpret: object = None,
) -> tuple[jax.Array | None, jax.Array | None]:
    """Scores, block maxima or both.

    Args:
        q: `[B, T, Hi, Di]`, bfloat16 or float8_e4m3fn; Hi one of 8, 16, 32, Di 64 or 128 (128 in
            float8).
        w: f32 `[B, T, Hi]`; scales of the queries are part of it.
        k: `[B, G, Di]` like q.
        lo, hi: i32 `[B, T]`.
        scales: f32 `[B, G]`, positive factors of the keys, or None for 1.
        full: return the scores.
        maxima: return the maxima.
        fill: write -inf beyond the last tile that any query near a query sees; without it anything
            may stand in results from `hi` on.
        config: how the work is cut; looked up in the table when None.
        interpret: of `plgpu.kernel`.

    Returns:
        scores: f32 `[B, T, G]`, -inf outside `lo <= j < hi`, or None.
        maxima: f32 `[B, T, ceil(G / 8)]` of blocks of 8 entries, counted from entry 0, or None.
    """
    config = config or TABLE.lookup(shape_class(k.dtype, full), TuningConfig())
    wanted = {"full": full, "maxima": maxima, "fill": fill}
    return _scores(q, w, k, lo, hi, scales, **wanted, config=config, interpret=interpret)


# Jitted, so that the layers of a model trace and compile one kernel.
@functools.partial(jax.jit, static_argnames=("full", "maxima", "fill", "config", "interpret"))
def _scores(q, w, k, lo, hi, scales, *, full, maxima, fill, config, interpret):
    batch, queries, heads, dim = q.shape
    entries = k.shape[1]
    group = queries_per_group(heads)
    groups = -(-queries // group)
    tiles = -(-entries // TILE_KEYS)

    def pad(x, axis, size):
        missing = size - x.shape[axis]
        if not missing:
            return x
        return jnp.pad(x, [(0, missing if i == axis else 0) for i in range(x.ndim)])

    q = pad(q, 1, groups * group).reshape(batch, groups * COLUMNS, dim)
    w = pad(w.astype(jnp.float32), 1, groups * group).reshape(batch, groups * COLUMNS)
    k = pad(k, 1, tiles * TILE_KEYS)
    # Queries that were added see nothing.
    lo = pad(jnp.where(lo < hi, jnp.maximum(lo, 0), entries).astype(jnp.int32), 1, groups * group)
    hi = pad(jnp.minimum(hi, entries).astype(jnp.int32), 1, groups * group)
    per_group = (batch, groups, group)
    seen = (lo < hi).reshape(per_group)
    first = jnp.min(jnp.where(seen, lo.reshape(per_group), entries), axis=-1) // TILE_KEYS
    last = -(-jnp.max(jnp.where(seen, hi.reshape(per_group), 0), axis=-1) // TILE_KEYS)
    last = jnp.maximum(last, first)
    if scales is not None:
        scales = pad(scales.astype(jnp.float32), 1, tiles * TILE_KEYS)

    rows = (batch, groups * group)
    out_type = []
    if full:
        out_type.append(jax.ShapeDtypeStruct((*rows, tiles * TILE_KEYS), jnp.float32))
    if maxima:
        out_type.append(jax.ShapeDtypeStruct((*rows, tiles * TILE_KEYS // BLOCK), jnp.float32))

    row_bytes = dim * q.dtype.itemsize
    swizzle = min(row_bytes, 128)
    transforms = (
        plgpu.TilingTransform((8, swizzle // q.dtype.itemsize)),
        plgpu.SwizzleTransform(swizzle),
    )
    stages = config.stages
    body = functools.partial(
        _kernel,
        heads=heads,
        tiles=tiles,
        scaled=scales is not None,
        full=full,
        maxima=maxima,
        fill=fill,
        config=config,
        interpret=interpret is not None,
    )
    kernel = plgpu.kernel(
        body,
        out_type=out_type,
        # The last axis alone may have more than 65,535 blocks.
        grid=(batch, groups),
        grid_names=("batch", "group"),
        num_threads=CONSUMERS + 1,
        thread_name="wg",
        scratch_types=dict(
            q_smem=plgpu.SMEM((COLUMNS, dim), q.dtype, transforms=transforms),
            k_smem=plgpu.SMEM((stages, TILE_KEYS, dim), q.dtype, transforms=transforms),
            q_barrier=plgpu.Barrier(),
            full_barriers=plgpu.Barrier(num_barriers=stages),
            free_barriers=plgpu.Barrier(num_barriers=stages),
            turns=plgpu.Barrier(num_barriers=CONSUMERS),
        ),
        interpret=interpret,
    )
    arguments = [first, last, lo, hi, q, w, k]
    if scales is not None:
        arguments.append(scales)
    results = list(kernel(*arguments))
    scores = results.pop(0)[:, :queries, :entries] if full else None
    best = results.pop(0)[:, :queries, : -(-entries // BLOCK)] if maxima else None
    return scores, best


def _kernel(
    first_ref,
    last_ref,
    lo_ref,
    hi_ref,
    q_ref,
    w_ref,
    k_ref,
    *refs,
    q_smem,
    k_smem,
    q_barrier,
    full_barriers,
    free_barriers,
    turns,
    heads,
    tiles,
    scaled,
    full,
    maxima,
    fill,
    config,
    interpret,
):
    refs = list(refs)
    scales_ref = refs.pop(0) if scaled else None
    scores_ref = refs.pop(0) if full else None
    maxima_ref = refs.pop(0) if maxima else None
    warpgroup = lax.axis_index("wg")
    b = lax.axis_index("batch")
    # Causal groups that see most come last in order; they are started first.
    group = lax.axis_size("group") - 1 - lax.axis_index("group")
    queries = queries_per_group(heads)
    shape = (TILE_KEYS, queries)
    stages = config.stages
    first, last = first_ref[b, group], last_ref[b, group]
    count = last - first

    def store(scores, tile):
        at = (b, (group * queries, queries))
        if full:
            lanes.store_transposed(
                scores, lanes.tile(scores_ref, *at, (tile * TILE_KEYS, TILE_KEYS)), interpret
            )
        if maxima:
            blocks = TILE_KEYS // BLOCK
            lanes.store_block_maxima(
                scores, lanes.tile(maxima_ref, *at, (tile * blocks, blocks)), interpret
            )

    @pl.when(warpgroup == CONSUMERS)
    def _():
        plgpu.set_max_registers(40, action="decrease")
        columns = pl.ds(group * COLUMNS, COLUMNS)
        plgpu.copy_gmem_to_smem(q_ref.at[b, columns], q_smem, q_barrier)

        @pl.loop(0, count)
        def _(step):
            slot = lax.rem(step, stages)

            @pl.when(step >= stages)
            def _():
                plgpu.barrier_wait(free_barriers.at[slot])

            keys = pl.ds((first + step) * TILE_KEYS, TILE_KEYS)
            plgpu.copy_gmem_to_smem(k_ref.at[b, keys], k_smem.at[slot], full_barriers.at[slot])

    @pl.when(warpgroup < CONSUMERS)
    def _():
        plgpu.set_max_registers(232, action="increase")
        parts = [COLUMNS - config.early, config.early] if config.early else [COLUMNS]
        begins = [0, COLUMNS - config.early]
        w = [
            lanes.column_vector(lanes.tile(w_ref, b, (group * COLUMNS + begin, part)), interpret)
            for begin, part in zip(begins, parts, strict=False)
        ]
        lo = lanes.column_vector(lanes.tile(lo_ref, b, (group * queries, queries)), interpret)
        hi = lanes.column_vector(lanes.tile(hi_ref, b, (group * queries, queries)), interpret)
        rows = lanes.row_numbers(shape, interpret)

        def visible(tile):
            j = rows + tile * TILE_KEYS
            return (j >= lanes.along_columns(lo, shape)) & (j < lanes.along_columns(hi, shape))

        # What no query of the group sees.
        @pl.loop(warpgroup, tiles - count if fill else first, step=CONSUMERS)
        def _(step):
            tile = jnp.where(step < first, step, step + count)
            hidden = jnp.full(shape, -jnp.inf, jnp.float32)
            store(hidden if interpret else plgpu.layout_cast(hidden, plgpu.Layout.WGMMA), tile)

        plgpu.barrier_wait(q_barrier)

        def await_keys(step):
            @pl.when(step < count)
            def _():
                plgpu.barrier_wait(full_barriers.at[lax.rem(step, stages)])

        await_keys(warpgroup)

        @pl.loop(0, lax.div(count + 1 - warpgroup, 2))
        def _(pair):
            step = 2 * pair + warpgroup
            slot = lax.rem(step, stages)
            tile = first + step
            if scaled:
                keys = (tile * TILE_KEYS, TILE_KEYS)
                scales = lanes.row_vector(lanes.tile(scales_ref, b, keys), interpret)
            if config.take_turns:

                @pl.when(step > 0)
                def _():
                    plgpu.barrier_wait(turns.at[warpgroup])

            def products(*accumulators):
                for begin, part, accumulator in zip(begins, parts, accumulators, strict=False):
                    columns = q_smem.at[pl.ds(begin, part)]
                    plgpu.wgmma(accumulator, k_smem.at[slot], columns.T)
                sums = []
                for i, accumulator in enumerate(accumulators):
                    pending = len(parts) - 1 - i
                    dots = plgpu.wgmma_accumulator_load(accumulator, wait_n=pending)
                    if i == 0:
                        if config.take_turns:

                            @pl.when(step + 1 < count)
                            def _():
                                plgpu.barrier_arrive(turns.at[1 - warpgroup])

                        # Done here, the branch that it takes to wait keeps the compiler from
                        # putting the epilogue before the arrival.
                        await_keys(step + CONSUMERS)
                    if pending == 0:

                        @pl.when(step + stages < count)
                        def _():
                            plgpu.barrier_arrive(free_barriers.at[slot])

                    sums.append(lanes.head_sums(dots, w[i], heads, interpret))
                return lanes.scores_of(lanes.join(sums, interpret), interpret)

            accumulators = [plgpu.ACC((TILE_KEYS, part), jnp.float32) for part in parts]
            scores = pl.run_scoped(products, *accumulators)
            if scaled:
                scores = scores * lanes.along_rows(scales, shape)
            store(jnp.where(visible(tile), scores, -jnp.inf), tile)
