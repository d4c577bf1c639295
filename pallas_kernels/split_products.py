"""Products of bfloat16 activations with float32 weights, in float32.

GPUs multiply float32 on their ordinary units, at a twentieth of the rate of bfloat16 on tensor
cores. A float32 number is the sum of three bfloat16 ones, and products of two bfloat16 numbers are
exact in float32: three bfloat16 products, added up in float32, give what one float32 product gives.
That holds for numbers between 2^-100 and 2^127; below, low parts vanish, and what is infinite comes
out as NaN.
"""

from __future__ import annotations

import functools
import math
import string

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.chunking import devices, platform

# Rows of x below which reading the weights takes longer than multiplying, in parts three times as
# long: a decoding step of one sequence took 11.8 ms with all products split, 9.8 with none; one of
# 56 sequences 9 ms less with all split (H200, two calls each). Nothing between was timed.
_FEW_ROWS = 32


def einsum(spec: str, x: jax.Array, w: jax.Array) -> jax.Array:
    """`jnp.einsum(spec, x, w)` in float32, nothing rounded before it is multiplied.

    Args:
        spec: "x axes,w axes->result axes", each axis in two of the three, in small letters;
            those of x and the result may begin with "...".
        x: bfloat16 or float32. On a GPU bfloat16 is several times as fast, except for few rows.
        w: bfloat16 or float32.

    Returns:
        float32. Gradients, in reverse mode, have the dtypes of x and w; before they are rounded to
        them they are exact to float32, and that of a bfloat16 x on a GPU to 2^-16.
    """
    ours, theirs = spec.split("->")[0].split(",")
    inner = math.prod(size for axis, size in zip(theirs, w.shape, strict=True) if axis in ours)
    if x.dtype == jnp.bfloat16 and platform() == "gpu" and x.size >= _FEW_ROWS * inner:
        # Transposes cannot leave out the axes that an ellipsis stands for.
        leading = string.ascii_uppercase[: x.ndim - len(ours.removeprefix("..."))]
        spec = spec.replace("...", leading)
        parts = 1 if w.dtype == jnp.bfloat16 else 3
        return _split(spec, parts, x.astype(jnp.float32), w.astype(jnp.float32))
    x, w = x.astype(jnp.float32), w.astype(jnp.float32)
    return jnp.einsum(spec, x, w, precision=lax.Precision.HIGHEST)


def bfloat16_parts(x: jax.Array, count: int) -> list[jax.Array]:
    """bfloat16 arrays whose sum is the float32 `x` to 8 bits each, the largest first."""
    parts, rest = [], x
    for _ in range(count):
        # Compilers take a cast there and back for nothing.
        part = lax.reduce_precision(rest, exponent_bits=8, mantissa_bits=7)
        parts.append(part.astype(jnp.bfloat16))
        rest = rest - part
    return parts


def _sum(spec: str, *pairs: tuple[jax.Array, jax.Array]) -> jax.Array:
    """The sum of the pairs' products.

    Where the result is larger than their left operands, it is written once, the pairs being one
    more axis to sum over; so it is where the compiler spreads the product over devices, which
    exchange it. Otherwise it is written for each pair, and a left operand that all have in common
    is read once.
    """
    left, right = zip(*pairs, strict=True)
    operands, out = spec.split("->")
    ours, theirs = operands.split(",")
    sizes = dict(zip(ours + theirs, left[0].shape + right[0].shape, strict=True))
    product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    larger = math.prod(sizes[axis] for axis in out) > left[0].size
    # No letter of a caller, nor of an ellipsis as short as they are.
    if larger or devices() > 1:
        return product(f"Z{ours},Z{theirs}->{out}", jnp.stack(left), jnp.stack(right))
    if all(one is left[0] for one in left):
        return product(f"{ours},Z{theirs}->Z{out}", left[0], jnp.stack(right)).sum(axis=0)
    return functools.reduce(jnp.add, [product(spec, *pair) for pair in reversed(pairs)])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _split(spec: str, parts: int, x: jax.Array, w: jax.Array) -> jax.Array:
    """`einsum` of float32 arrays: `x` holds numbers of bfloat16, `w` sums of so many of them."""
    x = x.astype(jnp.bfloat16)
    return _sum(spec, *((x, part) for part in bfloat16_parts(w, parts)))


def _forward(spec: str, parts: int, x: jax.Array, w: jax.Array) -> tuple[jax.Array, tuple]:
    return _split(spec, parts, x, w), (x.astype(jnp.bfloat16), w)


def _backward(
    spec: str, parts: int, residuals: tuple, grad: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x, w = residuals
    operands, out = spec.split("->")
    ours, theirs = operands.split(",")
    high, middle, low = bfloat16_parts(grad, 3)
    w_high, *w_rest = bfloat16_parts(w, min(parts, 2))
    pairs = (high, w_high), *((high, part) for part in w_rest), (middle, w_high)
    grad_x = _sum(f"{out},{theirs}->{ours}", *pairs)
    grad_w = _sum(f"{ours},{out}->{theirs}", (x, high), (x, middle), (x, low))
    return grad_x, grad_w


_split.defvjp(_forward, _backward)
