"""Top-k against a stable NumPy sort."""

import hypothesis
import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify

from pallas_kernels.topk import topk, topk_blocks
from pallas_kernels.topk.cases import CASES, arguments

jitted = jax.jit(topk, static_argnums=1, static_argnames=("order", "implementation"))


def numpy_topk(scores, k, lengths=None, order="score"):
    result = np.full((*scores.shape[:-1], k), -1, np.int32)
    for at in np.ndindex(scores.shape[:-1]):
        length = scores.shape[-1] if lengths is None else lengths[at]
        row = scores[at][:length].astype(np.float64) + 0.0
        allowed = np.flatnonzero(row > -np.inf)
        best = allowed[np.argsort(-row[allowed], kind="stable")][:k]
        result[at][: len(best)] = best if order == "score" else np.sort(best)
    return result


@pytest.mark.parametrize("order", ["score", "index"])
@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_equals_stable_sort(name, ties, order):
    scores, k, lengths = arguments(CASES[name], ties=ties)
    indices = jitted(scores, k, lengths, order=order)
    assert indices.dtype == jnp.int32
    np.testing.assert_array_equal(indices, numpy_topk(scores, k, lengths, order))


special = st.sampled_from([np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-45, -1e38, 1.0])


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(
    scores=hnp.arrays(np.float32, (3, 9), elements=special),
    lengths=hnp.arrays(np.int32, (3,), elements=st.integers(-1, 12)),
)
def test_special_values(scores, lengths):
    # XLA on CPU flushes subnormal numbers to zero.
    scores = np.where(np.abs(scores) < 1e-38, np.float32(0), scores)
    expected = numpy_topk(scores, 4, np.clip(lengths, 0, 9))
    np.testing.assert_array_equal(jitted(scores, 4, lengths), expected)


def test_bfloat16_compares_in_its_own_precision():
    scores = jnp.asarray([1.0, 1.0 + 2**-9, 1.0 + 2**-6], jnp.bfloat16)
    np.testing.assert_array_equal(topk(scores, 2), [2, 0])


def test_empty():
    np.testing.assert_array_equal(topk(jnp.zeros((2, 0)), 3), np.full((2, 3), -1))
    assert topk(jnp.zeros((2, 5)), 0).shape == (2, 0)


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("block", [1, 4, 8, 50])
def test_blocks(block, ties):
    scores, k, lengths = arguments(CASES["lengths"], ties=ties)
    best = [
        [row[:n][at : at + block].max(initial=-np.inf) for at in range(0, row.size, block)]
        for row, n in zip(scores, lengths, strict=True)
    ]
    expected = numpy_topk(np.float32(best), k, order="index")
    np.testing.assert_array_equal(topk_blocks(scores, k, block, lengths), expected)


def test_under_vmap():
    scores, k, _ = arguments(CASES["plain"], ties=True)
    np.testing.assert_array_equal(jax.vmap(lambda s: topk(s, k))(scores), numpy_topk(scores, k))


def test_nan_is_an_error_to_checkify():
    checked = checkify.checkify(lambda s: topk(s, 2), errors=checkify.user_checks)
    assert checked(jnp.asarray([1.0, -jnp.inf, 3.0]))[0].get() is None
    error, indices = checked(jnp.asarray([1.0, jnp.nan, 3.0]))
    assert "the scores have a NaN" in error.get()
    np.testing.assert_array_equal(indices, [2, 0])


@pytest.mark.parametrize(
    "args, message",
    [
        ((np.zeros((2, 5), np.float32), -1), "k must be at least 0"),
        ((np.zeros((2, 5), np.float32), 2, np.zeros(3, np.int32)), r"lengths must be \[2\]"),
        ((np.zeros((2, 5), np.int32), 2), "scores must be floats"),
        ((np.float32(1), 2), "scores must be floats"),
    ],
)
def test_bad_arguments(args, message):
    with pytest.raises(ValueError, match=message):
        topk(*args)


def test_bad_blocks():
    with pytest.raises(ValueError, match="block must be at least 1, got 0"):
        topk_blocks(jnp.zeros(5), 2, 0)


def test_unknown_order():
    with pytest.raises(ValueError, match="order must be one of score, index, got 'value'"):
        topk(jnp.zeros(5), 2, order="value")
