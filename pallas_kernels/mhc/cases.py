"""Named argument sets of the hyper-connections, for tests and benchmarks."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import mhc, tpu
from pallas_kernels.measure import Benchmark, Variant


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

_GRADIENTS = "_gradients"
_PASSES = {
    "small": Case((1, 2048), channels=256),
    "small_step": Case((2, 8192), channels=1024),
    "published_4k": Case((1, 4096), channels=5120),
}
# A pass forward, and forward and backward as "NAME_gradients".
BENCHMARKS = {name + part: case for name, case in _PASSES.items() for part in ("", _GRADIENTS)}


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


def _operands(case: Case) -> tuple[list[jax.Array], Any]:
    """Arguments of `write_read` by position, streams in bfloat16, and gradients of its results."""
    named = arguments(case, jnp.bfloat16)
    ordered = [
        jnp.asarray(named[name])
        for name in inspect.signature(mhc.write_read).parameters
        if name in named and name != "sinkhorn_iters"
    ]
    shapes, tree = jax.tree.flatten(jax.eval_shape(mhc.write_read, *ordered))
    keys = jax.random.split(jax.random.key(1), len(shapes))
    grads = [jax.random.normal(k, s.shape, s.dtype) for k, s in zip(keys, shapes, strict=True)]
    return ordered, jax.tree.unflatten(tree, grads)


def benchmark(name: str) -> Benchmark:
    """`write_read`, checked against float32; bytes: streams, output and next input once each.

    With gradients also those of all of them, and the streams and the output once more.
    """
    case = BENCHMARKS[name]
    ordered, grads = _operands(case)
    n, both = case.streams, name.endswith(_GRADIENTS)

    def run(implementation):
        op = functools.partial(
            mhc.write_read, sinkhorn_iters=case.sinkhorn_iters, implementation=implementation
        )

        def gradients(grads, *ordered):
            results, transpose = jax.vjp(op, *ordered)
            return results, transpose(grads)

        return gradients if both else op

    def reference(*arguments):
        return run("xla")(*jax.tree.map(lambda x: x.astype(jnp.float32), arguments))

    values = (2 * n + 2) + (3 * n + 3) * both
    variant = Variant(
        run,
        (grads, *ordered) if both else tuple(ordered),
        flops=0.0,
        bytes=2.0 * values * case.channels * math.prod(case.lead),
        tolerance=0.02,
    )
    return Benchmark(reference=reference, variants={"bfloat16": variant})


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
