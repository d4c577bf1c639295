"""Which implementation of each kernel the model runs."""

from __future__ import annotations

import dataclasses

from pallas_kernels.dispatch import Implementation


@dataclasses.dataclass(frozen=True)
class Kernels:
    """One entry per op of `pallas_kernels`: a name, a tuple of names to try in order, or None.

    None leaves the choice to the op (its own order of preference on the present device). An entry
    serves all functions of its op (`indexer`: select, scores and scores_at; `sparse_attention`:
    selected_mass too). Of a tuple a function passes over the names that it lacks; a single name
    that it lacks or that declines is an error.

    Attributes:
        strict: of every tuple only the first name counts, so that falling back is an error.
        keep_attention: training: a layer that is computed again for its gradients keeps the results
            of its attention kernel, queries x heads x head_dim a layer, in place of attending
            twice. Without a kernel for attention nothing changes.
    """

    sparse_attention: Implementation = None
    indexer: Implementation = None
    mhc: Implementation = None
    grouped_matmul: Implementation = None
    engram_gather: Implementation = None
    fp4: Implementation = None
    strict: bool = False
    keep_attention: bool = False

    def __post_init__(self) -> None:
        """Leaves the first name of each tuple where `strict`."""
        for name, names in vars(self).items():
            if self.strict and isinstance(names, tuple):
                object.__setattr__(self, name, names[0])
