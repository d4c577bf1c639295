"""Group-relative policy optimisation: advantages, and the loss of a packed batch.

With r the reward of a trajectory, A = r - mean(r of its group); with pi the trainer's and q the
sampler's probability of a token, the loss is the mean over all generated tokens of

    -min(pi/q A, clip(pi/q, 1 - clip_low, 1 + clip_high) A) + reference_weight (x - 1 - log x),

x = reference / pi. Every token of a step weighs the same: a mean within each trajectory would pay
for length a second time.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from train import losses
from train.rl.settings import RLSettings
from train.step import Batch, Objective
from v41flash.nn import ced


def advantages(rewards: np.ndarray, *, scale: bool = False) -> np.ndarray:
    """Advantages of groups of trajectories.

    Args:
        rewards: [groups, samples].
        scale: divide by the standard deviation of the group.

    Returns:
        float32 [groups, samples]; 0 where all rewards of a group are equal.
    """
    rewards = np.asarray(rewards, np.float64)
    centred = rewards - rewards.mean(1, keepdims=True)
    if scale:
        centred /= rewards.std(1, keepdims=True) + 1e-6
    return centred.astype(np.float32)


def batch_logprobs(
    params: Any, hidden: jax.Array, batch: Batch, *, allowed: np.ndarray, chunk_tokens: int
) -> jax.Array:
    """f32 [B, T], log-probabilities of the targets among the tokens that may be drawn.

    Args:
        params: of the model.
        hidden: [B, T, d], of it.
        batch: packed trajectories.
        allowed: bool [V], as the sampler has it (`v41flash.serving.sampling.Sampling`).
        chunk_tokens: tokens whose logits exist at once.
    """

    def logits(hidden: jax.Array) -> jax.Array:
        return jnp.where(allowed, ced.logits(params, hidden), -jnp.inf)

    # What is no target is padding or prompt, whose tokens may be ones that are never drawn.
    targets = jnp.where(batch["loss_mask"] > 0, batch["targets"], int(np.argmax(allowed)))
    return losses.target_logprobs(logits, hidden, targets, chunk_tokens=chunk_tokens)


def objective(settings: RLSettings, allowed: np.ndarray, chunk_tokens: int) -> Objective:
    """The loss above of batches from `train.rl.rollout.pack`, for `train.step.make_share`.

    Metrics: policy_loss; gap and max_gap, difference of the log-probabilities of trainer and
    sampler, absolute, in the mean and at most; clipped, share of the tokens without a gradient; and
    reference_kl where there is a reference.
    """
    of_batch = functools.partial(batch_logprobs, allowed=allowed, chunk_tokens=chunk_tokens)
    low, high = 1.0 - settings.clip_low, 1.0 + settings.clip_high

    def loss(
        params: Any, hidden: jax.Array, batch: Batch, totals: Mapping[str, jax.Array]
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        mask, tokens = batch["loss_mask"], totals["targets"]
        ours = of_batch(params, hidden, batch)
        difference = jnp.where(mask > 0, ours - batch["sampled_logprobs"], 0.0)
        ratio = jnp.exp(difference)
        gains = ratio * batch["advantages"]
        kept = jnp.clip(ratio, low, high) * batch["advantages"]
        value = -jnp.sum(jnp.minimum(gains, kept) * mask) / tokens
        away = jnp.abs(difference)
        metrics = {
            "policy_loss": value,
            "gap": jnp.sum(away) / tokens,
            "max_gap": jnp.max(away),
            "clipped": jnp.sum((kept < gains) * mask) / tokens,
        }
        if settings.reference_weight:
            back = jnp.where(mask > 0, batch["reference_logprobs"] - ours, 0.0)
            divergence = jnp.sum((jnp.exp(back) - 1.0 - back) * mask) / tokens
            metrics["reference_kl"] = divergence
            value = value + settings.reference_weight * divergence
        return value, metrics

    return loss
