"""Kernels of rows, under any leading axes and under `jax.vmap`."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp


def batched(select: Callable[..., jax.Array], scores: jax.Array, *per_row: jax.Array) -> jax.Array:
    """`select` of rows, over any leading axes; under `jax.vmap` one more of them.

    Args:
        select: takes `[rows, size]` and an array `[rows]` for each of `per_row`, and returns
            `[rows, k]`.
        scores: `[..., size]`.
        *per_row: `[...]`.

    Returns:
        `[..., k]`.
    """

    @jax.custom_batching.custom_vmap
    def flat(scores, *per_row):
        rows = scores.reshape(-1, scores.shape[-1])
        return select(rows, *(n.reshape(-1) for n in per_row)).reshape(*scores.shape[:-1], -1)

    @flat.def_vmap
    def batch(axis_size, is_batched, *arguments):
        arguments = (
            x if one else jnp.broadcast_to(x, (axis_size, *x.shape))
            for x, one in zip(arguments, is_batched, strict=True)
        )
        return batched(select, *arguments), True

    return flat(scores, *per_row)
