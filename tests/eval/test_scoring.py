"""Scores of given tokens against the training form of the same model."""

import jax
import numpy as np
import pytest

from eval.scoring import Scorer
from tests.v41flash.serving.served import CONFIG, Served
from v41flash.errors import InputError
from v41flash.serving import Generator, Options
from v41flash.text.tokenizer import ByteTokenizer

LENGTHS = (1, 2, 7, 8, 9, 20, 33)


@pytest.fixture(scope="module")
def served():
    return Served.create(CONFIG)


@pytest.fixture(scope="module")
def scorer(served):
    tokenizer = ByteTokenizer()
    options = Options(batch_size=4)
    token_map = np.arange(tokenizer.vocab_size)
    generator = Generator(CONFIG, served.params, tokenizer, token_map=token_map, options=options)
    return Scorer(generator, chunk=8)


def test_scores_are_those_of_the_training_form(scorer, served):
    rng = np.random.default_rng(0)
    rows = [rng.integers(3, 256, n) for n in LENGTHS]
    logits = served.truth(rows, 40)
    # Some tokens that are likeliest.
    for b, row in enumerate(rows):
        if len(row) > 5:
            row[-1] = logits[b, len(row) - 2].argmax()
    found = scorer.score(rows)
    logprobs = np.asarray(jax.nn.log_softmax(logits))
    for b, row in enumerate(rows):
        own = logprobs[b, np.arange(len(row) - 1), row[1:]]
        assert found[b].logprobs.shape == found[b].likeliest.shape == (len(row) - 1,)
        # A cached value on a rounding boundary may go either way, and moves logits by so much.
        np.testing.assert_allclose(found[b].logprobs, own, atol=1e-2)
        if len(row) > 5:
            assert found[b].likeliest[-1]
    sure = np.concatenate([one.likeliest for one in found])
    assert 0 < sure.mean() < 0.5


def test_results_do_not_depend_on_the_company(scorer):
    rng = np.random.default_rng(1)
    rows = [rng.integers(3, 256, n) for n in (20, 5, 33, 9, 12)]
    together = scorer.score(rows)
    for row, expected in zip(rows, together, strict=True):
        (alone,) = scorer.score([row])
        np.testing.assert_allclose(alone.logprobs, expected.logprobs, atol=1e-4)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ([], "sequence 0: 0 tokens; must be 1 .. 256"),
        ([3] * 257, "sequence 0: 257 tokens"),
        ([3, 260], "sequence 0: token ids leave the vocabulary"),
    ],
)
def test_impossible_sequences(scorer, row, message):
    with pytest.raises(InputError, match=message):
        scorer.score([row])


def test_nothing_to_score(scorer):
    assert scorer.score([]) == []
