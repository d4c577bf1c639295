"""Bias-free linear maps as einsums over parameters that keep their head and group axes."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def contract(spec: str, x: jax.Array, weight: jax.Array) -> jax.Array:
    """`einsum(spec, x, weight)` in the dtype of `x`, accumulated in float32.

    float32 inputs are multiplied in full float32 on every backend (accelerators would otherwise
    round them first).
    """
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jnp.einsum(spec, x, weight.astype(x.dtype), precision=precision)
