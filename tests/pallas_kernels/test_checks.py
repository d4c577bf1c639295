"""Kernels held against their references where they run: what is compared, and what is found."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.checks import Checks, KernelMismatch
from pallas_kernels.dispatch import dispatch


def _reference(x, index, *, scale):
    return {"out": scale * x**2, "order": jnp.argsort(index)}


@jax.custom_vjp
def _wrong_gradient(x):
    return x**2


_wrong_gradient.defvjp(lambda x: (x**2, x), lambda x, g: (2.2 * x * g,))

_KERNELS = {
    "same": lambda x, index, *, scale: {"out": scale * (x * x), "order": jnp.argsort(index)},
    "wrong": lambda x, index, *, scale: {"out": scale * x**2 * 1.1, "order": jnp.argsort(index)},
    "unordered": lambda x, index, *, scale: {"out": scale * x**2, "order": index},
    "backward": lambda x, index, *, scale: {
        "out": scale * _wrong_gradient(x),
        "order": jnp.argsort(index),
    },
    "nothing": lambda x, index, *, scale: {
        "out": scale * x**2 * jnp.nan,
        "order": jnp.argsort(index),
    },
    "xla": _reference,
}


def _loss(name, x, index):
    def layer(x, _):
        made = dispatch("op", _KERNELS, name, x, index, scale=2.0)
        return jnp.sin(made["out"]) + made["order"] * 0.1, None

    x, _ = jax.lax.scan(jax.checkpoint(layer), x, None, length=3)
    return jnp.sum(x)


def _run(name, *, gradient):
    checks = Checks()
    x = jnp.linspace(0.1, 1.0, 8)
    index = jnp.array([3, 1, 2, 5, 7, 0, 6, 4])
    function = functools.partial(_loss, name)
    function = jax.grad(function) if gradient else function
    with checks.tracing():
        compiled = jax.jit(function).lower(x, index).compile()
    result = compiled(x, index)
    jax.effects_barrier()
    return checks, result


def test_what_agrees_is_said_and_changes_nothing():
    checks, gradient = _run("same", gradient=True)
    assert set(checks.worst) == {
        ("op", "same", "result 1"),
        ("op", "same", "integer result 0"),
        ("op", "same", "gradient 0"),
    }
    assert checks.verdict().startswith("1 kernels agree with their references; farthest: op ")
    _, alone = _run("xla", gradient=True)
    np.testing.assert_allclose(gradient, alone, rtol=1e-6)


@pytest.mark.parametrize(
    ("name", "gradient", "what"),
    [
        ("wrong", False, "result 1 is 0.1 from the reference's, must be at most 0.03"),
        ("nothing", True, "result 1 is nan"),
        ("unordered", False, "integer result 0 is "),
        ("backward", True, "gradient 0 is 0.1 from the reference's, must be at most 0.06"),
    ],
)
def test_what_differs_is_named(name, gradient, what):
    checks, _ = _run(name, gradient=gradient)
    with pytest.raises(KernelMismatch) as caught:
        checks.verdict()
    assert f"kernel op, implementation {name!r}: {what}" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_nothing_is_checked_otherwise():
    checks, _ = _run("xla", gradient=True)
    assert checks.verdict() == "no kernel to check: every op runs its reference"
    jax.jit(functools.partial(_loss, "wrong"))(jnp.ones(3), jnp.arange(3))
    assert not checks.worst
