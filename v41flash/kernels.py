"""Which implementation of each kernel the model runs."""

from __future__ import annotations

import dataclasses

from pallas_kernels.dispatch import Implementation


@dataclasses.dataclass(frozen=True)
class Kernels:
    """One entry per op of `pallas_kernels`: a name, a tuple of names to try in order, or None.

    None leaves the choice to the op (its own order of preference on the present device).
    """

    sparse_attention: Implementation = None
    indexer: Implementation = None
    mhc: Implementation = None
    grouped_matmul: Implementation = None
    engram_gather: Implementation = None
