"""Index scores of listed entries on Hopper: a pool's blocks, a selection, or all of a packed cache.

A warpgroup takes one query and goes through its list, 64 entries at a time: while copies of the
next ones are on their way, the keys (rows) are multiplied with the query's heads (columns). Several
such groups share a multiprocessor and fill each other's waits.
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
from pallas_kernels.indexer import mosaic_gpu_rows as rows
from pallas_kernels.indexer.mosaic_gpu_lanes import BLOCK, TILE_KEYS
from pallas_kernels.tuning import Table


@dataclasses.dataclass(frozen=True)
class TuningConfig:
    """How the gathering kernel is cut.

    Attributes:
        stages: tiles of 64 keys that are in shared memory at a time, at least 2.
        tiles: tiles that one warpgroup goes through; None for all of a query.
    """

    stages: int = 3
    tiles: int | None = None


TABLE = Table(pathlib.Path(__file__).parent / "tuned.json", TuningConfig)
# By the size of runs: the fastest of those timed on an H200 (docs/results/kernels/indexer.md).
_DEFAULTS = {BLOCK: TuningConfig(stages=2), TILE_KEYS: TuningConfig(stages=4, tiles=64)}


def shape_class(size: int, dtype: jax.typing.DTypeLike) -> str:
    """What calls share a configuration: runs of the same size of keys of the same dtype."""
    return f"gathered runs of {size}, {jnp.dtype(dtype).name}"


def configuration(size: int, dtype: jax.typing.DTypeLike) -> TuningConfig:
    """The configuration of the table, or else the one for runs of this size."""
    return TABLE.lookup(shape_class(size, dtype), _DEFAULTS.get(size, TuningConfig()))


def gathered_scores(
    q: jax.Array,
    w: jax.Array,
    k: jax.Array,
    starts: jax.Array,
    lo: jax.Array,
    hi: jax.Array,
    *,
    size: int,
    absent: float,
    scales: jax.Array | None = None,
    config: TuningConfig | None = None,
    interpret: object = None,
) -> jax.Array:
    """Scores of runs of entries.

    Args:
        q: `[B, T, Hi, Di]`, bfloat16, or float8_e4m3fn; Hi a multiple of 8 up to 256, Di 128.
        w: f32 `[B, T, Hi]`; scales of the queries are part of it.
        k: `[B, G, Di]` like q, or packed keys, uint8 `[B, G, 68]`, with queries in bfloat16.
        starts: i32 `[B, T, R]`, each the first of `size` consecutive entries; negative for none.
            With packed keys and size > 1 they must be multiples of 4, and so must G.
            Only as many are worked on as make all tiles up to the last that is not.
        lo, hi: i32 `[B, T]`: entries outside `lo <= j < hi` are absent; hi at most G.
        size: 1, 8 or 64.
        absent: the score of absent entries.
        scales: f32 `[B, G]`, positive factors of the keys, or None for 1; not with packed keys.
        config: how the work is cut; looked up in the table when None.
        interpret: of `plgpu.kernel`.

    Returns:
        f32 `[B, T, R * size]`.
    """
    config = config or configuration(size, k.dtype)
    lists = starts, lo, hi, scales
    return _scores(q, w, k, *lists, size=size, absent=absent, config=config, interpret=interpret)


# Jitted, so that the layers of a model trace and compile one kernel.
@functools.partial(jax.jit, static_argnames=("size", "absent", "config", "interpret"))
def _scores(q, w, k, starts, lo, hi, scales, *, size, absent, config, interpret):
    batch, queries, heads, dim = q.shape
    packed = k.dtype == jnp.uint8
    runs = rows.Runs(size)
    count = starts.shape[-1]
    # The copy of starts takes whole tiles.
    per_tile = runs.per_tile
    tiles = -(-count // per_tile)
    starts = starts.astype(jnp.int32)
    if missing := tiles * per_tile - count:
        starts = jnp.pad(starts, [(0, 0), (0, 0), (0, missing)], constant_values=-1)
    place = jnp.arange(1, tiles * per_tile + 1)
    used = -(-jnp.max(jnp.where(starts >= 0, place, 0), axis=-1) // per_tile).astype(jnp.int32)
    w = w.astype(jnp.float32)
    if packed:
        k = lax.bitcast_convert_type(k.reshape(*k.shape[:2], -1, 4), jnp.int32)
        q, w = rows.permute_channels(q), w * rows.PACKED_WEIGHT
    share = min(config.tiles or tiles, tiles)
    stages = config.stages
    transforms = (
        plgpu.TilingTransform((8, 128 // q.dtype.itemsize)),
        plgpu.SwizzleTransform(128),
    )
    if packed:
        keys_smem = plgpu.SMEM((stages, TILE_KEYS, k.shape[-1]), jnp.int32)
    else:
        keys_smem = plgpu.SMEM((stages, TILE_KEYS, dim), q.dtype, transforms=transforms)
    kernel = plgpu.kernel(
        functools.partial(
            _kernel,
            runs=runs,
            packed=packed,
            tiles=tiles,
            share=share,
            absent=absent,
            stages=stages,
            interpret=interpret is not None,
        ),
        out_type=jax.ShapeDtypeStruct((batch, queries, tiles * TILE_KEYS), jnp.float32),
        # The last axis alone may have more than 65,535 blocks.
        grid=(batch, -(-tiles // share), queries),
        grid_names=("batch", "share", "query"),
        scratch_types=dict(
            q_smem=plgpu.SMEM((heads, dim), q.dtype, transforms=transforms),
            keys_smem=keys_smem,
            starts_smem=plgpu.SMEM((2 * stages, per_tile), jnp.int32),
            scales_smem=plgpu.SMEM((stages, TILE_KEYS), jnp.float32),
            q_barrier=plgpu.Barrier(),
        ),
        interpret=interpret,
    )
    lo, hi = (jnp.asarray(x, jnp.int32) for x in (lo, hi))
    arguments = [used, lo, hi, starts, q, w, k]
    if scales is not None:
        arguments.append(scales.astype(jnp.float32))
    scores = kernel(*arguments)
    return scores[..., : count * size]


def _kernel(
    used_ref,
    lo_ref,
    hi_ref,
    starts_ref,
    q_ref,
    w_ref,
    k_ref,
    *refs,
    q_smem,
    keys_smem,
    starts_smem,
    scales_smem,
    q_barrier,
    runs,
    packed,
    tiles,
    share,
    absent,
    stages,
    interpret,
):
    *scales_ref, out_ref = refs
    b, t, s = (lax.axis_index(name) for name in ("batch", "query", "share"))
    heads, _ = q_smem.shape
    begin = s * share
    end = jnp.minimum(begin + share, tiles)
    used = jnp.clip(used_ref[b, t], begin, end)
    bounds = lo_ref[b, t], hi_ref[b, t]
    ring = 2 * stages
    copies = rows.Copies(stages, runs, interpret)

    def fetch_starts(tile):
        at = lanes.tile(starts_ref, b, t, (tile * runs.per_tile, runs.per_tile))
        rows.fetch_starts(at, starts_smem.at[lax.rem(tile, ring)], runs, interpret)

    def fetch_keys(tile):
        starts = starts_smem.at[lax.rem(tile, ring)]
        slot = lax.rem(tile, stages)
        fetch = rows.fetch_packed if packed else rows.fetch_rows
        fetch(k_ref.at[b], starts, bounds, keys_smem.at[slot], runs, interpret)
        for ref in scales_ref:
            rows.fetch_scales(ref.at[b], starts, bounds, scales_smem.at[slot], runs, interpret)

    @pl.when(begin < used)
    def _():
        plgpu.copy_gmem_to_smem(q_ref.at[b, t], q_smem, q_barrier)
        copies.begin(begin, used, fetch_starts, fetch_keys)
        w = lanes.column_vector(w_ref.at[b, t], interpret)
        plgpu.barrier_wait(q_barrier)

        @pl.loop(begin, used)
        def _(tile):
            copies.advance(tile, used, fetch_starts, fetch_keys)
            slot = lax.rem(tile, stages)
            keys = keys_smem.at[slot]
            if packed:
                keys = rows.unpack_rows(keys, interpret)

            def product(accumulator):
                plgpu.wgmma(accumulator, keys, q_smem.T)
                return accumulator[...]

            if interpret and packed:  # which knows no left operand in registers
                dots = jnp.dot(keys, q_smem[...].T, preferred_element_type=jnp.float32)
            else:
                dots = pl.run_scoped(product, plgpu.ACC((TILE_KEYS, heads), jnp.float32))
            starts = starts_smem.at[lax.rem(tile, ring)]
            at = lanes.tile(out_ref, b, t, (tile * TILE_KEYS, TILE_KEYS))
            scales = scales_smem.at[slot] if scales_ref else None
            rows.store_scores(dots, w, starts, bounds, scales, absent, at, runs, interpret)

    @pl.loop(used, end)
    def _(tile):
        rows.store_absent(
            absent, lanes.tile(out_ref, b, t, (tile * TILE_KEYS, TILE_KEYS)), interpret
        )
