"""Next-token cross entropy, chunked so that the logits of a whole row never exist at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp


class CrossEntropy(NamedTuple):
    """Sums over the tokens that have a target; all f32 scalars."""

    nats: jax.Array
    tokens: jax.Array
    correct: jax.Array


def token_nats(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Negative log-probability of each target, in nats: [..., V], i32[...] -> f32[...]."""
    logits = logits.astype(jnp.float32)
    target = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1) - target


def cross_entropy(
    logits_fn: Callable[[jax.Array], jax.Array],
    hidden_BxTxd: jax.Array,
    targets_BxT: jax.Array,
    mask_BxT: jax.Array,
    *,
    chunk_tokens: int = 2048,
) -> CrossEntropy:
    """Cross entropy of a packed batch from its last hidden states.

    Positions are taken in chunks along T (all rows of the batch at once, so that a batch sharded
    over devices stays where it is). A chunk's logits live only inside that chunk, in the backward
    pass too, where they are computed again.

    Args:
        logits_fn: [B, t, d] -> logits [B, t, V]; may close over parameters.
        hidden_BxTxd: what the model's final norm returns.
        targets_BxT: i32, the next token inside the same document.
        mask_BxT: f32, 0 where there is no target.
        chunk_tokens: upper bound of B * t, unless B alone is larger (then t = 1).

    Returns:
        The sums; the mean loss is nats / tokens.
    """
    split = _splitter(*targets_BxT.shape, chunk_tokens)

    @jax.checkpoint
    def chunk_sums(hidden, targets, mask):
        logits = logits_fn(hidden)
        nats = jnp.sum(token_nats(logits, targets) * mask)
        correct = jnp.sum((jnp.argmax(logits, axis=-1) == targets) * mask)
        return CrossEntropy(nats, jnp.sum(mask), correct)

    def body(total, inputs):
        return jax.tree.map(jnp.add, total, chunk_sums(*inputs)), None

    zero = CrossEntropy(*(jnp.zeros((), jnp.float32) for _ in range(3)))
    inputs = (split(hidden_BxTxd), split(targets_BxT), split(mask_BxT.astype(jnp.float32)))
    total, _ = jax.lax.scan(body, zero, inputs)
    return total


def target_logprobs(
    logits_fn: Callable[[jax.Array], jax.Array],
    hidden_BxTxd: jax.Array,
    targets_BxT: jax.Array,
    *,
    chunk_tokens: int = 2048,
) -> jax.Array:
    """f32[B, T], log-probability of every target; arguments and memory as of `cross_entropy`."""
    batch, length = targets_BxT.shape
    split = _splitter(batch, length, chunk_tokens)

    @jax.checkpoint
    def chunk_logprobs(inputs):
        hidden, targets = inputs
        return -token_nats(logits_fn(hidden), targets)

    chunks = jax.lax.map(chunk_logprobs, (split(hidden_BxTxd), split(targets_BxT)))
    return jnp.moveaxis(chunks, 0, 1).reshape(batch, -1)[:, :length]


def _splitter(batch: int, length: int, chunk_tokens: int) -> Callable[[jax.Array], jax.Array]:
    """[B, T, ...] -> [chunks, B, t, ...], padded with zeros."""
    chunk = max(1, min(length, chunk_tokens // batch))
    chunks = -(-length // chunk)

    def split(array):
        widths = [(0, 0), (0, chunks * chunk - length)] + [(0, 0)] * (array.ndim - 2)
        array = jnp.pad(array, widths)
        array = array.reshape(batch, chunks, chunk, *array.shape[2:])
        return jnp.moveaxis(array, 1, 0)

    return split
