"""DSpark: a small head that drafts several tokens at once from the backbone's hidden states.

Its blocks are window layers with experts of their own. What they attend to is made of the
backbone: the streams in front of `dspark_target_layer_ids`, averaged, joined and projected, give
every block's window rows; nothing else of the past is seen. The draft itself is the last token and
noise tokens, which see each other in both directions; their hidden states give the next tokens'
logits through the backbone's head, plus a bias from the token emitted just before.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from pallas_kernels.rms_norm import rms_norm
from v41flash import layout
from v41flash.config import LayerSpec, ModelConfig
from v41flash.kernels import Kernels
from v41flash.nn import linear, ops, rope
from v41flash.nn.context import Context, make_context, rope_frequencies
from v41flash.nn.csa2 import CSA2
from v41flash.nn.linear import contract
from v41flash.nn.mhc import HyperConnection, Residual
from v41flash.nn.moe import MoE
from v41flash.sharding import partitioned

Choose = Callable[[jax.Array, int], jax.Array]


class Draft(NamedTuple):
    """n = `dspark_block_size` drafted tokens per sequence.

    Attributes:
        tokens: int32 [B, n].
        logits: float32 [B, n, V], what they were chosen by.
        confidence: float32 [B, n], logits of being accepted.
    """

    tokens: jax.Array
    logits: jax.Array
    confidence: jax.Array


def greedy(logits_BxV: jax.Array, slot: int) -> jax.Array:
    """The likeliest tokens [B]."""
    del slot
    return jnp.argmax(logits_BxV, axis=-1).astype(jnp.int32)


def target_hidden(streams: Sequence[jax.Array]) -> jax.Array:
    """What the head sees of the backbone.

    Args:
        streams: of each layer of `dspark_target_layer_ids`, [B, T, n, d] before its attention.

    Returns:
        [B, T, layers * d], their means over the streams.
    """
    means = [jnp.mean(s.astype(jnp.float32), axis=2).astype(s.dtype) for s in streams]
    return jnp.concatenate(means, axis=-1)


class DraftBlock(nn.Module):
    """One window layer whose past is made of the backbone."""

    config: ModelConfig
    kernels: Kernels
    block: int

    def setup(self) -> None:
        """Declares the sublayers."""
        cfg, kernels = self.config, self.kernels
        spec = LayerSpec(
            index=cfg.num_hidden_layers + self.block,
            mode="window",
            ratio=0,
            kv_source=None,
            index_source=None,
            engram=None,
            pool=None,
            part="decoder",
        )
        experts = dataclasses.replace(
            cfg,
            n_routed_experts=cfg.dspark_n_routed_experts,
            num_experts_per_tok=cfg.dspark_num_experts_per_tok,
        )
        self.hc_attn = HyperConnection(cfg, kernels)
        self.attn = CSA2(cfg, spec, kernels)
        self.hc_ffn = HyperConnection(cfg, kernels)
        self.ffn = MoE(experts, kernels)

    def context_rows(self, x_BxTxd: jax.Array, angles: rope.RopeTable) -> jax.Array:
        """Rows [B, T, D] of the past; their input passes no norm of this block."""
        return self.attn.window_rows(x_BxTxd, angles)

    def __call__(
        self, residual: Residual, past: jax.Array, lo: jax.Array, context: Context
    ) -> Residual:
        """Runs the block on the draft's streams; see `DSpark.__call__` for past and lo."""
        angles = context.angles["window"]
        x, residual = self.hc_attn(residual)
        _, q = self.attn.query(x, angles)
        rows = jnp.concatenate([past, self.attn.window_rows(x, angles)], axis=1)
        shape = q.shape[:2]
        out, _ = ops.sparse_attention(
            q,
            rows,
            jnp.broadcast_to(lo[:, None], shape),
            jnp.full(shape, rows.shape[1], jnp.int32),
            None,
            None,
            self.attn.sink,
            window=rows.shape[1],
            own_window=False,
            implementation=self.kernels.sparse_attention,
        )
        x, residual = self.hc_ffn(residual._replace(out=self.attn.output(out, angles)))
        out, _ = self.ffn(x, context)
        return residual._replace(out=out)


class DSpark(nn.Module):
    """The draft head of a model with `num_nextn_predict_layers` blocks (report, speculation)."""

    config: ModelConfig
    kernels: Kernels = Kernels()

    def setup(self) -> None:
        """Declares the parameters."""
        cfg = self.config
        d, rank, vocab = cfg.hidden_size, cfg.dspark_markov_rank, cfg.vocab_size
        normal = nn.initializers.truncated_normal(cfg.initializer_range)
        ones = nn.initializers.ones

        def param(name: str, init: nn.initializers.Initializer, *shape: int) -> jax.Array:
            axes = ("vocab" if size == vocab else None for size in shape)
            return self.param(name, partitioned(init, tuple(axes)), shape, jnp.float32)

        joined = layout.linear(d, len(cfg.dspark_target_layer_ids) * d)
        self.main_proj = linear.weight(self, "main_proj", joined, "embed", None)
        self.main_norm = param("main_norm", ones, d)
        blocks = range(cfg.num_nextn_predict_layers)
        self.blocks = [DraftBlock(cfg, self.kernels, b, name=f"block_{b}") for b in blocks]
        self.norm = param("norm", ones, d)
        self.markov_embed = param("markov_embed", normal, vocab, rank)
        self.markov_head = param("markov_head", normal, rank, vocab)
        self.confidence = param("confidence", normal, d + rank, 1)

    def context_rows(
        self, hidden_BxTxk: jax.Array, positions_BxT: jax.Array
    ) -> tuple[jax.Array, ...]:
        """Window rows of every block for tokens that the backbone has seen.

        Args:
            hidden_BxTxk: `target_hidden` of the tokens.
            positions_BxT: int32, their positions.

        Returns:
            [B, T, D] for each block, rotated and rounded.
        """
        cfg = self.config
        x = contract("btk,kd->btd", hidden_BxTxk, self.main_proj)
        x = rms_norm(x, self.main_norm, cfg.rms_norm_eps)
        angles = rope.table(positions_BxT, rope_frequencies(cfg)["window"])
        return tuple(block.context_rows(x, angles) for block in self.blocks)

    def __call__(
        self,
        token_B: jax.Array,
        position_B: jax.Array,
        past: tuple[jax.Array, ...],
        count_B: jax.Array,
        embed: jax.Array,
        head: jax.Array,
        choose: Choose = greedy,
    ) -> Draft:
        """Drafts the tokens after one that the backbone has emitted but not seen.

        Args:
            token_B: int32, the last token.
            position_B: int32, its position.
            past: rows [B, S, D] of each block, S at most `sliding_window`: those of the tokens just
                before, oldest first, in the last `count_B` places.
            count_B: int32, how many of them there are.
            embed: [V, d] of the backbone.
            head: [d, V] of the backbone.
            choose: (logits [B, V], slot) -> tokens [B].
        """
        cfg, slots = self.config, self.config.dspark_block_size
        noise = jnp.full((token_B.shape[0], slots - 1), cfg.dspark_noise_token_id, jnp.int32)
        tokens = jnp.concatenate([token_B[:, None], noise], axis=1)
        positions = position_B[:, None] + jnp.arange(slots, dtype=jnp.int32)
        context = make_context(cfg, positions, jnp.ones_like(positions), None)
        lo = past[0].shape[1] - count_B
        x = jnp.take(embed, tokens, axis=0).astype(cfg.dtype)
        residual = Residual.start(x, cfg.hc_mult)
        for block, rows in zip(self.blocks, past, strict=True):
            residual = block(residual, rows, lo, context)
        streams = residual.written(self.kernels.mhc).astype(jnp.float32)
        mixed = jnp.sum(residual.pre[..., None] * streams, axis=2).astype(cfg.dtype)
        hidden = rms_norm(mixed, self.norm, cfg.rms_norm_eps).astype(jnp.float32)
        logits = contract("bnd,dv->bnv", hidden, head)
        return self._emit(logits, mixed.astype(jnp.float32), token_B, choose)

    def _emit(
        self, logits: jax.Array, mixed: jax.Array, token_B: jax.Array, choose: Choose
    ) -> Draft:
        """Chooses token by token: each is biased by the one before it."""
        chosen, biased, trust = [], [], []
        for slot in range(logits.shape[1]):
            before = jnp.take(self.markov_embed, token_B, axis=0).astype(jnp.float32)
            biased.append(logits[:, slot] + contract("br,rv->bv", before, self.markov_head))
            joined = jnp.concatenate([mixed[:, slot], before], axis=-1)
            trust.append(contract("bk,ko->bo", joined, self.confidence)[:, 0])
            token_B = choose(biased[-1], slot)
            chosen.append(token_B)
        return Draft(*(jnp.stack(parts, axis=1) for parts in (chosen, biased, trust)))
