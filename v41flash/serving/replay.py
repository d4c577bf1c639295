"""Bounded replay: window rows made again out of a prefix whose global cache is there.

A request may find the global cache of its first p tokens while the window rows of them are gone.
Exact reconstruction would have to go back over L x W tokens, because each layer's window reaches
W tokens further. The bounded replay goes over the last R tokens of the prefix alone, with windows
cut at its start s = p - R: a query at i sees window rows of [max(s, i - W + 1), i]. These tokens
only make window rows; they read the cached entries and leave them as they are.

    state, start = begin_replay(programs, weights, state, prefixes, replay)
    logits, state = prefill(programs, weights, state,
                            [tokens[s:] for tokens, s in zip(prompts, start)])

Where the window rows were kept elsewhere, `resume` puts them back, and nothing is approximate:

    captured = programs.capture(state, slot)                      # at position p
    state = programs.resume(programs.recall(...), held, captured of all slots)

The decoder's replay at the end of every prefill is `v41flash.serving.forward.decoder_tail`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from v41flash.cache import CompressorState
from v41flash.serving.state import State
from v41flash.serving.weights import Weights

if TYPE_CHECKING:
    from v41flash.serving.programs import Programs


def recall(
    weights: Weights, state: State, start: jax.Array, lengths: jax.Array, before: jax.Array
) -> State:
    """The state from which a replay starts.

    Args:
        weights: of the model.
        state: its page tables name the pages of the cached prefixes; whatever else it holds of
            these sequences is forgotten.
        start: int32 [B], s.
        lengths: int32 [B], p, tokens in the global cache; at least s.
        before: int32 [B, N - 1], tokens before s, newest first, -1 where there are none (N is the
            longest n-gram of Engram; any width without Engram).
    """
    look_back = state.look_back
    if look_back is not None:
        ids = weights.token_map[jnp.maximum(before, 0)]
        look_back = jnp.where(before >= 0, ids, weights.hasher.pad)
    return State(
        positions=start,
        cache=dataclasses.replace(state.cache, lengths=lengths),
        encoder=None if state.encoder is None else state.encoder.restart(start),
        decoder=state.decoder.restart(start),
        groups=jax.tree.map(jnp.zeros_like, state.groups),
        look_back=look_back,
        draft=None if state.draft is None else state.draft.restart(start),
    )


class Captured(NamedTuple):
    """What a sequence needs beside its global cache to go on without a replay of the encoder.

    Attributes:
        rows: window rows of the encoder layers, [L, W, row bytes] ([L, B, W, row bytes] of a
            batch).
        starts: int32 [] or [B], see `WindowCache.starts`.
        groups: tokens of incomplete groups, see `CompressorState`.
        look_back: int32 [N - 1] or [B, N - 1]; None without Engram.
    """

    rows: jax.Array
    starts: jax.Array
    groups: dict[int, CompressorState]
    look_back: jax.Array | None


def capture(state: State, slot: jax.Array) -> Captured:
    """What there is of the sequence `slot`; the model must have encoder layers."""
    return Captured(
        rows=state.encoder.rows[:, slot],
        starts=state.encoder.starts[slot],
        groups=jax.tree.map(lambda x: x[slot], state.groups),
        look_back=None if state.look_back is None else state.look_back[slot],
    )


def resume(state: State, held: jax.Array, captured: Captured) -> State:
    """The state in which the sequences of `held` bool [B] have what was captured of them.

    Args:
        state: of `recall`, from the positions at which it was captured.
        held: what `captured` has of the others means nothing.
        captured: of the whole batch.
    """

    def choose(new: jax.Array, old: jax.Array, axis: int = 0) -> jax.Array:
        shape = [1] * old.ndim
        shape[axis] = -1
        return jnp.where(held.reshape(shape), new, old)

    encoder = dataclasses.replace(
        state.encoder,
        rows=choose(captured.rows, state.encoder.rows, 1),
        starts=choose(captured.starts, state.encoder.starts),
    )
    look_back = state.look_back
    if look_back is not None:
        look_back = choose(captured.look_back, look_back)
    groups = jax.tree.map(choose, captured.groups, state.groups)
    return dataclasses.replace(state, encoder=encoder, groups=groups, look_back=look_back)


def begin_replay(
    programs: Programs,
    weights: Weights,
    state: State,
    prefixes: Sequence[np.ndarray],
    replay: int | None = None,
) -> tuple[State, np.ndarray]:
    """Prepares the replay of sequences whose first tokens are in the global cache.

    Args:
        programs: compiled steps of the model.
        weights: of it.
        state: see `recall`. Its buffers are given up.
        prefixes: int [p_b], the cached tokens of each sequence; may be none.
        replay: R, tokens to go over again; `sliding_window` when None.

    Returns:
        (state, start int [B]): `prefill` goes on with each sequence's tokens from `start` on. At
        least one token must follow `start`.

    Raises:
        ValueError: not one prefix a sequence, or a replay shorter than a compression group.
    """
    config = programs.model.config
    replay = config.sliding_window if replay is None else replay
    batch = state.positions.shape[0]
    if len(prefixes) != batch:
        raise ValueError(f"{len(prefixes)} prefixes for {batch} sequences")
    # The group in which a replay starts must be in the cache as a whole.
    least = max(config.ratios_in_use, default=1)
    if replay < least:
        raise ValueError(f"replay = {replay}: must be at least {least}")
    lengths = np.array([len(prefix) for prefix in prefixes], np.int32)
    start = np.maximum(lengths - replay, 0)
    before = tokens_before(config.engram_max_ngram_size, prefixes, start)
    return programs.recall(weights, state, start, lengths, before), start


def tokens_before(
    ngram: int, sequences: Sequence[np.ndarray], start: Sequence[int] | np.ndarray
) -> np.ndarray:
    """int32 [B, N - 1]: the tokens before position `start` of each sequence, newest first, -1 where
    there are none; N is `ngram`, or 2 where that is less."""
    lags = max(ngram - 1, 1)
    before = np.full((len(sequences), lags), -1, np.int32)
    for row, tokens, first in zip(before, sequences, start, strict=True):
        known = np.asarray(tokens)[max(first - lags, 0) : first][::-1]
        row[: len(known)] = known
    return before
