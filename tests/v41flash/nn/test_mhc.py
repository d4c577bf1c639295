"""Hyper-connections of the model: what stays float32 when the streams do not."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import reference_np
from tests.v41flash.nn import samples
from v41flash.kernels import Kernels
from v41flash.nn.mhc import HyperConnection, Residual


def test_coefficients_are_float32_on_bfloat16_streams():
    """They are those of the rounded streams, not themselves rounded; so is the carried `pre`."""
    config = samples.two_layers(dtype="bfloat16")
    weights = samples.random_weights(config, seed=13)
    rng = np.random.default_rng(14)
    shape = (1, 9, config.hc_mult, config.hidden_size)
    streams = jnp.asarray(rng.normal(size=shape), jnp.bfloat16)
    start = Residual.start(streams[:, :, 0], config.hc_mult)
    params = samples.params_of(config, weights)["group_0"]["first"]["hc_attn"]
    module = HyperConnection(config, Kernels())
    x, after = jax.jit(module.apply)({"params": params}, start, streams)
    fn, base, scale = (weights[f"layers.0.hc_attn_{name}"] for name in ("fn", "base", "scale"))
    sweeps = config.hc_sinkhorn_iters
    wide = np.asarray(streams[0], np.float64)
    expected = reference_np.coefficients(wide, fn, base, scale, sweeps=sweeps)
    for ours, theirs in zip((after.pre, after.post, after.comb), expected, strict=True):
        assert ours.dtype == jnp.float32
        np.testing.assert_allclose(ours[0], theirs, atol=1e-5)
    assert x.dtype == after.streams.dtype == jnp.bfloat16


def test_the_first_read_takes_stream_0_and_nothing_is_pending():
    x = jnp.arange(24.0).reshape(1, 2, 12)
    start = Residual.start(x, 4)
    np.testing.assert_array_equal(start.pre, np.broadcast_to([1, 0, 0, 0], (1, 2, 4)))
    np.testing.assert_array_equal(start.written(), jnp.repeat(x[:, :, None], 4, axis=2))


@pytest.mark.parametrize("base, kept", [("zero", 0.25), ("identity", 0.9)])
def test_initial_mixing(base, kept):
    config = samples.two_layers(hc_base_init=base)
    start = Residual.start(jnp.ones((1, 1, config.hidden_size)), config.hc_mult)
    module = HyperConnection(config, Kernels())
    (_, after), _ = jax.jit(module.init_with_output)(jax.random.key(0), start)
    comb = np.asarray(after.comb[0, 0])
    np.testing.assert_allclose(np.diag(comb), kept, atol=0.05)
    np.testing.assert_allclose(comb.sum(0), 1, atol=1e-4)
    np.testing.assert_allclose(after.pre, 0.5, atol=0.05)
    np.testing.assert_allclose(after.post, 1.0, atol=0.05)


def test_without_a_single_pass_sublayers_read_by_their_own_coefficients():
    """The whole stack against the reference, in float64; the other way differs."""
    config = samples.two_layers(hc_single_pass=False, **samples.NO_ROUNDING)
    weights = samples.random_weights(config, seed=5)
    document = np.random.default_rng(6).integers(3, config.vocab_size, 19)
    inputs = samples.batch_inputs(config, [document], len(document))
    forward = samples.compiled_forward(config)
    _, logits, _ = forward(samples.params_of(config, weights), *inputs)
    wide = {name: value.astype(np.float64) for name, value in weights.items()}
    trace = reference_np.forward(document, inputs[3][0], wide, config)
    assert trace.margin > 1e-5, "choose another seed: a decision hangs on rounding errors"
    np.testing.assert_allclose(logits[0], trace.logits, atol=1e-4)
    ahead = dataclasses.replace(config, hc_single_pass=True)
    other = reference_np.forward(document, inputs[3][0], wide, ahead)
    assert np.abs(other.logits - trace.logits).max() > 0.1
