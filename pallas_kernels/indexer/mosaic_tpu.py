"""The indexer on TPUs: which kernels make `select`, `scores` and `scores_at`.

* All entries: scores are stored, a chunk of queries at a time, and the kernel of topk selects from
  them; a pool is selected from them by the same kernel, blocks in place of entries.
* A given pool: its blocks of 8 keys are copied one by one, whatever their number among all.
* Listed entries are scored densely, and their gradients made densely: 512 copies take a core some
  10,000 cycles to issue, in which its matrix unit scores 160,000 entries for 32 heads.

What is not in blocks of 8 is left to XLA: pools of blocks of another size and, decided at run time,
blocks that do not begin at multiples of their size.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import tpu
from pallas_kernels.chunking import chunk_size, map_queries
from pallas_kernels.fp4.reference import unpack
from pallas_kernels.indexer import mosaic_tpu_backward as backward
from pallas_kernels.indexer import reference
from pallas_kernels.indexer.mosaic_tpu_dense import dense_scores, listed, listed_scores
from pallas_kernels.indexer.mosaic_tpu_pool import BLOCK, pool_scores
from pallas_kernels.indexer.mosaic_tpu_tiles import TILE_QUERIES
from pallas_kernels.indexer.reference import PACKED_FORMAT, Pool
from pallas_kernels.topk import mosaic_tpu as selection

# Entries up to which listed ones are scored by scoring all.
LISTED_ENTRIES = 65536


def select(
    q, w, k, lo, hi, *, top_k, pool=None, make_pool=None, chunk=None, on_grid=False, interpret=None
):
    """See `pallas_kernels.indexer.select`.

    Raises:
        NotImplementedError: not on a TPU; a pool of blocks that are not of 8 entries.
    """
    del on_grid  # products are exact in bfloat16
    tpu.require("indexer.select", interpret)
    q, w, k = lax.stop_gradient((q, w, k))
    entries = k.shape[1]
    keywords = dict(top_k=top_k)
    if not entries or not q.shape[0] * q.shape[1]:
        return reference.select(q, w, k, lo, hi, pool=pool, make_pool=make_pool, **keywords)
    hi = jnp.minimum(hi, entries)
    best = functools.partial(selection.topk, order="index", interpret=interpret)

    if pool is not None:
        if pool.size != BLOCK:
            raise NotImplementedError(
                f"indexer.select: a pool of blocks of {pool.size}; the kernel has blocks of {BLOCK}"
            )
        chunk = chunk or _chunk(q, 3 * 4 * pool.blocks.shape[-1] * BLOCK)
        k = _floats(k, q)

        def in_pool(q, w, lo, hi, blocks):
            first = jnp.where(blocks >= 0, lo[..., None] + blocks * BLOCK, -1)
            scores = pool_scores(
                q, w, k, jnp.where(first >= 0, first // BLOCK, -1), interpret=interpret
            )
            # Blocks ascend, so those of them that are visible come first.
            held = jnp.clip(hi[..., None] - first, 0, BLOCK)
            held = jnp.sum(jnp.where(first >= 0, held, 0), axis=-1, dtype=jnp.int32)
            places = best(scores, top_k, held)
            start = jnp.take_along_axis(first, jnp.maximum(places, 0) // BLOCK, axis=-1)
            return jnp.where(places >= 0, start + places % BLOCK, -1)

        def by_xla(*operands):
            *operands, blocks = operands
            return reference.select(
                *operands[:2], k, *operands[2:], pool=Pool(blocks, BLOCK), **keywords
            )[0]

        def run(*operands):
            return lax.cond(_begin_blocks(*operands[2:4], BLOCK), in_pool, by_xla, *operands)

        return map_queries(run, (q, w, lo, hi, pool.blocks), chunk), None

    def everywhere(q, w, lo, hi):
        scores = dense_scores(q, w, k, lo, hi, interpret=interpret)
        indices = best(scores, top_k, jnp.maximum(hi, 0))
        if make_pool is None:
            return indices, None
        return indices, _pool(scores, lo, hi, *make_pool, interpret)

    return map_queries(everywhere, (q, w, lo, hi), chunk or _chunk(q, 4 * entries))


def scores(q, w, k, lo, hi, *, chunk=None, on_grid=False, interpret=None):
    """See `pallas_kernels.indexer.scores`.

    Raises:
        NotImplementedError: not on a TPU.
    """
    del chunk, on_grid  # no temporary but the result
    tpu.require("indexer.scores", interpret)
    if not k.shape[1] or not q.shape[0] * q.shape[1]:
        return reference.scores(q, w, k, lo, hi)

    @jax.custom_vjp
    def run(q, w, k, lo, hi):
        return dense_scores(q, w, k, lo, hi, interpret=interpret)

    def forward(*args):
        return run(*args), args

    def gradients(args, g):
        q, w, k, lo, hi = args
        ranges = jnp.stack([lo, jnp.minimum(hi, k.shape[1])], axis=-1)
        grads = backward.dense_gradients(q, w, _floats(k, q), ranges, g, interpret=interpret)
        return (*_as_inputs(grads, q, w, k), None, None)

    run.defvjp(forward, gradients)
    return run(q, w, k, lo, hi)


def scores_at(q, w, k, indices, *, chunk=None, on_grid=False, interpret=None):
    """See `pallas_kernels.indexer.scores_at`; `chunk` is for its gradients.

    Raises:
        NotImplementedError: not on a TPU; more than `LISTED_ENTRIES` entries.
    """
    del on_grid
    tpu.require("indexer.scores_at", interpret)
    entries = k.shape[1]
    if entries > LISTED_ENTRIES:
        raise NotImplementedError(
            f"indexer.scores_at: {entries} entries; the kernel takes up to {LISTED_ENTRIES}"
        )
    if not entries or not indices.size:
        return reference.scores_at(q, w, k, indices)
    chunk = chunk or _chunk(q, 4 * entries)

    @jax.custom_vjp
    def run(q, w, k, indices):
        return listed_scores(q, w, k, indices, interpret=interpret)

    def forward(*args):
        return run(*args), args

    def gradients(args, g):
        q, w, k, indices = args
        keys = _floats(k, q)
        places, ranges = listed(indices, entries)
        g = jnp.pad(g, [(0, 0), (0, 0), (0, places.shape[-1] - g.shape[-1])])

        def add(total, part):
            q, w, places, ranges, g = part
            g = backward.spread(places, g, entries, interpret=interpret)
            dq, dw, dk = backward.dense_gradients(q, w, keys, ranges, g, interpret=interpret)
            return total + dk, (dq.astype(q.dtype), dw)

        dk = jnp.zeros(keys.shape, jnp.float32)
        dk, (dq, dw) = _scan_queries(add, dk, (q, w, places, ranges, g), chunk)
        return (*_as_inputs((dq, dw, dk), q, w, k), None)

    run.defvjp(forward, gradients)
    return run(q, w, k, indices)


def _chunk(q, bytes_per_query: int) -> int:
    batch, queries, *_ = q.shape
    return chunk_size(queries, batch, bytes_per_query, min(TILE_QUERIES, queries))


def _floats(k, q):
    """Keys in the queries' type."""
    return unpack(k, PACKED_FORMAT, q.dtype) if k.dtype == jnp.uint8 else k.astype(q.dtype)


def _as_inputs(gradients, q, w, k):
    dq, dw, dk = gradients
    return (
        dq.astype(q.dtype),
        dw.astype(w.dtype),
        None if k.dtype == jnp.uint8 else dk.astype(k.dtype),
    )


def _scan_queries(step, carry, arrays, chunk: int):
    """`lax.scan` over chunks of arrays `[B, T, ...]`; zeros beyond the last query."""
    total = arrays[0].shape[1]
    chunks = -(-total // chunk)
    missing = chunks * chunk - total

    def cut(x):
        x = jnp.pad(x, [(0, 0), (0, missing)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(x.shape[0], chunks, chunk, *x.shape[2:]), 1, 0)

    def join(y):
        y = jnp.moveaxis(y, 0, 1)
        return y.reshape(y.shape[0], -1, *y.shape[3:])[:, :total]

    carry, results = lax.scan(step, carry, jax.tree.map(cut, arrays))
    return carry, jax.tree.map(join, results)


def _begin_blocks(lo, hi, size: int):
    """Whether every query that sees anything has its first entry at the start of a block."""
    return jnp.all((lo % size == 0) | (lo >= hi))


def _pool(scores, lo, hi, blocks: int, size: int, interpret) -> Pool:
    """See `reference.pool_from_scores`."""

    def by_xla(scores, lo, hi):
        return reference.pool_from_scores(scores, lo, hi, blocks, size).blocks

    if size not in selection.BLOCKS or blocks > selection.MAX_K:
        return Pool(by_xla(scores, lo, hi), size)

    def by_kernel(scores, lo, hi):
        # Blocks are counted from entry 0, of which every `lo` begins one.
        newest = jnp.where(hi > lo, (hi - 1) // size, -1)
        chosen = selection.topk_blocks(
            scores, blocks, size, jnp.maximum(hi, 0), first=newest, interpret=interpret
        )
        return jnp.where(chosen >= 0, chosen - lo[..., None] // size, -1)

    return Pool(lax.cond(_begin_blocks(lo, hi, size), by_kernel, by_xla, scores, lo, hi), size)
