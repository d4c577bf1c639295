"""Decoding against the training form of the model, for every prefix length; stops; neighbours."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.v41flash.serving.served import CONFIG, PREFIXES, Served
from v41flash.errors import InputError
from v41flash.serving import decode
from v41flash.serving.decode import Stops
from v41flash.serving.sampling import Sampling

NEW = 8
ALLOWED = np.arange(CONFIG.vocab_size) > 2


@pytest.fixture(scope="module")
def served():
    return Served.create(CONFIG)


@functools.cache
def prompts():
    tokens = np.random.default_rng(3).integers(3, CONFIG.vocab_size, (PREFIXES, PREFIXES))
    return [row[: b + 1] for b, row in enumerate(tokens)]


def stopping(limit=NEW, tokens=(1, 1), pair=(1, 1)):
    """Stops of always the same shape; 1 is never drawn."""
    return Stops.create(PREFIXES, limit=limit, tokens=tokens, sequences=[pair, (1, 1, 1)])


def decoded(served, prompts, sampling, stops, calls=(NEW - 1,), state=None):
    """(tokens, log-probabilities, why it ended) of every sequence."""
    logits, state = served.prefill(prompts, state, chunk=3, exact=True)
    programs, weights, batch = served.programs, served.weights, len(prompts)
    sequences, first = programs.begin(
        logits, state.positions, jnp.ones(batch, bool), sampling, stops
    )
    tokens, logprobs = [np.asarray(first.tokens)[None]], [np.asarray(first.logprobs)[None]]
    for steps in calls:
        state, sequences, chunk = programs.run(
            weights, state, sequences, sampling, stops, steps, size=NEW
        )
        done = int(chunk.steps)
        assert done <= steps
        tokens.append(np.asarray(chunk.tokens)[:done])
        logprobs.append(np.asarray(chunk.logprobs)[:done])
    tokens, logprobs = np.concatenate(tokens).T, np.concatenate(logprobs).T
    finish = np.asarray(sequences.finish)
    emitted = [row[row >= 0] for row in tokens]
    np.testing.assert_array_equal([len(row) for row in emitted], sequences.emitted)
    return emitted, [x[: len(row)] for x, row in zip(logprobs, emitted, strict=True)], finish


def check_against_training_form(served, prompts, emitted, logprobs):
    """Yields (logits, tokens) of every sequence.

    A cached value on a rounding boundary may go either way, and then moves the logits that see it
    by a step of its format: a share of tokens is allowed to be off by so much.
    """
    documents = [np.concatenate(pair) for pair in zip(prompts, emitted, strict=True)]
    truth, errors = served.truth(documents, PREFIXES + NEW), []
    for b, (prompt, new) in enumerate(zip(prompts, emitted, strict=True)):
        logits = truth[b, len(prompt) - 1 : len(prompt) + len(new) - 1]
        logits = np.where(ALLOWED, logits, -np.inf)
        own = np.asarray(jax.nn.log_softmax(logits))[np.arange(len(new)), new]
        errors.extend(np.abs(logprobs[b] - own))
        yield logits, new
    assert np.mean(np.array(errors) < 1e-4) > 0.95 and max(errors) < 2e-2


def test_greedy_decoding_from_every_prefix(served):
    sampling = Sampling.create(PREFIXES, ALLOWED, temperature=0)
    stops = stopping()
    emitted, logprobs, finish = decoded(served, prompts(), sampling, stops, calls=(3, 0, 4))
    assert (finish == decode.LENGTH).all() and {len(row) for row in emitted} == {NEW}
    for logits, new in check_against_training_form(served, prompts(), emitted, logprobs):
        np.testing.assert_array_equal(logits.argmax(-1), new)


def test_a_sequence_does_not_see_its_neighbours(served):
    seeds = np.arange(PREFIXES) + 100
    settings = dict(
        temperature=np.linspace(0.5, 1.5, PREFIXES), top_p=np.where(seeds % 3, 1.0, 0.8)
    )
    stops = stopping()
    sampling = Sampling.create(PREFIXES, ALLOWED, seed=seeds, **settings)
    emitted, logprobs, _ = decoded(served, prompts(), sampling, stops, calls=(3, 4))
    list(check_against_training_form(served, prompts(), emitted, logprobs))
    # The same sequences in other places, among others, in calls of other lengths.
    order = np.random.default_rng(0).permutation(PREFIXES)
    kept = order[: PREFIXES // 2]
    others = [np.arange(3, 3 + n) for n in range(1, PREFIXES - len(kept) + 1)]
    mixed = [prompts()[b] for b in kept] + others
    sampling = Sampling(*(x[order] for x in sampling[:-1]), sampling.allowed)
    again, _, _ = decoded(served, mixed, sampling, stops, calls=(1, 6))
    for place, b in enumerate(kept):
        np.testing.assert_array_equal(again[place], emitted[b])


def test_stops(served):
    sampling = Sampling.create(PREFIXES, ALLOWED, temperature=0)
    whole, _, _ = decoded(served, prompts(), sampling, stopping())
    # A token of one sequence, two tokens in a row of another, a limit each, and no page for a row.
    token, pair = whole[4][3], whole[9][4:6]
    limit = np.full(PREFIXES, NEW)
    limit[2] = 1
    stops = stopping(limit, (token, 1), pair)
    emitted, _, finish = decoded(served, prompts(), sampling, stops, calls=(2, 2, 3))
    reasons = set()
    for b, row in enumerate(whole):
        ends = [(n + 1, decode.STOP_TOKEN) for n in np.flatnonzero(row == token)]
        ends += [
            (n + 2, decode.STOP_SEQUENCE) for n in range(NEW - 1) if (row[n : n + 2] == pair).all()
        ]
        length, reason = min([*ends, (limit[b], decode.LENGTH)])
        np.testing.assert_array_equal(emitted[b], row[:length])
        assert finish[b] == reason
        reasons.add(int(reason))
    assert reasons == {decode.STOP_TOKEN, decode.STOP_SEQUENCE, decode.LENGTH}


def test_a_sequence_without_pages_ends(served):
    state = served.fresh(PREFIXES)
    _, state = served.prefill(prompts(), state, chunk=3, exact=True)
    table = np.asarray(state.cache.page_table).copy()
    table[5] = -1
    cache = dataclasses.replace(state.cache, page_table=jnp.asarray(table))
    state = dataclasses.replace(state, cache=cache)
    sampling = Sampling.create(PREFIXES, ALLOWED, temperature=0)
    stops = stopping()
    sequences = decode.Sequences(
        last=jnp.full(PREFIXES, 7, jnp.int32),
        emitted=jnp.ones(PREFIXES, jnp.int32),
        recent=jnp.full((PREFIXES, 3), 7, jnp.int32),
        finish=jnp.zeros(PREFIXES, jnp.int32),
    )
    before = int(state.positions[5])
    state, sequences, chunk = served.programs.run(
        served.weights, state, sequences, sampling, stops, 3, size=NEW
    )
    assert int(sequences.finish[5]) == decode.NO_ROOM and int(state.positions[5]) == before
    assert (np.asarray(chunk.tokens)[:, 5] == -1).all()
    assert (np.delete(np.asarray(sequences.finish), 5) == decode.RUNNING).all()


def test_stops_refuse():
    with pytest.raises(InputError, match="limit = 0"):
        Stops.create(2, limit=[1, 0])
    with pytest.raises(InputError, match="one of them is empty"):
        Stops.create(2, limit=1, sequences=[[3], []])
