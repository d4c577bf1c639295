"""Ranges of packed rows, in NumPy: what the kernels' cases and benchmarks are given.

Documents lie one after another in a row. Each starts at a multiple of `ALIGNMENT`, and so at the
start of a group of every compression ratio; the gaps between them are padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

ALIGNMENT = 8


class Ranges(NamedTuple):
    """What each token of a packed row sees, i32 `[T]` each; all ranges are empty on padding."""

    window_lo: np.ndarray
    window_hi: np.ndarray
    main_lo: np.ndarray
    main_hi: np.ndarray


def document_starts(lengths: Sequence[int]) -> list[int]:
    """The token at which each document of a row starts."""
    starts, end = [], 0
    for length in lengths:
        starts.append(-(-end // ALIGNMENT) * ALIGNMENT)
        end = starts[-1] + length
    return starts


def ranges(lengths: Sequence[int], tokens: int, window: int, ratio: int) -> Ranges:
    """Window and main ranges of the documents of one row.

    Args:
        lengths: tokens of each document.
        tokens: T, length of the row.
        window: positions that a token sees, itself included.
        ratio: tokens per compressed entry; a document's first entry is `start / ratio`.

    Returns:
        `Ranges` over window rows (one a token) and main rows (one a group of `ratio` tokens).

    Raises:
        ValueError: the documents do not fit into the row.
    """
    result = Ranges(*(np.zeros(tokens, np.int32) for _ in Ranges._fields))
    for start, length in zip(document_starts(lengths), lengths, strict=True):
        if start + length > tokens:
            raise ValueError(f"documents of {list(lengths)} tokens do not fit into {tokens}")
        position = np.arange(length)
        here = slice(start, start + length)
        result.window_lo[here] = start + np.maximum(position - window + 1, 0)
        result.window_hi[here] = start + position + 1
        result.main_lo[here] = start // ratio
        result.main_hi[here] = start // ratio + (position + 1) // ratio
    return result
