"""The indexer on Hopper GPUs: which kernels make `select`, `scores` and `scores_at`.

Selection has three ways.

* Few queries (decoding): each goes through the keys by itself, packed ones as they are, and its
  scores are stored.
* Many queries, and so few entries that their scores are cheap to store: the dense kernel stores
  them, a chunk of queries at a time.
* Many entries: the dense kernel stores only the largest score of every block of 8. The k best
  entries lie in the k blocks of largest maximum (with equal scores too: among equals the lower
  block holds the lower entries), so those blocks are scored again, and the k best are taken from
  them. An eighth of the scores reaches memory, and nothing is approximate.

A pool is made from the same maxima, and a given pool is read by the gathering kernel alone.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import hopper
from pallas_kernels.chunking import chunk_size, map_queries
from pallas_kernels.fp4.reference import unpack
from pallas_kernels.indexer import reference
from pallas_kernels.indexer.mosaic_gpu_backward import gathered_gradients
from pallas_kernels.indexer.mosaic_gpu_dense import dense_scores, queries_per_group
from pallas_kernels.indexer.mosaic_gpu_gather import configuration, gathered_scores
from pallas_kernels.indexer.mosaic_gpu_lanes import BLOCK, TILE_KEYS
from pallas_kernels.indexer.reference import PACKED_FORMAT, Pool, block_ranks
from pallas_kernels.topk import topk

# Entries up to which scores of all of them are stored. Beyond, scoring top_k blocks once more costs
# less than writing and reading the other seven eighths of the scores.
DIRECT_ENTRIES = 65536
# Queries of a batch row up to which each goes through the keys by itself.
FEW_QUERIES = 2


def select(
    q, w, k, lo, hi, *, top_k, pool=None, make_pool=None, chunk=None, on_grid=False, interpret=None
):
    """See `pallas_kernels.indexer.select`."""
    _accept("indexer.select", q, k, interpret)
    q, w, k = lax.stop_gradient((q, w, k))
    queries, heads = q.shape[1:3]
    hi = jnp.minimum(hi, k.shape[1])
    if pool is not None:
        run = functools.partial(
            _select_in_pool,
            _listed_keys(k, q, on_grid),
            top_k=top_k,
            size=pool.size,
            interpret=interpret,
        )
        chunk = chunk or _chunk(q, 4 * pool.blocks.shape[-1] * pool.size)
        return map_queries(run, (q, w, lo, hi, pool.blocks), chunk), None
    if not k.shape[1]:
        return reference.select(q, w, k, lo, hi, top_k=top_k, make_pool=make_pool)
    listed_keys = _listed_keys(k, q, on_grid)
    keys = None
    if queries > FEW_QUERIES:
        keys = _dense_keys(k, q, on_grid)
        if heads not in (8, 16, 32):
            raise NotImplementedError(f"indexer.select: {heads} heads; the kernel has 8, 16 and 32")
    by_blocks = make_pool is not None and make_pool[1] == BLOCK

    def stored(q, w, lo, hi, *, fast):
        """Indices and pool by way of all scores; not `fast` where a pool takes more than maxima."""
        if keys is None:
            scores, maxima = _few_scores(q, w, listed_keys, lo, hi, interpret)
        else:
            scores, maxima = _dense(
                q, w, keys, lo, hi, full=True, maxima=fast, fill=not fast, interpret=interpret
            )
        indices = topk(scores, top_k, jnp.maximum(hi, 0), order="index")
        if make_pool is None:
            return indices, None
        if fast:
            return indices, _pool(maxima, lo, hi, make_pool[0])
        return indices, reference.pool_from_scores(scores, lo, hi, *make_pool)

    def by_maxima(q, w, lo, hi):
        """Indices and pool by way of block maxima."""
        _, maxima = _dense(
            q, w, keys, lo, hi, full=False, maxima=True, fill=False, interpret=interpret
        )
        blocks = topk(maxima, min(top_k, maxima.shape[-1]), _blocks(hi), order="index")
        starts = jnp.where(blocks >= 0, blocks * BLOCK, -1)
        scores = _listed(q, w, keys, starts, lo, hi, size=BLOCK, interpret=interpret)
        indices = _entries(scores, top_k, starts, BLOCK)
        made = None if make_pool is None else _pool(maxima, lo, hi, make_pool[0])
        return indices, made

    long = keys is not None and k.shape[1] > DIRECT_ENTRIES

    def whole(run, largest):
        return map_queries(run, (q, w, lo, hi), chunk or _chunk(q, largest))

    def best(fast: bool):
        if long and (make_pool is None or fast):
            return whole(by_maxima, k.shape[1] // 2 + 4 * BLOCK * top_k)
        return whole(functools.partial(stored, fast=fast), 4 * k.shape[1])

    if not by_blocks:
        return best(make_pool is None)
    # Blocks of the pool are those of the maxima where every query's first entry begins one.
    aligned = jnp.all((lo % BLOCK == 0) | (lo >= hi))
    return lax.cond(aligned, lambda: best(True), lambda: best(False))


def scores(q, w, k, lo, hi, *, chunk=None, on_grid=False, interpret=None):
    """See `pallas_kernels.indexer.scores`; its gradients are those of the reference."""
    _accept("indexer.scores", q, k, interpret)
    heads = q.shape[2]
    if heads not in (8, 16, 32):
        raise NotImplementedError(f"indexer.scores: {heads} heads; the kernel has 8, 16 and 32")
    if not k.shape[1]:
        return reference.scores(q, w, k, lo, hi)

    @jax.custom_vjp
    def run(q, w, k, lo, hi):
        keys = _dense_keys(k, q, on_grid)
        return _dense(q, w, keys, lo, hi, full=True, maxima=False, interpret=interpret)[0]

    def forward(*args):
        return run(*args), args

    def backward(args, g):
        *inputs, lo, hi = args
        _, vjp = jax.vjp(lambda *a: reference.scores(*a, lo, hi, chunk=chunk), *inputs)
        return (*vjp(g), None, None)

    run.defvjp(forward, backward)
    return run(q, w, k, lo, hi)


def scores_at(q, w, k, indices, *, chunk=None, on_grid=False, interpret=None):
    """See `pallas_kernels.indexer.scores_at`."""
    del chunk, on_grid  # no temporary grows with queries; listed rows take no time in bfloat16
    _accept("indexer.scores_at", q, k, interpret)
    heads = q.shape[2]
    if heads > 64:
        raise NotImplementedError(f"indexer.scores_at: {heads} heads; the kernel has up to 64")
    entries = k.shape[1]
    if not entries or not indices.shape[-1]:
        return reference.scores_at(q, w, k, indices)

    @jax.custom_vjp
    def run(q, w, k, indices):
        keys, _ = _listed_keys(k, q, on_grid=False)
        lo = jnp.zeros(q.shape[:2], jnp.int32)
        return gathered_scores(
            q, w, keys, indices, lo, lo + entries, size=1, absent=0.0, interpret=interpret
        )

    def forward(*args):
        return run(*args), args

    def backward(args, g):
        q, w, k, indices = args
        packed = k.dtype == jnp.uint8
        keys = unpack(k, PACKED_FORMAT, q.dtype) if packed else k.astype(q.dtype)
        dq, dw, dk = gathered_gradients(q, w, keys, indices, g, interpret=interpret)
        return dq, dw.astype(w.dtype), None if packed else dk.astype(k.dtype), None

    run.defvjp(forward, backward)
    return run(q, w, k, indices)


def _accept(op: str, q, k, interpret) -> None:
    """Declines what no kernel takes."""
    if interpret is None:
        hopper.require(op, jax_release=(0, 11))
    if q.dtype != jnp.bfloat16:
        raise NotImplementedError(f"{op}: queries in {q.dtype}; the kernels take bfloat16")
    heads, dim = q.shape[2:]
    if dim != 128:
        raise NotImplementedError(f"{op}: index head_dim {dim}; the kernels have 128")
    if heads % 8 or heads > 256:
        raise NotImplementedError(f"{op}: {heads} heads; the kernels take multiples of 8")


def _chunk(q, bytes_per_query: int) -> int:
    batch, queries, heads, _ = q.shape
    multiple = min(queries_per_group(min(heads, 32)), queries)
    return chunk_size(queries, batch, bytes_per_query, multiple)


def _float8(x):
    """Rows of values on the mxfp4 grid as (float8_e4m3fn, power-of-two scales), exactly.

    The largest value of a row comes to lie in [256, 448); elements of E2M1 have two significant
    bits, so none is lost unless it is smaller by 2^14 than the largest of its row.
    """
    x = x.astype(jnp.float32)
    largest = lax.bitcast_convert_type(jnp.max(jnp.abs(x), axis=-1, keepdims=True), jnp.int32)
    exponent = jnp.clip((largest >> 23) - 8, 1, 253)
    inverse = lax.bitcast_convert_type((254 - exponent) << 23, jnp.float32)
    scale = lax.bitcast_convert_type(exponent << 23, jnp.float32)
    return (x * inverse).astype(jnp.float8_e4m3fn), scale[..., 0]


def _dense_keys(k, q, on_grid: bool):
    """Keys as the dense kernel takes them: (keys, scales or None)."""
    k = unpack(k, PACKED_FORMAT, jnp.bfloat16) if k.dtype == jnp.uint8 else k.astype(q.dtype)
    return _float8(k) if on_grid else (k, None)


def _listed_keys(k, q, on_grid: bool):
    """Keys as the gathering kernel takes them: (keys, scales or None).

    Packed keys are read as they are by few queries, which are bound by memory. Many queries read a
    key many times, and one in float8 needs no decoding.
    """
    packed = k.dtype == jnp.uint8
    if on_grid and q.shape[1] > FEW_QUERIES:
        return _float8(unpack(k, PACKED_FORMAT, jnp.bfloat16) if packed else k)
    return (k if packed else k.astype(q.dtype)), None


def _dense(q, w, keys, lo, hi, *, full, maxima, fill=True, interpret):
    k, scales = keys
    if scales is not None:
        q, factors = _float8(q)
        w = w * factors
    return dense_scores(
        q,
        w,
        k,
        lo,
        hi,
        scales=scales,
        full=full,
        maxima=maxima,
        fill=fill,
        interpret=interpret,
    )


def _listed(q, w, keys, starts, lo, hi, *, size: int, aligned=True, interpret):
    """Scores of runs of entries, -inf for absent ones.

    Packed keys are copied 16 bytes at a time where starts are multiples of 4: `aligned`, static or
    an array. Where they are not, every entry is listed by itself.
    """
    k, scales = keys
    if scales is not None:
        q, factors = _float8(q)
        w = w * factors

    # Of these runs, also where their entries are listed one by one.
    config = configuration(size, k.dtype)

    def score(starts, size):
        return gathered_scores(
            q,
            w,
            k,
            starts,
            lo,
            hi,
            size=size,
            absent=-jnp.inf,
            scales=scales,
            config=config,
            interpret=interpret,
        )

    def singly():
        entries = starts[..., None] + jnp.arange(size)
        entries = jnp.where(starts[..., None] >= 0, entries, -1)
        return score(entries.reshape(*starts.shape[:2], -1), 1)

    if size not in (1, BLOCK, TILE_KEYS):
        return singly()
    if size == 1 or k.dtype != jnp.uint8:
        return score(starts, size)
    if k.shape[1] % 4:
        return singly()
    return (
        score(starts, size)
        if aligned is True
        else lax.cond(aligned, lambda: score(starts, size), singly)
    )


def _few_scores(q, w, keys, lo, hi, interpret):
    """Scores, and maxima of their blocks, where every query goes through all keys by itself."""
    entries = keys[0].shape[1]
    starts = jnp.arange(-(-entries // TILE_KEYS), dtype=jnp.int32) * TILE_KEYS
    used = (starts < hi[..., None]) & (starts + TILE_KEYS > lo[..., None])
    starts = jnp.where(used, starts, -1)
    scores = _listed(q, w, keys, starts, lo, hi, size=TILE_KEYS, interpret=interpret)
    maxima = jnp.where(scores > -jnp.inf, scores, -jnp.inf)
    maxima = maxima.reshape(*scores.shape[:2], -1, BLOCK).max(axis=-1)
    return scores[..., :entries], maxima


def _blocks(hi):
    """Blocks, counted from entry 0, that hold the entries below `hi`."""
    return -(-jnp.maximum(hi, 0) // BLOCK)


def _pool(maxima, lo, hi, blocks: int) -> Pool:
    """The pool from maxima of blocks counted from entry 0, of which every `lo` begins one."""
    newest = jnp.where(hi > lo, (hi - 1) // BLOCK, -1)
    chosen = topk(block_ranks(maxima, newest), blocks, _blocks(hi), order="index")
    return Pool(jnp.where(chosen >= 0, chosen - lo[..., None] // BLOCK, -1), BLOCK)


def _select_in_pool(keys, q, w, lo, hi, blocks, *, top_k, size, interpret):
    starts = jnp.where(blocks >= 0, lo[..., None] + blocks * size, -1)
    aligned = jnp.all((lo % 4 == 0) | (lo >= hi)) if size % 4 == 0 else False
    scores = _listed(
        q,
        w,
        keys,
        starts,
        lo,
        hi,
        size=size,
        aligned=aligned,
        interpret=interpret,
    )
    return _entries(scores, top_k, starts, size)


def _entries(scores, top_k: int, starts, size: int):
    """The best entries of runs that ascend: ascending, -1 at the end."""
    best = topk(scores, top_k, order="index")
    start = jnp.take_along_axis(starts, jnp.maximum(best, 0) // size, axis=-1)
    return jnp.where(best >= 0, start + best % size, -1)
