"""The whole matrix: recorded decoding, every prefix length, chunk sizes, all kinds of layers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import golden_multimodal
from tests.conftest import GOLDEN
from tests.golden_check import Recorded
from tests.v41flash.nn import samples
from tests.v41flash.serving.served import Served, entries
from v41flash.serving import forward
from v41flash.serving.forward import ImageRows, Model
from v41flash.serving.prefill import prefill
from v41flash.serving.programs import Programs
from v41flash.serving.state import State, commit
from v41flash.serving.weights import Weights

pytestmark = pytest.mark.slow


def stepper(config):
    """jitted (weights, state, tokens, new) -> (logits [B, T, V], state)."""
    model = Model(config)

    def step(weights, state, tokens, new):
        out = forward.all_layers(model, weights, state, tokens, new)
        return forward.logits(weights, out.hidden), commit(weights, state, out.pending, new)

    return jax.jit(step, compiler_options=samples.QUICK_COMPILE, donate_argnums=1)


def every_prefix(config, weights, tokens, first):
    """Yields (position, logits [V]) of decoding all tokens from prefixes of `first` int [B]."""
    batch = len(first)
    state = State.create(config, weights, batch, np.arange(batch)[:, None])
    step = stepper(config)
    rows = jnp.asarray(np.tile(tokens, (batch, 1)))
    logits, state = step(weights, state, rows, jnp.asarray(first))
    for b, length in enumerate(first):
        yield from enumerate(np.asarray(logits[b, :length]))
    lengths = np.array(first)
    while (lengths < len(tokens)).any():
        new = (lengths < len(tokens)).astype(np.int32)
        following = tokens[np.minimum(lengths, len(tokens) - 1)]
        logits, state = step(weights, state, following[:, None], new)
        for b in np.flatnonzero(new):
            yield lengths[b], np.asarray(logits[b, 0])
        lengths += new
    np.testing.assert_array_equal(state.positions, len(tokens))


@pytest.mark.parametrize("mode", ["fakequant", "noquant"])
def test_recorded_decoding(recorded, mode):
    """From every prefix of the recorded tokens to their end."""
    arrays = np.load(GOLDEN / "layout_i" / "E_decode.npz")
    tokens, truth = arrays["tokens"], arrays[f"prefill_logits.{mode}"]
    config = recorded.model(mode == "fakequant").config
    weights = Weights.create(config, recorded.params, recorded.compressed_ids)
    seen = np.zeros(len(tokens), int)
    for position, logits in every_prefix(config, weights, tokens, np.arange(1, len(tokens))):
        np.testing.assert_allclose(logits, truth[position], atol=1e-4, err_msg=f"{position}")
        seen[position] += 1
    np.testing.assert_array_equal(seen, len(tokens) - 1)
    prefix = int(arrays["prefix_len"])
    repaired = arrays[f"decode_repaired_logits.{mode}"]
    np.testing.assert_allclose(repaired, truth[prefix:], atol=2e-4)


def test_recorded_images():
    """Prompts with images, cut anywhere, in chunks."""
    recorded = Recorded.load(GOLDEN / "layout_i" / "multimodal")
    arrays = dict(np.load(GOLDEN / "layout_i" / "multimodal" / "D_multimodal.npz"))
    tokens, config = arrays["tokens"], recorded.model(False).config
    vision = config.vision
    images = golden_multimodal.recorded_images(vision, arrays)
    batch = golden_multimodal.image_batch(vision, images, len(tokens))
    weights = Weights.create(config, recorded.params, recorded.compressed_ids)
    programs = Programs(Model(config))
    rows = programs.image_rows(weights, tokens[None], batch)
    count = len(tokens)
    rows = ImageRows(*(jnp.repeat(x, count, axis=0) for x in rows))
    prompts = [tokens[: n + 1] for n in range(count)]
    truth = arrays["final_norm"] @ np.asarray(weights.head)
    for keywords in (dict(exact=True), dict(replay=3 * config.sliding_window)):
        state = State.create(config, weights, count, np.arange(count)[:, None])
        logits, _ = prefill(programs, weights, state, prompts, chunk=7, images=rows, **keywords)
        np.testing.assert_allclose(logits, truth, atol=2e-4)


CONFIGS = {
    "three": samples.three_layers,
    "five": samples.five_layers,
    "two": samples.two_layers,
    "scanned": samples.scanned,
    "unpooled": functools.partial(samples.five_layers, use_candidate_pool=False),
    "fp8": functools.partial(samples.five_layers, main_kv_format="fp8"),
}


@pytest.mark.parametrize("rounding", [True, False], ids=["rounded", "exact"])
@pytest.mark.parametrize("name", CONFIGS)
def test_decoding_from_every_prefix(name, rounding):
    if name == "fp8" and not rounding:
        pytest.skip("a format of rounding")
    config = CONFIGS[name](**({} if rounding else samples.NO_ROUNDING))
    served = Served.create(config, seed=1)
    length = 3 * config.sliding_window + 7
    tokens = np.random.default_rng(2).integers(3, config.vocab_size, length)
    truth = served.truth([tokens], length)[0]
    found = every_prefix(config, served.weights, tokens, np.arange(1, length + 1))
    errors = np.array([np.abs(logits - truth[position]).max() for position, logits in found])
    if rounding:
        # A value on a rounding boundary may go either way.
        assert np.mean(errors < 1e-4) >= 0.8 and errors.max() < 0.1
    else:
        assert errors.max() < 1e-4


@pytest.mark.parametrize("rounding", [True, False], ids=["rounded", "exact"])
@pytest.mark.parametrize("exact", [True, False], ids=["all layers", "encoder"])
def test_chunks_of_any_size(exact, rounding):
    config = samples.five_layers(**({} if rounding else samples.NO_ROUNDING))
    served = Served.create(config, seed=1)
    length = 3 * config.sliding_window + 7
    tokens = np.random.default_rng(2).integers(3, config.vocab_size, length)
    prompts = [tokens[: n + 1] for n in range(length)]
    whole, state = served.prefill(prompts, chunk=64, exact=exact, replay=5)
    cached = entries(state, config)
    if exact:
        truth = served.truth([tokens], length)[0]
        np.testing.assert_allclose(whole, truth, atol=2e-2 if rounding else 1e-4)
    for chunk in (1, 2, 3, 7):
        logits, state = served.prefill(prompts, chunk=chunk, exact=exact, replay=5)
        errors = np.abs(logits - whole).max(-1)
        assert np.mean(errors < 1e-4) > 0.9 and errors.max() < (0.1 if rounding else 1e-4)
        for layer, rows in entries(state, config).items():
            close = np.isclose(rows, cached[layer], atol=1e-4)
            assert close.mean() > (0.99 if rounding else 1 - 1e-9)
