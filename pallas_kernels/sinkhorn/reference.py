"""Sinkhorn balancing in XLA, by row and column scale vectors."""

from __future__ import annotations

import jax
import jax.numpy as jnp

# Squares of float32 entries below 1e-19 underflow. Gradients get there, and nothing has to grow as
# far in the other direction, so norms are taken of entries multiplied by this power of two.
LIFT = 2.0**24


def norms(matrix: jax.Array, axis: int, scales: jax.Array | float = 1.0) -> jax.Array:
    """2-norms of `matrix * scales` along an axis, which is kept with size 1."""
    lifted = matrix * jnp.asarray(scales * LIFT, matrix.dtype)
    return jnp.sqrt(jnp.sum(jnp.square(lifted), axis=axis, keepdims=True)) / LIFT


def row_mask(rho: jax.Array, tau: float) -> jax.Array:
    """True for rows above tau times the mean of rho [..., m, 1]. A mean that is no finite number
    masks nothing, so that what is wrong is seen in every row."""
    mean = jnp.mean(rho, axis=-2, keepdims=True)
    return ~(rho <= tau * mean) | ~jnp.isfinite(mean)


def rescaled(scale: jax.Array, norm: jax.Array, eps: float) -> jax.Array:
    """The scale after a step, in its dtype, from the norms that the step divides by.

    A scale of 0 keeps zeros what they are: 1 / eps, step after step, would overflow. It also keeps
    masked rows out: times the scale of a column they may be infinite. A norm that has overflowed
    gives NaN, not 0.
    """
    divided = jnp.where(norm == jnp.inf, jnp.nan, scale / (norm + eps))
    return jnp.where((norm == 0) | (scale == 0), 0, divided).astype(scale.dtype)


def momentum_step(
    gradient: jax.Array, momentum: jax.Array, beta: float
) -> tuple[jax.Array, jax.Array]:
    """(averaged gradient with Nesterov's look-ahead, new momentum as it is kept)."""
    compute = jnp.promote_types(momentum.dtype, jnp.float32)
    fresh = (1 - beta) * gradient.astype(compute)
    new = (beta * momentum.astype(compute) + fresh).astype(momentum.dtype)
    return (beta * new.astype(compute) + fresh).astype(compute), new


def sinkhorn(
    matrix: jax.Array,
    *,
    tau: float,
    iterations: int,
    eps: float,
    keep: jax.Array | None,
    dtype: jax.typing.DTypeLike | None,
) -> jax.Array:
    """See `pallas_kernels.sinkhorn.sinkhorn`."""
    compute = jnp.promote_types(matrix.dtype, jnp.float32)
    rho = norms(matrix.astype(compute), -1)
    mask = row_mask(rho, tau) if keep is None else keep[..., None]
    kept = matrix.astype(compute if dtype is None else dtype)
    if dtype is not None:
        rho = norms(kept.astype(compute), -1)

    def columns_then_rows(_, scales):
        r, c = scales
        c = rescaled(c, c * norms(kept.astype(compute), -2, r), eps)
        r = rescaled(r, r * norms(kept.astype(compute), -1, c), eps)
        return r, c

    # The first row step needs no pass: a kept row's norm is rho.
    r = rescaled(mask.astype(compute), rho, eps)
    c = jnp.ones_like(kept[..., :1, :], dtype=compute)
    r, c = jax.lax.fori_loop(0, iterations // 2, columns_then_rows, (r, c))
    return kept.astype(compute) * r * (c * matrix.shape[-1] ** 0.5)


def sinkhorn_update(
    gradient: jax.Array,
    momentum: jax.Array,
    *,
    beta: float,
    tau: float,
    iterations: int,
    eps: float,
    dtype: jax.typing.DTypeLike | None,
) -> tuple[jax.Array, jax.Array]:
    """See `pallas_kernels.sinkhorn.sinkhorn_update`."""
    averaged, new = momentum_step(gradient, momentum, beta)
    update = sinkhorn(averaged, tau=tau, iterations=iterations, eps=eps, keep=None, dtype=dtype)
    return update, new
