"""Fake quantisation of the cached values, with straight-through gradients.

What is quantised, and when, is decided by three fields of `ModelConfig`: `main_kv_format`
(compressed entries after RoPE), `window_kv_format` (sliding-window entries after RoPE) and
`index_format` (indexer queries and keys after RoPE). The formats themselves are defined in
`pallas_kernels.fp4`. Rounding is part of the forward pass of the model, whatever the dtype of the
weights.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from pallas_kernels import fp4
from pallas_kernels.dispatch import Implementation
from v41flash.sharding import on_shards

# The largest value of a format: that of an element times that of a scale. A power-of-two scale has
# no such limit in practice; there, that of an element.
LARGEST = {"fp4": 6.0 * 448.0, "mxfp4": 6.0, "fp8": 448.0}


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _straight_through(x: jax.Array, fmt: str, implementation: Implementation) -> jax.Array:
    def local(axes: dict[str, tuple[str, ...]], x: jax.Array) -> jax.Array:
        del axes
        return fp4.fake_quantize(x, fmt, implementation=implementation)

    names = ("batch", "queries")[: x.ndim - 1]
    names += (None,) * (x.ndim - len(names))
    return on_shards(local, (names,), list(names))(x)


def _forward(x: jax.Array, fmt: str, implementation: Implementation) -> tuple[jax.Array, None]:
    return _straight_through(x, fmt, implementation), None


def _backward(
    fmt: str, implementation: Implementation, _: None, gradient: jax.Array
) -> tuple[jax.Array]:
    del fmt, implementation
    return (gradient,)


_straight_through.defvjp(_forward, _backward)


def fake_quantize(x: jax.Array, fmt: str, implementation: Implementation = None) -> jax.Array:
    """Rounds `x` to the values that a cache in format `fmt` can hold.

    Args:
        x: [..., D], any float dtype; blocks run along the last axis. On a mesh the first two axes
            are taken to be rows of a batch and tokens.
        fmt: "fp4", "mxfp4" or "fp8" (see `pallas_kernels.fp4`), or "none" for no rounding.
        implementation: of `pallas_kernels.fp4`: a name, a tuple of names, or None.

    Returns:
        The rounded values, shape and dtype of `x`. The gradient passes through unchanged.
    """
    return x if fmt == "none" else _straight_through(x, fmt, implementation)


def fake_quantize_scaled(
    x: jax.Array, fmt: str, implementation: Implementation = None
) -> jax.Array:
    """`fake_quantize` under a scale of the tensor, which puts the largest |x| at the largest value.

    The published cache needs none, its values being bounded. Arguments and result as for
    `fake_quantize`; the scale gets no gradient.
    """
    if fmt == "none":
        return x
    largest = jnp.max(jnp.abs(jax.lax.stop_gradient(x)).astype(jnp.float32))
    scale = jnp.maximum(largest, jnp.finfo(jnp.float32).tiny) / LARGEST[fmt]
    scaled = x.astype(jnp.float32) / scale
    return (_straight_through(scaled, fmt, implementation) * scale).astype(x.dtype)
