"""Named argument sets of the hyper-connections, for tests and benchmarks."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import mhc, tpu


@dataclasses.dataclass(frozen=True)
class Case:
    """Shapes of one call.

    Attributes:
        lead: leading axes, [B, T] in the model.
        streams: n.
        channels: d.
        sinkhorn_iters: sweeps.
    """

    lead: tuple[int, ...]
    streams: int = 4
    channels: int = 24
    sinkhorn_iters: int = 20


CASES = {
    "one_sweep": Case((2, 7), sinkhorn_iters=1),
    "two_sweeps": Case((2, 7), sinkhorn_iters=2),
    "published_sweeps": Case((2, 7)),
    "two_streams": Case((1, 5), streams=2, channels=9),
    "one_token": Case((1,), channels=40),
    "whole_lanes": Case((3, 7), channels=256),
    "eight_streams": Case((9,), streams=8, channels=128, sinkhorn_iters=2),
}

BENCHMARKS = {
    "small": Case((1, 2048), channels=256),
    "published_4k": Case((1, 4096), channels=5120),
}


def arguments(case: Case, dtype: Any = np.float32, seed: int = 0) -> dict[str, Any]:
    """Random arguments of `mhc.write_read`, by name, as NumPy.

    Args:
        case: the shapes.
        dtype: of the streams and the sublayer's output (`ml_dtypes.bfloat16` too).
        seed: of the values.

    Returns:
        Keywords of `write_read`; `coefficients`, `mix`, `read` and `write` take some of them.
    """
    rng = np.random.default_rng(seed)
    n, d = case.streams, case.channels

    def normal(*shape):
        return rng.normal(size=shape).astype(np.float32)

    def positive(*shape):
        return rng.uniform(0.1, 1.0, size=shape).astype(np.float32)

    comb = positive(*case.lead, n, n)
    return {
        "streams": normal(*case.lead, n, d).astype(dtype),
        "out": normal(*case.lead, d).astype(dtype),
        "post": positive(*case.lead, n),
        "comb": comb / comb.sum(-2, keepdims=True),
        "pre": positive(*case.lead, n),
        "fn": normal((2 + n) * n, n * d) / np.float32(np.sqrt(n * d)),
        "base": normal((2 + n) * n),
        "scale": np.asarray([1.0, 0.7, 1.3], np.float32),
        "norm_weight": positive(d),
        "sinkhorn_iters": case.sinkhorn_iters,
    }


def tpu_accounts() -> dict[str, tpu.Account]:
    """What the TPU kernels take at the published shape, bfloat16 streams, with their gradients."""
    case = BENCHMARKS["published_4k"]
    n, d = case.streams, case.channels

    def floats(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    shapes = {
        "streams": jax.ShapeDtypeStruct((*case.lead, n, d), jnp.bfloat16),
        "out": jax.ShapeDtypeStruct((*case.lead, d), jnp.bfloat16),
        "post": floats(*case.lead, n),
        "comb": floats(*case.lead, n, n),
        "pre": floats(*case.lead, n),
        "fn": floats((2 + n) * n, n * d),
        "base": floats((2 + n) * n),
        "scale": floats(3),
        "norm_weight": floats(d),
    }

    def gradients(op):
        def run(*arguments):
            kernel = functools.partial(op, implementation="mosaic_tpu")
            results, transpose = jax.vjp(kernel, *arguments)
            return transpose(results)

        return run

    accounts = {}
    for op in (mhc.write_read, mhc.read, mhc.write, mhc.mix):
        ordered = [shapes[name] for name in inspect.signature(op).parameters if name in shapes]
        accounts |= dict(tpu.accounts_of(gradients(op), *ordered))
    return accounts
