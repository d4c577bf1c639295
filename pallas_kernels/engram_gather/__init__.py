"""Look-up of Engram n-gram embeddings."""

from __future__ import annotations

import jax

from pallas_kernels.dispatch import Implementation, dispatch
from pallas_kernels.engram_gather import mosaic_tpu, reference

__all__ = ["IMPLEMENTATIONS", "engram_gather"]

IMPLEMENTATIONS = {"mosaic_tpu": mosaic_tpu.engram_gather, "xla": reference.engram_gather}


def engram_gather(
    table: jax.Array | mosaic_tpu.PackedTable,
    rows: jax.Array,
    dtype: jax.typing.DTypeLike | None = None,
    *,
    implementation: Implementation = None,
) -> jax.Array:
    """Concatenates the table rows of every token.

    Differentiable in the table: the gradient is added up over repeated rows and is zero in rows
    that no token names. The sum is in the table's dtype.

    Args:
        table: float[N, c], or packed rows uint8[N, row bytes] in the format "fp8" of
            `pallas_kernels.fp4`; those have no gradient, and are float32 where dtype is None. For
            "mosaic_tpu" alone they may be a `mosaic_tpu.PackedTable`, made once of the former.
        rows: int32[..., R], row numbers in 0..N-1. They must be in range, except that -1 stands for
            "no row"; such entries, and any other out of range, read as 0 and give no gradient.
        dtype: of the result; the table's where None.
        implementation: see `pallas_kernels.dispatch`.

    Returns:
        dtype[..., R*c], the R rows one after the other.

    Raises:
        ValueError: the table is not a matrix of floats or bytes, or rows are not integers.
    """
    return dispatch("engram_gather", IMPLEMENTATIONS, implementation, table, rows, dtype)
