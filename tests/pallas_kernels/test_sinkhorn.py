"""Sinkhorn balancing against NumPy loops in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.sinkhorn import sinkhorn, sinkhorn_update
from pallas_kernels.sinkhorn.cases import CASES, Case, arguments
from tests.v41flash.optim import numpy_optimizers

jitted = jax.jit(sinkhorn_update, static_argnames=("iterations", "dtype"))


def truth(gradient, momentum, **keywords):
    flat = [x.reshape(-1, *x.shape[-2:]) for x in (gradient, momentum)]
    both = [numpy_optimizers.sinkhorn_update(*pair, **keywords) for pair in zip(*flat, strict=True)]
    return [np.stack(part).reshape(gradient.shape) for part in zip(*both, strict=True)]


@pytest.mark.parametrize("name", CASES)
def test_update_equals_numpy(name):
    gradient, momentum = arguments(CASES[name])
    expected = truth(gradient, momentum)
    with jax.enable_x64(True):
        arrays = jnp.asarray(gradient), jnp.asarray(momentum)
        for got, want in zip(sinkhorn_update(*arrays), expected, strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-12 * np.abs(want).max())
    single = jitted(gradient.astype(np.float32), momentum.astype(np.float32))
    for got, want in zip(single, expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5 * np.abs(want).max())


@pytest.mark.parametrize("name", ["dense", "few_rows", "batch"])
def test_rows_and_columns_have_rms_1(name):
    case = CASES[name]
    matrix, _ = arguments(Case((*case.shape[:-2], 400, 8), case.touched, case.spread))
    update = np.asarray(sinkhorn(jnp.asarray(matrix, jnp.float32)), np.float64)
    for matrix in update.reshape(-1, *update.shape[-2:]):
        kept = matrix[np.abs(matrix).sum(1) > 0]
        np.testing.assert_allclose(np.sqrt((kept**2).mean(1)), 1, atol=1e-3)
        np.testing.assert_allclose(np.sqrt((kept**2).mean(0)), 1, atol=1e-3)


def test_masked_rows_are_exactly_zero():
    matrix = np.random.default_rng(0).normal(size=(20, 4))
    matrix[3] *= 1e-4
    matrix[5] = 0
    update = np.asarray(sinkhorn(jnp.asarray(matrix, jnp.float32)))
    assert np.flatnonzero((update == 0).all(1)).tolist() == [3, 5]
    # The mean is over all rows, those of zeros included.
    mostly_zero = np.concatenate([matrix, np.zeros((400, 4))])
    update = np.asarray(sinkhorn(jnp.asarray(mostly_zero, jnp.float32)))
    assert update[3].any() and not update[5].any()


def test_empty_column_stays_empty():
    matrix = np.random.default_rng(0).normal(size=(20, 4)).astype(np.float32)
    matrix[:, 2] = 0
    update = sinkhorn(jnp.asarray(matrix))
    np.testing.assert_allclose(update, numpy_optimizers.sinkhorn(matrix), atol=1e-5)


def test_masked_row_that_dominates_a_column():
    """Its entry times that column's scale overflows; it must not matter."""
    matrix = np.array([[1e-2, 9e-22], [2e-8, 1e-6]])
    update = sinkhorn(jnp.asarray(matrix, jnp.float32))
    np.testing.assert_allclose(update, numpy_optimizers.sinkhorn(matrix), atol=1e-5)


def test_zeros_give_zeros_and_nan_is_not_hidden():
    zeros = jnp.zeros((4, 3))
    update, momentum = sinkhorn_update(zeros, zeros)
    assert not np.asarray(update).any() and not np.asarray(momentum).any()
    assert np.isnan(sinkhorn(zeros.at[1, 1].set(jnp.nan))).any()


def test_given_rows():
    matrix = np.random.default_rng(0).normal(size=(6, 4))
    keep = np.array([1, 0, 1, 1, 0, 1], bool)
    update = sinkhorn(jnp.asarray(matrix, jnp.float32), keep=jnp.asarray(keep))
    expected = numpy_optimizers.sinkhorn(matrix * keep[:, None])
    np.testing.assert_allclose(update, expected, atol=1e-5)


def test_bfloat16_between_the_passes():
    gradient, momentum = (x.astype(np.float32) for x in arguments(CASES["few_rows"]))
    exact, kept = jitted(gradient, momentum)
    half, same = jitted(gradient, momentum, dtype="bfloat16")
    assert half.dtype == jnp.float32
    np.testing.assert_array_equal(kept, same)
    assert np.linalg.norm(half - exact) < 4e-3 * np.linalg.norm(exact)
    rounded = jitted(gradient, momentum.astype(jnp.bfloat16))[1]
    assert rounded.dtype == jnp.bfloat16


@settings(deadline=None, max_examples=20)
@given(
    seed=st.integers(0, 2**31),
    beta=st.floats(0, 0.999),
    tau=st.floats(0, 2),
    spread=st.floats(0, 4),
)
def test_any_hyperparameters(seed, beta, tau, spread):
    gradient, momentum = arguments(Case((17, 5), touched=0.7, spread=spread), seed)
    with jax.enable_x64(True):
        got = jitted(jnp.asarray(gradient), jnp.asarray(momentum), beta=beta, tau=tau)
    want = truth(gradient, momentum, beta=beta, tau=tau)
    for x, y in zip(got, want, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("iterations", [0, 2, -1])
def test_iterations_must_be_odd(iterations):
    with pytest.raises(ValueError, match="odd"):
        sinkhorn(jnp.ones((2, 2)), iterations=iterations)


@pytest.mark.parametrize("iterations", [1, 5])
def test_iterations(iterations):
    matrix = np.random.default_rng(0).normal(size=(6, 4))
    got = sinkhorn(jnp.asarray(matrix, jnp.float32), iterations=iterations)
    want = numpy_optimizers.sinkhorn(matrix, iterations=iterations)
    np.testing.assert_allclose(got, want, atol=1e-5)


def test_bad_shapes():
    with pytest.raises(ValueError, match="matrices"):
        sinkhorn(jnp.ones(3))
    with pytest.raises(ValueError, match="differ"):
        sinkhorn_update(jnp.ones((2, 3)), jnp.ones((3, 2)))
    with pytest.raises(ValueError, match="keep"):
        sinkhorn(jnp.ones((2, 3)), keep=jnp.ones(3, bool))
