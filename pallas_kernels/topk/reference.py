"""Top-k of masked scores in XLA: the definition, and what runs where there is no kernel."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def topk(scores, k, lengths=None, *, order="score"):
    """See `pallas_kernels.topk.topk`."""
    size = scores.shape[-1]
    if lengths is not None:
        inside = jnp.arange(size, dtype=jnp.int32) < lengths[..., None]
        scores = jnp.where(inside, scores, -jnp.inf)
    # A comparison with NaN is false, so NaN goes the way of -inf instead of to the top.
    scores = jnp.where(scores > -jnp.inf, scores, -jnp.inf)
    # The order of XLA's top_k tells -0.0 from 0.0, and sums of weighted ReLUs give both.
    scores = jnp.where(scores == 0, 0.0, scores)
    # XLA's top_k puts the lower index first among equals.
    values, indices = jax.lax.top_k(scores, min(k, size))
    indices = jnp.where(values > -jnp.inf, indices.astype(jnp.int32), -1)
    if order == "index":
        last = jnp.iinfo(jnp.int32).max
        indices = jnp.sort(jnp.where(indices >= 0, indices, last), axis=-1)
        indices = jnp.where(indices < last, indices, -1)
    missing = [(0, 0)] * (indices.ndim - 1) + [(0, k - indices.shape[-1])]
    return jnp.pad(indices, missing, constant_values=-1)


def topk_blocks(scores, k, block, lengths=None):
    """See `pallas_kernels.topk.topk_blocks`."""
    size = scores.shape[-1]
    if lengths is not None:
        inside = jnp.arange(size, dtype=jnp.int32) < lengths[..., None]
        scores = jnp.where(inside, scores, -jnp.inf)
    scores = jnp.where(scores > -jnp.inf, scores, -jnp.inf)
    missing = [(0, 0)] * (scores.ndim - 1) + [(0, -size % block)]
    scores = jnp.pad(scores, missing, constant_values=-jnp.inf)
    best = scores.reshape(*scores.shape[:-1], scores.shape[-1] // block, block).max(axis=-1)
    return topk(best, k, order="index")
