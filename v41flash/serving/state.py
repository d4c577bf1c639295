"""What the device holds of the sequences of a batch between two steps."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from v41flash.cache import CompressorState, GlobalCache, WindowCache
from v41flash.config import ModelConfig
from v41flash.serving.weights import Weights


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    """State of B sequences; a pytree.

    Attributes:
        positions: int32 [B], position of each sequence's next token.
        cache: the global cache. Its lengths equal `positions`, except while a replay goes over
            tokens that are in it already.
        encoder: sliding-window rows of the encoder layers; None where the model has none.
        decoder: of the decoder layers. Behind `positions` between a prefill's chunks.
        groups: tokens of incomplete groups, per KV source that pools several.
        look_back: int32 [B, N - 1], canonical ids before the next token; None without Engram.
        draft: window rows of the draft head's blocks, kept with those of the decoder; None where
            the weights have no head.
    """

    positions: jax.Array
    cache: GlobalCache
    encoder: WindowCache | None
    decoder: WindowCache
    groups: dict[int, CompressorState]
    look_back: jax.Array | None
    draft: WindowCache | None

    @classmethod
    def create(
        cls, config: ModelConfig, weights: Weights, num_pages: int, page_table: np.ndarray
    ) -> State:
        """Empty sequences.

        Args:
            config: the model.
            weights: of it.
            num_pages: pages of 128 tokens that all sequences share.
            page_table: int [B, N], pages of each sequence, -1 for none.
        """
        batch, first = np.shape(page_table)[0], config.num_encoder_layers
        decoder = range(first, config.num_hidden_layers)
        return cls(
            positions=jnp.zeros(batch, jnp.int32),
            cache=GlobalCache.create(config, num_pages, page_table),
            encoder=WindowCache.create(config, batch, range(first)) if first else None,
            decoder=WindowCache.create(config, batch, decoder),
            groups=CompressorState.create(config, batch),
            look_back=weights.hasher.start(batch) if weights.hasher else None,
            draft=_draft_windows(config, batch) if weights.draft is not None else None,
        )

    def take(self, slots: jax.Array) -> State:
        """The sequences `slots` int32 [S] as a batch of their own, on the same pages."""
        cache = dataclasses.replace(
            self.cache,
            page_table=self.cache.page_table[slots],
            lengths=self.cache.lengths[slots],
        )
        return State(
            positions=self.positions[slots],
            cache=cache,
            encoder=_windows_at(self.encoder, slots),
            decoder=_windows_at(self.decoder, slots),
            groups=jax.tree.map(lambda x: x[slots], self.groups),
            look_back=None if self.look_back is None else self.look_back[slots],
            draft=_windows_at(self.draft, slots),
        )

    def put(self, slots: jax.Array, part: State) -> State:
        """The batch in which the sequences `slots` int32 [S] are those of `part`.

        The pages are those of `part`: nothing else may have written to them in between.
        """

        def into(whole: jax.Array, rows: jax.Array) -> jax.Array:
            return whole.at[slots].set(rows)

        cache = dataclasses.replace(
            part.cache,
            page_table=into(self.cache.page_table, part.cache.page_table),
            lengths=into(self.cache.lengths, part.cache.lengths),
        )
        return State(
            positions=into(self.positions, part.positions),
            cache=cache,
            encoder=_windows_into(self.encoder, slots, part.encoder),
            decoder=_windows_into(self.decoder, slots, part.decoder),
            groups=jax.tree.map(into, self.groups, part.groups),
            look_back=None if self.look_back is None else into(self.look_back, part.look_back),
            draft=_windows_into(self.draft, slots, part.draft),
        )


def _draft_windows(config: ModelConfig, batch: int) -> WindowCache:
    blocks = range(config.num_nextn_predict_layers)
    return dataclasses.replace(WindowCache.create(config, batch, blocks), first_layer=0)


def _windows_at(windows: WindowCache | None, slots: jax.Array) -> WindowCache | None:
    if windows is None:
        return None
    return dataclasses.replace(
        windows,
        rows=windows.rows[:, slots],
        starts=windows.starts[slots],
        lengths=windows.lengths[slots],
    )


def _windows_into(
    windows: WindowCache | None, slots: jax.Array, part: WindowCache | None
) -> WindowCache | None:
    if windows is None:
        return None
    return dataclasses.replace(
        windows,
        rows=windows.rows.at[:, slots].set(part.rows),
        starts=windows.starts.at[slots].set(part.starts),
        lengths=windows.lengths.at[slots].set(part.lengths),
    )


class Pending(NamedTuple):
    """What a step of T tokens leaves to be stored; `commit` takes as many of them as count.

    Attributes:
        cache: the global cache with the step's entries written, lengths as before.
        encoder_rows: window rows [B, T, D] per encoder layer, () where they did not run.
        decoder_rows: likewise.
        projections: (kv, gate logits) [B, T, D] per KV source that pools several tokens.
        history: int32 [B, T, N] ids that each token hashes; None without Engram.
        draft_rows: window rows [B, T, D] per block of the draft head, () without one.
    """

    cache: GlobalCache
    encoder_rows: tuple[jax.Array, ...]
    decoder_rows: tuple[jax.Array, ...]
    projections: dict[int, tuple[jax.Array, jax.Array]]
    history: jax.Array | None
    draft_rows: tuple[jax.Array, ...] = ()


def commit(weights: Weights, state: State, pending: Pending, new: jax.Array) -> State:
    """The state after the first `new` int32 [B] tokens of a step.

    Args:
        weights: of the model.
        state: before the step.
        pending: what the step left.
        new: tokens that count; at most as many as the step was given.
    """
    groups = dict(state.groups)
    for layer, (kv, score) in pending.projections.items():
        _, groups[layer] = groups[layer].push(kv, score, state.positions, new)
    look_back = state.look_back
    if look_back is not None:
        look_back = weights.hasher.next_look_back(pending.history, look_back, new)
    positions = state.positions + new
    lengths = jnp.maximum(state.cache.lengths, positions)
    return State(
        positions=positions,
        cache=dataclasses.replace(pending.cache, lengths=lengths),
        encoder=appended(state.encoder, pending.encoder_rows, new),
        decoder=appended(state.decoder, pending.decoder_rows, new),
        groups=groups,
        look_back=look_back,
        draft=appended(state.draft, pending.draft_rows, new),
    )


def appended(
    windows: WindowCache | None, rows: tuple[jax.Array, ...], new: jax.Array
) -> WindowCache | None:
    """Windows with the first `new` int32 [B] of `rows`, [B, T, D] per layer; as they were without
    any."""
    if not rows:
        return windows
    for place, values in enumerate(rows):
        windows = windows.append(windows.first_layer + place, values, new)
    return windows.advance(new)
