"""What the backward kernels share: the sink's gradient, and three numbers for each query and head.

With `f = sigmoid(lse - sink)` the share of the keys in the denominator,

    P'_k = exp(s_k - lse),  dP_k = dout . row_k,  delta = f dout . out - dlse,
    dS_k = P'_k (f dP_k - delta),  dq = scale sum_k dS_k row_k,
    drow_k = sum over queries and heads of (f P'_k dout + scale dS_k q),
    dsink = -sum over queries of (1 - f) dout . out.

These are finite for every sink, infinite ones among them, and right for every `d_lse`.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Terms(NamedTuple):
    """Of each query and head, f32 `[B, T, H]`.

    Attributes:
        lse: 0 where there is no key.
        share: f, likewise.
        delta: see above.
    """

    lse: jax.Array
    share: jax.Array
    delta: jax.Array


def terms(sink, out, lse, d_out, d_lse) -> tuple[Terms, jax.Array]:
    """What a kernel needs beside queries and rows, and the gradient of the sink.

    Args:
        sink: `[H]`.
        out: `[B, T, H, D]`, result of `sparse_attention`.
        lse: f32 `[B, T, H]`, likewise.
        d_out: gradient of `out`.
        d_lse: gradient of `lse`; where `lse` is -inf it does not count.

    Returns:
        `Terms`, and `[H]` in the dtype of the sink.
    """
    f32 = jnp.float32
    any_key = lse > -jnp.inf
    share = jnp.where(any_key, jax.nn.sigmoid(lse - sink.astype(f32)), 0.0)
    dot = jnp.sum(d_out.astype(f32) * out.astype(f32), axis=-1)
    d_sink = -jnp.sum((1 - share) * dot, axis=(0, 1)).astype(sink.dtype)
    delta = share * dot - jnp.where(any_key, d_lse, 0.0)
    return Terms(jnp.where(any_key, lse, 0.0), share, delta), d_sink
