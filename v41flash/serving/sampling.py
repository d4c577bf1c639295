"""Drawing tokens on the device: temperature, top-k, top-p, greedy, one seed per sequence.

The draw for a position depends on the sequence's seed, that position and its logits alone, so a
batch's other members, chunks of decoding and restarts do not change it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from v41flash.errors import InputError


class Sampling(NamedTuple):
    """How each sequence draws.

    Attributes:
        temperature: float32 [B]; 0 takes the likeliest token.
        top_p: float32 [B] in (0, 1]: of the tempered distribution, the fewest likeliest tokens that
            hold this much probability.
        top_k: int32 [B]: only the k likeliest tokens; 0 for all.
        seed: uint32 [B].
        allowed: bool [V], tokens that may be drawn at all.
    """

    temperature: jax.Array
    top_p: jax.Array
    top_k: jax.Array
    seed: jax.Array
    allowed: jax.Array

    @classmethod
    def create(
        cls,
        batch: int,
        allowed: np.ndarray,
        *,
        temperature: float | Sequence[float] = 1.0,
        top_p: float | Sequence[float] = 1.0,
        top_k: int | Sequence[int] = 0,
        seed: int | Sequence[int] = 0,
    ) -> Sampling:
        """Checked settings of `batch` sequences: one value for all, or one each.

        With one seed for all, sequence b draws from seed + b.

        Raises:
            InputError: a value out of range, or as many values as there are not sequences.
        """
        if np.ndim(seed) == 0:
            seed = [int(seed) + b for b in range(batch)]
        values = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "seed": seed}
        for name, value in values.items():
            if np.ndim(value) and len(value) != batch:
                raise InputError(f"{name}: {len(value)} values for {batch} sequences")
            values[name] = np.broadcast_to(np.asarray(value), (batch,))
        rules = {
            "temperature": (lambda x: (x >= 0) & np.isfinite(x), "a finite number, at least 0"),
            "top_p": (lambda x: (x > 0) & (x <= 1), "above 0 and at most 1"),
            "top_k": (lambda x: x >= 0, "at least 0 (0: all tokens)"),
            "seed": (lambda x: (x >= 0) & (x < 2**32), "between 0 and 2^32 - 1"),
        }
        for name, (right, wanted) in rules.items():
            for value in values[name][~right(values[name])]:
                raise InputError(f"{name} = {value}: must be {wanted}")
        return cls(
            jnp.asarray(values["temperature"], jnp.float32),
            jnp.asarray(values["top_p"], jnp.float32),
            jnp.asarray(values["top_k"], jnp.int32),
            jnp.asarray(values["seed"].astype(np.uint32)),
            jnp.asarray(allowed, bool),
        )


class Draw(NamedTuple):
    """One token of each sequence.

    Attributes:
        tokens: int32 [B].
        logprobs: float32 [B], log-probability under the model's own distribution over the allowed
            tokens: temperature 1, nothing cut off.
        top_tokens: int32 [B, n], the n likeliest under that distribution.
        top_logprobs: float32 [B, n].
    """

    tokens: jax.Array
    logprobs: jax.Array
    top_tokens: jax.Array
    top_logprobs: jax.Array


def masked_logits(logits: jax.Array, sampling: Sampling) -> jax.Array:
    """Logits [B, V] of the distributions that are drawn from: tempered, cut to top-k and top-p.

    -inf is what cannot be drawn. Where the temperature is 0 nothing but the likeliest token is
    left. Tokens as likely as the last one kept are kept too.
    """
    logits = jnp.where(sampling.allowed, logits, -jnp.inf)
    greedy = sampling.temperature == 0
    tempered = logits / jnp.where(greedy, 1.0, sampling.temperature)[:, None]
    size = logits.shape[-1]
    top_k = jnp.where(sampling.top_k > 0, sampling.top_k, size)
    top_k = jnp.where(greedy, 1, jnp.minimum(top_k, size))

    def cut(tempered: jax.Array) -> jax.Array:
        ordered = jnp.sort(tempered, axis=-1, descending=True)
        share = jax.nn.softmax(ordered, axis=-1)
        before = jnp.cumsum(share, axis=-1) - share
        # At least one token; rounding may leave the whole sum a little below top_p.
        kept = jnp.sum(before < sampling.top_p[:, None], axis=-1)
        kept = jnp.where(sampling.top_p < 1, kept, size)
        kept = jnp.clip(jnp.minimum(kept, top_k), 1, size)
        least = jnp.take_along_axis(ordered, kept[:, None] - 1, axis=-1)
        return jnp.where(tempered >= least, tempered, -jnp.inf)

    needed = jnp.any((sampling.top_p < 1) | (top_k < size))
    return jax.lax.cond(needed, cut, lambda x: x, tempered)


def draw(logits: jax.Array, sampling: Sampling, positions: jax.Array, top: int = 0) -> Draw:
    """Draws the token at `positions` int32 [B] from float32 logits [B, V].

    Args:
        logits: of the model.
        sampling: how.
        positions: of the tokens to be drawn.
        top: how many likeliest tokens to report.
    """

    def noise(seed: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.key(seed), position)
        return jax.random.gumbel(key, logits.shape[-1:], jnp.float32)

    scores = masked_logits(logits, sampling)
    gumbel = jax.vmap(noise)(sampling.seed, positions)
    gumbel = jnp.where((sampling.temperature == 0)[:, None], 0.0, gumbel)
    tokens = jnp.argmax(scores + gumbel, axis=-1).astype(jnp.int32)
    own = jax.nn.log_softmax(jnp.where(sampling.allowed, logits, -jnp.inf), axis=-1)
    logprobs = jnp.take_along_axis(own, tokens[:, None], axis=-1)[:, 0]
    top_logprobs, top_tokens = jax.lax.top_k(own, top)
    return Draw(tokens, logprobs, top_tokens.astype(jnp.int32), top_logprobs)
