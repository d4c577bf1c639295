"""Named argument sets of the grouped matmul, for tests and benchmarks."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import tpu
from pallas_kernels.grouped_matmul import grouped_matmul
from pallas_kernels.grouped_matmul.mosaic_gpu import rows_by_weights
from pallas_kernels.grouped_matmul.mosaic_gpu_tile import TABLE, TuningConfig
from pallas_kernels.grouped_matmul.mosaic_gpu_weights import weight_gradient
from pallas_kernels.measure import Benchmark, Variant
from pallas_kernels.tuning import Tuning


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

_EXPERTS = 48
_G1 = Case((1024,) * _EXPERTS, rows=1024 * _EXPERTS, inner=5120, outer=4608)
_ZIPF = np.floor(1024 * _EXPERTS / np.arange(1, _EXPERTS + 1) / 4.5).astype(int)
# Two experts get nothing, and what rounding leaves over goes to the first.
_ZIPF[-2:] = 0
_ZIPF[0] += 1024 * _EXPERTS - _ZIPF.sum()

_PRODUCTS = {
    "G1": _G1,
    "G1_zipf": dataclasses.replace(_G1, sizes=tuple(map(int, _ZIPF))),
    "G4": dataclasses.replace(_G1, sizes=(16,) * _EXPERTS, rows=16 * _EXPERTS),
    "small_up": Case(None, rows=8192 * 4, inner=1024, outer=1024, experts=32),
    "small_down": Case(None, rows=8192 * 4, inner=512, outer=1024, experts=32),
    "published_up": Case(None, rows=4096 * 6, inner=5120, outer=4608, experts=384),
    "published_down": Case(None, rows=4096 * 6, inner=2304, outer=5120, experts=384),
    "tiny": Case((20, 0, 9, 3), rows=40, inner=64, outer=128),
}
_PARTS = ("", "_rows", "_weights")
# A product, and its gradients: of rows as "NAME_rows", of weights as "NAME_weights".
BENCHMARKS = {name + part: case for name, case in _PRODUCTS.items() for part in _PARTS}


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


def _part(name: str) -> str:
    """Which of `_PARTS` a benchmark is."""
    return next((part for part in _PARTS if part and name.endswith(part)), "")


def operands(name: str) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """(x, w, group sizes, gradient of the result) of a benchmark, bfloat16, on the device."""
    case = BENCHMARKS[name]
    sizes = case.sizes
    if sizes is None:
        rng = np.random.default_rng(0)
        sizes = rng.multinomial(case.rows, rng.dirichlet(np.full(case.experts, 3.0)))
    shapes = (case.rows, case.inner), (len(sizes), case.inner, case.outer), (case.rows, case.outer)
    keys = jax.random.split(jax.random.key(0), 3)
    x, w, grad = (
        jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes, strict=True)
    )
    return x, w, jnp.asarray(sizes, jnp.int32), grad


def product(name: str) -> Callable[..., jax.Array]:
    """A benchmark's function of `operands` and, by keyword, an implementation."""
    part = _part(name)

    def run(x, w, sizes, grad, implementation):
        function = functools.partial(grouped_matmul, implementation=implementation)
        if not part:
            return function(x, w, sizes)
        _, transpose = jax.vjp(lambda x, w: function(x, w, sizes), x, w)
        return transpose(grad)[part == "_weights"]

    return run


def benchmark(name: str) -> Benchmark:
    """One product, or one of its gradients; bytes: every operand once."""
    case = BENCHMARKS[name]
    arguments = operands(name)
    x, w, _, grad = arguments
    run = product(name)
    return Benchmark(
        reference=functools.partial(run, implementation="xla"),
        variants={
            "bfloat16": Variant(
                lambda implementation: functools.partial(run, implementation=implementation),
                arguments,
                flops=2.0 * case.rows * case.inner * case.outer,
                bytes=float(x.nbytes + w.nbytes + grad.nbytes),
                tolerance=0.02,
            )
        },
        rivals={"lax.ragged_dot": _ragged_dot(name, arguments)} if not _part(name) else {},
    )


def _ragged_dot(name: str, arguments: tuple[jax.Array, ...]) -> Variant:
    case = BENCHMARKS[name]
    return Variant(
        lambda _: lambda x, w, sizes, grad: jax.lax.ragged_dot(x, w, sizes),
        arguments,
        flops=2.0 * case.rows * case.inner * case.outer,
        bytes=0.0,
        tolerance=0.02,
    )


def tuning(name: str) -> Tuning:
    """Stages for one benchmark."""
    part = _part(name)
    key = "weights" if part == "_weights" else "rows"
    transposed = part == "_rows"

    def function(config):
        def run(x, w, sizes, grad):
            if key == "weights":
                return weight_gradient(x, grad, sizes, x.dtype, config=config)
            left = grad if transposed else x
            return rows_by_weights(left, w, sizes, transposed=transposed, config=config)

        return run

    return Tuning(TABLE, key, [TuningConfig(stages=n) for n in (4, 3, 2)], function, operands(name))


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
