"""The learning-rate schedule."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from v41flash.optim import warmup_constant_cosine


def test_published_recipe():
    """Warm-up 2000 steps to 2.6e-4, constant, cosine to 2.6e-5, constant."""
    steps = 1000
    rate = warmup_constant_cosine(
        2.6e-4, warmup_steps=2000, decay_from=280 * steps, decay_until=400 * steps
    )
    np.testing.assert_allclose(rate(0), 2.6e-4 / 2000, rtol=1e-6)
    np.testing.assert_allclose(rate(1999), 2.6e-4, rtol=1e-6)
    np.testing.assert_allclose(rate(280 * steps), 2.6e-4, rtol=1e-6)
    np.testing.assert_allclose(rate(340 * steps), (2.6e-4 + 2.6e-5) / 2, rtol=1e-6)
    for step in (400 * steps, 450 * steps):
        np.testing.assert_allclose(rate(step), 2.6e-5, rtol=1e-6)


@settings(deadline=None)
@given(
    warmup=st.integers(0, 20),
    constant=st.integers(0, 20),
    decay=st.integers(1, 20),
    final=st.floats(0, 1),
)
def test_shape(warmup, constant, decay, final):
    rate = warmup_constant_cosine(
        1.0,
        warmup_steps=warmup,
        decay_from=warmup + constant,
        decay_until=warmup + constant + decay,
        final=final,
    )
    values = np.array(rate(np.arange(70)))
    assert (values[:warmup] > 0).all()
    assert (np.diff(values[:warmup]) > 0).all()
    assert (values[warmup : warmup + constant + 1] == 1).all()
    assert (np.diff(values[warmup:]) <= 1e-6).all()
    np.testing.assert_allclose(values[warmup + constant + decay :], final, atol=1e-6)


def test_without_decay_it_stays_at_the_peak():
    rate = jax.jit(warmup_constant_cosine(3.0, warmup_steps=2))
    assert [float(rate(step)) for step in (0, 1, 2, 10**6)] == [1.5, 3.0, 3.0, 3.0]


@pytest.mark.parametrize(
    ("keywords", "names"),
    [
        (dict(peak=-1.0), "learning_rate"),
        (dict(peak=1.0, warmup_steps=-1), "warmup_steps"),
        (dict(peak=1.0, decay_from=3), "decay_until"),
        (dict(peak=1.0, warmup_steps=5, decay_from=3, decay_until=9), "5, 3, 9"),
        (dict(peak=1.0, decay_from=9, decay_until=9), "0, 9, 9"),
        (dict(peak=1.0, final=-0.1), "final"),
    ],
)
def test_impossible_horizons_are_refused(keywords, names):
    with pytest.raises(ValueError, match=names):
        warmup_constant_cosine(**keywords)
