"""Speculation: what comes out is distributed as the backbone's own tokens; greedily it is them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.v41flash.serving.served import CONFIG, PREFIXES, Served
from v41flash.nn.dspark import Draft
from v41flash.serving import decode, speculative
from v41flash.serving.decode import Stops
from v41flash.serving.sampling import Sampling, masked_logits

VOCABULARY, SLOTS, COUNT = 5, 2, 20_000


def probabilities(logits, settings):
    one = Sampling.create(1, np.ones(VOCABULARY, bool), **settings)
    return np.asarray(jax.nn.softmax(masked_logits(jnp.asarray(logits)[None], one))[0])


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        (dict(temperature=1.0), 2),
        (dict(temperature=0.6, top_p=0.9), 2),
        (dict(temperature=1.3), 1),
        (dict(temperature=1.0, top_k=2), 0),
        (dict(temperature=0.0), 2),
    ],
)
def test_verified_tokens_have_the_backbones_distribution(settings, kept):
    """Frequencies of the first token, and of the second one after each first one."""
    rng = np.random.default_rng(4)
    first, draft_first = rng.normal(size=(2, VOCABULARY)).astype(np.float32)
    # Distributions after each possible first token, of both.
    second, draft_second = rng.normal(size=(2, VOCABULARY, VOCABULARY)).astype(np.float32)
    third = rng.normal(size=VOCABULARY).astype(np.float32)
    sampling = Sampling.create(COUNT, np.ones(VOCABULARY, bool), seed=range(COUNT), **settings)

    @jax.jit
    def rounds(positions):
        # The draft draws as `_draft` does.
        tokens, drafted = [], []
        logits = jnp.broadcast_to(draft_first, (COUNT, VOCABULARY))
        for slot in range(SLOTS):
            noise = speculative._noise(
                sampling, positions + 1 + slot, speculative._DRAFT, logits.shape
            )
            drafted.append(logits)
            tokens.append(jnp.argmax(masked_logits(logits, sampling) + noise, axis=-1))
            logits = jnp.asarray(draft_second)[tokens[-1]]
        draft = jnp.stack(tokens, 1).astype(jnp.int32)
        backbone = jnp.stack(
            [
                jnp.broadcast_to(first, (COUNT, VOCABULARY)),
                jnp.asarray(second)[draft[:, 0]],
                jnp.broadcast_to(third, (COUNT, VOCABULARY)),
            ],
            axis=1,
        )
        return speculative._verify(
            draft,
            jnp.stack(drafted, 1),
            backbone,
            jnp.full(COUNT, kept),
            sampling,
            positions,
        )

    verdict = rounds(jnp.full(COUNT, 7, jnp.int32))
    tokens, accepted = np.asarray(verdict.tokens), np.asarray(verdict.accepted)
    assert accepted.max() <= kept
    if settings in (dict(temperature=1.0), dict(temperature=1.3)):
        # Nothing is cut off, so any draft has a chance.
        assert accepted.max() == kept

    def check(found, expected):
        share = np.bincount(found, minlength=VOCABULARY) / len(found)
        error = np.sqrt(expected * (1 - expected) / len(found))
        assert (np.abs(share - expected) <= 5 * error + 1e-9).all()

    check(tokens[:, 0], probabilities(first, settings))
    for token in range(VOCABULARY):
        after = (tokens[:, 0] == token) & (accepted >= 1)
        if after.sum() > 200:
            check(tokens[after, 1], probabilities(second[token], settings))
    if (accepted == 2).sum() > 200:
        check(tokens[accepted == 2, 2], probabilities(third, settings))


@pytest.mark.slow
@pytest.mark.parametrize("sampled", [False, True])
def test_any_draft_leaves_the_tokens_as_they_are(monkeypatch, sampled):
    """Right, wrong and half right drafts of given tokens, and stops in the middle of them.

    Sampled, only the drafts that are drawn so surely that no draw can differ are compared.
    """
    new, slots = 12, 3
    config = dataclasses.replace(CONFIG, dspark_block_size=slots)
    served = Served.create(config)
    allowed = np.arange(config.vocab_size) > 2
    keywords = dict(temperature=1.0, top_k=1) if sampled else dict(temperature=0.0)
    sampling = Sampling.create(PREFIXES, allowed, **keywords)
    rng = np.random.default_rng(3)
    prompts = [rng.integers(3, 259, n + 1) for n in range(PREFIXES)]
    active = jnp.ones(PREFIXES, bool)

    def begin(stops):
        logits, state = served.prefill(prompts, chunk=3, exact=True)
        return state, *served.programs.begin(logits, state.positions, active, sampling, stops)

    def finish(first, chunk):
        rows = np.concatenate([np.asarray(first.tokens)[None], np.asarray(chunk.tokens)]).T
        return [row[row >= 0] for row in rows]

    def plain(stops):
        state, sequences, first = begin(stops)
        _, sequences, chunk = served.programs.run(
            served.weights, state, sequences, sampling, stops, new, size=new
        )
        return finish(first, chunk), np.asarray(sequences.finish), chunk

    endless = Stops.create(PREFIXES, limit=new, tokens=[1], sequences=[[1, 1]])
    whole, _, _ = plain(endless)
    # Continuations by position, some of their tokens wrong.
    table = np.zeros((PREFIXES, PREFIXES + 2 * new + slots), np.int32)
    for b, row in enumerate(whole):
        table[b, b + 1 : b + 1 + len(row)] = row
    wrong = rng.random(table.shape) < 0.4
    table = jnp.asarray(np.where(wrong, (table + 1) % 256 + 3, table))

    def oracle(model, weights, state, last, sampling):
        places = state.positions[:, None] + 1 + jnp.arange(slots)
        tokens = jnp.take_along_axis(table, places, axis=1)
        logits = 50.0 * jax.nn.one_hot(tokens, config.vocab_size)
        # Sequences differ in how much of the draft they trust.
        trust = jnp.where(jnp.arange(slots) < state.positions[:, None] % 5, 4.0, -4.0)
        return Draft(tokens, logits, trust)

    monkeypatch.setattr(speculative, "_draft", oracle)
    limit = rng.integers(1, new + 1, PREFIXES)
    pair = whole[7][4:6]
    ending = Stops.create(PREFIXES, limit=limit, tokens=[int(whole[3][5])], sequences=[pair])
    for stops in (endless, ending):
        expected, reasons, once = plain(stops)
        state, sequences, first = begin(stops)
        pieces, logprobs, accepted = [np.asarray(first.tokens)[None]], [], 0
        # Calls of several lengths; the last ones have nothing to do.
        for steps in (5, new, 4, new, new):
            state, sequences, chunk, rounds = served.programs.speculate(
                served.weights, state, sequences, sampling, stops, steps, size=new,
                min_confidence=0.5,
            )  # fmt: skip
            pieces.append(np.asarray(chunk.tokens))
            logprobs.append(np.where(pieces[-1] >= 0, np.asarray(chunk.logprobs), np.nan))
            accepted += int(rounds.accepted.sum())
            assert (np.asarray(rounds.accepted) <= np.asarray(rounds.drafted)).all()
            assert (np.asarray(rounds.drafted) <= slots * np.asarray(rounds.rounds)).all()
        rows = np.concatenate(pieces).T
        for b, row in enumerate(rows):
            np.testing.assert_array_equal(row[row >= 0], expected[b])
        np.testing.assert_array_equal(sequences.finish, reasons)
        assert accepted > PREFIXES
        found = np.concatenate(logprobs).T
        truth = np.where(np.asarray(once.tokens) >= 0, np.asarray(once.logprobs), np.nan).T
        errors = [
            np.abs(a[~np.isnan(a)] - b[~np.isnan(b)]) for a, b in zip(found, truth, strict=True)
        ]
        errors = np.concatenate(errors)
        assert np.mean(errors < 1e-4) > 0.95 and errors.max() < 2e-2
    assert decode.LENGTH in reasons
