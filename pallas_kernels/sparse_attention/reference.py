"""CSA2 attention in XLA: the definition, and what runs where there is no kernel.

One softmax runs over two sets of keys, a window of consecutive rows and a selection of compressed
rows; a per-head sink adds to the denominator only. Rows are keys and values at once.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels import fp4
from pallas_kernels.chunking import chunk_size, map_queries
from pallas_kernels.sparse_attention.tables import Fp4Table, row_bytes

# How rows of bytes are packed.
MAIN_FORMAT, WINDOW_FORMAT = "fp4", "fp8"

# What kernels call their results for `jax.checkpoint` policies: their backward needs them, so that
# who keeps results of this name does not attend twice.
RESULT = "sparse_attention"

# Queries that share one slice of window rows. More of them score more rows than they need, fewer
# make small products.
SMALLEST_WINDOW_BLOCK = 32


def _einsum(spec: str, a: jax.Array, b: jax.Array) -> jax.Array:
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jnp.einsum(spec, a, b, precision=precision, preferred_element_type=jnp.float32)


def _in_range(lo: jax.Array, hi: jax.Array, rows: int) -> jax.Array:
    j = jnp.arange(rows, dtype=jnp.int32)
    return (j >= lo[..., None]) & (j < hi[..., None])


def values(rows: jax.Array, fmt: str, dtype: jax.typing.DTypeLike) -> jax.Array:
    """Rows as numbers of `dtype`, whether they are packed (uint8) or not."""
    return fp4.unpack(rows, fmt, dtype) if rows.dtype == jnp.uint8 else rows.astype(dtype)


def _gather(rows: jax.Array, indices: jax.Array) -> jax.Array:
    """Rows [B,N,W] at indices [B,C,K]: [B,C,K,W], zeros (and no gradient) at invalid indices."""
    # Negative indices would count from the end; this one is out of range.
    indices = jnp.where(indices >= 0, indices, rows.shape[1])
    return jax.vmap(lambda r, i: r.at[i].get(mode="fill", fill_value=0))(rows, indices)


def _window_part(q, lo, hi, rows, window, block, scale):
    """Logits [B,C,H,L] on one slice of L consecutive rows per block of queries, and their sum."""
    batch, chunk, heads, dim = q.shape
    size = rows.shape[1]
    length = min(size, block + window - 1)
    cut = (batch, chunk // block, block)
    q, lo, hi = q.reshape(*cut, heads, dim), lo.reshape(cut), hi.reshape(cut)

    start = jnp.where(lo < hi, lo, size).min(axis=-1)
    start = jnp.clip(start, 0, size - length)
    slices = jax.vmap(
        lambda r, s: jax.vmap(lambda one: jax.lax.dynamic_slice_in_dim(r, one, length))(s)
    )(rows, start).astype(q.dtype)
    visible = _in_range(lo - start[..., None], hi - start[..., None], length)
    logits = _einsum("bnchd,bnld->bnchl", q, slices) * scale
    logits = jnp.where(visible[..., None, :], logits, -jnp.inf)

    def weighted_sum(weights):
        weights = weights.reshape(*cut, heads, length)
        return _einsum("bnchl,bnld->bnchd", weights, slices).reshape(batch, chunk, heads, dim)

    return logits.reshape(batch, chunk, heads, length), weighted_sum


def _dense_part(q, lo, hi, rows, scale):
    """Logits [B,C,H,G] on every row of a range, and their sum."""
    rows = values(rows, MAIN_FORMAT, q.dtype)
    logits = _einsum("bchd,bgd->bchg", q, rows) * scale
    visible = _in_range(lo, hi, rows.shape[1])
    logits = jnp.where(visible[:, :, None, :], logits, -jnp.inf)
    return logits, lambda weights: _einsum("bchg,bgd->bchd", weights, rows)


def _gathered_part(q, indices, rows, scale):
    """Logits [B,C,H,K] on each query's own rows, and their sum."""
    valid = (indices >= 0) & (indices < rows.shape[1])
    # A packed row of zero bytes is a row of zeros.
    own = values(_gather(rows, indices), MAIN_FORMAT, q.dtype)
    logits = _einsum("bchd,bckd->bchk", q, own) * scale
    logits = jnp.where(valid[:, :, None, :], logits, -jnp.inf)
    return logits, lambda weights: _einsum("bchk,bckd->bchd", weights, own)


def _joint_softmax(parts, sink, dtype):
    """Output [B,C,H,D] and lse [B,C,H] of one softmax over all parts, with the sink."""
    highest = parts[0][0].max(axis=-1)
    for logits, _ in parts[1:]:
        highest = jnp.maximum(highest, logits.max(axis=-1))
    any_key = highest > -jnp.inf
    highest = jax.lax.stop_gradient(jnp.where(any_key, highest, 0.0))
    total, out = 0.0, 0.0
    for logits, weighted_sum in parts:
        weights = jnp.exp(logits - highest[..., None])
        total = total + weights.sum(axis=-1)
        out = out + weighted_sum(weights.astype(dtype))
    total = jnp.where(any_key, total, 1.0)
    lse = jnp.log(total) + highest
    # exp(lse) / (exp(lse) + exp(sink)), in a form whose gradients are finite for infinite sinks.
    keys_share = jax.nn.sigmoid(lse - sink.astype(jnp.float32))
    factor = jnp.where(any_key, keys_share / total, 0.0)
    return (out * factor[..., None]).astype(dtype), jnp.where(any_key, lse, -jnp.inf)


def _main_part(q, selection, rows, scale):
    part = _gathered_part if len(selection) == 1 else _dense_part
    return part(q, *selection, rows, scale)


def _slots(rows, indices):
    return min(rows.shape[1], rows.shape[1] if indices is None else indices.shape[-1])


def _main_bytes(heads, dim, rows, indices):
    """Bytes per query of the largest temporary that belongs to the main rows."""
    if indices is None:
        return 4 * heads * rows
    return 4 * indices.shape[-1] * max(heads, dim)


def sparse_attention(
    q,
    window_rows,
    window_lo,
    window_hi,
    main_rows,
    indices,
    sink,
    *,
    window,
    main_lo=None,
    main_hi=None,
    scale=None,
    chunk=None,
):
    """See `pallas_kernels.sparse_attention.sparse_attention`."""
    batch, queries, heads, dim = q.shape
    if isinstance(main_rows, Fp4Table):
        main_rows = jnp.broadcast_to(main_rows.rows(), (batch, main_rows.entries, row_bytes()))
    scale = dim**-0.5 if scale is None else scale
    has_window = window > 0 and window_rows.shape[1] > 0
    if main_rows is not None and _slots(main_rows, indices) == 0:
        main_rows = None

    block = min(queries, max(window, SMALLEST_WINDOW_BLOCK)) if has_window else 1
    if chunk is None:
        keys = min(window_rows.shape[1], block + window - 1) if has_window else 0
        largest = 4 * heads * keys
        if main_rows is not None:
            largest = max(largest, _main_bytes(heads, dim, main_rows.shape[1], indices))
        chunk = chunk_size(queries, batch, largest, multiple=block)
    else:
        block = min(block, chunk)
        chunk = -(-chunk // block) * block

    # The gradient of a row is a sum over many queries: the loop accumulates it in float32.
    window_rows = values(window_rows, WINDOW_FORMAT, jnp.float32)
    if main_rows is not None and main_rows.dtype != jnp.uint8:
        main_rows = main_rows.astype(jnp.float32)

    def body(q, window_lo, window_hi, *selection):
        parts = []
        if has_window:
            parts.append(_window_part(q, window_lo, window_hi, window_rows, window, block, scale))
        if main_rows is not None:
            parts.append(_main_part(q, selection, main_rows, scale))
        if not parts:
            return jnp.zeros_like(q), jnp.full(q.shape[:-1], -jnp.inf, jnp.float32)
        return _joint_softmax(parts, sink, q.dtype)

    if main_rows is None:
        selection = ()
    elif indices is None:
        selection = (main_lo, main_hi)
    else:
        selection = (indices,)
    return map_queries(body, (q, window_lo, window_hi, *selection), chunk)


def backward(arguments, cotangents, **keywords):
    """Gradients in q, window rows, main rows and sink; None for main rows that are packed.

    Args:
        arguments: positional ones of `sparse_attention`.
        cotangents: of its results.
        **keywords: its keyword arguments.
    """
    q, window_rows, lo, hi, main_rows, indices, sink = arguments
    packed = main_rows is not None and main_rows.dtype == jnp.uint8

    def again(q, window_rows, main, sink):
        main = main_rows if packed else main
        return sparse_attention(q, window_rows, lo, hi, main, indices, sink, **keywords)

    _, pullback = jax.vjp(again, q, window_rows, None if packed else main_rows, sink)
    return pullback(cotangents)


def selected_mass(
    q, main_rows, indices, lse_with_sink, *, main_lo=None, main_hi=None, scale=None, chunk=None
):
    """See `pallas_kernels.sparse_attention.selected_mass`."""
    q, main_rows, lse_with_sink = jax.lax.stop_gradient((q, main_rows, lse_with_sink))
    batch, queries, heads, dim = q.shape
    scale = dim**-0.5 if scale is None else scale
    if _slots(main_rows, indices) == 0:
        slots = main_rows.shape[1] if indices is None else indices.shape[-1]
        return jnp.zeros((batch, queries, slots), jnp.float32)
    if chunk is None:
        per_query = _main_bytes(heads, dim, main_rows.shape[1], indices)
        chunk = chunk_size(queries, batch, per_query)

    def body(q, lse, *selection):
        logits, _ = _main_part(q, selection, main_rows, scale)
        # -inf means that there is no key: every logit is -inf too, and the difference would be NaN.
        lse = jnp.where(lse > -jnp.inf, lse, 0.0)
        return jnp.exp(logits - lse[..., None]).sum(axis=2)

    selection = (main_lo, main_hi) if indices is None else (indices,)
    return map_queries(body, (q, lse_with_sink, *selection), chunk)
