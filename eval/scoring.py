"""Log-probabilities of given tokens, through the caches that serving uses, in chunks.

    scorer = Scorer(generator)
    for scored in scorer.score([tokens, other_tokens]):      # token ids, bos in front
        scored.logprobs.sum()

Every layer runs over every token (the exact prefill), so that the numbers are those of the model as
it was trained, whatever the chunks and the batch.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from v41flash.cache import PAGE_TOKENS
from v41flash.errors import InputError
from v41flash.serving import Generator, forward
from v41flash.serving.forward import Model
from v41flash.serving.state import State, commit
from v41flash.serving.weights import Weights

_CHUNK = 256


class Scored(NamedTuple):
    """Of every token of a sequence but the first, given all before it.

    Attributes:
        logprobs: float32 [n - 1].
        likeliest: bool [n - 1], whether no token was likelier.
    """

    logprobs: np.ndarray
    likeliest: np.ndarray


def _step(
    model: Model,
    weights: Weights,
    state: State,
    tokens: jax.Array,
    targets: jax.Array,
    new: jax.Array,
) -> tuple[jax.Array, jax.Array, State]:
    """(log-probabilities of targets [B, T], whether they are the likeliest [B, T], state)."""
    step = forward.all_layers(model, weights, state, tokens, new)
    logits = forward.logits(weights, step.hidden)
    own = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    logprobs = own - jax.nn.logsumexp(logits, axis=-1)
    likeliest = jnp.argmax(logits, axis=-1) == targets
    return logprobs, likeliest, commit(weights, state, step.pending, new)


class Scorer:
    """Scores token sequences with a generator's model."""

    def __init__(self, generator: Generator, *, chunk: int = _CHUNK):
        """Takes the model; batches are as large as the generator's.

        Args:
            generator: of the model.
            chunk: tokens per compiled step.
        """
        self._generator, self._chunk = generator, chunk
        step = functools.partial(_step, generator.programs.model)
        self._step = jax.jit(step, donate_argnums=(1,))

    def score(self, sequences: Sequence[Sequence[int] | np.ndarray]) -> list[Scored]:
        """The numbers of every sequence, each of at least one token.

        Raises:
            InputError: a sequence that the model cannot take.
        """
        sequences = [np.asarray(sequence, np.int32) for sequence in sequences]
        config = self._generator.config
        for number, tokens in enumerate(sequences):
            if not 1 <= len(tokens) <= config.max_position_embeddings:
                raise InputError(
                    f"sequence {number}: {len(tokens)} tokens; must be 1 .. "
                    f"{config.max_position_embeddings:,}, the positions of the model"
                )
            if not 0 <= tokens.min() <= tokens.max() < config.vocab_size:
                raise InputError(f"sequence {number}: token ids leave the vocabulary")
        # Of similar length together: few steps are padding.
        order = sorted(range(len(sequences)), key=lambda i: len(sequences[i]))
        size, results = self._generator.options.batch_size, {}
        for first in range(0, len(order), size):
            chosen = order[first : first + size]
            found = self._batch([sequences[i] for i in chosen])
            results |= dict(zip(chosen, found, strict=True))
        return [results[i] for i in range(len(sequences))]

    def _batch(self, rows: list[np.ndarray]) -> list[Scored]:
        config, weights = self._generator.config, self._generator.weights
        batch, longest = self._generator.options.batch_size, max(map(len, rows)) - 1
        steps = -(-longest // self._chunk)
        # Few sizes, of which each is compiled.
        pages = 1 << (max(steps * self._chunk // PAGE_TOKENS, 1) - 1).bit_length()
        table = np.arange(batch * pages, dtype=np.int32).reshape(batch, pages)
        state = State.create(config, weights, batch * pages, table)
        tokens = np.zeros((2, batch, steps * self._chunk), np.int32)
        lengths = np.zeros(batch, np.int32)
        for b, row in enumerate(rows):
            lengths[b] = len(row) - 1
            tokens[0, b, : lengths[b]], tokens[1, b, : lengths[b]] = row[:-1], row[1:]
        found = []
        for first in range(0, steps * self._chunk, self._chunk):
            here = slice(first, first + self._chunk)
            new = np.clip(lengths - first, 0, self._chunk)
            *numbers, state = self._step(weights, state, *tokens[:, :, here], new)
            found.append(jax.device_get(numbers))
        if not found:
            return [Scored(np.zeros(0, np.float32), np.zeros(0, bool)) for _ in rows]
        logprobs, likeliest = (np.concatenate(x, axis=1) for x in zip(*found, strict=True))
        return [
            Scored(logprobs[b, : lengths[b]], likeliest[b, : lengths[b]]) for b in range(len(rows))
        ]
