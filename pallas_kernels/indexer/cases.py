"""Named argument sets of the indexer, for tests and benchmarks."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from pallas_kernels.packed_rows import ranges


@dataclasses.dataclass(frozen=True)
class Case:
    """Shapes of one selection.

    Attributes:
        documents: lengths of the documents of each batch row; there are as many rows.
        queries: T, the last T tokens of the row are asked about.
        tokens: length of the row, at least T.
        ratio: tokens per entry.
        top_k: entries to select.
        heads: Hi.
        dim: Di.
        pool: (blocks, size) to be made, or None.
    """

    documents: tuple[tuple[int, ...], ...]
    queries: int
    tokens: int
    ratio: int
    top_k: int
    heads: int = 2
    dim: int = 32
    pool: tuple[int, int] | None = None


# Small shapes. The pools leave out most blocks; some documents start inside of a block of the row.
CASES = {
    "packed": Case(((19, 3, 9), (43,)), queries=43, tokens=43, ratio=2, top_k=4),
    "pool": Case(((25, 3, 26), (61,)), queries=67, tokens=67, ratio=1, top_k=5, pool=(3, 3)),
    "pool_of_pairs": Case(((25, 3, 26), (61,)), 67, 67, ratio=2, top_k=5, pool=(2, 4)),
    "few_entries": Case(((7,), (9,)), queries=9, tokens=9, ratio=2, top_k=11, pool=(9, 2)),
    "later_chunk": Case(((75,), (40, 27)), 11, 75, ratio=1, top_k=6, pool=(4, 8)),
    "decode": Case(((64,), (51,)), queries=1, tokens=64, ratio=1, top_k=6, pool=(3, 8)),
}

BENCHMARKS = {
    "small": Case(((512,),) * 4, 512, 512, ratio=1, top_k=32, heads=4, pool=(16, 8)),
    "published_4k": Case(((4096,),), 4096, 4096, 1, 512, 32, 128, pool=(2048, 8)),
    "published_32k": Case(((32768,),), 4096, 32768, 1, 512, 32, 128, pool=(2048, 8)),
    "published_decode": Case(((32768,),) * 16, 1, 32768, 1, 512, 32, 128, pool=(2048, 8)),
}


def arguments(case: Case, dtype: Any = np.float32, seed: int = 0, ties: bool = False) -> tuple:
    """Random arguments of one case.

    Args:
        case: the shapes.
        dtype: of queries and keys (anything NumPy casts to, `ml_dtypes.bfloat16` too).
        seed: of the values.
        ties: small integers instead of normal values: scores are exact in any order of summation,
            and many are equal.

    Returns:
        q, w, k, lo, hi of `select`, as NumPy arrays.
    """
    rng = np.random.default_rng(seed)
    batch, asked = len(case.documents), slice(case.tokens - case.queries, None)
    visible = [ranges(documents, case.tokens, 1, case.ratio) for documents in case.documents]
    lo, hi = (np.stack([r[i][asked] for r in visible]) for i in (2, 3))

    def values(*shape):
        if ties:
            return rng.integers(-1, 2, size=shape) * (rng.random(shape) < 0.3)
        return rng.normal(size=shape)

    q = values(batch, case.queries, case.heads, case.dim).astype(dtype)
    w = values(batch, case.queries, case.heads).astype(np.float32)
    k = values(batch, case.tokens // case.ratio, case.dim).astype(dtype)
    return q, w, k, lo, hi
