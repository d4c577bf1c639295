"""CSA2 attention: one softmax over a sliding window and a selection of compressed entries."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import Implementation, dispatch
from pallas_kernels.fp4 import row_bytes
from pallas_kernels.sparse_attention import (
    mosaic_gpu,
    mosaic_gpu_mass,
    mosaic_tpu,
    mosaic_tpu_mass,
    reference,
    tables,
)
from pallas_kernels.sparse_attention.reference import RESULT
from pallas_kernels.sparse_attention.tables import Fp4Table

ATTENTION_IMPLEMENTATIONS = {
    "mosaic_gpu": mosaic_gpu.sparse_attention,
    "mosaic_tpu": mosaic_tpu.sparse_attention,
    "xla": reference.sparse_attention,
}
MASS_IMPLEMENTATIONS = {
    "mosaic_gpu": mosaic_gpu_mass.selected_mass,
    "mosaic_tpu": mosaic_tpu_mass.selected_mass,
    "xla": reference.selected_mass,
}

# What is timed by `pallas_kernels.bench`.
IMPLEMENTATIONS = ATTENTION_IMPLEMENTATIONS

__all__ = ["RESULT", "Fp4Table", "selected_mass", "sparse_attention"]


def sparse_attention(
    q: jax.Array,
    window_rows: jax.Array,
    window_lo: jax.Array,
    window_hi: jax.Array,
    main_rows: jax.Array | Fp4Table | None,
    indices: jax.Array | None,
    sink: jax.Array,
    *,
    window: int,
    main_lo: jax.Array | None = None,
    main_hi: jax.Array | None = None,
    scale: float | None = None,
    chunk: int | None = None,
    implementation: Implementation = None,
) -> tuple[jax.Array, jax.Array]:
    """CSA2 attention of one layer (V4.1 report, section 2), before the inverse rotation.

    Every row is a key and a value at once and is shared by all heads. With the window rows
    `window_lo <= s < window_hi` and the selected main rows as one set of keys,

        s_hk = scale q_h . row_k,   out_h = sum_k exp(s_hk) row_k / (sum_k exp(s_hk) + exp(sink_h)).

    Documents, causality, replay and decoding are all expressed by the ranges and indices: S and G
    need not equal T, and a query never sees a row that its range or its indices do not name.

    Args:
        q: `[B, T, H, D]` rotated queries, float32 or bfloat16. float32 is computed at the highest
            matmul precision; bfloat16 multiplies in bfloat16. Logits, softmax and sums are float32.
        window_rows: `[B, S, D]`, finite; or uint8 `[B, S, row_bytes("fp8", D)]`, rows as
            `pallas_kernels.fp4.pack` makes them.
        window_lo: i32 `[B, T]`, first window row that a query sees, counted on S.
        window_hi: i32 `[B, T]`, one past the last; `window_lo >= window_hi` is an empty window.
            Where windows are not empty, `window_hi` must not decrease along T and may grow by at
            most one a query, which holds for consecutive tokens.
        main_rows: `[B, G, D]`, finite; or uint8 `[B, G, row_bytes("fp4", D)]`; or an `Fp4Table`,
            which a TPU reads single rows of (one of R entries for all sequences, a pool of pages,
            has G = R: `indices` then say where in it a selected entry lies); or None for a layer
            that has only its window.
        indices: i32 `[B, T, K]` rows of `main_rows`, in any order. Values outside `[0, G)`, -1
            among them, are no key; a row listed twice counts twice. None, with `main_rows` given,
            stands for every row of `main_lo <= j < main_hi`.
        sink: `[H]` logit that takes part in the denominator alone. -inf turns it off; +inf gives
            out 0.
        window: static bound of `window_hi - window_lo`; 0 turns the window off.
        main_lo: i32 `[B, T]`, needed where `indices` is None.
        main_hi: i32 `[B, T]`, needed where `indices` is None.
        scale: of the logits; `D ** -0.5` when None.
        chunk: queries at a time (rounded up where that is needed); chosen from a memory budget when
            None. Memory, in the backward pass too, does not grow with `T * G`.
        implementation: "mosaic_gpu" (Hopper), "mosaic_tpu", "xla", a sequence of names to be tried
            in order, or None for the best.

    Returns:
        out: `[B, T, H, D]` in the dtype of `q`; 0 for a query without any key.
        lse: f32 `[B, T, H]`, natural logarithm of `sum_k exp(s_hk)` without the sink; -inf without
            any key. `jnp.logaddexp(lse, sink)` is what `selected_mass` takes.

        Both are differentiable in `q`, `window_rows`, `main_rows` (where they are not packed) and
        `sink`. Packed rows give what their `fp4.unpack` gives.

    Raises:
        ValueError: arguments that do not fit each other.
    """
    if q.ndim != 4 or q.dtype not in (jnp.float32, jnp.bfloat16):
        raise ValueError(f"q must be float32 or bfloat16 [B,T,H,D], got {q.dtype}{list(q.shape)}")
    batch, queries, heads, dim = q.shape
    _check_rows("window_rows", window_rows, batch, dim, reference.WINDOW_FORMAT)
    _check_shape("window_lo", window_lo, (batch, queries))
    _check_shape("window_hi", window_hi, (batch, queries))
    _check_shape("sink", sink, (heads,))
    _check_selection(q, main_rows, indices, main_lo, main_hi)
    if window < 0:
        raise ValueError(f"window must be at least 0, got {window}")
    _check_chunk(chunk)
    return dispatch(
        "sparse_attention",
        ATTENTION_IMPLEMENTATIONS,
        implementation,
        q,
        window_rows,
        window_lo,
        window_hi,
        main_rows,
        indices,
        sink,
        window=window,
        main_lo=main_lo,
        main_hi=main_hi,
        scale=scale,
        chunk=chunk,
    )


def selected_mass(
    q: jax.Array,
    main_rows: jax.Array,
    indices: jax.Array | None,
    lse_with_sink: jax.Array,
    *,
    main_lo: jax.Array | None = None,
    main_hi: jax.Array | None = None,
    scale: float | None = None,
    chunk: int | None = None,
    implementation: Implementation = None,
) -> jax.Array:
    """Head-summed probabilities that `sparse_attention` gave to main rows: the indexer's teacher.

    Args:
        q: `[B, T, H, D]`, as given to `sparse_attention`.
        main_rows: `[B, G, D]` or packed, likewise.
        indices: i32 `[B, T, K]`, likewise; None stands for every row of `main_lo <= j < main_hi`.
        lse_with_sink: f32 `[B, T, H]`, logarithm of the whole denominator: `logaddexp(lse, sink)`.
        main_lo: i32 `[B, T]`, needed where `indices` is None.
        main_hi: i32 `[B, T]`, needed where `indices` is None.
        scale: of the logits; `D ** -0.5` when None.
        chunk: queries at a time; chosen from a memory budget when None.
        implementation: "mosaic_gpu" (Hopper), "mosaic_tpu", "xla", a sequence of names to be tried
            in order, or None for the best.

    Returns:
        f32 `[B, T, K]` (`[B, T, G]` where `indices` is None): sum over heads of the probability of
        each slot, 0 where there is no key. A row that is listed twice gets its share in both slots.
        No gradient flows through it.

    Raises:
        ValueError: arguments that do not fit each other.
    """
    if q.ndim != 4:
        raise ValueError(f"q must be [B,T,H,D], got {list(q.shape)}")
    if main_rows is None:
        raise ValueError("selected_mass needs main_rows, got None")
    _check_shape("lse_with_sink", lse_with_sink, q.shape[:3])
    _check_selection(q, main_rows, indices, main_lo, main_hi)
    _check_chunk(chunk)
    return dispatch(
        "selected_mass",
        MASS_IMPLEMENTATIONS,
        implementation,
        q,
        main_rows,
        indices,
        lse_with_sink,
        main_lo=main_lo,
        main_hi=main_hi,
        scale=scale,
        chunk=chunk,
    )


def _check_shape(name: str, array: jax.Array, shape: tuple[int, ...]) -> None:
    if array.shape != shape:
        raise ValueError(f"{name} must be {list(shape)}, got {list(array.shape)}")


def _check_rows(name: str, rows: jax.Array, batch: int, dim: int, fmt: str) -> None:
    width = row_bytes(fmt, dim) if rows.dtype == jnp.uint8 else dim
    if rows.ndim != 3 or (rows.shape[0], rows.shape[2]) != (batch, width):
        raise ValueError(
            f"{name} must be [{batch}, rows, {width}] in {rows.dtype}, got {list(rows.shape)}"
        )


def _check_chunk(chunk: int | None) -> None:
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk must be at least 1 or None, got {chunk}")


def _check_selection(q, main_rows, indices, main_lo, main_hi) -> None:
    batch, queries, _, dim = q.shape
    if main_rows is None:
        if indices is not None:
            raise ValueError("indices are given, but main_rows is None")
        return
    if isinstance(main_rows, Fp4Table):
        tables.check(main_rows, batch, dim)
    else:
        _check_rows("main_rows", main_rows, batch, dim, reference.MAIN_FORMAT)
    if indices is not None:
        if indices.ndim != 3 or indices.shape[:2] != (batch, queries):
            raise ValueError(f"indices must be [{batch}, {queries}, K], got {list(indices.shape)}")
        return
    if main_lo is None or main_hi is None:
        raise ValueError("main_rows without indices need main_lo and main_hi")
    _check_shape("main_lo", main_lo, (batch, queries))
    _check_shape("main_hi", main_hi, (batch, queries))
