"""Named argument sets of the Engram gather, for tests and benchmarks."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import fp4, tpu
from pallas_kernels.engram_gather import engram_gather, mosaic_tpu


@dataclasses.dataclass(frozen=True)
class Case:
    """Shapes of one call.

    Attributes:
        table: [N, c].
        lead: leading axes of the rows, [B, T] in the model.
        count: R, rows a token.
        absent: share of the rows that are -1.
    """

    table: tuple[int, int]
    lead: tuple[int, ...]
    count: int
    absent: float = 0.0


CASES = {
    "one_row": Case((1, 3), (2, 5), 2),
    "repeated": Case((7, 5), (2, 11), 6),
    "absent": Case((50, 8), (3, 4), 3, absent=0.4),
    "one_token": Case((50, 8), (), 4),
}

BENCHMARKS = {
    "small": Case((65536, 32), (1, 2048), 12),
    "published_4k": Case((4_000_000, 256), (1, 4096), 24),
}


def arguments(case: Case, dtype: Any = np.float32, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Random (table, rows) of one case, as NumPy; `dtype` may be `ml_dtypes.bfloat16`."""
    rng = np.random.default_rng(seed)
    table = rng.standard_normal(case.table, np.float32).astype(dtype)
    shape = (*case.lead, case.count)
    rows = rng.integers(case.table[0], size=shape)
    return table, np.where(rng.random(shape) < case.absent, -1, rows).astype(np.int32)


def tpu_accounts() -> dict[str, tpu.Account]:
    """What the TPU kernel takes for a published prefill, bfloat16 results."""
    case = BENCHMARKS["published_4k"]
    rows = jax.ShapeDtypeStruct((*case.lead, case.count), jnp.int32)
    table = jax.ShapeDtypeStruct(case.table, jnp.float32)
    stored = jax.ShapeDtypeStruct((case.table[0], fp4.row_bytes("fp8", 256)), jnp.uint8)
    gather = functools.partial(engram_gather, dtype=jnp.bfloat16, implementation="mosaic_tpu")
    packed = jax.eval_shape(mosaic_tpu.to_layout, stored)
    return dict(tpu.accounts_of(gather, table, rows) + tpu.accounts_of(gather, packed, rows))
