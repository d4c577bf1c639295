"""Products of bfloat16 with float32 on tensor cores, against float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import split_products

SPECS = {
    "btd,dv->btv": ((2, 9, 300), (300, 40)),
    "...d,dv->...v": ((7, 33), (33, 5)),
    # More results than activations, as of a head over a vocabulary.
    "...k,kv->...v": ((2, 3, 8), (8, 50)),
    "tc,kc->kt": ((50, 256), (24, 256)),
}


def samples(spec, seed=0):
    rng = np.random.default_rng(seed)
    shapes = SPECS[spec]
    x, w = (rng.normal(size=shape).astype(np.float32) for shape in shapes)
    # Weights of widely different magnitudes, which three parts have to hold all the same.
    w = w * np.exp2(rng.integers(-12, 13, size=w.shape)).astype(np.float32)
    x = jnp.asarray(x, jnp.bfloat16)
    grad = rng.normal(size=np.einsum(spec, np.asarray(x, np.float64), w).shape)
    return x, jnp.asarray(w), jnp.asarray(grad, jnp.float32)


def exact(spec, x, w):
    """(the product, the sum of the absolute values of its terms), in float64."""
    x, w = np.asarray(x, np.float64), np.asarray(w, np.float64)
    return np.einsum(spec, x, w), np.einsum(spec, abs(x), abs(w))


def transposed(spec):
    letters = "nm"[: len(SPECS[spec][0]) - 1]
    operands, out = spec.replace("...", letters).split("->")
    ours, theirs = operands.split(",")
    return f"{out},{theirs}->{ours}", f"{ours},{out}->{theirs}"


@pytest.fixture(autouse=True)
def _few_rows_are_enough(monkeypatch):
    monkeypatch.setattr(split_products, "_FEW_ROWS", 1)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_against_float64(spec, kind, monkeypatch):
    monkeypatch.setattr(split_products, "platform", lambda: kind)
    x, w, grad = samples(spec)
    y, transpose = jax.vjp(jax.jit(lambda x, w: split_products.einsum(spec, x, w)), x, w)
    grad_x, grad_w = transpose(grad)
    assert (y.dtype, grad_x.dtype, grad_w.dtype) == (jnp.float32, jnp.bfloat16, jnp.float32)
    to_x, to_w = transposed(spec)
    for actual, (expected, scale), bound in (
        (y, exact(spec, x, w), 1e-6),
        (grad_w, exact(to_w, x, grad), 1e-6),
        (grad_x, exact(to_x, grad, w), 2.0**-8),
    ):
        assert np.max(np.abs(np.asarray(actual, np.float64) - expected) / scale) < bound


def test_the_gradient_of_activations_before_it_is_rounded():
    spec = "btd,dv->btv"
    x, w, grad = samples(spec)
    _, transpose = jax.vjp(lambda x: split_products._split(spec, 3, x, w), x.astype(jnp.float32))
    expected, scale = exact(transposed(spec)[0], grad, w)
    assert np.max(np.abs(np.asarray(transpose(grad)[0], np.float64) - expected) / scale) < 2.0**-16


def test_other_activations_are_multiplied_as_they_are(monkeypatch):
    monkeypatch.setattr(split_products, "platform", lambda: "gpu")
    x, w, _ = samples("btd,dv->btv")
    x = x.astype(jnp.float32) + 2.0**-12
    y = split_products.einsum("btd,dv->btv", x, w)
    expected, scale = exact("btd,dv->btv", x, w)
    assert np.max(np.abs(np.asarray(y, np.float64) - expected) / scale) < 1e-6


def test_weights_of_bfloat16_take_one_product(monkeypatch):
    monkeypatch.setattr(split_products, "platform", lambda: "gpu")
    spec = "btd,dv->btv"
    x, w, grad = samples(spec)
    w = w.astype(jnp.bfloat16)
    run = functools.partial(split_products.einsum, spec)
    assert str(jax.make_jaxpr(run)(x, w)).count("dot_general") == 1
    y, transpose = jax.vjp(run, x, w)
    grad_x, grad_w = transpose(grad)
    assert grad_w.dtype == jnp.bfloat16
    to_x, to_w = transposed(spec)
    for actual, (expected, scale), bound in (
        (y, exact(spec, x, w), 1e-6),
        (grad_x, exact(to_x, grad, w), 2.0**-8),
        (grad_w, exact(to_w, x, grad), 2.0**-8),
    ):
        assert np.max(np.abs(np.asarray(actual, np.float64) - expected) / scale) < bound


@pytest.mark.parametrize("rows, products", [(18, 1), (19, 0)])
def test_few_rows_are_not_split(rows, products, monkeypatch):
    monkeypatch.setattr(split_products, "platform", lambda: "gpu")
    monkeypatch.setattr(split_products, "_FEW_ROWS", rows)
    x, w, _ = samples("btd,dv->btv")
    run = functools.partial(split_products.einsum, "btd,dv->btv")
    assert str(jax.make_jaxpr(run)(x, w)).count("reduce_precision") == 3 * products


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_what_is_no_number_shows(value, monkeypatch):
    monkeypatch.setattr(split_products, "platform", lambda: "gpu")
    x, w, _ = samples("btd,dv->btv")
    y = split_products.einsum("btd,dv->btv", x, w.at[3, 7].set(value))
    assert not np.isfinite(np.asarray(y[..., 7])).any()
    assert np.isfinite(np.asarray(y[..., :7])).all()
