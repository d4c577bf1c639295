"""The k largest of many scores."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import Implementation, dispatch
from pallas_kernels.topk import reference

IMPLEMENTATIONS = {"xla": reference.topk}

__all__ = ["topk"]


def topk(
    scores: jax.Array,
    k: int,
    lengths: jax.Array | None = None,
    *,
    implementation: Implementation = None,
) -> jax.Array:
    """Indices of the k largest scores of each row, among equals the ones with the lower index.

    -inf and NaN are never selected, so masking is done by writing -inf before. -0.0 and 0.0 are
    equal.

    Args:
        scores: `[..., N]`, float32 or bfloat16; compared in their own precision.
        k: how many; may exceed N.
        lengths: i32 `[...]`: only the first `lengths` scores of a row take part. None: all do.
        implementation: "xla", a sequence of names to be tried in order, or None for the best.

    Returns:
        i32 `[..., k]` in decreasing order of score (increasing index among equals), -1 at the end
        where fewer than k scores can be selected. Not differentiable.

    Raises:
        ValueError: k is negative or lengths does not fit scores.
    """
    if scores.ndim < 1 or not jnp.issubdtype(scores.dtype, jnp.floating):
        raise ValueError(f"scores must be floats [..., N], got {scores.dtype}{list(scores.shape)}")
    if k < 0:
        raise ValueError(f"k must be at least 0, got {k}")
    if lengths is not None and lengths.shape != scores.shape[:-1]:
        raise ValueError(f"lengths must be {list(scores.shape[:-1])}, got {list(lengths.shape)}")
    return dispatch("topk", IMPLEMENTATIONS, implementation, scores, k, lengths)
