"""Named argument sets of the grouped matmul, for tests and benchmarks."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import tpu
from pallas_kernels.grouped_matmul import grouped_matmul


@dataclasses.dataclass(frozen=True)
class Case:
    """Shapes of one call.

    Attributes:
        sizes: rows of each group; None draws them at random, unequal, with sum `rows`.
        rows: M; those beyond the sum of `sizes` belong to no expert.
        inner: K.
        outer: N.
        experts: E, where the sizes are drawn.
    """

    sizes: tuple[int, ...] | None
    rows: int
    inner: int = 6
    outer: int = 10
    experts: int = 0


CASES = {
    "unequal": Case((5, 1, 20, 11), rows=37),
    "empty_groups": Case((0, 30, 0, 7), rows=37),
    "all_in_one": Case((0, 0, 37, 0), rows=37),
    "rows_left_over": Case((9, 0, 8, 3), rows=37),
    "no_rows_used": Case((0, 0, 0, 0), rows=37),
    "whole_blocks": Case((8, 16, 0, 8), rows=37),
    "fewer_rows_than_experts": Case((0, 1, 0, 0, 1, 0), rows=3),
    "one_expert": Case((13,), rows=17),
}

BENCHMARKS = {
    "small_8": Case(None, rows=4096, inner=64, outer=128, experts=8),
    "small_32": Case(None, rows=4096, inner=64, outer=128, experts=32),
    "published_up": Case(None, rows=4096 * 6, inner=5120, outer=2304, experts=384),
    "published_down": Case(None, rows=4096 * 6, inner=2304, outer=5120, experts=384),
}


def arguments(
    case: Case, dtype: Any = np.float32, seed: int = 0
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Random (x, w, group_sizes) of one case, as NumPy; `dtype` may be `ml_dtypes.bfloat16`."""
    rng = np.random.default_rng(seed)
    sizes = case.sizes
    if sizes is None:
        sizes = rng.multinomial(case.rows, rng.dirichlet(np.full(case.experts, 3.0)))
    x = rng.normal(size=(case.rows, case.inner)).astype(np.float32)
    w = rng.normal(size=(len(sizes), case.inner, case.outer)).astype(np.float32)
    return x.astype(dtype), w.astype(dtype), np.asarray(sizes, np.int32)


def tpu_accounts() -> dict[str, tpu.Account]:
    """What the TPU kernel takes at the published widths, bfloat16, with its gradients."""
    kernel = functools.partial(grouped_matmul, implementation="mosaic_tpu")

    def gradients(x, w, sizes):
        y, transpose = jax.vjp(lambda x, w: kernel(x, w, sizes), x, w)
        return transpose(y)

    accounts = {}
    for name in ("published_up", "published_down"):
        case = BENCHMARKS[name]
        x = jax.ShapeDtypeStruct((case.rows, case.inner), jnp.bfloat16)
        w = jax.ShapeDtypeStruct((case.experts, case.inner, case.outer), jnp.bfloat16)
        sizes = jax.ShapeDtypeStruct((case.experts,), jnp.int32)
        stated = tpu.accounts_of(gradients, x, w, sizes)
        parts = ("forward", "gradient of rows", "gradient of weights")
        for part, (_, account) in zip(parts, stated, strict=True):
            accounts[f"{name} {part}"] = account
    return accounts
