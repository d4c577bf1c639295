"""Manifold-constrained hyper-connections in XLA, V4.1 report section on single-pass mHC.

Coefficients are computed with the tokens on the last axis: n = 4 is far too short to vectorise, and
40 normalisations of a [4, 4] matrix a token are nothing but overhead otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import split_products
from pallas_kernels.rms_norm import rms_norm


class Coefficients(NamedTuple):
    """Mixing weights of one sublayer, fp32.

    Attributes:
        pre: [..., n], what the next read takes of each stream.
        post: [..., n], what the write gives each stream of the sublayer's output.
        comb: [..., n, n]; comb[..., j, k] moves old stream j into new stream k.
    """

    pre: jax.Array
    post: jax.Array
    comb: jax.Array


def check_streams(streams: jax.Array, fn: jax.Array, base: jax.Array, scale: jax.Array) -> None:
    """ValueError unless the projection's shapes fit the streams'."""
    n, d = streams.shape[-2:]
    rows = (2 + n) * n
    for name, array, shape in (
        ("fn", fn, (rows, n * d)),
        ("base", base, (rows,)),
        ("scale", scale, (3,)),
    ):
        if array.shape != shape:
            raise ValueError(
                f"mhc: {name} has shape {array.shape}; {n} streams of {d} channels need {shape}"
            )


# Measured on two CPU cores, n=4, 2048 tokens, 20 sweeps, forward / forward + backward in ms:
# [T,4,4] unrolled 1.9 / 8.0, [T,4,4] scan 2.7 / 5.7, [4,4,T] unrolled 0.35 / 7.5, [4,4,T] scan
# 0.37 / 1.7 (2.0 when the scan's residuals are stored, not recomputed), 16 separate [T] vectors
# 0.33 / 10.5, diagonal scaling vectors 0.2 / 3.4.
def sinkhorn(logits_NxNxT: jax.Array, sweeps: int, eps: float) -> jax.Array:
    """Softmax over the second axis, then `sweeps` column and `sweeps - 1` row normalisations."""

    def columns(comb: jax.Array) -> jax.Array:
        return comb / (comb.sum(axis=0, keepdims=True) + eps)

    def sweep(comb: jax.Array, _: None) -> tuple[jax.Array, None]:
        comb = comb / (comb.sum(axis=1, keepdims=True) + eps)
        return columns(comb), None

    def balance(logits: jax.Array) -> jax.Array:
        comb = columns(jax.nn.softmax(logits, axis=1) + eps)
        return lax.scan(sweep, comb, None, length=sweeps - 1)[0]

    # Without the checkpoint every sublayer would keep 40 matrices a token for its backward pass.
    return jax.checkpoint(balance)(logits_NxNxT)


def coefficients_from_projection(
    mixes_KxT: jax.Array,
    base: jax.Array,
    scale: jax.Array,
    *,
    sinkhorn_iters: int,
    eps: float,
    balance: Callable[[jax.Array, int, float], jax.Array],
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(pre[n,T], post[n,T], comb[n,n,T]) of the normalised projection, rows [pre | post | comb]."""
    n = round((mixes_KxT.shape[0] + 1) ** 0.5) - 1
    base = base.astype(jnp.float32)[:, None]
    scale = scale.astype(jnp.float32)
    mixes = mixes_KxT.astype(jnp.float32)
    pre = jax.nn.sigmoid(mixes[:n] * scale[0] + base[:n]) + eps
    post = 2 * jax.nn.sigmoid(mixes[n : 2 * n] * scale[1] + base[n : 2 * n])
    logits = (mixes[2 * n :] * scale[2] + base[2 * n :]).reshape(n, n, -1)
    return pre, post, balance(logits, sinkhorn_iters, eps)


def coefficients(
    streams: jax.Array,
    fn: jax.Array,
    base: jax.Array,
    scale: jax.Array,
    *,
    sinkhorn_iters: int = 20,
    eps: float = 1e-6,
    norm_eps: float = 1e-20,
    balance: Callable[[jax.Array, int, float], jax.Array] = sinkhorn,
) -> Coefficients:
    """XLA definition of `mhc.coefficients`; `balance` computes what `sinkhorn` does."""
    check_streams(streams, fn, base, scale)
    if sinkhorn_iters < 1:
        raise ValueError(f"mhc: sinkhorn_iters is {sinkhorn_iters}; must be at least 1")
    *lead, n, d = streams.shape
    rows = streams.reshape(-1, n * d)
    product_KxT = split_products.einsum("tc,kc->kt", rows, fn)
    z_TxC = rows.astype(jnp.float32)
    return normalised_coefficients(
        product_KxT,
        jnp.mean(z_TxC * z_TxC, axis=-1),
        base,
        scale,
        tuple(lead),
        sinkhorn_iters=sinkhorn_iters,
        eps=eps,
        norm_eps=norm_eps,
        balance=balance,
    )


def normalised_coefficients(
    product_KxT: jax.Array,
    mean_squares_T: jax.Array,
    base: jax.Array,
    scale: jax.Array,
    lead: tuple[int, ...],
    *,
    norm_eps: float,
    **keywords: Any,
) -> Coefficients:
    """Coefficients of tokens of shape `lead` from fn z and mean(z^2).

    `keywords` are those of `coefficients_from_projection`.
    """
    mixes_KxT = product_KxT * lax.rsqrt(mean_squares_T + norm_eps)
    pre, post, comb = coefficients_from_projection(mixes_KxT, base, scale, **keywords)
    n = pre.shape[0]
    return Coefficients(
        pre=pre.T.reshape(*lead, n),
        post=post.T.reshape(*lead, n),
        comb=jnp.moveaxis(comb, -1, 0).reshape(*lead, n, n),
    )


def _combine_by_sums(weights: jax.Array, rows: jax.Array) -> jax.Array:
    weights = weights.astype(jnp.float32)[..., None]
    rows = rows.astype(jnp.float32)
    result = weights[..., 0, :, :] * rows[..., 0, None, :]
    for j in range(1, rows.shape[-2]):
        result = result + weights[..., j, :, :] * rows[..., j, None, :]
    return result


def _combine_by_matmul(weights: jax.Array, rows: jax.Array) -> jax.Array:
    batch = tuple(range(rows.ndim - 2))
    return lax.dot_general(
        weights.astype(jnp.float32),
        rows.astype(jnp.float32),
        (((weights.ndim - 2,), (rows.ndim - 2,)), (batch, batch)),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )


# Matmul units do so short a contraction badly, so elsewhere it is n elementwise sums. The CPU
# compiler however fuses those sums into every consumer, so that one sublayer's streams are computed
# again in the next, and each of n gradients for each of n outputs. A matmul is a fence: a chain of
# sublayers with 2048 tokens of 4 x 256, forward and backward, took 153 ms of CPU time against 254.
@jax.custom_vjp
def _combine(weights: jax.Array, rows: jax.Array) -> jax.Array:
    """sum_j weights[..., j, k] * rows[..., j, :] as f32[..., k, d]."""
    return lax.platform_dependent(weights, rows, cpu=_combine_by_matmul, default=_combine_by_sums)


def _combine_forward(weights: jax.Array, rows: jax.Array) -> tuple[jax.Array, tuple]:
    return _combine(weights, rows), (weights, rows)


def _combine_backward(residuals: tuple, grad: jax.Array) -> tuple[jax.Array, jax.Array]:
    weights, rows = residuals
    batch = tuple(range(rows.ndim - 2))
    # Left to autodiff, the long reduction over d is fused with the elementwise sums around it:
    # 228 ms for 2048 tokens of 4 x 256 on two CPU cores, against 2.3 ms as this matmul.
    grad_weights = lax.dot_general(
        rows.astype(jnp.float32),
        grad,
        (((rows.ndim - 1,), (grad.ndim - 1,)), (batch, batch)),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
    grad_rows = _combine(jnp.swapaxes(weights, -1, -2), grad)
    return grad_weights.astype(weights.dtype), grad_rows.astype(rows.dtype)


_combine.defvjp(_combine_forward, _combine_backward)


def mix(
    streams: jax.Array, pre: jax.Array, norm_weight: jax.Array, *, norm_eps: float = 1e-20
) -> jax.Array:
    """XLA definition of `mhc.mix`."""
    x = _combine(pre[..., :, None], streams)[..., 0, :]
    return rms_norm(x, norm_weight, norm_eps).astype(streams.dtype)


def read(
    streams: jax.Array,
    pre: jax.Array,
    fn: jax.Array,
    base: jax.Array,
    scale: jax.Array,
    norm_weight: jax.Array,
    *,
    norm_eps: float = 1e-20,
    **keywords: Any,
) -> tuple[jax.Array, Coefficients]:
    """XLA definition of `mhc.read`; `keywords` are those of `coefficients`."""
    made = coefficients(streams, fn, base, scale, norm_eps=norm_eps, **keywords)
    return mix(streams, pre, norm_weight, norm_eps=norm_eps), made


def write(streams: jax.Array, out: jax.Array, post: jax.Array, comb: jax.Array) -> jax.Array:
    """XLA definition of `mhc.write`."""
    kept = _combine(comb, streams)
    added = _combine(post[..., None, :], out[..., None, :])
    return (kept + added).astype(streams.dtype)


def write_read(
    streams: jax.Array,
    out: jax.Array,
    post: jax.Array,
    comb: jax.Array,
    *read_arguments: jax.Array,
    **keywords: Any,
) -> tuple[jax.Array, jax.Array, Coefficients]:
    """XLA definition of `mhc.write_read`: `write`, then `read` with all that follows."""
    streams = write(streams, out, post, comb)
    return streams, *read(streams, *read_arguments, **keywords)
