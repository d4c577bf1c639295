"""Prefill against the training form; decoder and encoder replay; images; what is refused."""

import dataclasses

import numpy as np
import pytest

from tests.v41flash.serving.served import CONFIG, PREFIXES, Served, entries
from v41flash.serving.prefill import chunk_width
from v41flash.serving.replay import begin_replay

WINDOW = CONFIG.sliding_window
# The last query sees W rows of the second decoder layer, the oldest of which saw W of the first.
EXACT_REPLAY = 2 * WINDOW - 1


@pytest.fixture(scope="module")
def served():
    return Served.create(CONFIG)


@pytest.fixture(scope="module")
def tokens():
    return np.random.default_rng(3).integers(3, CONFIG.vocab_size, PREFIXES)


@pytest.fixture(scope="module")
def truth(served, tokens):
    return served.truth([tokens] * PREFIXES, PREFIXES + 8)[0]


def prefixes(tokens):
    return [tokens[: n + 1] for n in range(len(tokens))]


def test_exact_prefill_of_every_length(served, tokens, truth):
    logits, state = served.prefill(prefixes(tokens), chunk=3, exact=True)
    np.testing.assert_allclose(logits, truth[:PREFIXES], atol=2e-5)
    np.testing.assert_array_equal(state.positions, np.arange(PREFIXES) + 1)


def test_half_prefill_of_every_length(served, tokens, truth):
    """With a replay that reaches as far as the decoder's windows do, it is exact."""
    logits, state = served.prefill(prefixes(tokens), chunk=3, replay=EXACT_REPLAY)
    np.testing.assert_allclose(logits, truth[:PREFIXES], atol=2e-5)
    _, whole = served.prefill(prefixes(tokens), chunk=3, exact=True)
    ours, theirs = entries(state, CONFIG), entries(whole, CONFIG)
    for layer in ours:
        np.testing.assert_array_equal(ours[layer], theirs[layer])


@pytest.mark.slow
def test_decoder_replay_is_that_of_training(served, tokens, truth):
    """Decoder windows that start at the replay are what `replay_segment` trains."""
    segmented = Served.create(dataclasses.replace(CONFIG, replay_segment=8))
    cut = segmented.truth([tokens] * PREFIXES, PREFIXES + 8)[0]
    # The last segment of 10, 11, 18 and 19 tokens begins at 8, 8, 16 and 16.
    lengths = [10, 11, 18, 19]
    for replay in (2, 3):
        logits, _ = served.prefill(prefixes(tokens), chunk=3, replay=replay)
        last = [n - 1 for n in lengths if n % 8 == replay]
        np.testing.assert_allclose(logits[last], cut[last], atol=2e-5)
        assert np.abs(cut[last] - truth[last]).max(-1).min() > 1e-3


def test_a_conversation_goes_on(served, tokens, truth):
    """A second prompt after a first one, shorter and longer than the replay."""
    lengths = np.arange(PREFIXES) + 1
    first = np.maximum(lengths - np.array([1, 5, 9])[lengths % 3], 0)
    state = served.fresh(PREFIXES)
    _, state = served.prefill([tokens[:n] for n in first], state, chunk=3, replay=EXACT_REPLAY)
    rest = [tokens[n:end] for n, end in zip(first, lengths, strict=True)]
    logits, _ = served.prefill(rest, state, chunk=3, replay=EXACT_REPLAY)
    np.testing.assert_allclose(logits, truth[:PREFIXES], atol=2e-5)


def replayed(served, tokens, replay):
    """Logits after each prefix, the first part of which is in the global cache alone."""
    lengths = np.arange(PREFIXES) + 1
    cached = lengths * 3 // 4
    _, state = served.prefill([tokens[:n] for n in cached], chunk=3, exact=True)
    before = entries(state, CONFIG)
    # What is left of the sequences is what their pages hold.
    empty = served.fresh(PREFIXES)
    state = dataclasses.replace(empty, cache=state.cache)
    state, start = begin_replay(
        served.programs, served.weights, state, [tokens[:n] for n in cached], replay
    )
    np.testing.assert_array_equal(start, np.maximum(cached - replay, 0))
    rest = [tokens[s:n] for s, n in zip(start, lengths, strict=True)]
    logits, state = served.prefill(rest, state, chunk=3, exact=True)
    after = entries(state, CONFIG)
    for layer, rows in before.items():
        for b, n in enumerate(cached // CONFIG.layers[layer].ratio):
            np.testing.assert_array_equal(after[layer][b, :n], rows[b, :n])
    np.testing.assert_array_equal(state.cache.lengths, lengths)
    return logits, cached


def test_encoder_replay(served, tokens, truth):
    """Over layers x window tokens it is exact; over fewer it is not."""
    logits, _ = replayed(served, tokens, 3 * WINDOW)
    np.testing.assert_allclose(logits, truth[:PREFIXES], atol=2e-5)
    logits, cached = replayed(served, tokens, 2)
    error = np.abs(logits - truth[:PREFIXES]).max(-1)
    assert error[cached <= 2].max() < 2e-5 and error[cached > WINDOW].max() > 1e-2


def test_prefill_refuses(served):
    state = served.fresh(2)
    with pytest.raises(ValueError, match="1 prompts for 2 sequences"):
        served.prefill([[5]], state)
    with pytest.raises(ValueError, match="every prompt is empty"):
        served.prefill([[], []], state)
    with pytest.raises(ValueError, match=r"prompt 1: token ids 5..260 leave the vocabulary"):
        served.prefill([[5], [5, 260]], state)
    with pytest.raises(ValueError, match="replay = 0"):
        served.prefill([[5], [5]], state, replay=0)
    with pytest.raises(ValueError, match="sequence 1: 129 more tokens"):
        served.prefill([[5], [5] * 129], state)
    with pytest.raises(ValueError, match="replay = 1: must be at least 2"):
        begin_replay(served.programs, served.weights, state, [[5] * 9] * 2, 1)


def test_few_widths_are_compiled():
    widths = {chunk_width(n, 100) for n in range(1, 101)}
    assert widths == {8, 16, 32, 64, 100}
    assert all(n <= chunk_width(n, 100) for n in range(1, 101))
