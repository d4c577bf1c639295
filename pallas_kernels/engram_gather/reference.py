"""Engram table look-up in XLA: a gather, whose transpose is a scatter-add into the touched rows."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels import fp4


def engram_gather(
    table: jax.Array, rows: jax.Array, dtype: jax.typing.DTypeLike | None = None
) -> jax.Array:
    """XLA definition of `engram_gather.engram_gather`."""
    table, rows = jnp.asarray(table), jnp.asarray(rows)
    packed = table.dtype == jnp.uint8
    if table.ndim != 2 or not (packed or jnp.issubdtype(table.dtype, jnp.floating)):
        raise ValueError(
            f"engram_gather: table is {table.dtype}{list(table.shape)}; must be float[N, c] or"
            " packed rows"
        )
    if rows.ndim < 1 or not jnp.issubdtype(rows.dtype, jnp.integer):
        raise ValueError(
            f"engram_gather: rows is {rows.dtype}{list(rows.shape)}; must be int32[..., R]"
        )
    # Not wrapped: -1 is "no row", never the last one.
    taken = table.at[rows].get(mode="fill", fill_value=0, wrap_negative_indices=False)
    if packed:
        # A row of zero bytes is a row of zeros.
        taken = fp4.unpack(taken, "fp8", jnp.float32 if dtype is None else dtype)
    taken = taken.reshape(*rows.shape[:-1], rows.shape[-1] * taken.shape[-1])
    return taken if dtype is None else taken.astype(dtype)
