"""The indexer's loss: KL from the attention's own distribution over entries to the index scores.

Nothing is published for V4.1; this follows DeepSeek-V3.2's sparse-attention training. For each
index source the teacher is the mean, over the layers that use its selection, of the head-summed
probability on compressed entries in the joint softmax, renormalised over those entries; the student
is the softmax of the index scores over the same entries: all visible ones while selection is dense
(the warm-up), the selected ones afterwards. The teacher and the indexer's inputs are detached.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels import indexer as indexer_op
from v41flash.nn.context import Ranges
from v41flash.nn.csa2 import SharedKV
from v41flash.nn.indexer import IndexQuery


def student_scores(
    query: IndexQuery,
    shared: SharedKV,
    visible: Ranges,
    implementation: indexer_op.Implementation,
) -> jax.Array:
    """Index scores on the entries in use, float32 [B, T, K or G], -inf on the others."""
    if shared.indices is None:
        return indexer_op.scores(
            query.q,
            query.weights,
            shared.index_keys,
            visible.lo,
            visible.hi,
            implementation=implementation,
        )
    scores = indexer_op.scores_at(
        query.q, query.weights, shared.index_keys, shared.indices, implementation=implementation
    )
    return jnp.where(shared.indices >= 0, scores, -jnp.inf)


def indexer_kl(mass: jax.Array, scores: jax.Array, valid: jax.Array) -> jax.Array:
    """Mean over the tokens of documents of KL(teacher || student), in nats.

    A query without any entry, as the first of a document can be, counts as 0. So the mean of a
    batch is that of its parts weighted by their tokens.

    Args:
        mass: float32 [B, T, K], unnormalised teacher; 0 where scores are -inf.
        scores: float32 [B, T, K], -inf where there is no entry.
        valid: bool [B, T], False on padding.

    Returns:
        float32 scalar, differentiable in `scores` alone; 0 without any token.
    """
    present = (scores > -jnp.inf) & valid[..., None]
    mass = jnp.where(present, jax.lax.stop_gradient(mass), 0.0)
    total = jnp.sum(mass, axis=-1, keepdims=True)
    teacher = mass / jnp.where(total > 0, total, 1.0)
    # A finite stand-in keeps the gradient of rows without any entry free of NaN.
    student = jax.nn.log_softmax(jnp.where(present, scores, -1e30), axis=-1)
    log_teacher = jnp.log(jnp.where(teacher > 0, teacher, 1.0))
    kl = jnp.sum(jnp.where(present, teacher * (log_teacher - student), 0.0))
    return kl / jnp.maximum(jnp.sum(valid), 1)
