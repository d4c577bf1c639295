"""A byte n-gram model: the bits per byte that counting alone reaches on the same split.

Interpolated counts. With c the next byte and h_n the n bytes before it,

    p_0(c)       = (count(c) + k_0 / 256) / (N + k_0)
    p_n(c | h_n) = (count(h_n c) + k_n * p_{n-1}(c | h_{n-1})) / (count(h_n) + k_n)

so a context that was seen often speaks for itself and a rare one leans on the shorter one. Each
weight k_n is the one of a grid of powers of two that gives the training data the highest
leave-one-out likelihood (every byte predicted from counts without itself), lowest order first; the
held-out documents are never looked at. Documents do not see each other: the first byte of one is
predicted by p_0, the second by p_1.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

_MAX_ORDER = 2
_WEIGHTS = 2.0 ** np.arange(-6, 13)


@dataclasses.dataclass(frozen=True)
class ByteNgram:
    """A fitted model.

    Attributes:
        weights: k_0 .. k_order.
        counts: counts[n] is i64[256^n, 256]: next byte after every context of n bytes (the
            context's older bytes are the more significant digits).
        totals: totals[n] is i64[256^n], the sum of `counts[n]` over the next byte.
    """

    weights: tuple[float, ...]
    counts: tuple[np.ndarray, ...]
    totals: tuple[np.ndarray, ...]

    @property
    def order(self) -> int:
        """Bytes of context."""
        return len(self.weights) - 1

    def probabilities(self, contexts: np.ndarray, nexts: np.ndarray, order: int) -> np.ndarray:
        """p_order(next | context), f64[n].

        Args:
            contexts: i64[n], the last `order` bytes as one number, in [0, 256^order).
            nexts: i64[n], the next byte.
            order: at most `self.order`.
        """
        probability = np.full(len(nexts), 1 / 256)
        for n in range(order + 1):
            context = contexts % 256**n
            weight = self.weights[n]
            probability = (self.counts[n][context, nexts] + weight * probability) / (
                self.totals[n][context] + weight
            )
        return probability

    def bits(self, documents: Sequence[bytes]) -> float:
        """Bits that the model needs for all bytes of `documents`."""
        total = 0.0
        for n, (contexts, nexts) in enumerate(_by_context_length(documents, self.order)):
            total -= float(np.log2(self.probabilities(contexts, nexts, n)).sum())
        return total


def _by_context_length(
    documents: Sequence[bytes], order: int
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Per n, (contexts, next bytes) where n bytes come before; the last one has the rest."""
    data = np.frombuffer(b"".join(documents), np.uint8).astype(np.int64)
    lengths = np.array([len(document) for document in documents], np.int64)
    starts = np.cumsum(lengths) - lengths
    position = np.arange(len(data)) - np.repeat(starts, lengths)
    result = []
    for n in range(order + 1):
        at = np.flatnonzero(position == n if n < order else position >= n)
        context = np.zeros(len(at), np.int64)
        for back in range(n, 0, -1):
            context = context * 256 + data[at - back]
        result.append((context, data[at]))
    return result


def fit(documents: Sequence[bytes], order: int = 2) -> ByteNgram:
    """Counts `documents` and chooses the weights on them.

    Args:
        documents: the training documents.
        order: bytes of context, 0, 1 or 2 (the counts are dense tables).

    Returns:
        The model.

    Raises:
        ValueError: an order out of range, or no bytes at all.
    """
    if not 0 <= order <= _MAX_ORDER:
        raise ValueError(f"order={order}: a dense byte n-gram model has order 0 .. {_MAX_ORDER}")
    if not any(documents):
        raise ValueError("a byte n-gram model needs at least one training byte")
    counts, totals, weights = [], [], []
    for n in range(order + 1):
        contexts, nexts = _by_context_length(documents, n)[-1]
        table = np.bincount(contexts * 256 + nexts, minlength=256 ** (n + 1)).reshape(-1, 256)
        counts.append(table)
        totals.append(table.sum(axis=1))
    # Every distinct (context, next) of the longest order stands for count equal positions.
    lower = None
    for n in range(order + 1):
        contexts, nexts = np.nonzero(counts[n])
        seen = counts[n][contexts, nexts]
        if lower is None:
            lower_probability = np.full(len(nexts), 1 / 256)
        else:
            lower_probability = lower[contexts % 256 ** (n - 1), nexts]
        others, total = seen - 1, totals[n][contexts] - 1
        likelihoods = [
            (seen * np.log((others + k * lower_probability) / (total + k))).sum() for k in _WEIGHTS
        ]
        weight = float(_WEIGHTS[int(np.argmax(likelihoods))])
        weights.append(weight)
        if n < order:
            # The next order backs off to this one, likewise without the byte that is being
            # predicted.
            lower = np.zeros(counts[n].shape)
            lower[contexts, nexts] = (others + weight * lower_probability) / (total + weight)
    return ByteNgram(tuple(weights), tuple(counts), tuple(totals))


def ngram_bits_per_byte(
    train_docs_bytes: Sequence[bytes], heldout_docs_bytes: Sequence[bytes], order: int = 2
) -> float:
    """Bits per byte on the held-out documents of an n-gram model fitted on the training documents.

    Args:
        train_docs_bytes: UTF-8 text of every training document.
        heldout_docs_bytes: the same of the held-out ones.
        order: bytes of context, at most 2.

    Returns:
        Bits per byte.

    Raises:
        ValueError: an order out of range, or a side without a byte.
    """
    size = sum(len(document) for document in heldout_docs_bytes)
    if not size:
        raise ValueError("bits per byte need at least one held-out byte")
    return fit(train_docs_bytes, order).bits(heldout_docs_bytes) / size
