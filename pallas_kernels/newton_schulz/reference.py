"""Newton-Schulz iteration in XLA: direct and Gram form, one code for both."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Literal

import jax
import jax.numpy as jnp

Form = Literal["direct", "gram"]
Coefficients = Sequence[tuple[float, float, float]]

# Eight fast steps, then two that converge (DeepSeek-V4 report, Algorithm 1).
HYBRID = ((3.4445, -4.7750, 2.0315),) * 8 + ((2.0, -1.5, 0.5),) * 2

# How far the product of a^2 may grow within a segment of the Gram form. A step multiplies an
# eigenvalue near 0 by a^2, also one that is rounding and negative; it must stay well below 1.
_GROWTH = {"bfloat16": 2.0**8, "float32": 2.0**18, "float64": 2.0**20}


def segments(
    rows: int,
    columns: int,
    coefficients: Coefficients,
    dtype: jax.typing.DTypeLike,
    form: Form | None,
) -> tuple[int, ...]:
    """Steps between two multiplications of X, in order; all 1 is the direct form."""
    direct = (1,) * len(coefficients)
    if form == "direct":
        return direct
    limit = _GROWTH.get(jnp.dtype(dtype).name, 1.0)
    gram: list[int] = []
    growth = float("inf")
    for a, _, _ in coefficients:
        growth *= a * a
        if growth <= limit:
            gram[-1] += 1
        else:
            gram.append(1)
            growth = a * a
    chosen = tuple(gram)
    if form is None and flops(rows, columns, direct) <= flops(rows, columns, chosen):
        return direct
    return chosen


def flops(rows: int, columns: int, steps: Sequence[int]) -> float:
    """FLOPs for one matrix with segments of so many `steps`, no use made of symmetry."""
    n, m = sorted((rows, columns))
    return float(sum(4 * n * n * m + (8 * s - 6) * n**3 for s in steps))


def newton_schulz(
    x: jax.Array,
    coefficients: Coefficients,
    *,
    eps: float,
    dtype: jax.typing.DTypeLike | None,
    form: Form | None,
    unroll: bool,
) -> jax.Array:
    """See `pallas_kernels.newton_schulz.newton_schulz`."""
    kept = jnp.dtype(x.dtype if dtype is None else dtype)
    rows, columns = x.shape[-2:]
    tall = rows > columns
    accumulate = jnp.promote_types(kept, jnp.float32)

    def contract(spec, left, right):
        return jnp.einsum(
            spec,
            left,
            right,
            precision=jax.lax.Precision.HIGHEST,
            preferred_element_type=accumulate,
        )

    def square(g, h):
        return contract("...ij,...jk->...ik", g, h)

    def gram_of(x):
        return contract("...ki,...kj->...ij" if tall else "...ik,...jk->...ij", x, x).astype(kept)

    def multiply(q, x):
        return contract("...ij,...kj->...ki" if tall else "...ij,...jk->...ik", q, x)

    def plus(a, x, product):
        return (a * x.astype(accumulate) + product).astype(kept)

    def inner(g, a, b, c):
        """B = bG + cG^2; a step is aX + BX."""
        return (b * g.astype(accumulate) + c * square(g, g)).astype(kept)

    def segment(steps, out):
        (a, b, c), *rest = steps
        g = gram_of(out)
        poly = inner(g, a, b, c)
        if not rest:
            return plus(a, out, multiply(poly, out))
        total = plus(a, jnp.eye(g.shape[-1], dtype=kept), poly.astype(accumulate))
        for a_next, b, c in rest:
            half = plus(a, g, square(poly, g))
            g = plus(a, half, square(half, poly))
            a, poly = a_next, inner(g, a_next, b, c)
            total = plus(a, total, square(poly, total))
        return multiply(total, out).astype(kept)

    out = _normalised(x.astype(jnp.promote_types(x.dtype, accumulate)), eps).astype(kept)
    ends = list(itertools.accumulate(segments(rows, columns, coefficients, kept, form)))
    parts = [tuple(coefficients[i:j]) for i, j in itertools.pairwise([0, *ends])]
    if unroll:
        for steps in parts:
            out = segment(steps, out)
        return out.astype(x.dtype)
    for steps, equal in itertools.groupby(parts):
        out = jax.lax.fori_loop(0, len(list(equal)), lambda _, x, s=steps: segment(s, x), out)
    return out.astype(x.dtype)


def _normalised(x: jax.Array, eps: float) -> jax.Array:
    """x / (||x||_F + eps), without squaring numbers that are too small for it."""
    largest = jnp.max(jnp.abs(x), axis=(-2, -1), keepdims=True, initial=0)
    largest = jnp.where(largest == 0, 1.0, largest).astype(x.dtype)
    scaled = x / largest
    norm = largest * jnp.sqrt(jnp.sum(jnp.square(scaled), axis=(-2, -1), keepdims=True))
    return x / (norm + eps)
