"""Newton-Schulz against NumPy in float64, and its error in float32 and bfloat16."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.newton_schulz import HYBRID, IMPLEMENTATIONS, newton_schulz
from pallas_kernels.newton_schulz.cases import CASES, Case, arguments
from pallas_kernels.newton_schulz.reference import flops, segments
from tests.v41flash.optim import numpy_optimizers

jitted = jax.jit(newton_schulz, static_argnames=("dtype", "form", "implementation", "eps"))


def truth(x):
    flat = x.reshape(-1, *x.shape[-2:])
    return np.stack([numpy_optimizers.newton_schulz(matrix) for matrix in flat]).reshape(x.shape)


@pytest.mark.parametrize("form", ["direct", "gram"])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_equals_numpy_in_float64(implementation, name, form):
    x = arguments(CASES[name])
    with jax.enable_x64(True):
        got = newton_schulz(jnp.asarray(x), form=form, implementation=implementation)
        assert got.dtype == jnp.float64
    # Directions that are rounding alone ("half") grow by 79,000.
    np.testing.assert_allclose(got, truth(x), atol=1e-9 if name != "half" else 1e-5)


@pytest.mark.parametrize("form", ["direct", "gram"])
@pytest.mark.parametrize("name", CASES)
def test_float32_error_bound(name, form):
    x = arguments(CASES[name])
    got = np.asarray(jitted(x.astype(np.float32), form=form), np.float64)
    error = np.linalg.norm(got - truth(x), 2, axis=(-2, -1)).max()
    assert error < (1e-5 if CASES[name].spectrum == "normal" and "square" != name else 2e-3)


@pytest.mark.parametrize("form", ["direct", "gram"])
@pytest.mark.parametrize("name", CASES)
def test_bfloat16_error_bound(name, form):
    x = arguments(CASES[name])
    got = np.asarray(jitted(x.astype(np.float32), dtype="bfloat16", form=form), np.float64)
    values = np.linalg.svd(got, compute_uv=False)
    assert values.max() < 1.05
    smallest = np.linalg.svd(x, compute_uv=False)[..., -1].min()
    if smallest > 0.01 * np.linalg.norm(x, axis=(-2, -1)).max():
        assert np.linalg.norm(got - truth(x), 2, axis=(-2, -1)).max() < 0.05
        assert values.min() > 0.95


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("spectrum", ["normal", "power", "steep", "spike", "half"])
def test_gram_form_stays_bounded(spectrum, seed):
    """Rounding must not turn into growth, neither in bfloat16 nor in float32."""
    x = arguments(Case((96, 240), spectrum), seed)
    for dtype, largest in (("bfloat16", 1.05), ("float32", 1.003)):
        got = np.asarray(jitted(x.astype(np.float32), dtype=dtype, form="gram"), np.float64)
        assert np.linalg.norm(got, 2) < largest


def test_forms_are_chosen_by_work():
    wide, square = (512, 1280), (512, 700)
    assert segments(*wide, HYBRID, "float32", None) == (5, 5)
    assert segments(*wide, HYBRID, "bfloat16", None) == (2,) * 5
    assert segments(*square, HYBRID, "float32", None) == (1,) * 10
    assert segments(*wide, HYBRID, "float32", "direct") == (1,) * 10
    assert segments(*wide, HYBRID, "float16", "gram") == (1,) * 10
    # Ten direct steps of F1: two products with X and one of the small side each.
    assert flops(*wide, (1,) * 10) == 10 * (4 * 512**2 * 1280 + 2 * 512**3)
    assert flops(*wide, (5, 5)) < 0.75 * flops(*wide, (1,) * 10)


@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1e30])
def test_scale_does_not_matter(scale):
    """Not even where squares under- or overflow; only eps does, as declared."""
    x = arguments(Case((5, 13)))
    got = jitted((x * scale).astype(np.float32), eps=1e-36)
    np.testing.assert_allclose(got, truth(x), atol=1e-5)


def test_zeros_and_dtypes():
    x = jnp.zeros((2, 3, 4), jnp.bfloat16)
    got = newton_schulz(x)
    assert got.dtype == jnp.bfloat16
    assert not np.asarray(got, np.float32).any()
    assert newton_schulz(jnp.zeros((0, 3, 4))).shape == (0, 3, 4)


def test_coefficients_are_free():
    x = arguments(Case((5, 13)))
    steps = ((1.5, -0.5, 0.0),) * 6
    got = newton_schulz(jnp.asarray(x, jnp.float32), steps, form="gram")
    np.testing.assert_allclose(got, numpy_optimizers.newton_schulz(x, steps), atol=1e-5)


@pytest.mark.parametrize(
    "bad, message",
    [
        (dict(x=jnp.ones(3)), "matrices"),
        (dict(coefficients=()), "triples"),
        (dict(coefficients=((1, 2),)), "triples"),
        (dict(form="best"), "form must be"),
        (dict(implementation="none"), "no implementation"),
    ],
)
def test_bad_arguments(bad, message):
    with pytest.raises(ValueError, match=message):
        functools.partial(newton_schulz, **({"x": jnp.ones((2, 3))} | bad))()
