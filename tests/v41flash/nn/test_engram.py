"""Engram against a NumPy float64 write, and the history it hashes at document starts."""

import functools

import jax
import numpy as np
import pytest

from tests import reference_np
from tests.v41flash.nn import samples
from v41flash.kernels import Kernels
from v41flash.nn.context import make_context
from v41flash.nn.engram import Engram
from v41flash.text.engram_hash import EngramHasher

CONFIG = samples.two_layers()
PAD = 7
T = 21


@pytest.fixture(scope="module")
def hasher():
    return EngramHasher.from_config(CONFIG, pad_compressed_id=PAD)


@functools.partial(jax.jit, compiler_options=samples.QUICK_COMPILE)
def apply(params, streams, rows, is_image):
    positions = jax.numpy.zeros(streams.shape[:2], jax.numpy.int32)
    context = make_context(CONFIG, positions, positions + 1, rows, is_image)
    module = Engram(CONFIG, 0, Kernels())
    out, state = module.apply({"params": params}, streams, context, mutable=["intermediates"])
    return out, state["intermediates"]["gate"][0]


def test_equals_the_reference_and_leaves_image_tokens_alone(hasher):
    rng = np.random.default_rng(0)
    weights = samples.random_weights(CONFIG, seed=6)
    streams = rng.normal(size=(1, T, CONFIG.hc_mult, CONFIG.hidden_size)).astype(np.float32)
    rows = hasher.rows(rng.integers(0, 256, (1, T)), np.arange(T)[None])
    image = rng.random((1, T)) < 0.3
    params = samples.params_of(CONFIG, weights)["group_0"]["first"]["engram"]
    out, gate = jax.device_get(apply(params, streams, rows, image))
    wide = {name: value.astype(np.float64) for name, value in weights.items()}
    expected, expected_gate = reference_np.engram(
        streams[0].astype(np.float64), rows[0, :, 0], wide, "layers.0.engram.", image[0]
    )
    # The gate's slope is infinite at a score of 0.
    np.testing.assert_allclose(gate[0], expected_gate, atol=1e-4)
    np.testing.assert_allclose(out[0], expected, atol=2e-4, rtol=1e-4)
    np.testing.assert_array_equal(out[image], streams[image])
    assert (np.abs(out - streams).max((2, 3))[~image] > 1e-2).all()
    # One gate a stream, from norms of that stream alone.
    scaled, other = streams.copy(), slice(1, None)
    scaled[:, :, 0] *= 100
    regated = jax.device_get(apply(params, scaled, rows, image))[1]
    np.testing.assert_allclose(regated[:, :, other], gate[:, :, other], atol=1e-6)
    np.testing.assert_allclose(regated[:, :, 0], gate[:, :, 0], atol=1e-4)


def test_history_ends_at_the_start_of_a_document(hasher):
    rng = np.random.default_rng(1)
    documents = [rng.integers(0, 256, n) for n in (9, 1, 4)]
    tokens, positions, segment_ids = samples.packed(documents, 32)
    rows = hasher.rows(tokens, positions)[0, :, 0]
    multipliers = [int(m) for m in hasher.multipliers[0]]
    primes = hasher.primes[0]
    for start, document in zip((0, 16, 24), documents, strict=True):
        for t in range(len(document)):
            history = [int(document[t - i]) if i <= t else PAD for i in range(4)]
            expected, offset = [], 0
            for order in (2, 3, 4):
                mix = 0
                for i in range(order):
                    mix ^= history[i] * multipliers[i]
                for prime in primes[order - 2]:
                    expected.append(mix % prime + offset)
                    offset += prime
            np.testing.assert_array_equal(rows[start + t], expected)
    assert segment_ids.max() == 3
