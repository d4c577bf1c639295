"""Prompts into state, in chunks of any size.

Under the causal encoder-decoder a prompt token needs the encoder and the KV side of the first
decoder layer, half of the model; the decoder runs over the last R tokens alone (bounded replay,
`decoder_tail`). The exact mode runs every layer over every token. Both take the sequences of a
batch from wherever each of them stands, so a conversation goes on with another prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from v41flash.serving import forward
from v41flash.serving.forward import ImageRows, Model, Tail
from v41flash.serving.state import State, commit
from v41flash.serving.weights import Weights

if TYPE_CHECKING:
    from v41flash.serving.programs import Programs

DEFAULT_CHUNK = 512
SMALLEST_CHUNK = 8


def exact_chunk(
    model: Model,
    weights: Weights,
    state: State,
    logits: jax.Array,
    tokens: jax.Array,
    new: jax.Array,
    images: ImageRows | None = None,
) -> tuple[jax.Array, State]:
    """All layers over the next T tokens.

    Args:
        model: the model.
        weights: of it.
        state: before the chunk.
        logits: float32 [B, V], kept for the sequences without a token in this chunk.
        tokens: int32 [B, T].
        new: int32 [B], tokens that count.
        images: image spans, or None.

    Returns:
        (logits [B, V] after each sequence's last token, state).
    """
    step = forward.all_layers(model, weights, state, tokens, new, images)
    last = jnp.maximum(new - 1, 0)[:, None, None]
    hidden = jnp.take_along_axis(step.hidden, last, axis=1)[:, 0]
    logits = jnp.where((new > 0)[:, None], forward.logits(weights, hidden), logits)
    return logits, commit(weights, state, step.pending, new)


def encoder_chunk(
    model: Model,
    weights: Weights,
    state: State,
    tail: Tail,
    tokens: jax.Array,
    new: jax.Array,
    images: ImageRows | None = None,
) -> tuple[Tail, State]:
    """The encoder over the next T tokens; arguments as for `exact_chunk`.

    Returns:
        (the tail with these tokens, state; its decoder is behind until `decoder_replay`).
    """
    rows, pending = forward.encoder_layers(model, weights, state, tokens, new, images)
    return tail.push(rows), commit(weights, state, pending, new)


def decoder_replay(
    model: Model, weights: Weights, state: State, tail: Tail
) -> tuple[jax.Array, State]:
    """The decoder over the tail: (logits [B, V] after each sequence's last token, state)."""
    hidden, state = forward.decoder_tail(model, weights, state, tail)
    return forward.logits(weights, hidden), state


def prefill(
    programs: Programs,
    weights: Weights,
    state: State,
    prompts: Sequence[np.ndarray],
    *,
    chunk: int = DEFAULT_CHUNK,
    exact: bool = False,
    replay: int | None = None,
    images: ImageRows | None = None,
    after_chunk: Callable[[State], None] | None = None,
) -> tuple[jax.Array, State]:
    """Takes a prompt into each sequence of a batch.

    Args:
        programs: compiled steps of the model.
        weights: of it.
        state: where the sequences stand. Its buffers are given up.
        prompts: int [n_b] token ids per sequence; a sequence with none stays as it is, and its
            logits mean nothing.
        chunk: tokens per compiled step; the last step of a batch may be shorter.
        exact: run all layers over all tokens.
        replay: R, tokens that the decoder goes over; `sliding_window` when None. A prompt of at
            most R tokens is exact, whatever the mode.
        images: image spans of the prompts, [B, T, ...] with T at least the longest prompt, or None.
        after_chunk: shown the state after every chunk, whose buffers the next one takes; or None.

    Returns:
        (float32 logits [B, V] after each prompt, state).

    Raises:
        ValueError: not one prompt a sequence, an impossible chunk or replay, a token outside the
            vocabulary, or a prompt that a sequence's pages have no room for.
    """
    config = programs.model.config
    replay = config.sliding_window if replay is None else replay
    batch = state.positions.shape[0]
    _check(config.vocab_size, prompts, batch, chunk, replay)
    lengths = np.array([len(prompt) for prompt in prompts])
    # A replay goes over tokens that have their place already.
    state.cache.check_room(lengths + np.asarray(state.positions - state.cache.lengths))
    exact = exact or lengths.max() <= min(replay, chunk)
    logits = jnp.zeros((batch, config.vocab_size), jnp.float32)
    tail = None if exact else Tail.create(config, batch, replay)
    for start in range(0, int(lengths.max()), chunk):
        tokens, new = _cut(prompts, lengths, start, chunk)
        spans = None if images is None else _spans(images, start, tokens.shape[1])
        if exact:
            logits, state = programs.exact_chunk(weights, state, logits, tokens, new, spans)
        else:
            tail, state = programs.encoder_chunk(weights, state, tail, tokens, new, spans)
        if after_chunk is not None:
            after_chunk(state)
    if exact:
        return logits, state
    return programs.decoder_replay(weights, state, tail)


def chunk_width(tokens: int, chunk: int) -> int:
    """Length of the compiled step that takes `tokens`: a power of two, at most `chunk`, so that few
    lengths are compiled."""
    width = SMALLEST_CHUNK
    while width < tokens:
        width *= 2
    return min(width, chunk)


def _cut(
    prompts: Sequence[np.ndarray], lengths: np.ndarray, start: int, chunk: int
) -> tuple[np.ndarray, np.ndarray]:
    """(tokens [B, T], new [B]) of the chunk that begins at token `start` of every prompt."""
    new = np.clip(lengths - start, 0, chunk).astype(np.int32)
    tokens = np.zeros((len(prompts), chunk_width(int(new.max()), chunk)), np.int32)
    for row, prompt, count in zip(tokens, prompts, new, strict=True):
        row[:count] = prompt[start : start + count]
    return tokens, new


def _spans(images: ImageRows, start: int, length: int) -> ImageRows:
    """The rows of one chunk, padded to its length."""

    def cut(rows: jax.Array) -> jax.Array:
        rows = rows[:, start : start + length]
        missing = length - rows.shape[1]
        return jnp.pad(rows, ((0, 0), (0, missing)) + ((0, 0),) * (rows.ndim - 2))

    return ImageRows(*map(cut, images))


def _check(
    vocabulary: int, prompts: Sequence[np.ndarray], batch: int, chunk: int, replay: int
) -> None:
    if len(prompts) != batch:
        raise ValueError(f"{len(prompts)} prompts for {batch} sequences")
    if chunk < 1 or replay < 1:
        raise ValueError(f"chunk = {chunk}, replay = {replay}: both must be at least 1")
    if not any(len(prompt) for prompt in prompts):
        raise ValueError("every prompt is empty: give at least one token (bos)")
    for b, prompt in enumerate(prompts):
        ids = np.asarray(prompt)
        if ids.size and not 0 <= ids.min() <= ids.max() < vocabulary:
            raise ValueError(
                f"prompt {b}: token ids {ids.min()}..{ids.max()} leave the vocabulary of"
                f" {vocabulary}"
            )
