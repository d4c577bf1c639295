"""Named argument sets of the quantisers, for tests and benchmarks."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import fp4, tpu


@dataclasses.dataclass(frozen=True)
class Case:
    """One call.

    Attributes:
        fmt: the format.
        shape: of x.
        magnitude: standard deviation of x.
        spread: of the blocks' magnitudes, in powers of two.
    """

    fmt: str
    shape: tuple[int, ...]
    magnitude: float = 1.0
    spread: float = 0.0


CASES = {
    "fp4_one_block": Case("fp4", (16,)),
    "fp4_odd": Case("fp4", (3, 5, 48), spread=6.0),
    "fp4_wide_range": Case("fp4", (7, 512), spread=20.0),
    "mxfp4_one_block": Case("mxfp4", (1, 32)),
    "mxfp4_odd": Case("mxfp4", (3, 5, 2, 96), spread=6.0),
    "mxfp4_wide_range": Case("mxfp4", (7, 128), spread=40.0),
    "mxfp4_subnormal": Case("mxfp4", (5, 64), magnitude=2.0**-127, spread=2.0),
    "fp8_one_block": Case("fp8", (32,)),
    "fp8_odd": Case("fp8", (3, 5, 96), spread=6.0),
    "fp8_wide_range": Case("fp8", (7, 512), spread=20.0),
}

BENCHMARKS = {
    "main_kv_4k": Case("fp4", (1, 4096, 512)),
    "index_keys_4k": Case("mxfp4", (1, 4096, 128)),
    "index_queries_4k": Case("mxfp4", (1, 4096, 32, 128)),
    "window_kv_4k": Case("fp8", (1, 4096, 512)),
}


def arguments(case: Case, dtype: Any = np.float32, seed: int = 0) -> tuple[np.ndarray, str]:
    """Random (x, fmt) of one case, as NumPy; `dtype` may be `ml_dtypes.bfloat16`."""
    rng = np.random.default_rng(seed)
    *lead, channels = case.shape
    scale = np.exp2(case.spread * rng.normal(size=(*lead, channels // 16, 1)))
    x = (rng.normal(size=(*lead, channels // 16, 16)) * scale).reshape(case.shape)
    return (x * case.magnitude).astype(np.float32).astype(dtype), case.fmt


def tpu_accounts() -> dict[str, tpu.Account]:
    """What the TPU kernels take for the values of a published prefill, bfloat16."""
    accounts = {}
    for name, case in BENCHMARKS.items():
        x = jax.ShapeDtypeStruct(case.shape, jnp.bfloat16)
        packed = jax.ShapeDtypeStruct(
            (*case.shape[:-1], fp4.row_bytes(case.fmt, case.shape[-1])), jnp.uint8
        )
        for op, argument in ((fp4.fake_quantize, x), (fp4.pack, x), (fp4.unpack, packed)):
            kernel = functools.partial(op, fmt=case.fmt, implementation="mosaic_tpu")
            stated = tpu.accounts_of(kernel, argument)
            accounts |= {f"{name} {what}": account for what, account in stated}
    return accounts
