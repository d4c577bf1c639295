"""Named argument sets of newton_schulz, for tests and benchmarks."""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.measure import Benchmark, Variant
from pallas_kernels.newton_schulz import HYBRID, newton_schulz
from pallas_kernels.newton_schulz.reference import flops, segments


@dataclasses.dataclass(frozen=True)
class Case:
    """Shapes of one call.

    Attributes:
        shape: [..., rows, columns].
        spectrum: of the singular values: "normal" (a random normal matrix), "power" (1, 1/2, 1/3,
            ...), "steep" (down to 1e-4), "spike" (one of 1, the others 3e-5), "half" (as many zeros
            as ones), "zero".
    """

    shape: tuple[int, ...]
    spectrum: str = "normal"


CASES = {
    "square": Case((7, 7)),
    "wide": Case((3, 5, 13)),
    "tall": Case((2, 2, 17, 6)),
    "row": Case((1, 9)),
    "power": Case((2, 24, 60), "power"),
    "steep": Case((24, 60), "steep"),
    "spike": Case((60, 24), "spike"),
    "half": Case((24, 60), "half"),
    "zero": Case((2, 4, 9), "zero"),
}

# F1 and F3 are the queries of a layer per head, and the inputs of 48 experts.
BENCHMARKS = {
    "small": Case((8, 64, 160)),
    "F1": Case((64, 512, 1280)),
    "F3": Case((48, 2304, 5120)),
}


def arguments(case: Case, seed: int = 0) -> np.ndarray:
    """The matrices of a case, float64."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=case.shape)
    if case.spectrum == "normal":
        return x
    u, _, vt = np.linalg.svd(x, full_matrices=False)
    n = u.shape[-1]
    values = {
        "power": 1 / np.arange(1, n + 1),
        "steep": np.logspace(0, -4, n),
        "spike": np.r_[1, np.full(n - 1, 3e-5)],
        "half": (np.arange(n) < n // 2).astype(float),
        "zero": np.zeros(n),
    }[case.spectrum]
    return (u * values) @ vt


def benchmark(name: str) -> Benchmark:
    """Momentum in float32 in, direction in float32 out; checked against the float32 direct form."""
    case = BENCHMARKS[name]
    rows, columns = case.shape[-2:]
    count = math.prod(case.shape[:-2])
    x = jax.random.normal(jax.random.key(0), case.shape, jnp.float32)

    def variant(dtype: str, form: str | None, tolerance: float) -> Variant:
        def function(implementation):
            return functools.partial(
                newton_schulz, dtype=dtype, form=form, implementation=implementation
            )

        steps = segments(rows, columns, HYBRID, dtype, form)
        work = count * flops(rows, columns, steps)
        return Variant(function, (x,), flops=work, bytes=8.0 * x.size, tolerance=tolerance)

    plain = Variant(
        lambda _: functools.partial(_loop, dtype="bfloat16"),
        (x,),
        flops=count * flops(rows, columns, (1,) * len(HYBRID)),
        bytes=8.0 * x.size,
        tolerance=0.03,
    )
    return Benchmark(
        reference=functools.partial(newton_schulz, dtype="float32", form="direct"),
        variants={
            "bfloat16": variant("bfloat16", None, 0.03),
            "bfloat16 direct": variant("bfloat16", "direct", 0.03),
            "float32": variant("float32", None, 1e-4),
            "float32 direct": variant("float32", "direct", 1e-4),
        },
        rivals={"loop bfloat16": plain},
    )


def _loop(x: jax.Array, dtype: str) -> jax.Array:
    """The iteration as one would write it down."""
    flip = x.shape[-2] > x.shape[-1]
    y = jnp.swapaxes(x, -1, -2) if flip else x
    y = (y / (jnp.linalg.norm(y, axis=(-2, -1), keepdims=True) + 1e-20)).astype(dtype)
    for a, b, c in HYBRID:
        gram = y @ jnp.swapaxes(y, -1, -2)
        y = a * y + (b * gram + c * (gram @ gram)) @ y
    return (jnp.swapaxes(y, -1, -2) if flip else y).astype(x.dtype)
