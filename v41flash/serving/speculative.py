"""Speculative decoding: DSpark drafts several tokens, the backbone checks them in one pass.

A round, for each sequence: the draft head proposes d_1 .. d_n after the last token; its confidence
cuts the proposal short; the backbone runs over the last token and what is left of the draft; then,
with p_i the backbone's distribution (tempered and cut as the sequence is sampled) and q_i the
draft's, d_i is accepted with probability min(1, p_i(d_i) / q_i(d_i)), and at the first rejection
the token is drawn from max(p_i - q_i, 0) instead. If all are accepted one more is drawn from p.
So what comes out is distributed as if the backbone had decoded alone, and greedily it is the same
token for token.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from v41flash.nn.dspark import DSpark
from v41flash.serving import forward
from v41flash.serving.decode import NO_ROOM, RUNNING, Chunk, Sequences, Stops, take
from v41flash.serving.forward import Model
from v41flash.serving.sampling import Sampling, masked_logits
from v41flash.serving.state import State, commit
from v41flash.serving.weights import Weights

# What a draw of one position is for; `sampling.draw` uses the position's key itself.
_DRAFT, _ACCEPT, _REPLACE = 1, 2, 3


class Rounds(NamedTuple):
    """Counts of one call, int32 [B] each: rounds, tokens drafted (after the cut), accepted."""

    rounds: jax.Array
    drafted: jax.Array
    accepted: jax.Array


class _Verdict(NamedTuple):
    """Outcome of a round: n + 1 tokens of which the first `count` are emitted.

    Attributes:
        tokens: int32 [B, n + 1].
        logprobs: float32 [B, n + 1], under the model's own distribution.
        accepted: int32 [B], tokens of the draft that stand; one more is emitted.
    """

    tokens: jax.Array
    logprobs: jax.Array
    accepted: jax.Array


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
    min_confidence: float = 0.0,
) -> tuple[State, Sequences, Chunk, Rounds]:
    """Decodes like `decode.run`, several tokens a pass.

    Args:
        model: one with a draft head (`dspark_block_size`).
        weights: with the parameters of the head.
        state: of the sequences, with the head's window rows.
        sequences: where they stand.
        sampling: how to draw.
        stops: what ends a sequence.
        steps: int32 scalar, tokens of each sequence at most; at least n + 1, at most `size`.
        size: C, rows of the result.
        min_confidence: probability of acceptance, by the head's own word, below which a draft is
            cut off.

    Returns:
        (state, sequences, tokens, counts). A column of the tokens is filled from the top; its first
        -1 ends it. `top_tokens` are none.
    """
    batch, slots = sequences.last.shape[0], model.config.dspark_block_size
    zero = jnp.zeros(batch, jnp.int32)

    def step(carry: tuple) -> tuple:
        state, sequences, chunk, counts, rounds = carry
        full = (sequences.finish == RUNNING) & (state.cache.room() < 1)
        sequences = sequences._replace(finish=jnp.where(full, NO_ROOM, sequences.finish))
        running = sequences.finish == RUNNING
        drafted = _draft(model, weights, state, sequences.last, sampling)
        sure = jax.nn.sigmoid(drafted.confidence) >= min_confidence
        kept = jnp.sum(jnp.cumprod(sure.astype(jnp.int32), axis=1), axis=1)
        kept = jnp.where(running, jnp.minimum(kept, state.cache.room() - 1), 0)
        tokens = jnp.concatenate([sequences.last[:, None], drafted.tokens], axis=1)
        out = forward.all_layers(model, weights, state, tokens, jnp.where(running, 1 + kept, 0))
        logits = forward.logits(weights, out.hidden)
        verdict = _verify(drafted.tokens, drafted.logits, logits, kept, sampling, state.positions)
        new = jnp.where(running, 1 + verdict.accepted, 0)
        state = commit(weights, state, out.pending, new)
        for slot in range(slots + 1):
            emits = (sequences.finish == RUNNING) & (slot <= verdict.accepted)
            token = verdict.tokens[:, slot]
            sequences = take(sequences, token, stops, emits)
            row = jnp.where(emits, counts, size)
            column = jnp.arange(batch)
            chunk = chunk._replace(
                tokens=chunk.tokens.at[row, column].set(token, mode="drop"),
                logprobs=chunk.logprobs.at[row, column].set(verdict.logprobs[:, slot], mode="drop"),
            )
            counts = counts + emits
        rounds = Rounds(
            rounds.rounds + running,
            rounds.drafted + kept,
            rounds.accepted + jnp.where(running, verdict.accepted, 0),
        )
        return state, sequences, chunk._replace(steps=jnp.max(counts)), counts, rounds

    def going_on(carry: tuple) -> jax.Array:
        _, sequences, chunk, _, _ = carry
        return (chunk.steps + slots + 1 <= steps) & jnp.any(sequences.finish == RUNNING)

    carry = (state, sequences, Chunk.empty(size, batch, 0), zero, Rounds(zero, zero, zero))
    state, sequences, chunk, _, rounds = jax.lax.while_loop(going_on, step, carry)
    return state, sequences, chunk, rounds


def _draft(model: Model, weights: Weights, state: State, last: jax.Array, sampling: Sampling):
    """The head's `Draft` after each sequence's last token."""
    held = state.draft
    past = tuple(held.held(block) for block in range(model.config.num_nextn_predict_layers))
    count = jnp.minimum(held.lengths - held.starts, held.window)

    def choose(logits: jax.Array, slot: int) -> jax.Array:
        noise = _noise(sampling, state.positions + 1 + slot, _DRAFT, logits.shape)
        return jnp.argmax(masked_logits(logits, sampling) + noise, axis=-1).astype(jnp.int32)

    return DSpark(model.config, model.kernels).apply(
        {"params": weights.draft},
        last,
        state.positions,
        past,
        count,
        weights.embed,
        weights.head,
        choose,
    )


def _verify(
    draft: jax.Array,
    draft_logits: jax.Array,
    logits: jax.Array,
    kept: jax.Array,
    sampling: Sampling,
    positions: jax.Array,
) -> _Verdict:
    """Accepts or replaces drafted tokens.

    Args:
        draft: int32 [B, n].
        draft_logits: float32 [B, n, V], what the draft was chosen by.
        logits: float32 [B, n + 1, V] of the backbone, after the last token and each drafted one.
        kept: int32 [B], drafted tokens that were checked.
        sampling: how each sequence is sampled.
        positions: int32 [B], of the last token.
    """
    slots = draft.shape[1]
    everything = range(slots + 1)
    p = jnp.stack(
        [jax.nn.softmax(masked_logits(logits[:, i], sampling), axis=-1) for i in everything], 1
    )
    q = jnp.stack(
        [jax.nn.softmax(masked_logits(draft_logits[:, i], sampling), -1) for i in range(slots)], 1
    )
    rows = draft[..., None]
    own_p = jnp.take_along_axis(p[:, :slots], rows, axis=-1)[..., 0]
    own_q = jnp.take_along_axis(q, rows, axis=-1)[..., 0]
    chance = jnp.stack(
        [_uniform(sampling, positions + 1 + slot, _ACCEPT) for slot in range(slots)], axis=1
    )
    # u < p / q, without dividing: q(d) > 0, because d was drawn from q.
    stands = (chance * own_q < own_p) & (jnp.arange(slots) < kept[:, None])
    accepted = jnp.sum(jnp.cumprod(stands.astype(jnp.int32), axis=1), axis=1)
    # What replaces the first token that does not stand; behind the last checked one, q is nothing.
    index = accepted[:, None, None]
    last_p = jnp.take_along_axis(p, index, axis=1)[:, 0]
    last_q = jnp.take_along_axis(q, jnp.minimum(index, slots - 1), axis=1)[:, 0]
    last_q = jnp.where((accepted < kept)[:, None], last_q, 0.0)
    rest = jnp.maximum(last_p - last_q, 0.0)
    # Rounding may leave nothing where p and q are equal; then a rejection had no chance.
    rest = jnp.where(jnp.sum(rest, axis=-1, keepdims=True) > 0, rest, last_p)
    noise = _noise(sampling, positions + 1 + accepted, _REPLACE, rest.shape)
    other = jnp.argmax(jnp.log(rest) + noise, axis=-1).astype(jnp.int32)
    tokens = jnp.concatenate([draft, draft[:, -1:]], axis=1)
    tokens = jnp.where(jnp.arange(slots + 1) == accepted[:, None], other[:, None], tokens)
    allowed = jnp.where(sampling.allowed, logits, -jnp.inf)
    logprobs = jax.nn.log_softmax(allowed, axis=-1)
    logprobs = jnp.take_along_axis(logprobs, tokens[..., None], axis=-1)[..., 0]
    return _Verdict(tokens, logprobs, accepted)


def _keys(sampling: Sampling, positions: jax.Array, purpose: int) -> jax.Array:
    def key(seed: jax.Array, position: jax.Array) -> jax.Array:
        own = jax.random.fold_in(jax.random.key(seed), position)
        return jax.random.fold_in(own, purpose)

    return jax.vmap(key)(sampling.seed, positions)


def _uniform(sampling: Sampling, positions: jax.Array, purpose: int) -> jax.Array:
    """float32 [B] in [0, 1)."""
    return jax.vmap(jax.random.uniform)(_keys(sampling, positions, purpose))


def _noise(
    sampling: Sampling, positions: jax.Array, purpose: int, shape: tuple[int, ...]
) -> jax.Array:
    """Gumbel noise [B, V]; none where the likeliest token is taken."""
    keys = _keys(sampling, positions, purpose)
    noise = jax.vmap(lambda key: jax.random.gumbel(key, shape[-1:], jnp.float32))(keys)
    return jnp.where((sampling.temperature == 0)[:, None], 0.0, noise)
