"""The indexer's loss: KL from the attention's own distribution over entries to the index scores.

Nothing is published for V4.1; this follows DeepSeek-V3.2's sparse-attention training. For each
index source it is the mean, over the tokens of documents and over the layers l that use its
selection, of

    KL(p_l || softmax(index scores)) in nats,

where p_l is the head-summed probability that layer l gave to each entry in its joint softmax,
renormalised over the entries, and where both run over the same entries: all visible ones while
selection is dense (the warm-up), the selected ones afterwards. Its gradient is that of
KL(mean_l p_l || softmax). A query without any entry, as the first of a document can be, counts as
0; so the mean of a batch is that of its parts weighted by their tokens. The teacher and the
indexer's inputs are detached.

Over selected entries the student's share is taken once for all layers, from the sum of their
teachers. Over all visible ones nothing of size T x G may exist: each layer takes the whole
divergence, a chunk of queries at a time.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import indexer as indexer_op
from pallas_kernels import sparse_attention as attention_op
from pallas_kernels.chunking import chunk_size, map_queries
from v41flash.kernels import Kernels
from v41flash.nn import ops
from v41flash.nn.context import Ranges
from v41flash.nn.indexer import IndexQuery


class Lesson(NamedTuple):
    """What layers have contributed to the loss of their index source, summed over them.

    Attributes:
        nats: float32 [B, T], sum p log p, from which the student's share is still to be taken; with
            dense selection the whole divergence.
        teacher: float32 [B, T, K], p on the selected entries; None with dense selection.
    """

    nats: jax.Array
    teacher: jax.Array | None


def probabilities(mass: jax.Array) -> jax.Array:
    """Teacher p [..., K] of masses [..., K]: their shares, 0 in a row of zeros."""
    mass = jax.lax.stop_gradient(mass)
    total = jnp.sum(mass, axis=-1, keepdims=True)
    return mass / jnp.where(total > 0, total, 1.0)


def negative_entropy(p: jax.Array) -> jax.Array:
    """sum p log p over the last axis."""
    return jnp.sum(p * jnp.log(jnp.where(p > 0, p, 1.0)), axis=-1)


def cross_entropy(p: jax.Array, scores: jax.Array) -> jax.Array:
    """-sum p log softmax(scores) over the last axis; p is 0 where scores are -inf."""
    # A finite stand-in keeps the gradient of rows without any entry free of NaN.
    log_student = jax.nn.log_softmax(jnp.where(scores > -jnp.inf, scores, -1e30), axis=-1)
    return -jnp.sum(p * log_student, axis=-1)


def teach(
    q: jax.Array,
    lse_with_sink: jax.Array,
    main_rows: jax.Array,
    indices: jax.Array | None,
    query: IndexQuery,
    index_keys: jax.Array,
    visible: Ranges,
    kernels: Kernels,
) -> Lesson:
    """Contribution of one layer.

    Args:
        q: [B, T, H, D] attention queries of the layer.
        lse_with_sink: float32 [B, T, H], logarithm of its softmax denominators.
        main_rows: [B, G, D] entries.
        indices: int32 [B, T, K], the selection; None for all visible entries.
        query: index queries of the source that selected for the layer.
        index_keys: [B, G, Di] of the entries.
        visible: entries visible to each query.
        kernels: implementations to run.

    Returns:
        The `Lesson`, differentiable in `query` and `index_keys` alone.
    """
    q, lse_with_sink, main_rows = jax.lax.stop_gradient((q, lse_with_sink, main_rows))
    if indices is not None:
        mass = ops.selected_mass(q, main_rows, indices, lse_with_sink, kernels.sparse_attention)
        teacher = probabilities(mass)
        return Lesson(negative_entropy(teacher), teacher)

    # Gradients of a key from many chunks add up in float32.
    keys = index_keys.astype(jnp.float32)
    run = functools.partial(_divergence, kernels=kernels)
    queries = (q, lse_with_sink, *query, *visible)
    return Lesson(ops.of_queries(run, queries, (main_rows, keys)), None)


def _divergence(queries: tuple, shared: tuple, *, kernels: Kernels) -> jax.Array:
    """float32 [B, T]: the whole divergence over all visible entries, a chunk of queries at a time.

    Args:
        queries: attention queries, logarithms of their denominators, index queries, head weights,
            and ranges of visible entries.
        shared: entries and index keys.
        kernels: implementations to run.
    """
    main_rows, keys = shared

    def divergence(q, lse_with_sink, index_q, weights, lo, hi):
        mass = attention_op.selected_mass(
            q,
            main_rows,
            None,
            lse_with_sink,
            main_lo=lo,
            main_hi=hi,
            implementation=kernels.sparse_attention,
        )
        scores = indexer_op.scores(index_q, weights, keys, lo, hi, implementation=kernels.indexer)
        teacher = probabilities(mass)
        return negative_entropy(teacher) + cross_entropy(teacher, scores)

    batch, length, heads, _ = queries[0].shape
    largest = 4 * max(heads, queries[2].shape[2]) * main_rows.shape[1]
    return map_queries(divergence, queries, chunk_size(length, batch, largest))


def indexer_kl(
    lesson: Lesson,
    layers: int,
    query: IndexQuery,
    index_keys: jax.Array,
    indices: jax.Array | None,
    valid: jax.Array,
    kernels: Kernels,
) -> jax.Array:
    """Loss of one index source.

    Args:
        lesson: sum of the contributions of the layers that use its selection.
        layers: their number.
        query: index queries of the source.
        index_keys: [B, G, Di] of the entries.
        indices: int32 [B, T, K], the selection; None for all visible entries.
        valid: bool [B, T], False on padding.
        kernels: implementations to run.

    Returns:
        float32 scalar; 0 without any token. Differentiable in `query` and `index_keys` alone.
    """
    nats = lesson.nats
    if lesson.teacher is not None:
        scores = ops.scores_at(*query, index_keys, indices, kernels.indexer)
        scores = jnp.where(indices >= 0, scores, -jnp.inf)
        nats = nats + cross_entropy(lesson.teacher, scores)
    return jnp.sum(jnp.where(valid, nats, 0.0)) / (layers * jnp.maximum(jnp.sum(valid), 1))
