"""The indexer's loss as a function of teacher masses and student scores."""

import jax
import jax.numpy as jnp
import numpy as np

from v41flash.nn.index_loss import indexer_kl

B, T, K = 2, 5, 7


def example(seed=0):
    """(masses, scores, valid): rows of one entry, of some and of none, and a row of padding."""
    rng = np.random.default_rng(seed)
    scores = rng.normal(size=(B, T, K)).astype(np.float32)
    mass = rng.random((B, T, K)).astype(np.float32) * 4
    present = rng.random((B, T, K)) < 0.6
    present[0, 0] = False
    present[1, 2] = np.arange(K) == 3
    valid = np.ones((B, T), bool)
    valid[1, 4] = False
    return np.where(present, mass, 0), np.where(present, scores, -np.inf), valid


def test_equals_a_loop():
    mass, scores, valid = example()
    expected = []
    for at in np.ndindex(B, T):
        present = scores[at] > -np.inf
        if not valid[at]:
            continue
        if not present.any():
            expected.append(0.0)
            continue
        p = mass[at][present].astype(np.float64)
        p = p / p.sum()
        q = np.exp(scores[at][present].astype(np.float64))
        q = q / q.sum()
        expected.append(np.sum(p * np.log(p / q)))
    np.testing.assert_allclose(indexer_kl(mass, scores, valid), np.mean(expected), rtol=1e-5)


def test_is_zero_when_the_student_is_the_teacher():
    _, scores, valid = example()
    probability = jax.nn.softmax(jnp.where(scores > -jnp.inf, scores, -1e30), axis=-1)
    mass = jnp.where(scores > -jnp.inf, probability, 0) * 2.5
    loss, gradient = jax.value_and_grad(indexer_kl, argnums=1)(mass, scores + 3.0, valid)
    np.testing.assert_allclose(loss, 0, atol=1e-6)
    np.testing.assert_allclose(gradient, 0, atol=1e-6)


def test_gradient_is_student_minus_teacher_and_never_nan():
    mass, scores, valid = example(1)
    gradient = np.asarray(jax.grad(indexer_kl, argnums=1)(mass, scores, valid))
    present = scores > -np.inf
    student = np.asarray(jax.nn.softmax(jnp.where(present, scores, -1e30), axis=-1))
    total = mass.sum(-1, keepdims=True)
    teacher = mass / np.where(total > 0, total, 1)
    present &= valid[..., None]
    expected = np.where(present, student - teacher, 0) / valid.sum()
    np.testing.assert_allclose(gradient, expected, atol=1e-6)
    assert not gradient[0, 0].any() and not gradient[1, 4].any()


def test_the_teacher_is_detached():
    mass, scores, valid = example(2)
    assert not np.asarray(jax.grad(indexer_kl, argnums=0)(mass, scores, valid)).any()


def test_rows_of_padding_alone_are_finite():
    empty, padding = jnp.full((B, T, K), -jnp.inf), jnp.zeros((B, T), bool)
    loss, gradient = jax.value_and_grad(indexer_kl, argnums=1)(jnp.zeros((B, T, K)), empty, padding)
    assert loss == 0 and not np.asarray(gradient).any()


def test_parts_weighted_by_their_tokens_make_the_whole():
    mass, scores, valid = example(3)
    valid[0, 2:] = False
    parts = [indexer_kl(mass[[b]], scores[[b]], valid[[b]]) * valid[b].sum() for b in range(B)]
    whole = indexer_kl(mass, scores, valid)
    np.testing.assert_allclose(whole, sum(parts) / valid.sum(), rtol=1e-6)
