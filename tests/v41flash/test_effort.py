"""The length price, and its best response against numerical optimisation."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from v41flash.effort import EFFORTS, LengthPrice
from v41flash.errors import InputError

PRICE = LengthPrice(k0=1.5, b_min=5, scale=1.2, delta_b=30, l_norm=900.0, c_max=50.0)
LINEAR = dataclasses.replace(PRICE, shape="linear")
EFFORT = np.arange(5, 101, 5)
# a, s: harder problems have a larger scale.
PROBLEMS = [(1 / 40, 40.0), (1 / 90, 90.0), (1 / 200, 200.0)]


def best_length(price, effort, gain, scale):
    """The maximum of p(l) - k(b) l / L_norm, by golden-section search on the net reward itself."""
    low, high = 0.0, 5000.0
    ratio = (np.sqrt(5) - 1) / 2

    def net(tokens):
        return gain * scale * -np.expm1(-tokens / scale) + float(price.reward(effort, tokens))

    for _ in range(80):
        left, right = high - ratio * (high - low), low + ratio * (high - low)
        low, high = (low, right) if net(left) > net(right) else (left, high)
    return (low + high) / 2


@pytest.mark.parametrize("price", [PRICE, LINEAR], ids=lambda price: price.shape)
@pytest.mark.parametrize(("gain", "scale"), PROBLEMS)
def test_optimum_is_that_of_a_search(price, gain, scale):
    found = [best_length(price, effort, gain, scale) for effort in EFFORT]
    np.testing.assert_allclose(price.optimum(EFFORT, gain=gain, scale=scale), found, atol=0.02)


def test_exponential_price_gives_lines_and_linear_price_logarithms():
    gain, scale = (np.array(values)[:, None] for values in zip(*PROBLEMS, strict=True))
    lines = PRICE.optimum(EFFORT, gain=gain, scale=scale)
    np.testing.assert_allclose(np.diff(lines, 2), 0, atol=1e-9)
    np.testing.assert_allclose(np.diff(lines) / 5, np.broadcast_to(PRICE.slope(scale), (3, 19)))
    assert PRICE.tau == 36
    # The linear price: the same ends, l = s log(a L / k) with k falling steadily.
    curves = LINEAR.optimum(EFFORT, gain=gain, scale=scale)
    np.testing.assert_allclose(curves[:, [0, -1]], lines[:, [0, -1]])
    np.testing.assert_allclose(np.diff(np.exp(-curves / scale), 2), 0, atol=1e-12)
    assert np.all(np.diff(curves, 2) > 0) and np.all(curves[:, 1:-1] < lines[:, 1:-1])


def test_price_and_cap():
    price = LengthPrice(k0=2.0, l_norm=100.0, c_max=1.0)
    assert price.rate(1) == 2.0 and price.reward(1, 0) == 0.0
    np.testing.assert_allclose(price.rate(26), 2 / np.e)
    np.testing.assert_allclose(price.reward(1, np.array([10, 50, 51, 9999])), [-0.2, -1, -1, -1])
    # Where the first token costs more than it gains, none is best.
    assert price.optimum(1, gain=0.01, scale=50.0) == 0
    assert EFFORTS == {"low": 50, "high": 75, "max": 100}


def test_jax_and_numpy_agree():
    effort, tokens = np.array([[5.0], [50.0], [100.0]]), np.array([1.0, 100.0, 90000.0])
    compiled = jax.jit(PRICE.reward)(jnp.asarray(effort), jnp.asarray(tokens))
    np.testing.assert_allclose(compiled, PRICE.reward(effort, tokens), rtol=1e-6)
    assert isinstance(PRICE.reward(effort, tokens), np.ndarray)
    slope = jax.grad(lambda b: PRICE.optimum(b, gain=1 / 40, scale=40.0))(50.0)
    np.testing.assert_allclose(slope, PRICE.slope(40.0), rtol=1e-6)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (dict(k0=0.0), "k0 = 0.0: must be positive"),
        (dict(l_norm=float("inf")), "l_norm = inf"),
        (dict(b_min=100), "b_min = 100: must be an effort"),
        (dict(shape="cubic"), "shape = 'cubic': must be one of exponential, linear"),
    ],
)
def test_constants_are_checked(changed, message):
    with pytest.raises(InputError, match=message):
        LengthPrice(**changed)


def test_a_linear_price_has_no_slope():
    with pytest.raises(InputError, match="only the exponential"):
        LINEAR.slope(1.0)
