"""FP4 main rows as a TPU can read single ones of them: the layout of a cache, made once.

A TPU copies one row of memory at any offset only where elements have 32 bits and rows are 128 of
them. The bytes of `pallas_kernels.fp4` are kept as they are, elements and scales apart: two entries
of 512 channels share a row of elements, 16 entries a row of scales. That is 288 bytes an entry, as
published.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

CHANNELS = 512
LANES = 128
# Entries of one row of elements, and of one row of scales; a table holds a multiple of the latter.
ELEMENT_ENTRIES, SCALE_ENTRIES = 2, 16
_ELEMENT_BYTES, _SCALE_BYTES = CHANNELS // 2, CHANNELS // 16


class Fp4Table(NamedTuple):
    """Packed main rows of D = 512, R entries for each of X sequences, or for all (X = 1).

    Attributes:
        elements: i32 `[X, R / 2, 128]`, 64 words an entry; channel 8 w + j in nibble j of word w.
        scales: i32 `[X, R / 16, 128]`, 8 words an entry.
    """

    elements: jax.Array
    scales: jax.Array

    @classmethod
    def pack(cls, rows: jax.Array) -> Fp4Table:
        """The table of canonical rows uint8 `[X, R, 288]`.

        Raises:
            ValueError: other rows, or R not a multiple of 16.
        """
        if rows.dtype != jnp.uint8 or rows.ndim != 3 or rows.shape[2] != row_bytes():
            raise ValueError(
                f"rows must be uint8 [X, R, {row_bytes()}], got {rows.dtype}{list(rows.shape)}"
            )
        if rows.shape[1] % SCALE_ENTRIES:
            raise ValueError(f"R must be a multiple of {SCALE_ENTRIES}, got {rows.shape[1]}")

        def words(part):
            part = part.reshape(rows.shape[0], -1, LANES, 4)
            return lax.bitcast_convert_type(part, jnp.int32)

        return cls(words(rows[..., :_ELEMENT_BYTES]), words(rows[..., _ELEMENT_BYTES:]))

    @property
    def entries(self) -> int:
        """R."""
        return self.elements.shape[1] * ELEMENT_ENTRIES

    def rows(self) -> jax.Array:
        """Canonical rows uint8 `[X, R, 288]`."""

        def part(words, size):
            return lax.bitcast_convert_type(words, jnp.uint8).reshape(-1, self.entries, size)

        parts = part(self.elements, _ELEMENT_BYTES), part(self.scales, _SCALE_BYTES)
        return jnp.concatenate(parts, axis=-1)


def row_bytes() -> int:
    """Bytes of an entry."""
    return _ELEMENT_BYTES + _SCALE_BYTES


def check(table: Fp4Table, batch: int, dim: int) -> None:
    """Raises ValueError for a table that does not fit to queries of B sequences and D channels."""
    if dim != CHANNELS:
        raise ValueError(f"an Fp4Table has {CHANNELS} channels, the queries have {dim}")
    sequences, rows, lanes = table.elements.shape
    scales = (sequences, rows * ELEMENT_ENTRIES // SCALE_ENTRIES, LANES)
    if sequences not in (1, batch) or lanes != LANES or table.scales.shape != scales:
        raise ValueError(
            f"main_rows must be [1 or {batch}, R/2, {LANES}] elements and [.., R/16, {LANES}]"
            f" scales, got {list(table.elements.shape)} and {list(table.scales.shape)}"
        )
