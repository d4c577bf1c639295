"""Engram rows on the host: hashed n-grams of canonical token ids (V4.1 report, Engram section).

For the token at position t with canonical ids c, and for every order n = 2 .. max_ngram,

    mix_n = XOR over i < n of c[t - i] * multiplier[i]        (int64, cannot overflow)
    row   = mix_n mod prime[n][h] + offset[n][h]              (h = 0 .. heads - 1)

Every (site, order, head) has a prime of its own and so a block of rows of its own in the site's
table. The products need 64-bit integers, which is why this runs in NumPy beside the data pipeline
and not inside the jitted step. Imports NumPy only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

_INT64_MAX = 2**63 - 1
_SEED_PER_LAYER = 10007
# Tokens per block of `rows`: the block's intermediate int64 arrays then stay in the L2 cache.
_BLOCK = 1 << 14


def _is_prime(number: int) -> bool:
    if number < 4:
        return number >= 2
    if number % 2 == 0:
        return False
    divisors = np.arange(3, int(np.sqrt(number)) + 2, 2)
    return not np.any(number % divisors[divisors < number] == 0)


def table_primes(
    engram_vocab_size: int, max_ngram: int, heads: int, sites: int
) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """The moduli of every table.

    Each order searches upwards from `engram_vocab_size` (inclusive) and takes the next `heads`
    primes that no order of no site has taken before, sites in layer order.

    Args:
        engram_vocab_size: where each search starts.
        max_ngram: largest n-gram order; orders 2 .. max_ngram are hashed.
        heads: primes per order.
        sites: number of Engram layers.

    Returns:
        primes[site][order - 2][head].
    """
    taken: set[int] = set()
    result = []
    for _ in range(sites):
        orders = []
        for _ in range(max_ngram - 1):
            found: list[int] = []
            candidate = max(engram_vocab_size, 2)
            while len(found) < heads:
                if candidate not in taken and _is_prime(candidate):
                    found.append(candidate)
                    taken.add(candidate)
                candidate += 1
            orders.append(tuple(found))
        result.append(tuple(orders))
    return tuple(result)


def site_multipliers(compressed_vocab_size: int, max_ngram: int, layer_id: int) -> np.ndarray:
    """The odd multipliers i64[max_ngram] of one Engram layer, `multiplier * id` below 2^63."""
    bound = (_INT64_MAX // compressed_vocab_size) // 2
    draws = np.random.default_rng(_SEED_PER_LAYER * layer_id).integers(
        0, bound, max_ngram, dtype=np.int64
    )
    return 2 * draws + 1


class EngramHasher:
    """Maps canonical token ids to table rows for every Engram layer of one model.

    Attributes:
        layer_ids: the Engram layers, ascending; S of them.
        primes: primes[site][order - 2][head].
        multipliers: i64[S,max_ngram].
        offsets: i64[S,R], first row of every (order, head) block; R = (max_ngram - 1) * heads,
            columns are all heads of order 2, then of order 3, ...
        num_embeddings: rows of each site's table.
    """

    def __init__(
        self,
        *,
        compressed_vocab_size: int,
        engram_vocab_size: int,
        max_ngram: int,
        heads: int,
        layer_ids: Sequence[int],
        pad_compressed_id: int,
        num_embeddings: Sequence[int] | None = None,
    ):
        """Derives primes, multipliers and offsets.

        Args:
            compressed_vocab_size: number of canonical ids; the multipliers depend on it.
            engram_vocab_size: least modulus.
            max_ngram: largest order, at least 2.
            heads: hash heads per order.
            layer_ids: Engram layers (may be empty).
            pad_compressed_id: canonical id that stands for history that is not there.
            num_embeddings: table rows that the model declares, checked when given.

        Raises:
            ValueError: a parameter is out of range, or the tables' rows differ from
                `num_embeddings`.
        """
        if layer_ids:
            if max_ngram < 2:
                raise ValueError(f"engram_max_ngram_size={max_ngram}: must be at least 2")
            if heads < 1:
                raise ValueError(f"engram_n_heads={heads}: must be at least 1")
            if not 0 <= pad_compressed_id < compressed_vocab_size:
                raise ValueError(
                    f"engram pad token: canonical id {pad_compressed_id} is outside "
                    f"engram_compressed_vocab_size={compressed_vocab_size}"
                )
        sites = len(layer_ids)
        self.compressed_vocab_size = compressed_vocab_size
        self.pad_compressed_id = pad_compressed_id
        self.max_ngram = max_ngram
        self.heads = heads
        self.layer_ids = tuple(layer_ids)
        self.columns = max(max_ngram - 1, 0) * heads
        self.primes = table_primes(engram_vocab_size, max_ngram, heads, sites)
        self.multipliers = np.array(
            [site_multipliers(compressed_vocab_size, max_ngram, layer) for layer in layer_ids],
            np.int64,
        ).reshape(sites, max_ngram)
        moduli = np.array(self.primes, np.int64).reshape(sites, self.columns)
        ends = np.cumsum(moduli, axis=1)
        self.offsets = ends - moduli
        self.num_embeddings = tuple(int(end[-1]) for end in ends)
        if num_embeddings is not None and tuple(num_embeddings) != self.num_embeddings:
            raise ValueError(
                f"engram_num_embeddings={list(num_embeddings)}: the primes of engram_vocab_size="
                f"{engram_vocab_size}, engram_max_ngram_size={max_ngram}, engram_n_heads={heads} "
                f"and {sites} Engram layers give {list(self.num_embeddings)}"
            )
        if any(rows > np.iinfo(np.int32).max for rows in self.num_embeddings):
            raise ValueError(f"engram tables of {self.num_embeddings} rows do not fit 32-bit rows")

    @classmethod
    def from_config(cls, config: Any, pad_compressed_id: int) -> EngramHasher:
        """The hasher of a ModelConfig, given the canonical id of its Engram pad token."""
        return cls(
            compressed_vocab_size=config.engram_compressed_vocab_size,
            engram_vocab_size=config.engram_vocab_size,
            max_ngram=config.engram_max_ngram_size,
            heads=config.engram_n_heads,
            layer_ids=config.engram_layer_ids,
            pad_compressed_id=pad_compressed_id,
            num_embeddings=config.engram_num_embeddings,
        )

    def history(
        self, compressed_ids: np.ndarray, positions: np.ndarray, dead: np.ndarray | None = None
    ) -> np.ndarray:
        """The ids that every position hashes, newest first.

        A lag that would leave the document (`positions < lag`) reads the pad id. At a dead token
        (image) the look-back latches: it and everything older read the pad id.

        Args:
            compressed_ids: int[B,T] canonical ids.
            positions: int[B,T], 0-based inside the document.
            dead: bool[B,T], or None where every token is text.

        Returns:
            i64[B,T,max_ngram].
        """
        ids_BxT = np.asarray(compressed_ids, np.int64)
        positions = np.asarray(positions)
        length = ids_BxT.shape[1]
        out = np.full((*ids_BxT.shape, self.max_ngram), self.pad_compressed_id, np.int64)
        blocked = np.zeros(ids_BxT.shape, bool)
        for lag in range(min(self.max_ngram, length)):
            blocked |= positions < lag
            blocked[:, :lag] = True
            if dead is not None:
                blocked[:, lag:] |= dead[:, : length - lag]
            np.copyto(out[:, lag:, lag], ids_BxT[:, : length - lag], where=~blocked[:, lag:])
        return out

    def rows(
        self, compressed_ids: np.ndarray, positions: np.ndarray, dead: np.ndarray | None = None
    ) -> np.ndarray:
        """Table rows of every token.

        Args:
            compressed_ids: int[B,T] canonical ids.
            positions: int[B,T], 0-based inside the document; history never crosses its start.
            dead: bool[B,T], tokens at which the look-back latches (image tokens), or None.

        Returns:
            i32[B,T,S,R] rows of each site's own table.

        Raises:
            ValueError: an id outside the canonical vocabulary, or shapes that differ.
        """
        ids_BxT = np.asarray(compressed_ids)
        if ids_BxT.ndim != 2 or np.shape(positions) != ids_BxT.shape:
            raise ValueError(
                f"compressed_ids {ids_BxT.shape} and positions {np.shape(positions)} must both be "
                "[B,T]"
            )
        if dead is not None and np.shape(dead) != ids_BxT.shape:
            raise ValueError(
                f"dead {np.shape(dead)} must have the shape of the ids, {ids_BxT.shape}"
            )
        if not self.layer_ids:
            return np.empty((*ids_BxT.shape, 0, self.columns), np.int32)
        if ids_BxT.size and not (0 <= ids_BxT.min() and ids_BxT.max() < self.compressed_vocab_size):
            raise ValueError(
                f"canonical ids {ids_BxT.min()}..{ids_BxT.max()} leave the vocabulary of "
                f"{self.compressed_vocab_size} (engram_compressed_vocab_size)"
            )
        history_BxTxN = self.history(ids_BxT, positions, dead)
        tokens = ids_BxT.size
        out = np.empty((tokens, len(self.layer_ids), self.columns), np.int32)
        history_NxM = np.ascontiguousarray(history_BxTxN.reshape(tokens, -1).T)
        for start in range(0, tokens, _BLOCK):
            block = history_NxM[:, start : start + _BLOCK]
            for site in range(len(self.layer_ids)):
                self._hash_block(block, site, out[start : start + _BLOCK, site])
        return out.reshape(*ids_BxT.shape, len(self.layer_ids), self.columns)

    def _hash_block(self, history_NxM: np.ndarray, site: int, out_MxR: np.ndarray) -> None:
        rows_RxM = np.empty((self.columns, history_NxM.shape[1]), np.int32)
        mix = history_NxM[0] * self.multipliers[site, 0]
        column = 0
        for order in range(2, self.max_ngram + 1):
            mix = mix ^ (history_NxM[order - 1] * self.multipliers[site, order - 1])
            for prime in self.primes[site][order - 2]:
                # mix >= 0, so this is mix % prime; NumPy vectorises division by a constant, not %.
                rows_RxM[column] = mix - mix // prime * prime + self.offsets[site, column]
                column += 1
        out_MxR[...] = rows_RxM.T
