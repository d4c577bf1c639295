"""Packing documents into rows: a pure function of lengths, seed and epoch.

A document of n tokens (bos and eos among them) has n - 1 predictions: token i is read, the next
one is the target. They are cut into pieces of at most `sequence_length`; the next piece begins with
the token that was the last target of the piece before, so every token but bos is a target exactly
once. Pieces are segments of their own. In its row a piece starts at a multiple of 8, the least
common multiple of every compression ratio and of the candidate block times its ratio.

Shuffled pieces are packed best-fit decreasing in windows of a few thousand, then all rows of the
epoch are shuffled, so that neither the length order of a window nor the pieces of one long document
end up next to each other.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from v41flash.config_checks import DOCUMENT_ALIGNMENT as ALIGNMENT
from v41flash.errors import InputError


@dataclasses.dataclass(frozen=True)
class Plan:
    """One epoch of rows. Pieces are ordered by row, then by place in the row.

    Attributes:
        document: i64[P], index into the lengths that were packed.
        start: i64[P], first token of the piece in its document.
        length: i32[P], tokens of the piece.
        offset: i32[P], place of the piece's first token in its row.
        row_first: i64[rows + 1], the first piece of every row.
        sequence_length: tokens a row.
    """

    document: np.ndarray
    start: np.ndarray
    length: np.ndarray
    offset: np.ndarray
    row_first: np.ndarray
    sequence_length: int

    @property
    def num_rows(self) -> int:
        """Rows of the epoch."""
        return len(self.row_first) - 1

    @property
    def padding_rate(self) -> float:
        """Share of the rows' tokens that belong to no document; 0 without rows."""
        total = self.num_rows * self.sequence_length
        return 1.0 - int(self.length.sum(dtype=np.int64)) / total if total else 0.0


class Limit(NamedTuple):
    """What a row may hold beside its tokens.

    Attributes:
        weights: sizes that a document (by index) brings along; [] where it brings nothing.
        fits: whether all of these go into one row. A single document's always do.
    """

    weights: Callable[[int], list[int]]
    fits: Callable[[Sequence[int]], bool]


def cut(lengths: np.ndarray, sequence_length: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Cuts documents into pieces.

    Args:
        lengths: int[N], tokens of every document, bos and eos included.
        sequence_length: largest piece.

    Returns:
        (document i64[P], start i64[P], length i32[P]) in document order.
    """
    predictions = np.maximum(np.asarray(lengths, np.int64) - 1, 0)
    pieces = -(-predictions // sequence_length)
    document = np.repeat(np.arange(len(predictions)), pieces)
    first_piece = np.cumsum(pieces) - pieces
    start = (np.arange(len(document)) - first_piece[document]) * sequence_length
    length = np.minimum(predictions[document] - start, sequence_length)
    return document, start, length.astype(np.int32)


def best_fit(units: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray, int]:
    """Best-fit decreasing: each size goes to the fullest row that still holds it, largest first.

    Args:
        units: int[P], sizes, 1 .. capacity.
        capacity: what a row holds.

    Returns:
        (row i64[P], offset i64[P] in units, number of rows).
    """
    row = np.empty(len(units), np.int64)
    offset = np.zeros(len(units), np.int64)
    order = np.argsort(-units, kind="stable")
    # A size that fills its row needs no search; with long documents that is nearly all of them.
    full = int(np.searchsorted(-units[order], -capacity, side="right"))
    row[order[:full]] = np.arange(full)
    rows_with_room: list[list[int]] = [[] for _ in range(capacity + 1)]
    room_left = 0  # bit r is set where rows_with_room[r] is not empty
    rows = full
    for piece, size in zip(order[full:].tolist(), units[order[full:]].tolist(), strict=True):
        candidates = room_left >> size
        if candidates:
            room = size + (candidates & -candidates).bit_length() - 1
            target = rows_with_room[room].pop()
            if not rows_with_room[room]:
                room_left &= ~(1 << room)
        else:
            target, room = rows, capacity
            rows += 1
        row[piece] = target
        offset[piece] = capacity - room
        if room > size:
            rows_with_room[room - size].append(target)
            room_left |= 1 << (room - size)
    return row, offset, rows


def _spread(
    row: np.ndarray,
    offset: np.ndarray,
    rows: int,
    units: np.ndarray,
    capacity: int,
    weights: Sequence[list[int]],
    fits: Callable[[Sequence[int]], bool],
) -> tuple[np.ndarray, np.ndarray, int]:
    """Moves pieces out of rows whose weights do not fit, into rows of their own.

    Arguments and results as of `best_fit`. What is moved is packed again in the order in which it
    was met, into the last new row while it fits there: a moved piece left a row for its weights,
    so that the new rows are rarely short of room.
    """
    row, offset = row.copy(), offset.copy()
    held: list[list[int]] = [[] for _ in range(rows)]
    moved = []
    for piece in np.lexsort((offset, row)):
        if not weights[piece]:
            continue
        together = held[row[piece]] + weights[piece]
        if fits(together):
            held[row[piece]] = together
        else:
            moved.append(piece)
    used, together = capacity, []
    for piece in moved:
        if used + units[piece] > capacity or not fits(together + weights[piece]):
            rows, used, together = rows + 1, 0, []
        row[piece], offset[piece] = rows - 1, used
        used, together = used + units[piece], together + weights[piece]
    return row, offset, rows


def pack(
    lengths: np.ndarray,
    sequence_length: int,
    *,
    seed: int,
    epoch: int,
    window: int = 4096,
    limit: Limit | None = None,
) -> Plan:
    """Packs one epoch.

    Args:
        lengths: int[N], tokens of every document, bos and eos included.
        sequence_length: tokens a row, a multiple of 8.
        seed: with `epoch`, decides the order of pieces and rows.
        epoch: counts from 0.
        window: pieces that are packed together.
        limit: on what else the documents of a row bring along; documents that bring anything must
            fit one row whole.

    Returns:
        The plan; equal arguments give equal plans.

    Raises:
        InputError: a sequence length that is not a positive multiple of 8, or a window below 1.
    """
    if sequence_length < ALIGNMENT or sequence_length % ALIGNMENT:
        raise InputError(
            f"data.sequence_length={sequence_length}: must be a positive multiple of {ALIGNMENT}"
        )
    if window < 1:
        raise InputError(f"data.pack_window={window}: must be at least 1")
    rng = np.random.default_rng([seed, epoch])
    document, start, length = cut(lengths, sequence_length)
    order = rng.permutation(len(document))
    document, start, length = document[order], start[order], length[order]
    units = -(-length.astype(np.int64) // ALIGNMENT)
    row = np.empty(len(document), np.int64)
    offset = np.empty(len(document), np.int64)
    rows, capacity = 0, sequence_length // ALIGNMENT
    for low in range(0, len(document), window):
        part = slice(low, low + window)
        packed = best_fit(units[part], capacity)
        if limit is not None:
            weights = [limit.weights(index) for index in document[part]]
            packed = _spread(*packed, units[part], capacity, weights, limit.fits)
        row[part], offset[part], used = packed
        row[part] += rows
        rows += used
    row = rng.permutation(rows)[row]
    order = np.lexsort((offset, row))
    return Plan(
        document=document[order],
        start=start[order],
        length=length[order],
        offset=(offset[order] * ALIGNMENT).astype(np.int32),
        row_first=np.searchsorted(row[order], np.arange(rows + 1)),
        sequence_length=sequence_length,
    )
