"""Sinkhorn balancing of a matrix: unit row and column norms by diagonal scalings."""

from __future__ import annotations

import jax

from pallas_kernels.dispatch import Implementation, dispatch
from pallas_kernels.sinkhorn import mosaic_tpu, reference

__all__ = ["IMPLEMENTATIONS", "UPDATE_IMPLEMENTATIONS", "sinkhorn", "sinkhorn_update"]

IMPLEMENTATIONS = {"mosaic_tpu": mosaic_tpu.sinkhorn, "xla": reference.sinkhorn}
UPDATE_IMPLEMENTATIONS = {
    "mosaic_tpu": mosaic_tpu.sinkhorn_update,
    "xla": reference.sinkhorn_update,
}


def sinkhorn(
    matrix: jax.Array,
    *,
    tau: float = 1e-3,
    iterations: int = 11,
    eps: float = 1e-20,
    keep: jax.Array | None = None,
    dtype: jax.typing.DTypeLike | None = None,
    implementation: Implementation = None,
) -> jax.Array:
    r"""Balances a matrix G [m, n] so that its rows, and nearly its columns, have RMS 1.

    Rows with :math:`\rho_i = \|G_i\|_2 \le \tau \, \mathrm{mean}_i(\rho)` (the mean over all rows,
    zeros included) become 0. Then `iterations` normalisations alternate, odd ones of rows and even
    ones of columns, the first and the last of rows:

    .. math:: U_i \leftarrow U_i / (\|U_i\|_2 + \epsilon), \qquad
        U_{\cdot j} \leftarrow U_{\cdot j} / (\|U_{\cdot j}\|_2 + \epsilon),

    and the result is :math:`\sqrt{n}\,U`. Two vectors are all that changes on the way: U stays
    :math:`\mathrm{diag}(r)\, G\, \mathrm{diag}(c)` and is not written in between. Passes over the
    matrix: iterations + 1 reads and one write. A row or column of zeros stays one.

    Row RMS is 1 up to rounding. Column RMS over the kept rows converges at the rate of Sinkhorn's
    iteration: 1 +- 1e-3 after 11 steps for dense rows. Entries of float32 matrices may lie between
    1e-26 and 1e10; smaller ones may count as 0, larger ones may give NaN everywhere, as NaN and inf
    do.

    Args:
        matrix: float[..., m, n]; leading axes are a batch, every matrix on its own.
        tau: threshold of the row mask; 0 masks rows of zeros only.
        iterations: K, odd.
        eps: added to every norm.
        keep: bool[..., m] in place of the mask above. None: computed from tau.
        dtype: of the matrix between the passes: float32 (None: at least that), or bfloat16 for half
            the traffic and relative errors of 2^-9. Norms and scales are float32 or float64.
        implementation: see `pallas_kernels.dispatch`.

    Returns:
        float32[..., m, n] (float64 for float64).

    Raises:
        ValueError: fewer than two axes, an even or non-positive number of iterations, or a `keep`
            of another shape.
    """
    _check(matrix, iterations)
    if keep is not None and keep.shape != matrix.shape[:-1]:
        raise ValueError(f"keep must be {list(matrix.shape[:-1])}, got {list(keep.shape)}")
    return dispatch(
        "sinkhorn",
        IMPLEMENTATIONS,
        implementation,
        matrix,
        tau=tau,
        iterations=iterations,
        eps=eps,
        keep=keep,
        dtype=dtype,
    )


def sinkhorn_update(
    gradient: jax.Array,
    momentum: jax.Array,
    *,
    beta: float = 0.95,
    tau: float = 1e-3,
    iterations: int = 11,
    eps: float = 1e-20,
    dtype: jax.typing.DTypeLike | None = None,
    implementation: Implementation = None,
) -> tuple[jax.Array, jax.Array]:
    r"""The Sinkhorn-balanced update (V4.1 report, Algorithm 1): momentum, then `sinkhorn`.

    .. math:: M' = \beta M + (1-\beta) G, \qquad \hat G = \beta M' + (1-\beta) G .

    Args:
        gradient: float[..., m, n].
        momentum: float[..., m, n], in the dtype that it is kept in.
        beta: decay of the momentum.
        tau: as in `sinkhorn`.
        iterations: as in `sinkhorn`.
        eps: as in `sinkhorn`.
        dtype: as in `sinkhorn`.
        implementation: see `pallas_kernels.dispatch`.

    Returns:
        (update, new momentum): the balanced :math:`\hat G`, float32 or float64, and M' in the
        momentum's dtype. Where that is bfloat16, :math:`\hat G` is made from the rounded M'.

    Raises:
        ValueError: as `sinkhorn`, or shapes that differ.
    """
    _check(gradient, iterations)
    if gradient.shape != momentum.shape:
        raise ValueError(f"gradient {gradient.shape} and momentum {momentum.shape} differ in shape")
    return dispatch(
        "sinkhorn_update",
        UPDATE_IMPLEMENTATIONS,
        implementation,
        gradient,
        momentum,
        beta=beta,
        tau=tau,
        iterations=iterations,
        eps=eps,
        dtype=dtype,
    )


def _check(matrix: jax.Array, iterations: int) -> None:
    if matrix.ndim < 2:
        raise ValueError(f"sinkhorn needs matrices [..., m, n], got shape {matrix.shape}")
    check_iterations(iterations)


def check_iterations(iterations: int) -> None:
    """Raises ValueError for a number of steps that is not odd and positive."""
    whole = isinstance(iterations, int) and not isinstance(iterations, bool)
    if not whole or iterations < 1 or iterations % 2 == 0:
        raise ValueError(
            f"iterations must be odd (the first and the last step are rows), got {iterations}"
        )
