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

from pallas_kernels import fp4


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _straight_through(x: jax.Array, fmt: str) -> jax.Array:
    return fp4.fake_quantize(x, fmt)


def _forward(x: jax.Array, fmt: str) -> tuple[jax.Array, None]:
    return fp4.fake_quantize(x, fmt), None


def _backward(fmt: str, _: None, gradient: jax.Array) -> tuple[jax.Array]:
    del fmt
    return (gradient,)


_straight_through.defvjp(_forward, _backward)


def fake_quantize(x: jax.Array, fmt: str) -> jax.Array:
    """Rounds `x` to the values that a cache in format `fmt` can hold.

    Args:
        x: [..., D], any float dtype; blocks run along the last axis.
        fmt: "fp4", "mxfp4" or "fp8" (see `pallas_kernels.fp4`), or "none" for no rounding.

    Returns:
        The rounded values, shape and dtype of `x`. The gradient passes through unchanged.
    """
    return x if fmt == "none" else _straight_through(x, fmt)
