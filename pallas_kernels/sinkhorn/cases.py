"""Named argument sets of sinkhorn_update, for tests and benchmarks."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import tpu
from pallas_kernels.measure import Benchmark, Variant
from pallas_kernels.sinkhorn import sinkhorn_update


@dataclasses.dataclass(frozen=True)
class Case:
    """Shapes of one call.

    Attributes:
        shape: [..., m, n].
        touched: share of the rows that have a gradient; the others have momentum or nothing.
        spread: standard deviation of the logarithm of the row norms.
        scale: of all entries.
    """

    shape: tuple[int, ...]
    touched: float = 1.0
    spread: float = 0.0
    scale: float = 1.0


CASES = {
    "dense": Case((37, 7)),
    "few_rows": Case((203, 8), touched=0.1, spread=2.0),
    "masked": Case((64, 5), spread=5.0),
    "tiny": Case((64, 5), touched=0.5, scale=1e-24),
    "huge": Case((64, 5), scale=1e8),
    "batch": Case((2, 3, 29, 6), touched=0.5, spread=1.0),
    "one_column": Case((11, 1)),
    "one_row": Case((1, 6)),
    "zero": Case((9, 4), touched=0.0),
}

# E1 is the embedding, E2 a part of an Engram table.
BENCHMARKS = {
    "small": Case((4096, 128)),
    "E1": Case((129280, 5120)),
    "E2": Case((1048576, 256)),
}


def arguments(case: Case, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """(gradient, momentum) of a case, float64. Half of the rows without gradient have momentum."""
    rng = np.random.default_rng(seed)
    rows = (*case.shape[:-1], 1)
    size = case.scale * np.exp(case.spread * rng.normal(size=rows))
    touched = rng.random(rows) < case.touched
    remembered = touched | (rng.random(rows) < 0.5) & (case.touched > 0)
    gradient = rng.normal(size=case.shape) * size * touched
    return gradient, rng.normal(size=case.shape) * size * remembered * 0.3


def tpu_accounts() -> dict[str, tpu.Account]:
    """What each pass over the embedding and the Engram table takes, float32 between the passes."""
    accounts = {}
    for name in ("E1", "E2"):
        shape = jax.ShapeDtypeStruct(BENCHMARKS[name].shape, jnp.float32)
        update = functools.partial(sinkhorn_update, implementation="mosaic_tpu")
        stated = tpu.accounts_of(update, shape, shape)
        accounts |= {f"{name} {what}": account for what, account in stated}
    return accounts


def benchmark(name: str) -> Benchmark:
    """Gradient and momentum in float32; checked against the XLA form in float32.

    Bytes: momentum read and written, gradient read, update written, seven passes over what lies in
    between (a kernel takes a row step and the next column step in one read).
    """
    case = BENCHMARKS[name]
    keys = jax.random.split(jax.random.key(0))
    gradient, momentum = (jax.random.normal(key, case.shape, jnp.float32) for key in keys)

    def variant(dtype: str, per_element: float, tolerance: float) -> Variant:
        def function(implementation):
            return functools.partial(sinkhorn_update, dtype=dtype, implementation=implementation)

        return Variant(
            function,
            (gradient, momentum),
            flops=0.0,
            bytes=per_element * gradient.size,
            tolerance=tolerance,
        )

    loop = Variant(lambda _: _loop, (gradient, momentum), 0.0, 44.0 * gradient.size, tolerance=1e-4)
    return Benchmark(
        reference=functools.partial(sinkhorn_update, implementation="xla"),
        variants={
            "float32": variant("float32", 44, 1e-4),
            "bfloat16": variant("bfloat16", 30, 0.02),
        },
        rivals={"loop": loop},
    )


def _loop(gradient: jax.Array, momentum: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The algorithm as one would write it down: the matrix is divided at every step."""
    momentum = 0.95 * momentum + 0.05 * gradient
    u = 0.95 * momentum + 0.05 * gradient
    rho = jnp.linalg.norm(u, axis=-1, keepdims=True)
    u = jnp.where(rho > 1e-3 * jnp.mean(rho, axis=-2, keepdims=True), u, 0)
    for step in range(11):
        axis = -2 if step % 2 else -1
        u = u / (jnp.linalg.norm(u, axis=axis, keepdims=True) + 1e-20)
    return u * u.shape[-1] ** 0.5, momentum
