"""Steps over the layers with caches: the same layers as in training, unrolled.

    all_layers       T tokens of each sequence through every layer (decode, verification, and the
                     exact prefill)
    encoder_layers   T tokens through the encoder and the KV side of the first decoder layer
    decoder_tail     the decoder over the last tokens that `encoder_layers` has left behind

What a step of T tokens holds beyond `new[b]` is padding. Nothing here is compiled by itself: the
callers jit.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import split_products
from v41flash.cache import WindowCache
from v41flash.config import ModelConfig
from v41flash.image_rows import TEXT
from v41flash.kernels import Kernels
from v41flash.nn import ops, rope
from v41flash.nn.block import Block, Carry
from v41flash.nn.context import Context, Ranges, rope_frequencies
from v41flash.nn.csa2 import SharedKV
from v41flash.nn.dspark import DSpark, target_hidden
from v41flash.nn.memory import Memory
from v41flash.nn.mhc import Residual
from v41flash.nn.vision import ImageBatch, Images
from v41flash.serving.state import Pending, State, appended
from v41flash.serving.weights import Weights


@dataclasses.dataclass(frozen=True)
class Model:
    """What is static about the model: its configuration and the kernels to run."""

    config: ModelConfig
    kernels: Kernels = Kernels()

    def block(self, layer: int) -> Block:
        """The module of one layer."""
        return Block(self.config, self.config.layers[layer], self.kernels, False)


class ImageRows(NamedTuple):
    """Image spans among the tokens of a step, or of a prompt.

    Attributes:
        mask: bool [B, T], tokens of image spans.
        embeddings: [B, T, d], in place of their token embeddings.
    """

    mask: jax.Array
    embeddings: jax.Array


class Step(NamedTuple):
    """Result of `all_layers`.

    Attributes:
        hidden: [B, T, d], input of the head.
        pending: to be committed.
        targets: [B, T, n_targets * d], what the draft head reads: the mean over streams at the
            input of each of `config.dspark_target_layer_ids`, side by side; None without any.
    """

    hidden: jax.Array
    pending: Pending
    targets: jax.Array | None


class Tail(NamedTuple):
    """The newest tokens as they enter the first decoder layer's attention: R rows of which the
    first `count` are filled, oldest first.

    Attributes:
        x: [B, R, d], attention input.
        residual: of those rows; its `out` is due.
        engram_rows: int32 [B, R, S, rows], or None.
        is_image: bool [B, R], or None.
        count: int32 [B].
    """

    x: jax.Array
    residual: Residual
    engram_rows: jax.Array | None
    is_image: jax.Array | None
    count: jax.Array

    @classmethod
    def create(cls, config: ModelConfig, batch: int, rows: int) -> Tail:
        """An empty tail of at most `rows` tokens."""
        n, d, dtype, f32 = config.hc_mult, config.hidden_size, config.dtype, jnp.float32
        residual = Residual(
            streams=jnp.zeros((batch, rows, n, d), dtype),
            out=jnp.zeros((batch, rows, d), dtype),
            post=jnp.zeros((batch, rows, n), f32),
            comb=jnp.zeros((batch, rows, n, n), f32),
            pre=jnp.zeros((batch, rows, n), f32),
        )
        sites, columns = config.num_engram_sites, config.engram_rows_per_token
        return cls(
            x=jnp.zeros((batch, rows, d), dtype),
            residual=residual,
            engram_rows=jnp.zeros((batch, rows, sites, columns), jnp.int32) if sites else None,
            is_image=jnp.zeros((batch, rows), bool) if config.vision else None,
            count=jnp.zeros(batch, jnp.int32),
        )

    def push(self, step: Tail) -> Tail:
        """The tail after a step, whose first `step.count` rows count."""
        rows = self.x.shape[1]
        total = self.count + step.count
        kept = jnp.minimum(total, rows)
        order = (total - kept)[:, None] + jnp.arange(rows, dtype=jnp.int32)
        held = self.count[:, None]
        place = jnp.where(order < held, order, order - held + rows)

        def pick(old: jax.Array, new: jax.Array) -> jax.Array:
            both = jnp.concatenate([old, new], axis=1)
            index = place.reshape(*place.shape, *(1,) * (both.ndim - 2))
            return jnp.take_along_axis(both, index, axis=1, mode="clip")

        joined = jax.tree.map(pick, self._replace(count=None), step._replace(count=None))
        return joined._replace(count=kept)


def image_rows(model: Model, weights: Weights, tokens: jax.Array, batch: ImageBatch) -> ImageRows:
    """Encodes the images of prompts.

    Args:
        model: one with an image encoder.
        weights: of it.
        tokens: int32 [B, T], whole prompts; images stand at `batch.source`.
        batch: the images.
    """
    x = jnp.take(weights.embed, tokens, axis=0).astype(model.config.dtype)
    encoder = Images(model.config)
    embeddings = encoder.apply({"params": weights.images}, x, batch)
    return ImageRows(batch.source != TEXT, embeddings)


def logits(weights: Weights, hidden: jax.Array) -> jax.Array:
    """float32 logits [..., V] of hidden states [..., d]: the head runs in float32."""
    return split_products.einsum("...d,dv->...v", hidden, weights.head)


def all_layers(
    model: Model,
    weights: Weights,
    state: State,
    tokens: jax.Array,
    new: jax.Array,
    images: ImageRows | None = None,
) -> Step:
    """Runs every layer on the next T tokens of each sequence.

    Args:
        model: the model.
        weights: of it.
        state: before the step; its decoder windows are up to date.
        tokens: int32 [B, T].
        new: int32 [B], tokens that count.
        images: image spans, or None.

    Returns:
        `Step`.
    """
    config = model.config
    residual, context, history = _start(model, state, tokens, new, images, weights)
    first = config.num_encoder_layers
    memory = Memory(state.cache, state.encoder, state.groups, state.positions, new)
    carry, shared, targets = Carry(residual, memory=memory), None, []
    for spec in config.layers:
        if spec.index == first:
            encoder_rows = carry.memory.window_rows
            memory = carry.memory._replace(windows=state.decoder, window_rows=())
            carry = carry._replace(memory=memory)
        x, read = _apply(model, weights, spec.index, "read", carry.residual, context)
        if spec.index in config.dspark_target_layer_ids:
            targets.append(read.streams)
        carry, shared = _finish(model, weights, spec.index, x, carry, read, shared, context)
    memory = carry.memory
    joined = target_hidden(targets) if targets else None
    pending = Pending(
        cache=memory.cache,
        encoder_rows=encoder_rows,
        decoder_rows=memory.window_rows,
        projections=memory.projections,
        history=history,
        draft_rows=_draft_rows(model, weights, joined, state.positions),
    )
    return Step(_hidden(model, weights, carry.residual), pending, joined)


def encoder_layers(
    model: Model,
    weights: Weights,
    state: State,
    tokens: jax.Array,
    new: jax.Array,
    images: ImageRows | None = None,
) -> tuple[Tail, Pending]:
    """Runs the encoder, and of the decoder only what makes the last global cache.

    Args:
        model, weights, tokens, new, images: as for `all_layers`.
        state: before the step; its decoder windows are not read.

    Returns:
        (all rows of the step as a Tail, what is to be committed).
    """
    config = model.config
    residual, context, history = _start(model, state, tokens, new, images, weights)
    first = config.num_encoder_layers
    memory = Memory(state.cache, state.encoder, state.groups, state.positions, new)
    carry, shared = Carry(residual, memory=memory), None
    for layer in range(first):
        x, read = _apply(model, weights, layer, "read", carry.residual, context)
        carry, shared = _finish(model, weights, layer, x, carry, read, shared, context)
    x, residual, memory = _apply(
        model, weights, first, "fill", carry.residual, context, carry.memory
    )
    rows = Tail(x, residual, context.engram_rows, context.is_image, new)
    return rows, Pending(memory.cache, memory.window_rows, (), memory.projections, history)


def decoder_tail(
    model: Model, weights: Weights, state: State, tail: Tail
) -> tuple[jax.Array, State]:
    """Bounded replay of the decoder: its layers over the tail alone, under truncated windows.

    Args:
        model: the model.
        weights: of it.
        state: after the encoder has seen every token.
        tail: the newest tokens. A query at i sees window rows of [max(s, i - W + 1), i], s being
            the tail's first position. Where the decoder has seen every token before s, its windows
            go on instead: then nothing is approximate.

    Returns:
        (hidden [B, d] of the newest token, undefined where the tail is empty; the state with the
        decoder's windows rebuilt).
    """
    config = model.config
    batch, rows = tail.x.shape[:2]
    first = config.num_encoder_layers
    start = state.positions - tail.count
    decoder = _from(state.decoder, start)
    # The first decoder layer makes its entries again; all of them are in the cache.
    context = _context(config, start, tail.count, rows, None, decoder)
    context = context._replace(engram_rows=tail.engram_rows, is_image=tail.is_image)
    memory = Memory(state.cache, decoder, state.groups, start, tail.count)
    carry, shared, targets = Carry(tail.residual, memory=memory), None, []
    x, read = tail.x, tail.residual
    for layer in range(first, config.num_hidden_layers):
        if layer > first:
            x, read = _apply(model, weights, layer, "read", carry.residual, context)
        if layer in config.dspark_target_layer_ids:
            targets.append(read.streams)
        carry, shared = _finish(model, weights, layer, x, carry, read, shared, context)
    last = jnp.maximum(tail.count - 1, 0)
    newest = jax.tree.map(lambda leaf: leaf[jnp.arange(batch), last][:, None], carry.residual)
    hidden = _hidden(model, weights, newest)[:, 0]
    decoder = appended(decoder, carry.memory.window_rows, tail.count)
    draft = state.draft
    if draft is not None:
        drafted = _draft_rows(model, weights, target_hidden(targets), start)
        draft = appended(_from(draft, start), drafted, tail.count)
    return hidden, dataclasses.replace(state, decoder=decoder, draft=draft)


def _from(decoder: WindowCache, start: jax.Array) -> WindowCache:
    """Windows that go on at `start` int32 [B]: anew where tokens in between were left out."""
    gap = start > decoder.lengths
    return dataclasses.replace(
        decoder,
        starts=jnp.where(gap, start, decoder.starts),
        lengths=jnp.where(gap, start, decoder.lengths),
    )


def _draft_rows(
    model: Model, weights: Weights, targets: jax.Array | None, first: jax.Array
) -> tuple[jax.Array, ...]:
    """What the draft head keeps of tokens at positions `first` int32 [B] and after."""
    if weights.draft is None:
        return ()
    positions = first[:, None] + jnp.arange(targets.shape[1], dtype=jnp.int32)
    head = DSpark(model.config, model.kernels)
    return head.apply({"params": weights.draft}, targets, positions, method="context_rows")


def _apply(model: Model, weights: Weights, layer: int, method: str, *args) -> tuple:
    return model.block(layer).apply({"params": weights.layers[layer]}, *args, method=method)


def _finish(
    model: Model,
    weights: Weights,
    layer: int,
    x: jax.Array,
    carry: Carry,
    residual: Residual,
    shared: SharedKV | None,
    context: Context,
) -> tuple[Carry, SharedKV | None]:
    carry = carry._replace(residual=residual)
    carry, (_, made) = _apply(model, weights, layer, "finish", x, carry, shared, context)
    return carry, shared if made is None else made


def _hidden(model: Model, weights: Weights, residual: Residual) -> jax.Array:
    """The head's input [B, T, d]."""
    return ops.mix(
        residual.written(model.kernels.mhc),
        residual.pre,
        weights.norm,
        norm_eps=model.config.rms_norm_eps,
        implementation=model.kernels.mhc,
    )


def _start(
    model: Model,
    state: State,
    tokens: jax.Array,
    new: jax.Array,
    images: ImageRows | None,
    weights: Weights,
) -> tuple[Residual, Context, jax.Array | None]:
    """(residual streams, context, hash history [B, T, N]) of a step."""
    config = model.config
    x = jnp.take(weights.embed, tokens, axis=0).astype(config.dtype)
    mask = None
    if images is not None:
        mask = images.mask
        x = jnp.where(mask[..., None], images.embeddings.astype(x.dtype), x)
    context = _context(config, state.positions, new, tokens.shape[1], state.encoder, state.decoder)
    history = rows = None
    if weights.hasher is not None:
        history = weights.hasher.history(weights.token_map[tokens], state.look_back, mask)
        rows = weights.hasher.rows(history)
    if config.vision is not None and mask is None:
        mask = jnp.zeros(tokens.shape, bool)
    context = context._replace(engram_rows=rows, is_image=mask)
    return Residual.start(x, config.hc_mult), context, history


def _context(
    config: ModelConfig,
    first: jax.Array,
    new: jax.Array,
    length: int,
    encoder: WindowCache | None,
    decoder: WindowCache,
) -> Context:
    """Ranges and tables of a step of `length` tokens from position `first` int32 [B] on."""
    step = jnp.arange(length, dtype=jnp.int32)[None]
    valid = step < new[:, None]
    positions = first[:, None] + step
    parts = {"encoder": encoder, "decoder": decoder}
    window = {name: w.ranges(length, new) for name, w in parts.items() if w is not None}
    main, entry_angles = {}, {}
    freqs = rope_frequencies(config)
    for m in config.ratios_in_use:
        visible = jnp.where(valid, (positions + 1) // m, 0)
        main[m] = Ranges(jnp.zeros_like(visible), visible)
        made = jnp.arange((length + m - 1) // m, dtype=jnp.int32)
        entry_angles[m] = rope.table((first[:, None] // m + made) * m, freqs["compressed"])
    angles = {name: rope.table(positions, freqs[name]) for name in freqs}
    return Context(valid, None, None, window, main, angles, entry_angles)
