"""The transforms that every general test runs, and the targets that they minimise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from v41flash.optim import (
    MatrixSpec,
    Rule,
    TableSpec,
    head_muon,
    sinkhorn_balanced,
    v41_optimizer,
)

RULES = (
    Rule("parabola|matrix", "matrix", MatrixSpec()),
    Rule("rosenbrock", "table", TableSpec()),
    Rule("third", "engram_table", TableSpec()),
)


class Entry(NamedTuple):
    """One transform.

    Attributes:
        factory: makes it from keywords; the first, learning_rate, is left to the test.
        keywords: the others.
        static: keywords that `optax.inject_hyperparams` must not turn into arrays.
    """

    factory: Callable[..., optax.GradientTransformation]
    keywords: dict[str, Any]
    static: tuple[str, ...] = ()

    def make(self, learning_rate: Any = 1e-2) -> optax.GradientTransformation:
        return self.factory(learning_rate=learning_rate, **self.keywords)


TRANSFORMS = {
    "head_muon": Entry(head_muon, dict(weight_decay=0.0)),
    "sinkhorn": Entry(sinkhorn_balanced, dict(), ("iterations",)),
    # Two rows: some leaves fit and some do not.
    "sinkhorn_rows": Entry(sinkhorn_balanced, dict(capacity=2), ("iterations", "capacity")),
    "v41": Entry(
        v41_optimizer,
        dict(weight_decay=0.0, engram_capacity=2, rules=RULES),
        ("sinkhorn_iterations", "engram_capacity", "warmup_steps"),
    ),
}


def targets(dtype: Any) -> tuple[dict[str, jax.Array], dict[str, jax.Array], Callable[[Any], Any]]:
    """(start, minimum, loss) of several targets side by side, one leaf each."""
    start = {
        "parabola": [[-1.0, 10.0, 1.0]],
        "rosenbrock": [[0.0, 0.0]],
        "matrix": [[0.0, 0.0], [0.0, 0.0]],
        "third": [[0.5, 0.5], [0.0, 0.0], [0.0, 0.0], [-1.0, 0.0]],
    }
    minimum = {
        "parabola": [[1.0, -1.0, 1.0]],
        "rosenbrock": [[1.0, 1.0]],
        "matrix": [[3.0, -2.0], [1.0, 4.0]],
        "third": [[1.0, -1.0], [0.0, 0.0], [0.0, 0.0], [2.0, 0.5]],
    }

    def loss(params):
        (x, y), *_ = params["rosenbrock"]
        valley = jnp.square(1.0 - x) + 100.0 * jnp.square(y - jnp.square(x))
        bowls = [
            jnp.sum(jnp.square(params[name] - jnp.asarray(minimum[name], dtype)))
            for name in minimum
            if name != "rosenbrock"
        ]
        return valley + sum(bowls)

    as_arrays = lambda tree: {name: jnp.asarray(rows, dtype) for name, rows in tree.items()}  # noqa: E731
    return as_arrays(start), as_arrays(minimum), loss
