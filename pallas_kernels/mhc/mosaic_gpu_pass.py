"""`write_read` on Hopper: streams are read once and written once, forward and backward.

XLA does what is left: the mix of the new streams and its normalisation, whose inverse norms the
kernel before has made (a pass of its own, as no block has all channels of a token); the mean that
the gradient of that norm takes; the gradient of fn, a matrix product of the new streams; the
coefficients' formula but for Sinkhorn.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import split_products
from pallas_kernels.mhc import mosaic_gpu_backward, mosaic_gpu_forward, reference
from pallas_kernels.mhc.mosaic_gpu_tiles import CHANNELS, PIECE, TOKENS

# Tokens below which starting several kernels takes longer than one of XLA's.
_FEW_TOKENS = 256


def takes(streams: jax.Array, out: jax.Array) -> bool:
    """Whether the kernels are for such arrays: bfloat16, 2 or 4 streams, d a multiple of 64."""
    *lead, n, d = streams.shape
    whole = n in (2, 4) and d % CHANNELS == 0 and math.prod(lead) >= _FEW_TOKENS
    narrow = streams.dtype == jnp.bfloat16 and out.dtype == jnp.bfloat16
    return whole and narrow and jax.__version_info__ >= (0, 11)


@dataclasses.dataclass(frozen=True)
class _Static:
    """What of a call is no array."""

    norm_eps: float
    interpret: Any


def write_read(
    streams: jax.Array,
    out: jax.Array,
    post: jax.Array,
    comb: jax.Array,
    pre: jax.Array,
    fn: jax.Array,
    base: jax.Array,
    scale: jax.Array,
    norm_weight: jax.Array,
    *,
    sinkhorn_iters: int = 20,
    eps: float = 1e-6,
    norm_eps: float = 1e-20,
    balance: Callable[[jax.Array, int, float], jax.Array],
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array, reference.Coefficients]:
    """See `pallas_kernels.mhc.write_read`; `balance` is as for `reference.coefficients`."""
    reference.check_streams(streams, fn, base, scale)
    if sinkhorn_iters < 1:
        raise ValueError(f"mhc: sinkhorn_iters is {sinkhorn_iters}; must be at least 1")
    *lead, n, d = streams.shape
    tokens = math.prod(lead)
    mixing = [x.astype(jnp.float32).reshape(tokens, -1) for x in (pre, post, comb)]
    new, x, product, squares = _passed(
        _Static(norm_eps, interpret),
        streams.reshape(tokens, n * d),
        out.reshape(tokens, d),
        jnp.concatenate(mixing, axis=1).T,
        fn,
        norm_weight,
    )
    made = reference.normalised_coefficients(
        product.T,
        squares / (n * d),
        base,
        scale,
        tuple(lead),
        sinkhorn_iters=sinkhorn_iters,
        eps=eps,
        norm_eps=norm_eps,
        balance=balance,
    )
    return new.reshape(streams.shape), x.reshape(*lead, d), made


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _passed(static, streams, out, mixing, fn, norm_weight):
    """(new streams [T, n d], next input [T, d], projection f32[T, K], sums of squares f32[T])."""
    return _forward(static, streams, out, mixing, fn, norm_weight)[0]


def _forward(static, streams, out, mixing, fn, norm_weight):
    d = out.shape[1]
    parts = jnp.concatenate(split_products.bfloat16_parts(fn.astype(jnp.float32), 3))
    kernel = functools.partial(mosaic_gpu_forward.write, interpret=static.interpret)
    results = jax.custom_batching.sequential_vmap(kernel)(
        *_whole(streams, out), _whole(mixing.T)[0].T, parts
    )
    new, product, sums = _cut(out.shape[0], (0, 0, 1), results)
    # Or the sums over blocks might be made for every channel of the mix again.
    new, product, (squares, mixed_squares) = lax.optimization_barrier((new, product, sums))
    inverse = lax.rsqrt(mixed_squares / d + static.norm_eps)
    mixed = 0.0
    for k, weights in enumerate(mixing[: new.shape[1] // d]):
        mixed += weights[:, None] * new[:, k * d : (k + 1) * d].astype(jnp.float32)
    x = mixed * inverse[:, None] * norm_weight.astype(jnp.float32)
    x = x.astype(out.dtype)
    residuals = streams, out, mixing, fn, norm_weight, new, x, inverse
    return (new, x, product, squares), residuals


def _backward(static, residuals, grads):
    streams, out, mixing, fn, norm_weight, new, x, inverse = residuals
    grad_new, grad_x, grad_product, grad_squares = grads
    mean = jnp.mean(grad_x.astype(jnp.float32) * x.astype(jnp.float32), axis=1)
    # A reduction of its own, not a loop of one thread in what stacks the rows.
    mean = lax.optimization_barrier(mean)
    rows = jnp.stack([inverse, -inverse * inverse * mean, 2 * grad_squares])
    kernel = functools.partial(mosaic_gpu_backward.gradients, interpret=static.interpret)
    grad_streams, grad_out, grad_mixing, grad_norm = jax.custom_batching.sequential_vmap(kernel)(
        *_whole(streams, out, grad_new, grad_x),
        _whole(jnp.concatenate([mixing, rows]).T)[0].T,
        _columns(*_whole(grad_product)),
        _columns(fn.astype(jnp.float32).T),
        norm_weight.astype(jnp.float32),
    )
    grad_streams, grad_out, grad_mixing = _cut(
        out.shape[0], (0, 0, 1), (grad_streams, grad_out, grad_mixing)
    )
    grad_fn = split_products.einsum("tc,tk->kc", new, grad_product)
    return (
        grad_streams,
        grad_out,
        grad_mixing,
        grad_fn.astype(fn.dtype),
        grad_norm.astype(norm_weight.dtype),
    )


_passed.defvjp(_forward, _backward)


def _whole(*arrays: jax.Array) -> list[jax.Array]:
    """[T, ...] with zeros after the last token, up to a multiple of 64 of them."""
    missing = -arrays[0].shape[0] % TOKENS
    return [jnp.pad(x, ((0, missing), (0, 0))) if missing else x for x in arrays]


def _cut(tokens: int, axes: tuple[int, ...], arrays: tuple[jax.Array, ...]) -> list[jax.Array]:
    """Arrays without what `_whole` gave them, along their axes of tokens."""
    return [lax.slice_in_dim(x, 0, tokens, axis=axis) for axis, x in zip(axes, arrays, strict=True)]


def _columns(x: jax.Array) -> jax.Array:
    """float32[R, K] in two bfloat16 parts, with zeros beyond K: [2, R, 32]."""
    parts = jnp.stack(split_products.bfloat16_parts(x, 2))
    return jnp.pad(parts, ((0, 0), (0, 0), (0, PIECE - x.shape[1])))
