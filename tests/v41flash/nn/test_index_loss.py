"""The indexer's loss as a function of teacher masses and student scores."""

import jax
import jax.numpy as jnp
import numpy as np

from v41flash.nn.index_loss import indexer_kl

B, T, K = 2, 5, 7


def example(seed=0):
    """(masses, scores) with rows of one entry, rows of some, and a row of none."""
    rng = np.random.default_rng(seed)
    scores = rng.normal(size=(B, T, K)).astype(np.float32)
    mass = rng.random((B, T, K)).astype(np.float32) * 4
    present = rng.random((B, T, K)) < 0.6
    present[0, 0] = False
    present[1, 2] = np.arange(K) == 3
    return np.where(present, mass, 0), np.where(present, scores, -np.inf)


def test_equals_a_loop():
    mass, scores = example()
    expected = []
    for at in np.ndindex(B, T):
        present = scores[at] > -np.inf
        if not present.any():
            continue
        p = mass[at][present].astype(np.float64)
        p = p / p.sum()
        q = np.exp(scores[at][present].astype(np.float64))
        q = q / q.sum()
        expected.append(np.sum(p * np.log(p / q)))
    np.testing.assert_allclose(indexer_kl(mass, scores), np.mean(expected), rtol=1e-5)


def test_is_zero_when_the_student_is_the_teacher():
    _, scores = example()
    probability = jax.nn.softmax(jnp.where(scores > -jnp.inf, scores, -1e30), axis=-1)
    mass = jnp.where(scores > -jnp.inf, probability, 0) * 2.5
    loss, gradient = jax.value_and_grad(indexer_kl, argnums=1)(mass, scores + 3.0)
    np.testing.assert_allclose(loss, 0, atol=1e-6)
    np.testing.assert_allclose(gradient, 0, atol=1e-6)


def test_gradient_is_student_minus_teacher_and_never_nan():
    mass, scores = example(1)
    gradient = np.asarray(jax.grad(indexer_kl, argnums=1)(mass, scores))
    present = scores > -np.inf
    student = np.asarray(jax.nn.softmax(jnp.where(present, scores, -1e30), axis=-1))
    total = mass.sum(-1, keepdims=True)
    teacher = mass / np.where(total > 0, total, 1)
    rows = present.any(-1)
    expected = np.where(present, student - teacher, 0) / rows.sum()
    np.testing.assert_allclose(gradient, expected, atol=1e-6)
    assert not gradient[0, 0].any()


def test_the_teacher_is_detached():
    mass, scores = example(2)
    assert not np.asarray(jax.grad(indexer_kl, argnums=0)(mass, scores)).any()


def test_rows_of_padding_alone_are_finite():
    empty = jnp.full((B, T, K), -jnp.inf)
    loss, gradient = jax.value_and_grad(indexer_kl, argnums=1)(jnp.zeros((B, T, K)), empty)
    assert loss == 0 and not np.asarray(gradient).any()
