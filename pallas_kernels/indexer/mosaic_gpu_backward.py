"""Gradients of the index scores of listed entries on Hopper.

Of a score `sum_h w_h relu(x_h)`, x_h = q_h . k, with gradient g, products make everything: x again,
S_h = g w_h [x_h > 0] times the keys for dq (two, of S in two pieces of bfloat16), and S transposed,
entry by entry, times the query's heads for dk. A warpgroup takes one query, as in the forward
kernel; gradients of keys are added up in float32 in memory, in no fixed order, so their last bits
vary from call to call.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.indexer import mosaic_gpu_lanes as lanes
from pallas_kernels.indexer import mosaic_gpu_rows as rows
from pallas_kernels.indexer.mosaic_gpu_lanes import TILE_KEYS

# Both products with S contract 64 heads, the least that wgmma's 128-byte swizzle has; missing heads
# are zeros.
HEADS = 64


@dataclasses.dataclass(frozen=True)
class TuningConfig:
    """How the backward kernel is cut.

    Attributes:
        stages: tiles of 64 keys that are in shared memory at a time, at least 2.
    """

    stages: int = 2


def gathered_gradients(
    q: jax.Array,
    w: jax.Array,
    k: jax.Array,
    indices: jax.Array,
    g: jax.Array,
    *,
    config: TuningConfig = TuningConfig(),
    interpret: object = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients of `gathered_scores` with runs of one entry.

    Args:
        q: bfloat16 `[B, T, Hi, Di]`, Hi at most 64 and a multiple of 8, Di 128.
        w: f32 `[B, T, Hi]`.
        k: bfloat16 `[B, G, Di]`.
        indices: i32 `[B, T, K]`; outside `[0, G)` is no entry.
        g: f32 `[B, T, K]`, gradients of the scores.
        config: how the work is cut.
        interpret: of `plgpu.kernel`.

    Returns:
        dq like q, dw f32 like w, dk f32 like k.
    """
    batch, queries, heads, dim = q.shape
    tiles = -(-indices.shape[-1] // TILE_KEYS)
    missing = tiles * TILE_KEYS - indices.shape[-1]
    last = [(0, 0), (0, 0), (0, missing)]
    indices = jnp.pad(indices.astype(jnp.int32), last, constant_values=-1)
    g = jnp.pad(g.astype(jnp.float32), last)
    place = jnp.arange(1, tiles * TILE_KEYS + 1)
    valid = (indices >= 0) & (indices < k.shape[1])
    g = jnp.where(valid, g, 0)
    used = -(-jnp.max(jnp.where(valid, place, 0), axis=-1) // TILE_KEYS).astype(jnp.int32)
    absent_heads = [(0, 0), (0, 0), (0, HEADS - heads)]
    q_padded = jnp.pad(q, [*absent_heads, (0, 0)])
    w_padded = jnp.pad(w.astype(jnp.float32), absent_heads)

    transforms = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    stages = config.stages
    outputs = [
        jax.ShapeDtypeStruct(q.shape, q.dtype),
        jax.ShapeDtypeStruct((batch, queries, 4, HEADS), jnp.float32),
    ]
    arguments = [used, indices, g, q_padded, w_padded, k]
    if interpret is None:
        arguments.append(jax.new_ref(jnp.zeros(k.shape, jnp.float32)))
    else:  # which takes no array that it could add to
        outputs.append(jax.ShapeDtypeStruct((*indices.shape, dim), jnp.float32))
    kernel = plgpu.kernel(
        functools.partial(
            _kernel, heads=heads, stages=stages, entries=k.shape[1], interpret=interpret is not None
        ),
        out_type=outputs,
        # The last axis alone may have more than 65,535 blocks.
        grid=(batch, queries),
        grid_names=("batch", "query"),
        scratch_types=dict(
            q_smem=plgpu.SMEM((HEADS, dim), jnp.bfloat16, transforms=transforms),
            s_smem=plgpu.SMEM((2, TILE_KEYS, HEADS), jnp.bfloat16, transforms=transforms),
            keys_smem=plgpu.SMEM((stages, TILE_KEYS, dim), jnp.bfloat16, transforms=transforms),
            starts_smem=plgpu.SMEM((2 * stages, TILE_KEYS), jnp.int32),
            q_barrier=plgpu.Barrier(),
        ),
        interpret=interpret,
    )
    dq, dw, *listed = kernel(*arguments)
    if interpret is None:
        dk = jax.freeze(arguments[-1])
    else:
        listed = jnp.where(valid[..., None], listed[0], 0)
        places = jnp.where(valid, indices, k.shape[1])
        dk = jax.vmap(lambda i, x: jnp.zeros(k.shape[1:]).at[i].add(x, mode="drop"))(places, listed)
    return dq, dw.sum(axis=2)[..., :heads], dk


def _kernel(
    used_ref,
    indices_ref,
    g_ref,
    q_ref,
    w_ref,
    k_ref,
    *refs,
    q_smem,
    s_smem,
    keys_smem,
    starts_smem,
    q_barrier,
    heads,
    stages,
    entries,
    interpret,
):
    # What keys' gradients are added to is an argument, or in interpret mode the last result.
    dq_ref, dw_ref, dk_ref = refs if interpret else (*refs[1:], refs[0])
    b, t = (lax.axis_index(name) for name in ("batch", "query"))
    used = used_ref[b, t]
    bounds = jnp.int32(0), jnp.int32(entries)
    shape = (TILE_KEYS, HEADS)
    ring = 2 * stages
    runs = rows.Runs(1)
    copies = rows.Copies(stages, runs, interpret)
    dim = q_smem.shape[1]

    def fetch_starts(tile):
        at = lanes.tile(indices_ref, b, t, (tile * TILE_KEYS, TILE_KEYS))
        rows.fetch_starts(at, starts_smem.at[lax.rem(tile, ring)], runs, interpret)

    def fetch_keys(tile):
        starts = starts_smem.at[lax.rem(tile, ring)]
        slot = lax.rem(tile, stages)
        rows.fetch_rows(k_ref.at[b], starts, bounds, keys_smem.at[slot], runs, interpret)

    plgpu.copy_gmem_to_smem(q_ref.at[b, t], q_smem, q_barrier)
    copies.begin(0, used, fetch_starts, fetch_keys)
    w = lanes.column_vector(w_ref.at[b, t], interpret)
    plgpu.barrier_wait(q_barrier)

    def step(tile, carry):
        dq, dw = carry
        copies.advance(tile, used, fetch_starts, fetch_keys)
        keys = keys_smem.at[lax.rem(tile, stages)]
        g = lanes.row_vector(lanes.tile(g_ref, b, t, (tile * TILE_KEYS, TILE_KEYS)), interpret)
        g = lanes.along_rows(g, shape)

        def again(accumulator):
            plgpu.wgmma(accumulator, keys, q_smem.T)
            return accumulator[...]

        x = pl.run_scoped(again, plgpu.ACC(shape, jnp.float32))
        dw = dw + g * jnp.maximum(x, 0)
        s = jnp.where(x > 0, g * lanes.along_columns(w, shape), 0.0)
        rounded = s.astype(jnp.bfloat16)
        s_smem[0] = rounded
        s_smem[1] = (s - rounded.astype(jnp.float32)).astype(jnp.bfloat16)
        plgpu.commit_smem()

        # In dq terms of one entry, or of like ones, may cancel, and what rounding took from each
        # would not: it is added by a second product.
        if interpret:  # which knows accumulators only inside of the scope that makes them
            for part in range(2):
                product = jnp.dot(s_smem[part].T, keys[...], preferred_element_type=jnp.float32)
                dq = dq + product
        else:

            def to_queries(accumulator):
                plgpu.wgmma(accumulator, s_smem.at[0].T, keys)
                plgpu.wgmma(accumulator, s_smem.at[1].T, keys)

            dq = pl.run_state(to_queries)(plgpu.ACC.init(dq))

        def to_keys(accumulator):
            plgpu.wgmma(accumulator, s_smem.at[0], q_smem)
            return accumulator[...]

        dk = pl.run_scoped(to_keys, plgpu.ACC((TILE_KEYS, dim), jnp.float32))
        if interpret:
            dk_ref[b, t, pl.ds(tile * TILE_KEYS, TILE_KEYS)] = dk
        else:
            rows.add_rows(dk, starts_smem.at[lax.rem(tile, ring)], bounds, dk_ref.at[b], runs)
        return dq, dw

    def zeros(shape):
        array = jnp.zeros(shape, jnp.float32)
        return array if interpret else plgpu.layout_cast(array, plgpu.Layout.WGMMA)

    dq, dw = lax.fori_loop(0, used, step, (zeros((HEADS, dim)), zeros(shape)))
    lanes.store_column_sums(dw, dw_ref.at[b, t], interpret)
    plgpu.commit_smem()  # every warp has read q
    q_smem[...] = dq.astype(q_smem.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(q_smem.at[pl.ds(0, heads)], dq_ref.at[b, t])
    plgpu.wait_smem_to_gmem(0)
