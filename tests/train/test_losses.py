"""Chunked cross entropy against a plain NumPy one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from train import losses

B, T, D, V = 2, 13, 5, 11


def _inputs(seed=0):
    rng = np.random.default_rng(seed)
    hidden = rng.normal(size=(B, T, D)).astype(np.float32)
    head = rng.normal(size=(D, V)).astype(np.float32)
    targets = rng.integers(0, V, (B, T)).astype(np.int32)
    mask = (rng.random((B, T)) < 0.7).astype(np.float32)
    return hidden, head, targets, mask


def _numpy_nats(hidden, head, targets):
    logits = hidden.astype(np.float64) @ head.astype(np.float64)
    log_z = np.log(np.exp(logits).sum(-1))
    return log_z - np.take_along_axis(logits, targets[..., None], -1)[..., 0], logits


@pytest.mark.parametrize("chunk_tokens", [1, 2, 8, 26, 1000])
def test_sums_equal_numpy_whatever_the_chunk(chunk_tokens):
    hidden, head, targets, mask = _inputs()
    got = losses.cross_entropy(lambda h: h @ head, hidden, targets, mask, chunk_tokens=chunk_tokens)
    nats, logits = _numpy_nats(hidden, head, targets)
    np.testing.assert_allclose(got.nats, (nats * mask).sum(), rtol=1e-5)
    assert got.tokens == mask.sum()
    assert got.correct == ((logits.argmax(-1) == targets) * mask).sum()


def test_gradients_equal_the_unchunked_ones():
    hidden, head, targets, mask = _inputs(1)

    def chunked(hidden, head):
        return losses.cross_entropy(lambda h: h @ head, hidden, targets, mask, chunk_tokens=6).nats

    def whole(hidden, head):
        return jnp.sum(losses.token_nats(hidden @ head, targets) * mask)

    got = jax.grad(chunked, (0, 1))(hidden, head)
    want = jax.grad(whole, (0, 1))(jnp.asarray(hidden), jnp.asarray(head))
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_low_precision_hidden_states_are_summed_in_float32():
    hidden, head, targets, mask = _inputs(2)
    got = losses.cross_entropy(
        lambda h: h.astype(jnp.float32) @ head, jnp.asarray(hidden, jnp.bfloat16), targets, mask
    )
    assert {leaf.dtype for leaf in got} == {jnp.dtype("float32")}


def test_nothing_holds_all_logits_at_once():
    """Neither the forward nor the backward pass has an array of B * T * V elements."""
    hidden, head, targets, mask = _inputs(3)
    hidden, targets, mask = (np.repeat(x, 20, axis=1) for x in (hidden, targets, mask))

    def loss(hidden, head):
        return losses.cross_entropy(lambda h: h @ head, hidden, targets, mask, chunk_tokens=20).nats

    text = jax.jit(jax.value_and_grad(loss, (0, 1))).lower(hidden, head).compile().as_text()
    length = T * 20
    assert f"f32[{B},{length},{V}]" not in text
    assert f"f32[26,{B},10,{V}]" not in text
    assert f"f32[{B},10,{V}]" in text
