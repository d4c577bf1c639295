"""Named argument sets of topk, for tests and benchmarks."""

from __future__ import annotations

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class Case:
    """Shapes of one call.

    Attributes:
        shape: of the scores.
        k: how many are selected.
        lengths: whether rows have lengths of their own.
    """

    shape: tuple[int, ...]
    k: int
    lengths: bool = False


CASES = {
    "plain": Case((3, 5, 37), k=6),
    "lengths": Case((4, 37), k=6, lengths=True),
    "one_row": Case((37,), k=37),
    "more_than_all": Case((4, 5), k=9, lengths=True),
}

BENCHMARKS = {
    "small": Case((2048, 512), k=32),
    "published_4k": Case((4096, 4096), k=512, lengths=True),
    "published_32k": Case((512, 32768), k=512, lengths=True),
}


def arguments(case: Case, seed: int = 0, ties: bool = False):
    """Scores, k and lengths of one case; with `ties`, few values, -inf and -0.0 among them."""
    rng = np.random.default_rng(seed)
    scores = rng.normal(size=case.shape).astype(np.float32)
    if ties:
        scores = rng.choice(np.float32([-np.inf, -1, -0.0, 0.0, 2]), size=case.shape)
    lengths = None
    if case.lengths:
        lengths = rng.integers(0, case.shape[-1] + 1, size=case.shape[:-1]).astype(np.int32)
    return scores, case.k, lengths
