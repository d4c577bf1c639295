"""What every layer knows of the rows it is given: positions, visible ranges, tables.

Packing, causality and replay all reduce to ranges per query, so that no layer or kernel needs to
know about documents. Documents start at multiples of `config_checks.DOCUMENT_ALIGNMENT` in the
packed row, so that compression groups never straddle two of them.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from v41flash.config import ModelConfig
from v41flash.nn import rope


class Ranges(NamedTuple):
    """Half-open ranges of rows, int32 [B, T] each; empty where lo >= hi."""

    lo: jax.Array
    hi: jax.Array


class Context(NamedTuple):
    """Per-row facts shared by all layers.

    Attributes:
        valid: bool [B, T], False on padding.
        is_image: bool [B, T] or None: tokens that are part of an image span.
        engram_rows: int32 [B, T, sites, rows] of the Engram tables, or None.
        engram_memory: what has been looked up of them already, [B, T, rows * c] per site.
        window: sliding-window rows seen by each query, per part ("encoder", "decoder").
        main: compressed entries visible to each query, per compression ratio m.
        angles: rotation angles, per table ("window", "compressed").
        entry_angles: rotation angles of the compressed entries that these rows make, at the
            position of each entry's first token, per compression ratio m.
    """

    valid: jax.Array
    is_image: jax.Array | None
    engram_rows: jax.Array | None
    window: dict[str, Ranges]
    main: dict[int, Ranges]
    angles: dict[str, rope.RopeTable]
    entry_angles: dict[int, rope.RopeTable]
    engram_memory: dict[int, jax.Array] = {}


def rope_frequencies(config: ModelConfig) -> dict[str, np.ndarray]:
    """The two frequency tables of the model: "window" (plain) and "compressed" (YaRN)."""
    return {
        "window": rope.frequencies(config.qk_rope_head_dim, config.rope_theta),
        "compressed": rope.frequencies(
            config.qk_rope_head_dim,
            config.compress_rope_theta,
            yarn_factor=config.rope_factor,
            original_length=config.rope_original_max_position_embeddings,
            beta_fast=config.rope_beta_fast,
            beta_slow=config.rope_beta_slow,
        ),
    }


def make_context(
    config: ModelConfig,
    positions: jax.Array,
    segment_ids: jax.Array,
    engram_rows: jax.Array | None,
    is_image: jax.Array | None = None,
    decoder_starts: jax.Array | None = None,
) -> Context:
    """Builds the ranges and tables of a packed batch.

    Args:
        config: the model.
        positions: int32 [B, T], position of each token inside its document.
        segment_ids: int32 [B, T], 0 on padding.
        engram_rows: int32 [B, T, sites, rows] or None.
        is_image: bool [B, T] or None.
        decoder_starts: int32 [B, T], position inside its document at which a replay of the decoder
            starts, per token: from there on its windows reach no further back. None: nowhere.

    Returns:
        The Context. A query at document position t sees the window rows of its document in
        [t - W + 1, t], cut at the start of its replay segment in the decoder where
        `config.replay_segment` is set and at `decoder_starts`, and the (t + 1) // m complete groups
        of its document.
    """
    row = jnp.arange(positions.shape[1], dtype=jnp.int32)[None]
    valid = segment_ids > 0
    start = row - positions
    window_hi = jnp.broadcast_to(row + 1, positions.shape)
    lo = jnp.maximum(start, row - config.sliding_window + 1)
    decoder_lo = lo
    if config.replay_segment:
        replay_start = start + positions // config.replay_segment * config.replay_segment
        decoder_lo = jnp.maximum(lo, replay_start)
    if decoder_starts is not None:
        after = positions >= decoder_starts
        decoder_lo = jnp.maximum(decoder_lo, jnp.where(after, start + decoder_starts, lo))
    window = {
        "encoder": Ranges(jnp.where(valid, lo, window_hi), window_hi),
        "decoder": Ranges(jnp.where(valid, decoder_lo, window_hi), window_hi),
    }
    main = {}
    for ratio in config.ratios_in_use:
        group = start // ratio
        main[ratio] = Ranges(group, group + jnp.where(valid, (positions + 1) // ratio, 0))
    freqs = rope_frequencies(config)
    angles = {name: rope.table(positions, freqs[name]) for name in freqs}
    entry_angles = {ratio: angles["compressed"].every(ratio) for ratio in config.ratios_in_use}
    return Context(valid, is_image, engram_rows, window, main, angles, entry_angles)
