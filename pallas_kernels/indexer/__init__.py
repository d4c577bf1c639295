"""The indexer: which compressed entries each query attends to."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import Implementation, dispatch
from pallas_kernels.fp4 import row_bytes
from pallas_kernels.indexer import mosaic_gpu, mosaic_tpu, reference
from pallas_kernels.indexer.reference import PACKED_FORMAT, Pool

# What the kernels decline is scored by XLA, and still selected by the kernel of topk.
SELECT_IMPLEMENTATIONS = {
    "mosaic_gpu": mosaic_gpu.select,
    "mosaic_tpu": mosaic_tpu.select,
    "xla_mosaic_gpu": functools.partial(reference.select, topk_implementation="mosaic_gpu"),
    "xla_mosaic_tpu": functools.partial(reference.select, topk_implementation="mosaic_tpu"),
    "xla": reference.select,
}
IMPLEMENTATIONS = SELECT_IMPLEMENTATIONS
SCORES_IMPLEMENTATIONS = {
    "mosaic_gpu": mosaic_gpu.scores,
    "mosaic_tpu": mosaic_tpu.scores,
    "xla": reference.scores,
}
SCORES_AT_IMPLEMENTATIONS = {
    "mosaic_gpu": mosaic_gpu.scores_at,
    "mosaic_tpu": mosaic_tpu.scores_at,
    "xla": reference.scores_at,
}

__all__ = ["Pool", "scores", "scores_at", "select"]


def select(
    q: jax.Array,
    w: jax.Array,
    k: jax.Array,
    lo: jax.Array,
    hi: jax.Array,
    *,
    top_k: int,
    pool: Pool | None = None,
    make_pool: tuple[int, int] | None = None,
    chunk: int | None = None,
    on_grid: bool = False,
    implementation: Implementation = None,
) -> tuple[jax.Array, Pool | None]:
    """Selects the `top_k` entries of highest index score for each query (V4.1 report, section 2).

    The score of entry j for query t is `sum_h w[t,h] relu(q[t,h] . k[j])`, accumulated in float32,
    over the entries `lo <= j < hi`. Among equal scores (ReLU makes exact zeros common) the lower
    index wins. Every query counts from its own `lo`, so a packed row selects what its documents
    select alone.

    Args:
        q: `[B, T, Hi, Di]` rotated index queries, float32 or bfloat16.
        w: `[B, T, Hi]` head weights, constant factors included; may be negative.
        k: `[B, G, Di]` rotated index keys, or packed ones, uint8 `[B, G, Di / 2 + Di / 32]` as
            `fp4.pack(k, "mxfp4")` makes them.
        lo: i32 `[B, T]` first visible entry, at least 0.
        hi: i32 `[B, T]` one past the last; `hi <= lo` means that nothing is visible.
        top_k: entries to select; may exceed G.
        pool: where given, only its blocks are searched, and only their keys are read.
        make_pool: `(blocks, size)`, where a pool is to be made from the scores: the `blocks` blocks
            of `size` consecutive entries whose best entry scores highest. The block of the newest
            visible entry always belongs to it.
        chunk: queries at a time; chosen from a memory budget when None, so that scores of all
            queries never exist at once.
        on_grid: promises that q, and k unless packed, are values of the format "mxfp4"
            (`fp4.fake_quantize`). A backend may then compute dot products in FP8: on this grid
            their terms are exact, but for elements below 2^-14 of their row's largest. Without the
            promise products are exact for whatever bfloat16 holds.
        implementation: "mosaic_gpu" (Hopper), "mosaic_tpu", "xla", a sequence of names to be tried
            in order, or None for the best.

    Returns:
        indices: i32 `[B, T, top_k]`, places in k in increasing order, -1 at the end where fewer can
            be selected.
        pool: the pool asked for by `make_pool`, else None.

        Neither is differentiable: `scores_at` is.

    Raises:
        ValueError: arguments that do not fit each other.
    """
    _check_inputs(q, w, k)
    _check_ranges(q, lo, hi)
    _check_chunk(chunk)
    if top_k < 1:
        raise ValueError(f"top_k must be at least 1, got {top_k}")
    if pool is not None and make_pool is not None:
        raise ValueError("pool and make_pool exclude each other: a pool is made from all entries")
    if make_pool is not None and min(make_pool) < 1:
        raise ValueError(f"make_pool must be (blocks, size), both at least 1, got {make_pool}")
    if pool is not None and pool.blocks.shape[:2] != q.shape[:2]:
        raise ValueError(
            f"pool.blocks must be {list(q.shape[:2])} + [P], got {list(pool.blocks.shape)}"
        )
    return dispatch(
        "indexer.select",
        SELECT_IMPLEMENTATIONS,
        implementation,
        q,
        w,
        k,
        lo,
        hi,
        top_k=top_k,
        pool=pool,
        make_pool=make_pool,
        chunk=chunk,
        on_grid=on_grid,
    )


def scores(
    q: jax.Array,
    w: jax.Array,
    k: jax.Array,
    lo: jax.Array,
    hi: jax.Array,
    *,
    chunk: int | None = None,
    on_grid: bool = False,
    implementation: Implementation = None,
) -> jax.Array:
    """Index scores of every entry: the student of the indexer's dense warm-up, and a test's truth.

    Args:
        q, w, k, lo, hi, chunk, on_grid, implementation: as for `select`.

    Returns:
        f32 `[B, T, G]`, -inf outside `lo <= j < hi`; differentiable in q, w and k (not packed).

    Raises:
        ValueError: arguments that do not fit each other.
    """
    _check_inputs(q, w, k)
    _check_ranges(q, lo, hi)
    _check_chunk(chunk)
    return dispatch(
        "indexer.scores",
        SCORES_IMPLEMENTATIONS,
        implementation,
        q,
        w,
        k,
        lo,
        hi,
        chunk=chunk,
        on_grid=on_grid,
    )


def scores_at(
    q: jax.Array,
    w: jax.Array,
    k: jax.Array,
    indices: jax.Array,
    *,
    chunk: int | None = None,
    on_grid: bool = False,
    implementation: Implementation = None,
) -> jax.Array:
    """Index scores of given entries: the student of the indexer's loss over a selection.

    Args:
        q, w, k: as for `select`.
        indices: i32 `[B, T, K]` places in k; -1, or any other value outside `[0, G)`, is no entry.
        chunk, on_grid, implementation: as for `select`.

    Returns:
        f32 `[B, T, K]`, 0 where there is no entry; differentiable in q, w and k (not packed). On a
        GPU the gradient of k is added up in any order: its last bits may differ between calls.

    Raises:
        ValueError: arguments that do not fit each other.
    """
    _check_inputs(q, w, k)
    _check_chunk(chunk)
    if indices.ndim != 3 or indices.shape[:2] != q.shape[:2]:
        raise ValueError(f"indices must be {list(q.shape[:2])} + [K], got {list(indices.shape)}")
    return dispatch(
        "indexer.scores_at",
        SCORES_AT_IMPLEMENTATIONS,
        implementation,
        q,
        w,
        k,
        indices,
        chunk=chunk,
        on_grid=on_grid,
    )


def _check_inputs(q, w, k) -> None:
    if q.ndim != 4 or q.dtype not in (jnp.float32, jnp.bfloat16):
        raise ValueError(f"q must be float32 or bfloat16 [B,T,Hi,Di], got {q.dtype}{list(q.shape)}")
    if w.shape != q.shape[:3]:
        raise ValueError(f"w must be {list(q.shape[:3])}, got {list(w.shape)}")
    row = row_bytes(PACKED_FORMAT, q.shape[3]) if k.dtype == jnp.uint8 else q.shape[3]
    if k.ndim != 3 or (k.shape[0], k.shape[2]) != (q.shape[0], row):
        raise ValueError(f"k must be [{q.shape[0]}, G, {row}], got {k.dtype}{list(k.shape)}")


def _check_ranges(q, lo, hi) -> None:
    for name, bound in (("lo", lo), ("hi", hi)):
        if bound.shape != q.shape[:2]:
            raise ValueError(f"{name} must be {list(q.shape[:2])}, got {list(bound.shape)}")


def _check_chunk(chunk) -> None:
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk must be at least 1 or None, got {chunk}")
