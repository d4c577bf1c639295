"""RMSNorm, in float32 whatever the dtype around it."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """`weight * x / sqrt(mean(x^2) + eps)` over the last axis.

    Args:
        x: [..., d].
        weight: [d] float32.
        eps: 1e-20 in this model, so small that an all-zero row must never come with a gradient:
            its backward pass multiplies by 1e10.

    Returns:
        [..., d] in the dtype of `x`; computed in float32.
    """
    x32 = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    return (weight * (x32 * scale)).astype(x.dtype)
