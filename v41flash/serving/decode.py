"""Decoding many tokens in one compiled loop, without a word from the host.

    sequences = decode.begin(...)              the first token, from a prefill's logits
    sequences, chunk = decode.run(...)         up to C more tokens of every running sequence

Between two calls the host may stream, stop sequences, or put others in their place. What a
sequence emits does not depend on where the calls' borders lie, nor on its neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from v41flash.errors import InputError
from v41flash.serving import forward
from v41flash.serving.forward import Model
from v41flash.serving.sampling import Draw, Sampling, draw
from v41flash.serving.state import State, commit
from v41flash.serving.weights import Weights

# Why a sequence does not run. IDLE: it never began.
RUNNING, STOP_TOKEN, STOP_SEQUENCE, LENGTH, NO_ROOM, IDLE = range(6)
FINISH_NAMES = ("running", "stop_token", "stop_sequence", "length", "no_room", "idle")
# No token: what `recent` holds before there are any, and what pads stop tokens and sequences.
_NOTHING, _ANY = -2, -1


class Stops(NamedTuple):
    """What ends each sequence.

    Attributes:
        tokens: int32 [B, S], each of which ends it; -1 padded.
        sequences: int32 [B, Q, M], token sequences that end it, aligned to the right, -1 padded;
            one of nothing but -1 is none.
        limit: int32 [B], tokens to emit at most.
    """

    tokens: jax.Array
    sequences: jax.Array
    limit: jax.Array

    @classmethod
    def create(
        cls,
        batch: int,
        *,
        limit: int | Sequence[int],
        tokens: Sequence[int] = (),
        sequences: Sequence[Sequence[int]] = (),
    ) -> Stops:
        """The same stops for `batch` sequences (the limit may be one each).

        Raises:
            InputError: a limit below 1, or an empty stop sequence.
        """
        limits = np.broadcast_to(np.asarray(limit), (batch,))
        if limits.min(initial=1) < 1:
            raise InputError(f"limit = {limits.min()}: at least one token must be allowed")
        if any(len(sequence) == 0 for sequence in sequences):
            raise InputError("stop sequences: one of them is empty")
        longest = max((len(sequence) for sequence in sequences), default=1)
        padded = np.full((max(len(sequences), 1), longest), _ANY, np.int32)
        for row, sequence in zip(padded, sequences, strict=False):
            row[longest - len(sequence) :] = sequence
        single = np.array(list(tokens) or [_ANY], np.int32)
        return cls(
            jnp.asarray(np.tile(single, (batch, 1))),
            jnp.asarray(np.tile(padded, (batch, 1, 1))),
            jnp.asarray(limits, jnp.int32),
        )


class Sequences(NamedTuple):
    """Sequences being decoded.

    Attributes:
        last: int32 [B], the newest token of each; emitted, but not yet in the state.
        emitted: int32 [B], tokens emitted so far.
        recent: int32 [B, M], the newest emitted tokens, newest last.
        finish: int32 [B], RUNNING or why not.
    """

    last: jax.Array
    emitted: jax.Array
    recent: jax.Array
    finish: jax.Array


class Chunk(NamedTuple):
    """Tokens of one call, C rows of which the first `steps` are filled.

    Attributes:
        tokens: int32 [C, B]; -1 where a sequence was not running.
        logprobs: float32 [C, B]; see `Draw`.
        top_tokens: int32 [C, B, n].
        top_logprobs: float32 [C, B, n].
        steps: int32 scalar.
    """

    tokens: jax.Array
    logprobs: jax.Array
    top_tokens: jax.Array
    top_logprobs: jax.Array
    steps: jax.Array

    @classmethod
    def empty(cls, size: int, batch: int, top: int) -> Chunk:
        """No tokens yet, room for `size` of each of `batch` sequences."""
        return cls(
            tokens=jnp.full((size, batch), -1, jnp.int32),
            logprobs=jnp.zeros((size, batch), jnp.float32),
            top_tokens=jnp.zeros((size, batch, top), jnp.int32),
            top_logprobs=jnp.zeros((size, batch, top), jnp.float32),
            steps=jnp.zeros((), jnp.int32),
        )


def begin(
    logits: jax.Array,
    positions: jax.Array,
    active: jax.Array,
    sampling: Sampling,
    stops: Stops,
    top: int = 0,
) -> tuple[Sequences, Draw]:
    """Draws the first token after a prefill.

    Args:
        logits: float32 [B, V].
        positions: int32 [B], of the tokens to be drawn (`State.positions`).
        active: bool [B], sequences to decode.
        sampling: how to draw.
        stops: what ends a sequence.
        top: likeliest tokens to report.
    """
    batch = positions.shape[0]
    drawn = draw(logits, sampling, positions, top)
    sequences = Sequences(
        last=drawn.tokens,
        emitted=jnp.zeros(batch, jnp.int32),
        recent=jnp.full((batch, stops.sequences.shape[-1]), _NOTHING, jnp.int32),
        finish=jnp.where(active, RUNNING, IDLE).astype(jnp.int32),
    )
    return take(sequences, drawn.tokens, stops), drawn


def run(
    model: Model,
    weights: Weights,
    state: State,
    sequences: Sequences,
    sampling: Sampling,
    stops: Stops,
    steps: jax.Array,
    *,
    size: int,
    top: int = 0,
) -> tuple[State, Sequences, Chunk]:
    """Decodes until every sequence has ended, or `steps` tokens each.

    Args:
        model: the model.
        weights: of it.
        state: of the sequences.
        sequences: where they stand.
        sampling: how to draw.
        stops: what ends a sequence.
        steps: int32 scalar, at most `size`.
        size: C, rows of the result.
        top: likeliest tokens to report.

    Returns:
        (state, sequences, the tokens).
    """

    def step(carry: tuple[State, Sequences, Chunk]) -> tuple[State, Sequences, Chunk]:
        state, sequences, chunk = carry
        # A token without a page would be lost: its sequence ends here.
        full = (sequences.finish == RUNNING) & (state.cache.room() < 1)
        finish = jnp.where(full, NO_ROOM, sequences.finish)
        running = finish == RUNNING
        new = running.astype(jnp.int32)
        out = forward.all_layers(model, weights, state, sequences.last[:, None], new)
        state = commit(weights, state, out.pending, new)
        logits = forward.logits(weights, out.hidden[:, 0])
        drawn = draw(logits, sampling, state.positions, top)
        sequences = take(sequences._replace(finish=finish), drawn.tokens, stops)
        tokens = jnp.where(running, drawn.tokens, -1)
        row = (tokens, drawn.logprobs, drawn.top_tokens, drawn.top_logprobs)
        filled = (whole.at[chunk.steps].set(new) for whole, new in zip(chunk, row, strict=False))
        return state, sequences, Chunk(*filled, chunk.steps + 1)

    def going_on(carry: tuple[State, Sequences, Chunk]) -> jax.Array:
        _, sequences, chunk = carry
        return (chunk.steps < steps) & jnp.any(sequences.finish == RUNNING)

    chunk = Chunk.empty(size, sequences.last.shape[0], top)
    return jax.lax.while_loop(going_on, step, (state, sequences, chunk))


def take(
    sequences: Sequences, tokens: jax.Array, stops: Stops, emits: jax.Array | None = None
) -> Sequences:
    """Emits one of `tokens` int32 [B] for every running sequence (where `emits` bool [B], if it is
    given) and ends those that are done."""
    running = sequences.finish == RUNNING
    if emits is not None:
        running = running & emits
    recent = jnp.concatenate([sequences.recent[:, 1:], tokens[:, None]], axis=1)
    recent = jnp.where(running[:, None], recent, sequences.recent)
    emitted = sequences.emitted + running
    match = (stops.sequences == _ANY) | (stops.sequences == recent[:, None])
    spelled = jnp.all(match, -1) & jnp.any(stops.sequences != _ANY, -1)
    reasons = (
        (jnp.any(stops.tokens == tokens[:, None], axis=1), STOP_TOKEN),
        (jnp.any(spelled, axis=1), STOP_SEQUENCE),
        (emitted >= stops.limit, LENGTH),
    )
    finish = sequences.finish
    for holds, reason in reasons:
        finish = jnp.where(running & (finish == RUNNING) & holds, reason, finish)
    return Sequences(jnp.where(running, tokens, sequences.last), emitted, recent, finish)
