"""Selecting compressed entries by index scores, in XLA: the definition, and the fallback.

A score is a weighted sum over heads of ReLU(q . k). A pool is a coarse selection, made once from
block maxima, which later index layers search instead of every entry.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.chunking import chunk_size, map_queries
from pallas_kernels.fp4.reference import unpack
from pallas_kernels.topk import topk

# Of packed index keys.
PACKED_FORMAT = "mxfp4"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Pool:
    """The blocks of entries that each query may still select from; a pytree with one leaf.

    Attributes:
        blocks: i32 `[B, T, P]` ascending, -1 at the end. Block b of a query holds the entries
            `lo + b * size <= j < lo + (b + 1) * size`: blocks count from the query's own first
            entry.
        size: entries per block, static.
    """

    blocks: jax.Array
    size: int = dataclasses.field(metadata={"static": True})


def _weighted_relu(spec, q, w, k):
    """Scores [B,C,N] in float32 from q [B,C,Hi,Di], w [B,C,Hi] and keys as `spec` says."""
    precision = jax.lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
    dots = jnp.einsum(
        spec, q, k.astype(q.dtype), precision=precision, preferred_element_type=jnp.float32
    )
    return (w.astype(jnp.float32)[..., None] * jax.nn.relu(dots)).sum(axis=2)


def _unpacked(keys, dtype=None):
    """Keys in floats: packed rows unpacked, others as `dtype` where given."""
    if keys.dtype == jnp.uint8:
        return unpack(keys, PACKED_FORMAT, dtype or jnp.float32)
    return keys if dtype is None else keys.astype(dtype)


def _gather(keys, indices):
    """Keys [B,G,Di] at indices [B,C,K]: [B,C,K,Di], zeros (and no gradient) at invalid indices."""
    if keys.shape[1] == 0:
        return _unpacked(jnp.zeros((*indices.shape, keys.shape[2]), keys.dtype))
    # Negative indices would count from the end; this one is out of range.
    indices = jnp.where(indices >= 0, indices, keys.shape[1])
    # A packed row of zeros is zeros too.
    return _unpacked(jax.vmap(lambda k, i: k.at[i].get(mode="fill", fill_value=0))(keys, indices))


def _masked_scores(q, w, k, lo, hi):
    j = jnp.arange(k.shape[1], dtype=jnp.int32)
    visible = (j >= lo[..., None]) & (j < hi[..., None])
    return jnp.where(visible, _weighted_relu("bchd,bgd->bchg", q, w, k), -jnp.inf)


def block_ranks(best, newest):
    """What blocks of a pool are chosen by: their maxima, infinity for the block `newest`."""
    return jnp.where(jnp.arange(best.shape[-1]) == newest[..., None], jnp.inf, best)


def pool_from_scores(scores, lo, hi, blocks, size, topk_implementation="xla"):
    """The pool that masked scores make.

    Args:
        scores: f32 `[B, C, G]`, -inf (or NaN) outside `lo <= j < hi`.
        lo: i32 `[B, C]`, each query's first entry.
        hi: i32 `[B, C]`, one past its newest visible entry; at most G.
        blocks: P, how many blocks to keep.
        size: consecutive entries of a block, counted from `lo`.
        topk_implementation: of `pallas_kernels.topk`.

    Returns:
        `Pool` with the P blocks of largest maximum. The block of the newest visible entry always
        belongs to it; a block without any score above -inf never does.
    """
    entries = scores.shape[-1]
    count = -(-entries // size)
    scores = jnp.where(scores > -jnp.inf, scores, -jnp.inf)
    # A packed row gives each document its own `lo`, so blocks begin at any entry: moving a query's
    # first entry to the front makes them a reshape.
    extended = jnp.pad(scores, [(0, 0), (0, 0), (0, count * size)], constant_values=-jnp.inf)
    first = jnp.clip(lo, 0, entries)
    shifted = jax.vmap(
        jax.vmap(lambda row, start: jax.lax.dynamic_slice_in_dim(row, start, count * size))
    )(extended, first)
    best = shifted.reshape(*scores.shape[:2], count, size).max(axis=-1)
    newest = jnp.where(hi > lo, (hi - lo - 1) // size, -1)
    chosen = topk(
        block_ranks(best, newest), blocks, order="index", implementation=topk_implementation
    )
    return Pool(chosen, size)


def select(
    q,
    w,
    k,
    lo,
    hi,
    *,
    top_k,
    pool=None,
    make_pool=None,
    chunk=None,
    on_grid=False,
    topk_implementation="xla",
):
    """See `pallas_kernels.indexer.select`; `topk_implementation` is of `pallas_kernels.topk`."""
    del on_grid  # the arithmetic is the same
    q, w, k = jax.lax.stop_gradient((q, w, k))
    if pool is None:
        k = _unpacked(k, q.dtype)
    batch, queries, heads, dim = q.shape
    entries = k.shape[1]
    if chunk is None:
        if pool is None:
            largest = 4 * heads * entries
        else:
            largest = 4 * pool.blocks.shape[-1] * pool.size * max(heads, dim)
        chunk = chunk_size(queries, batch, largest)

    def best(scores):
        return topk(scores, top_k, order="index", implementation=topk_implementation)

    def everywhere(q, w, lo, hi):
        scores = _masked_scores(q, w, k, lo, hi)
        if make_pool is None:
            return best(scores), None
        return best(scores), pool_from_scores(scores, lo, hi, *make_pool, topk_implementation)

    def in_pool(q, w, lo, hi, blocks):
        candidates = lo[..., None, None] + blocks[..., None] * pool.size + jnp.arange(pool.size)
        inside = (blocks >= 0)[..., None] & (candidates < jnp.minimum(hi, entries)[..., None, None])
        candidates = jnp.where(inside, candidates, -1).reshape(*blocks.shape[:2], -1)
        scores = _weighted_relu("bchd,bckd->bchk", q, w, _gather(k, candidates))
        scores = jnp.where(candidates >= 0, scores, -jnp.inf)
        # Blocks ascend, so the lower place is also the lower index.
        places = best(scores)
        chosen = jnp.take_along_axis(candidates, jnp.maximum(places, 0), axis=-1)
        return jnp.where(places >= 0, chosen, -1)

    if pool is not None:
        return map_queries(in_pool, (q, w, lo, hi, pool.blocks), chunk), None
    return map_queries(everywhere, (q, w, lo, hi), chunk)


def scores(q, w, k, lo, hi, *, chunk=None, on_grid=False):
    """See `pallas_kernels.indexer.scores`."""
    del on_grid
    batch, queries, heads, _ = q.shape
    if chunk is None:
        chunk = chunk_size(queries, batch, 4 * heads * k.shape[1])
    k = _unpacked(k, jnp.float32)  # gradients of a key from many chunks add up in float32
    return map_queries(lambda q, w, lo, hi: _masked_scores(q, w, k, lo, hi), (q, w, lo, hi), chunk)


def scores_at(q, w, k, indices, *, chunk=None, on_grid=False):
    """See `pallas_kernels.indexer.scores_at`."""
    del on_grid
    batch, queries, heads, dim = q.shape
    slots = indices.shape[-1]
    if chunk is None:
        chunk = chunk_size(queries, batch, 4 * slots * max(heads, dim))
    if k.dtype != jnp.uint8:
        k = k.astype(jnp.float32)  # gradients of a key from many chunks add up in float32

    def body(q, w, indices):
        # An invalid index reads a zero key, whose score and gradients are zero.
        return _weighted_relu("bchd,bckd->bchk", q, w, _gather(k, indices))

    return map_queries(body, (q, w, indices), chunk)
