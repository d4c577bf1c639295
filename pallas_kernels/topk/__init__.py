"""The k largest of many scores."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental import checkify

from pallas_kernels.dispatch import Implementation, dispatch
from pallas_kernels.topk import mosaic_gpu, mosaic_tpu, reference

IMPLEMENTATIONS = {
    "mosaic_gpu": mosaic_gpu.topk,
    "mosaic_tpu": mosaic_tpu.topk,
    "xla": reference.topk,
}
BLOCKS_IMPLEMENTATIONS = {
    "mosaic_gpu": mosaic_gpu.topk_blocks,
    "mosaic_tpu": mosaic_tpu.topk_blocks,
    "xla": reference.topk_blocks,
}
ORDERS = ("score", "index")

__all__ = ["topk", "topk_blocks"]


def topk(
    scores: jax.Array,
    k: int,
    lengths: jax.Array | None = None,
    *,
    order: str = "score",
    implementation: Implementation = None,
) -> jax.Array:
    """Indices of the k largest scores of each row, among equals the ones with the lower index.

    -inf and NaN are never selected, so masking is done by writing -inf before. -0.0 and 0.0 are
    equal. A NaN is an error to `jax.experimental.checkify.checkify(f, errors=user_checks)`, and to
    nothing else.

    Args:
        scores: `[..., N]`, float32 or bfloat16; compared in their own precision.
        k: how many; may exceed N.
        lengths: i32 `[...]`: only the first `lengths` scores of a row take part. None: all do.
        order: "score" sorts by decreasing score, among equals by index; "index" by index alone,
            which costs kernels less.
        implementation: "mosaic_gpu", "mosaic_tpu", "xla", a sequence of names to be tried in order,
            or None for the best.

    Returns:
        i32 `[..., k]` in the order asked for, -1 at the end where fewer than k scores can be
        selected. Not differentiable.

    Raises:
        ValueError: k is negative, lengths does not fit scores, or there is no such order.
    """
    _check("topk", scores, k, lengths)
    if order not in ORDERS:
        raise ValueError(f"order must be one of {', '.join(ORDERS)}, got {order!r}")
    return dispatch("topk", IMPLEMENTATIONS, implementation, scores, k, lengths, order=order)


def topk_blocks(
    scores: jax.Array,
    k: int,
    block: int,
    lengths: jax.Array | None = None,
    *,
    implementation: Implementation = None,
) -> jax.Array:
    """The k blocks of consecutive scores whose largest scores are largest.

    Args:
        scores: `[..., N]`, float32 or bfloat16. -inf and NaN count as in `topk`: a block of nothing
            else is never selected.
        k: how many blocks; may exceed their number.
        block: scores of a block; the last block may have fewer.
        lengths: i32 `[...]`: only the first `lengths` scores of a row take part. None: all do.
        implementation: as for `topk`.

    Returns:
        i32 `[..., k]` blocks in increasing order, -1 at the end where fewer than k can be selected.
        Among equals the lower block is selected. Not differentiable.

    Raises:
        ValueError: k is negative, block below 1, or lengths does not fit scores.
    """
    _check("topk_blocks", scores, k, lengths)
    if block < 1:
        raise ValueError(f"block must be at least 1, got {block}")
    return dispatch(
        "topk_blocks", BLOCKS_IMPLEMENTATIONS, implementation, scores, k, block, lengths
    )


def _check(op: str, scores, k: int, lengths) -> None:
    if scores.ndim < 1 or not jnp.issubdtype(scores.dtype, jnp.floating):
        raise ValueError(f"scores must be floats [..., N], got {scores.dtype}{list(scores.shape)}")
    if k < 0:
        raise ValueError(f"k must be at least 0, got {k}")
    if lengths is not None and lengths.shape != scores.shape[:-1]:
        raise ValueError(f"lengths must be {list(scores.shape[:-1])}, got {list(lengths.shape)}")
    checkify.debug_check(~jnp.isnan(scores).any(), f"{op}: the scores have a NaN")
