"""What the transforms refuse, in one line that names the argument or the parameter."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.sinkhorn import check_iterations
from v41flash.optim.axes import leaf_names


def number(name: str, value: Any, *, below: float = math.inf) -> None:
    """A hyperparameter that must be in [0, below).

    Arrays pass: they are what `optax.inject_hyperparams` makes of numbers, and cannot be looked at.

    Raises:
        ValueError: another number, also one that is not finite.
        TypeError: no number at all.
    """
    if isinstance(value, jax.Array):
        return
    if isinstance(value, bool) or not hasattr(value, "__float__"):
        raise TypeError(f"{name} = {value!r}: must be a number")
    if not 0 <= value < below:
        limit = "finite and not negative" if below == math.inf else f"in [0, {below:g})"
        raise ValueError(f"{name} = {value}: must be {limit}")


def learning_rate(value: Any) -> None:
    """A rate is a schedule or a number as `number` wants it."""
    if not callable(value):
        number("learning_rate", value)


def sinkhorn(*, beta: Any, tau: Any, gamma: Any, eps: Any, iterations: int) -> None:
    """Hyperparameters of Sinkhorn balancing."""
    number("beta", beta, below=1)
    for name, value in (("tau", tau), ("gamma", gamma), ("eps", eps)):
        number(name, value)
    check_iterations(iterations)


def floating(name: str, dtype: jax.typing.DTypeLike | None) -> None:
    """A dtype that must hold fractions, or None.

    Raises:
        ValueError: it does not.
    """
    if dtype is not None and not jnp.issubdtype(jnp.dtype(dtype), jnp.floating):
        raise ValueError(f"{name} = {jnp.dtype(dtype).name}: must be a floating-point dtype")


def parameters(tree: Any) -> None:
    """Parameters must be floating-point arrays.

    Raises:
        ValueError: one is not; it is named.
    """
    for name, leaf in zip(leaf_names(tree), jax.tree.leaves(tree), strict=True):
        floating(f"dtype of parameter {name!r}", jnp.result_type(leaf))


def gradients(updates: Any, momentum: Any) -> None:
    """Gradients must be what the state was made for.

    Raises:
        ValueError: another tree, or another shape; the first is named.
    """
    names, expected = leaf_names(updates), leaf_names(momentum)
    if names != expected:
        odd = sorted(set(names) ^ set(expected)) or names
        raise ValueError(
            f"gradients have other leaves than the parameters of init, for example {odd[0]!r}"
        )
    kept = jax.tree.leaves(momentum)
    for name, leaf, buffer in zip(names, jax.tree.leaves(updates), kept, strict=True):
        if jnp.shape(leaf) != jnp.shape(buffer):
            raise ValueError(
                f"gradient {name!r} has shape {jnp.shape(leaf)}, its parameter {jnp.shape(buffer)}"
            )
