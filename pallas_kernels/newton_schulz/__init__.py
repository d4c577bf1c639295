"""Orthogonalisation of matrices by Newton-Schulz iteration."""

from __future__ import annotations

from collections.abc import Sequence

import jax

from pallas_kernels.dispatch import Implementation, dispatch
from pallas_kernels.newton_schulz import reference
from pallas_kernels.newton_schulz.reference import HYBRID, Form

__all__ = ["HYBRID", "IMPLEMENTATIONS", "check_steps", "newton_schulz"]

IMPLEMENTATIONS = {"xla": reference.newton_schulz}


def newton_schulz(
    x: jax.Array,
    coefficients: Sequence[tuple[float, float, float]] = HYBRID,
    *,
    eps: float = 1e-20,
    dtype: jax.typing.DTypeLike | None = None,
    form: Form | None = None,
    unroll: bool = False,
    implementation: Implementation = None,
) -> jax.Array:
    r"""Brings the singular values of every matrix of a batch close to 1.

    With X_0 = X / (||X||_F + eps) and one triple (a, b, c) per step,

    .. math:: X_{k+1} = a X_k + b (X_k X_k^T) X_k + c (X_k X_k^T)^2 X_k .

    The default is DeepSeek-V4's hybrid schedule: eight steps that grow small singular values by
    3.44 each and leave large ones scattered between about 0.7 and 1.2, then two that contract them
    to 1. A singular value above about 1e-5 of the Frobenius norm ends within 2e-3 of 1, smaller
    ones end between 0 and 1. A matrix of zeros stays one.

    Two forms compute the same, n being the smaller side and m the larger:

    * "direct" iterates on X: 4 n^2 m + 2 n^3 FLOPs a step.
    * "gram" iterates on the n x n matrix X X^T and multiplies X once per segment of s steps:
      4 n^2 m + (8 s - 6) n^3 FLOPs a segment. Rounding of X X^T may make an eigenvalue that should
      be 0 negative, and a step multiplies it by a^2; X is therefore multiplied, and its Gram matrix
      computed anew, before the product of a^2 reaches 2^8 in bfloat16 (every second step of the
      default) and 2^18 in float32 (every fifth).

    `form=None` takes the one of fewer FLOPs for the dtype: gram for m > 1.5 n.

    Errors against float64 (held by a test, for both forms), as spectral norms of the difference:
    float32 at most 2e-3 for any spectrum, 1e-5 for a random normal matrix; bfloat16 at most 0.05
    where the smallest singular value is above 1 % of the Frobenius norm. Smaller ones drown in the
    rounding of bfloat16 in both forms: those directions get a value between 0 and 1.05 that means
    little.

    Args:
        x: float[..., rows, columns], in any orientation; leading axes are a batch.
        coefficients: (a, b, c) of every step; at least one.
        eps: added to the Frobenius norm, which is taken in float32 (float64 for float64) and does
            not underflow for small entries.
        dtype: of the products' operands: bfloat16, float32 (float32 products are not rounded to
            TF32) or float64; accumulation is in float32 at least. None: the dtype of x.
        form: "direct", "gram", or None for the cheaper.
        unroll: every step by itself. Otherwise equal ones are a loop, which is compiled once; but
            where the compiler spreads a batch over a mesh, it may lay it out anew in a loop.
        implementation: see `pallas_kernels.dispatch`.

    Returns:
        An array like x, in the dtype of x.

    Raises:
        ValueError: x has fewer than two axes, no coefficients, or an unknown form.
    """
    if x.ndim < 2:
        raise ValueError(f"newton_schulz needs matrices [..., rows, columns], got shape {x.shape}")
    return dispatch(
        "newton_schulz",
        IMPLEMENTATIONS,
        implementation,
        x,
        check_steps(coefficients, form),
        eps=eps,
        dtype=dtype,
        form=form,
        unroll=unroll,
    )


def check_steps(
    coefficients: Sequence[tuple[float, float, float]], form: str | None
) -> tuple[tuple[float, float, float], ...]:
    """The coefficients as tuples.

    Raises:
        ValueError: none, not triples of numbers, or an unknown form.
    """
    try:
        steps = tuple((float(a), float(b), float(c)) for a, b, c in coefficients)
    except (TypeError, ValueError):
        steps = ()
    if not steps:
        raise ValueError(f"coefficients must be triples (a, b, c), got {coefficients}")
    if form not in (None, "direct", "gram"):
        raise ValueError(f"form must be 'direct', 'gram' or None, got {form!r}")
    return steps
