"""The kernels as the layers call them: on a mesh, each on a device's own part of a batch.

Queries are split by rows of the batch, along their length over the `context` axis, and by heads (or
once more by tokens, where an op needs all heads) over the `tensor` axis. The entries of the shared
cache are few bytes a token: every device of the `context` axis has all of its rows' entries, and
they travel as they are stored. Of a sliding window a device needs the rows just before its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import fp4
from pallas_kernels import indexer as indexer_op
from pallas_kernels import mhc as mhc_op
from pallas_kernels import sparse_attention as attention_op
from pallas_kernels.dispatch import Implementation
from pallas_kernels.mhc import Coefficients
from v41flash import quant
from v41flash.sharding import on_shards, part, parts

_HEADS = ("batch", "length", "heads", None)
_TOKEN = ("batch", "length")
_SHARED = ("batch", None, None)
# Of ops that need every head of a token.
_QUERY = ("batch", "queries")
_STREAMS, _MATRIX, _ROW = (*_QUERY, None, None), (*_QUERY, None, None), (*_QUERY, None)


def sparse_attention(
    q: jax.Array,
    window_rows: jax.Array,
    window_lo: jax.Array,
    window_hi: jax.Array,
    main_rows: jax.Array | None,
    indices: jax.Array | None,
    sink: jax.Array,
    *,
    window: int,
    own_window: bool,
    main_lo: jax.Array | None = None,
    main_hi: jax.Array | None = None,
    implementation: Implementation = None,
) -> tuple[jax.Array, jax.Array]:
    """`pallas_kernels.sparse_attention`.

    Args:
        q, window_rows, window_lo, window_hi, main_rows, indices, sink: as there.
        window: as there.
        own_window: window rows are those of the queries themselves, S = T.
        main_lo, main_hi, implementation: as there.

    Returns:
        (out, lse), as there.
    """

    def local(axes, q, rows, lo, hi, main_rows, indices, sink, main_lo, main_hi):
        if own_window and axes["length"]:
            rows, start = _with_halo(rows, window, axes["length"])
            lo, hi = lo - start, hi - start
        return attention_op.sparse_attention(
            q,
            rows,
            lo,
            hi,
            main_rows,
            indices,
            sink,
            window=window,
            main_lo=main_lo,
            main_hi=main_hi,
            implementation=implementation,
        )

    names = (
        _HEADS,
        (*_TOKEN, None) if own_window else _SHARED,
        _TOKEN,
        _TOKEN,
        _SHARED,
        (*_TOKEN, None),
        ("heads",),
        _TOKEN,
        _TOKEN,
    )
    run = on_shards(local, names, (_HEADS, _HEADS[:3]))
    return run(q, window_rows, window_lo, window_hi, main_rows, indices, sink, main_lo, main_hi)


def _with_halo(
    rows: jax.Array, width: int, axes: tuple[str, ...]
) -> tuple[jax.Array, jax.Array | int]:
    """(rows that this device's queries may see, number of the first of them in the whole length).

    The first device has zeros before its own, which nothing sees.
    """
    own, count = rows.shape[1], parts(axes)
    if own < width:
        return jax.lax.all_gather(rows, axes, axis=1, tiled=True), 0
    before = jax.lax.ppermute(rows[:, own - width :], axes, [(i, i + 1) for i in range(count - 1)])
    return jnp.concatenate([before, rows], axis=1), part(axes) * own - width


def shared_rows(x: jax.Array, fmt: str, implementation: Implementation = None) -> jax.Array:
    """Entries of the shared cache, rounded to its format, for all queries of their row.

    Args:
        x: [B, G, D], as the tokens make them.
        fmt: of `v41flash.quant.fake_quantize`. What is rounded travels packed.
        implementation: of `pallas_kernels.fp4`.

    Returns:
        [B, G, D] in the dtype of x, whole along G on every device. The gradient passes through the
        rounding.
    """

    def local(axes, x):
        axes = axes["length"]
        if not axes:
            return quant.fake_quantize(x, fmt, implementation)

        @jax.custom_vjp
        def gather(x):
            travelling = x
            if fmt != "none":
                travelling = fp4.pack(x, fmt, implementation=implementation)
            whole = jax.lax.all_gather(travelling, axes, axis=1, tiled=True)
            if fmt == "none":
                return whole
            return fp4.unpack(whole, fmt, x.dtype, implementation=implementation)

        def forward(x):
            return gather(x), None

        def backward(_, gradient):
            return (jax.lax.psum_scatter(gradient, axes, scatter_dimension=1, tiled=True),)

        gather.defvjp(forward, backward)
        return gather(x)

    return on_shards(local, ((*_TOKEN, None),), list(_SHARED))(x)


def selected_mass(
    q: jax.Array,
    main_rows: jax.Array,
    indices: jax.Array,
    lse_with_sink: jax.Array,
    implementation: Implementation = None,
) -> jax.Array:
    """`pallas_kernels.sparse_attention.selected_mass` of a selection."""

    def local(axes, q, main_rows, indices, lse):
        mass = attention_op.selected_mass(q, main_rows, indices, lse, implementation=implementation)
        return jax.lax.psum(mass, axes["heads"]) if axes["heads"] else mass

    places = (*_TOKEN, None)
    run = on_shards(local, (_HEADS, _SHARED, places, _HEADS[:3]), list(places))
    return run(q, main_rows, indices, lse_with_sink)


def select(
    q: jax.Array,
    w: jax.Array,
    k: jax.Array,
    lo: jax.Array,
    hi: jax.Array,
    *,
    pool: indexer_op.Pool | None = None,
    make_pool: tuple[int, int] | None = None,
    **keywords: Any,
) -> tuple[jax.Array, indexer_op.Pool | None]:
    """`pallas_kernels.indexer.select`; arguments and results as there."""
    size = None if pool is None else pool.size

    def local(axes, q, w, k, lo, hi, blocks):
        del axes
        given = None if blocks is None else indexer_op.Pool(blocks, size)
        indices, made = indexer_op.select(
            q, w, k, lo, hi, pool=given, make_pool=make_pool, **keywords
        )
        return indices, None if made is None else made.blocks

    names = (_MATRIX, _ROW, _SHARED, _QUERY, _QUERY, _ROW)
    run = on_shards(local, names, (_ROW, _ROW))
    indices, blocks = run(q, w, k, lo, hi, None if pool is None else pool.blocks)
    return indices, None if blocks is None else indexer_op.Pool(blocks, make_pool[1])


def scores_at(
    q: jax.Array,
    w: jax.Array,
    k: jax.Array,
    indices: jax.Array,
    implementation: Implementation = None,
) -> jax.Array:
    """`pallas_kernels.indexer.scores_at`."""

    def local(axes, q, w, k, indices):
        del axes
        return indexer_op.scores_at(q, w, k, indices, implementation=implementation)

    return on_shards(local, (_MATRIX, _ROW, _SHARED, _ROW), list(_ROW))(q, w, k, indices)


def of_queries(
    function: Callable[..., jax.Array], queries: tuple[jax.Array, ...], shared: tuple
) -> jax.Array:
    """A function of queries one by one, over shared entries.

    Args:
        function: (queries, shared) -> [B, T]; all heads of a token are its own.
        queries: arrays [B, T, ...].
        shared: arrays [B, G, D].

    Returns:
        [B, T].
    """

    def local(axes, *arrays):
        del axes
        return function(arrays[: len(queries)], arrays[len(queries) :])

    names = [(*_QUERY, *(None,) * (x.ndim - 2)) for x in queries] + [_SHARED] * len(shared)
    return on_shards(local, names, list(_QUERY))(*queries, *shared)


def write(
    streams: jax.Array,
    out: jax.Array,
    post: jax.Array,
    comb: jax.Array,
    implementation: Implementation = None,
) -> jax.Array:
    """`pallas_kernels.mhc.write`."""

    def local(axes, *arrays):
        del axes
        return mhc_op.write(*arrays, implementation=implementation)

    run = on_shards(local, (_STREAMS, _ROW, _ROW, _MATRIX), list(_STREAMS))
    return run(streams, out, post, comb)


def mix(streams: jax.Array, pre: jax.Array, norm_weight: jax.Array, **keywords: Any) -> jax.Array:
    """`pallas_kernels.mhc.mix`."""

    def local(axes, *arrays):
        del axes
        return mhc_op.mix(*arrays, **keywords)

    return on_shards(local, (_STREAMS, _ROW, (None,)), list(_ROW))(streams, pre, norm_weight)


_WEIGHTS = ((None, None), (None,), (None,), (None,))


def read(
    streams: jax.Array, pre: jax.Array, *weights: jax.Array, **keywords: Any
) -> tuple[jax.Array, Coefficients]:
    """`pallas_kernels.mhc.read`."""

    def local(axes, *arrays):
        del axes
        x, made = mhc_op.read(*arrays, **keywords)
        return x, *made

    run = on_shards(local, (_STREAMS, _ROW, *_WEIGHTS), (_ROW, _ROW, _ROW, _MATRIX))
    x, *made = run(streams, pre, *weights)
    return x, Coefficients(*made)


def write_read(
    streams: jax.Array,
    out: jax.Array,
    post: jax.Array,
    comb: jax.Array,
    pre: jax.Array,
    *weights: jax.Array,
    **keywords: Any,
) -> tuple[jax.Array, jax.Array, Coefficients]:
    """`pallas_kernels.mhc.write_read`."""

    def local(axes, *arrays):
        del axes
        streams, x, made = mhc_op.write_read(*arrays, **keywords)
        return streams, x, *made

    arguments = (_STREAMS, _ROW, _ROW, _MATRIX, _ROW, *_WEIGHTS)
    run = on_shards(local, arguments, (_STREAMS, _ROW, _ROW, _ROW, _MATRIX))
    streams, x, *made = run(streams, out, post, comb, pre, *weights)
    return streams, x, Coefficients(*made)
