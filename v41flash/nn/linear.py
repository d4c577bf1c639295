"""Bias-free linear maps as einsums over parameters that keep their head and group axes."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp


def contract(spec: str, x: jax.Array, weight: jax.Array) -> jax.Array:
    """`einsum(spec, x, weight)` in the dtype of `x`.

    bfloat16 products accumulate in float32 on accelerators; XLA for the CPU may round partial sums
    of batched ones. float32 inputs are multiplied in full float32 on every backend (accelerators
    would otherwise round them first). A float32 weight of a bfloat16 `x` is rounded for the
    product, but its gradient is not: it comes out of the accumulation in float32.

    Args:
        spec: "x axes,weight axes->result axes", each axis in two of the three.
        x: activations.
        weight: a parameter, in the dtype of `x` or float32.
    """
    if x.dtype == weight.dtype:
        return _einsum(spec, x, weight)
    return _mixed(spec, x, weight)


def _einsum(spec: str, a: jax.Array, b: jax.Array, dtype: jnp.dtype | None = None) -> jax.Array:
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jnp.einsum(spec, a, b, precision=precision, preferred_element_type=dtype)


# The transpose of a product has the dtype of its operands: autodiff of a cast weight would round
# the whole sum over tokens to bfloat16 before it is added to a float32 parameter.
@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _mixed(spec: str, x: jax.Array, weight: jax.Array) -> jax.Array:
    return _einsum(spec, x, weight.astype(x.dtype))


def _forward(spec: str, x: jax.Array, weight: jax.Array) -> tuple[jax.Array, tuple]:
    return _mixed(spec, x, weight), (x, weight)


def _backward(spec: str, residuals: tuple, grad: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, weight = residuals
    operands, out = spec.split("->")
    ours, theirs = operands.split(",")
    grad_x = _einsum(f"{out},{theirs}->{ours}", grad, weight.astype(x.dtype))
    grad_weight = _einsum(f"{ours},{out}->{theirs}", x, grad, jnp.float32)
    return grad_x, grad_weight.astype(weight.dtype)


_mixed.defvjp(_forward, _backward)
