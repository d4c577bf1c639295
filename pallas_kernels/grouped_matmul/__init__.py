"""Matmul of rows sorted by expert with their expert's weight: the mixture-of-experts product."""

from __future__ import annotations

import jax

from pallas_kernels.dispatch import Implementation, dispatch
from pallas_kernels.grouped_matmul import mosaic_gpu, mosaic_tpu, reference

__all__ = ["IMPLEMENTATIONS", "grouped_matmul"]

IMPLEMENTATIONS = {
    "mosaic_gpu": mosaic_gpu.grouped_matmul,
    "mosaic_tpu": mosaic_tpu.grouped_matmul,
    "xla": reference.grouped_matmul,
}


def grouped_matmul(
    x: jax.Array,
    w: jax.Array,
    group_sizes: jax.Array,
    scales: jax.Array | None = None,
    *,
    implementation: Implementation = None,
) -> jax.Array:
    """y[r] = x[r] @ w[e] for the e whose group holds row r.

    The first group_sizes[0] rows belong to expert 0, the next group_sizes[1] to expert 1, and on.
    Exact and dropless for any sizes, empty groups and one group of everything included.
    Differentiable in x and w; accumulates in fp32. The gradient of an fp32 weight is that sum over
    rows, unrounded, whatever the dtype of x.

    Args:
        x: float[M, K], rows sorted by expert.
        w: [E, K, N], of the same dtype or fp32 (then rounded to the dtype of x for the product).
        group_sizes: int32[E], not negative, of sum at most M (not checked: they are traced values).
        scales: of packed weights: then w is uint8[E, N, K/2] in the format "mxfp4" of
            `pallas_kernels.fp4` along K, and scales uint8[E, N, K/32]. An expert is dequantised, to
            the dtype of x, when its rows are multiplied; there is no gradient for it.
        implementation: see `pallas_kernels.dispatch`.

    Returns:
        [M, N] in the dtype of x. Rows beyond sum(group_sizes) are 0 and get no gradient.

    Raises:
        ValueError: shapes or dtypes that do not fit each other.
    """
    packed = () if scales is None else (scales,)
    return dispatch("grouped_matmul", IMPLEMENTATIONS, implementation, x, w, group_sizes, *packed)
