"""Holds every kernel against its reference on the tensors that a program really gives it.

    checks = Checks()
    with checks.tracing():                  # while the program is traced, once
        step = jax.jit(program).lower(*arguments).compile()
    step(*arguments)
    jax.effects_barrier()
    checks.verdict()                        # KernelMismatch, or what was compared

What is traced so runs both, forward and (where it is differentiated) backward, and hands the
distance to the host. The program goes on with what the kernel gave. It costs the reference's time
and memory, and is for the first steps of a run on new hardware, shapes or versions.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

REFERENCE = "xla"
# Largest distance of floats, as a share of the reference's largest value: roundings of bfloat16
# that add up in another order. Of integers (selections, packed bytes), the share that may differ:
# near-ties fall to either side.
FLOAT_LIMIT, GRADIENT_LIMIT, INTEGER_LIMIT = 0.03, 0.06, 0.02

_active: list[Checks] = []


class KernelMismatch(RuntimeError):
    """A kernel gives other numbers than its reference; the text is one line for the user."""


class Checks:
    """Distances between kernels and references.

    Attributes:
        worst: (op, implementation, what) -> the largest distance so far.
    """

    def __init__(self):
        self.worst: dict[tuple[str, str, str], float] = {}

    @contextlib.contextmanager
    def tracing(self) -> Iterator[None]:
        """What is traced inside is checked whenever it runs."""
        _active.append(self)
        try:
            yield
        finally:
            _active.pop()

    def verdict(self) -> str:
        """What was compared, in one line.

        Raises:
            KernelMismatch: a distance is above its limit, or no number.
        """
        if not self.worst:
            return "no kernel to check: every op runs its reference"
        # A wrong result may be what makes the gradients wrong.
        for (op, name, what), distance in sorted(
            self.worst.items(), key=lambda item: ("gradient" in item[0][2], item[0])
        ):
            limit = _limit(what)
            if not distance <= limit:
                raise KernelMismatch(
                    f"kernel {op}, implementation {name!r}: {what} is {distance:.3g} from the "
                    f"reference's, must be at most {limit:g}; kernels.* chooses another one"
                )
        (op, name, what), distance = max(self.worst.items(), key=lambda item: item[1])
        count = len({(op, name) for op, name, _ in self.worst})
        return f"{count} kernels agree with their references; farthest: {op} {what}, {distance:.2g}"

    def _record(self, key: tuple[str, str, str], distance: Any) -> None:
        distance, before = float(np.max(distance)), self.worst.get(key, 0.0)
        self.worst[key] = distance if np.isnan(distance) else max(before, distance)

    def _compare(self, op: str, name: str, kind: str, made: Any, right: Any) -> None:
        pairs = zip(jax.tree.leaves(made), jax.tree.leaves(right), strict=True)
        for number, (a, b) in enumerate(pairs):
            if a.dtype == jax.dtypes.float0 or not a.size:
                continue
            floats = jnp.issubdtype(b.dtype, jnp.floating)
            what = f"{kind if floats else 'integer ' + kind} {number}"
            distance = _far(a, b) if floats else jnp.mean(a != b, dtype=jnp.float32)
            jax.debug.callback(functools.partial(self._record, (op, name, what)), distance)


def _limit(what: str) -> float:
    if what.startswith("integer"):
        return INTEGER_LIMIT
    return GRADIENT_LIMIT if what.startswith("gradient") else FLOAT_LIMIT


def _far(a: jax.Array, b: jax.Array) -> jax.Array:
    a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    # Both -inf: a row that sees nothing.
    far = jnp.max(jnp.where(a == b, 0.0, jnp.abs(a - b)))
    size = jnp.max(jnp.where(jnp.isfinite(b), jnp.abs(b), 0.0))
    return far / jnp.maximum(size, 1e-30)


def watching(name: str, implementations: Mapping[str, Any]) -> Checks | None:
    """Who checks this call of an implementation, if anyone does."""
    if not _active or name == REFERENCE or REFERENCE not in implementations:
        return None
    return _active[-1]


def run(
    checks: Checks,
    op: str,
    name: str,
    implementations: Mapping[str, Callable[..., Any]],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Any:
    """An implementation's results, compared with the reference's, and its gradients likewise."""
    leaves, structure = jax.tree.flatten((tuple(args), dict(kwargs)))
    moving = [
        isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in leaves
    ]
    array = [isinstance(leaf, jax.Array) for leaf in leaves]

    def join(floats: Sequence[jax.Array], others: Sequence[jax.Array]) -> tuple[Any, Any]:
        floats, others = iter(floats), iter(others)
        made = [
            next(floats) if moves else next(others) if held else leaf
            for moves, held, leaf in zip(moving, array, leaves, strict=True)
        ]
        return jax.tree.unflatten(structure, made)

    def call(which: str, floats: Sequence[jax.Array], others: Sequence[jax.Array]) -> Any:
        arguments, keywords = join(floats, others)
        return implementations[which](*arguments, **keywords)

    def both(floats: Sequence[jax.Array], others: Sequence[jax.Array]) -> Any:
        made = call(name, floats, others)
        checks._compare(op, name, "result", made, call(REFERENCE, floats, others))
        return made

    def forward(floats: Sequence[jax.Array], others: Sequence[jax.Array]) -> tuple[Any, Any]:
        made, back = jax.vjp(lambda floats: call(name, floats, others), floats)
        right, right_back = jax.vjp(lambda floats: call(REFERENCE, floats, others), floats)
        checks._compare(op, name, "result", made, right)
        return made, (back, right_back)

    def backward(backs: tuple[Any, Any], cotangents: Any) -> tuple[Any, None]:
        (gradients,), (right,) = (back(cotangents) for back in backs)
        checks._compare(op, name, "gradient", gradients, right)
        return gradients, None

    floats = [leaf for leaf, moves in zip(leaves, moving, strict=True) if moves]
    others = [
        leaf for leaf, moves, held in zip(leaves, moving, array, strict=True) if held and not moves
    ]
    results = jax.tree.leaves(jax.eval_shape(functools.partial(call, name), floats, others))
    if not any(jnp.issubdtype(result.dtype, jnp.floating) for result in results):
        return both([jax.lax.stop_gradient(x) for x in floats], others)
    checked = jax.custom_vjp(both)
    checked.defvjp(forward, backward)
    return checked(floats, others)
