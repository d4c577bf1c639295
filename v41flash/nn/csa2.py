"""Compressed Sparse Attention 2: one attention over a sliding window and a selected few of a shared
cache, in the four layer modes.

* window: the sliding window alone (the first layers).
* full: makes the shared latent cache and its index keys, and selects.
* reindex: reads both, selects with index queries of its own (from the candidate pool).
* reuse: reads the cache and the selection of the layers before it.

Rows come from the sequence itself (training) or from the caches of a `Memory` (serving);
everything else is one code. Keys and values are the same vectors. Every key, the window's and the
selected ones, enters one softmax with a per-head sink in the denominator.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from pallas_kernels import indexer as indexer_op
from pallas_kernels.rms_norm import rms_norm
from v41flash import layout, quant
from v41flash.config import ConfigError, LayerSpec, ModelConfig
from v41flash.kernels import Kernels
from v41flash.nn import linear, ops, rope
from v41flash.nn.compressor import Compressor
from v41flash.nn.context import Context
from v41flash.nn.index_loss import Lesson, teach
from v41flash.nn.indexer import Indexer, IndexQuery, select, select_in_pool
from v41flash.nn.linear import contract
from v41flash.nn.memory import Memory
from v41flash.sharding import constrain, partitioned


class SharedKV(NamedTuple):
    """What a layer hands to the next. Full replaces all of it, Reindex the selection and its query,
    Reuse nothing.

    Attributes:
        main_rows: [B, G, D] cached entries, rotated and rounded. Out of a `Memory` they are those
            that `indices` names, or all.
        index_keys: [B, G, Di]; None where a `Memory` has them.
        indices: int32 [B, T, K] places in main_rows, ascending, -1 padded; None while every visible
            entry is selected.
        pool: candidate blocks, or None.
        index_query: what selected; None where the indexer's loss is not asked for.
    """

    main_rows: jax.Array
    index_keys: jax.Array | None
    indices: jax.Array | None
    pool: indexer_op.Pool | None
    index_query: IndexQuery | None


class AttentionResult(NamedTuple):
    """Result of one attention sublayer.

    Attributes:
        out: [B, T, d].
        shared: SharedKV after this layer.
        lesson: contribution to the indexer's loss; None where it was not asked for.
        max_main_kv: float32 scalar, largest absolute entry of the shared cache before it is
            rounded to `main_kv_format`; 0 where the layer makes none.
        memory: the Memory after this layer, or None.
    """

    out: jax.Array
    shared: SharedKV | None
    lesson: Lesson | None
    max_main_kv: jax.Array
    memory: Memory | None


class CSA2(nn.Module):
    """Attention of one layer (V4.1 report, section 2.2).

    Attributes:
        config: the model.
        spec: mode, ratio and part of the layer.
        kernels: implementations to run.
        teacher: also contribute to the indexer's loss.
    """

    config: ModelConfig
    spec: LayerSpec
    kernels: Kernels
    teacher: bool = False

    def setup(self) -> None:
        """Declares the parameters."""
        cfg, spec = self.config, self.spec
        d, rank, heads, dim = (
            cfg.hidden_size,
            cfg.q_lora_rank,
            cfg.num_attention_heads,
            cfg.head_dim,
        )
        groups, o_rank = cfg.o_groups, cfg.o_lora_rank
        ones, zeros = nn.initializers.ones, nn.initializers.zeros
        weight = functools.partial(linear.weight, self)

        def param(name: str, init: Any, shape: tuple[int, ...], *axes: str | None) -> jax.Array:
            return self.param(name, partitioned(init, axes), shape, jnp.float32)

        self.wq_a = weight("wq_a", layout.linear(rank, d), "embed", None)
        self.q_norm = param("q_norm", ones, (rank,), None)
        self.wq_b = weight("wq_b", layout.heads(heads, dim, rank), "rank", "heads", None)
        self.wkv = weight("wkv", layout.linear(dim, d), "embed", None)
        self.kv_norm = param("kv_norm", ones, (dim,), None)
        self.sink = param("sink", zeros, (heads,), "heads")
        inputs = layout.groups_in(groups, o_rank, heads // groups * dim)
        # The published engine multiplies this one in bfloat16.
        self.wo_a = weight("wo_a", inputs, "o_groups", "rank", None, storage="unrounded")
        outputs = layout.groups_out(groups, o_rank, d)
        self.wo_b = weight("wo_b", outputs, "o_groups", None, "embed")
        if spec.mode == "full":
            self.compressor = Compressor(cfg, spec.ratio)
        if spec.mode in ("full", "reindex"):
            self.indexer = Indexer(cfg, self.kernels, owns_keys=spec.mode == "full")

    def query(self, x_BxTxd: jax.Array, angles: rope.RopeTable) -> tuple[jax.Array, jax.Array]:
        """(query latent [B, T, r], rotated queries [B, T, H, D])."""
        latent = contract("btd,dr->btr", x_BxTxd, self.wq_a)
        latent = rms_norm(latent, self.q_norm, self.config.rms_norm_eps)
        return latent, rope.rotate(contract("btr,rhk->bthk", latent, self.wq_b), angles)

    def window_rows(self, x_BxTxd: jax.Array, angles: rope.RopeTable) -> jax.Array:
        """This layer's sliding-window entries [B, T, D]: normed, rotated, rounded."""
        kv = rms_norm(
            contract("btd,dk->btk", x_BxTxd, self.wkv), self.kv_norm, self.config.rms_norm_eps
        )
        return quant.fake_quantize(
            rope.rotate(kv, angles), self.config.window_kv_format, self.kernels.fp4
        )

    def make_cache(
        self, x_BxTxd: jax.Array, context: Context, memory: Memory | None = None
    ) -> tuple[jax.Array, jax.Array, jax.Array, Memory | None]:
        """Entries of a Full layer.

        Args:
            x_BxTxd: [B, T, d], the attention input.
            context: of the step.
            memory: where the entries are stored, if anywhere.

        Returns:
            (main rows [B, G, D], index keys [B, G, Di], `max_main_kv`, memory). With a memory they
            are the entries that the step completes.
        """
        layer, first = self.spec.index, None
        if memory is None:
            latent = self.compressor(x_BxTxd)
        else:
            groups, memory = memory.complete(layer, *self.compressor.project(x_BxTxd))
            latent, first = self.compressor.pool(groups.kv, groups.score), groups.first
        self.sow("intermediates", "latent", latent)
        entry_angles = context.entry_angles[self.spec.ratio]
        rotated = rope.rotate(latent, entry_angles)
        largest = jnp.max(jnp.abs(jax.lax.stop_gradient(rotated))).astype(jnp.float32)
        rows = self._shared_rows(latent, rotated, entry_angles, memory)
        keys = self.indexer.keys(latent, entry_angles)
        if memory is not None:
            memory = memory.store(layer, rows, keys, first)
        return rows, keys, largest, memory

    def _shared_rows(
        self, latent: jax.Array, rotated: jax.Array, angles: rope.RopeTable, memory: Memory | None
    ) -> jax.Array:
        """Main rows [B, G, D] of latents: rotated and rounded."""
        fmt, rounding, fp4 = (
            self.config.main_kv_format,
            self.config.main_kv_rounding,
            self.kernels.fp4,
        )
        if rounding == "after_rope":
            return ops.shared_rows(rotated, fmt, fp4)
        if memory is not None:
            raise ConfigError("main_kv_rounding", rounding, "must be 'after_rope' where caches are")
        if rounding == "before_rope":
            rounded = rope.rotate(quant.fake_quantize(latent, fmt, fp4), angles)
        else:
            rounded = quant.fake_quantize_scaled(rotated, fmt, fp4)
        return ops.shared_rows(rounded, "none")

    def output(self, o_BxTxHxD: jax.Array, angles: rope.RopeTable) -> jax.Array:
        """Rotates the attention output back and projects it, group-wise, to [B, T, d]."""
        batch, length = o_BxTxHxD.shape[:2]
        o = rope.rotate(o_BxTxHxD, angles, inverse=True)
        o = o.reshape(batch, length, self.config.o_groups, -1)
        o = contract("btgk,gkr->btgr", o, self.wo_a)
        return constrain(contract("btgr,grd->btd", o, self.wo_b), "batch", "length", None)

    def __call__(
        self,
        x_BxTxd: jax.Array,
        shared: SharedKV | None,
        context: Context,
        memory: Memory | None = None,
    ) -> AttentionResult:
        """Runs the sublayer on its normalised input x [B, T, d]."""
        spec = self.spec
        angles = context.angles["compressed" if spec.ratio else "window"]
        latent, q = self.query(x_BxTxd, angles)
        window = self.window_rows(x_BxTxd, angles)
        self.sow("intermediates", "win_kv", window)
        if memory is not None:
            window, memory = memory.with_window(spec.index, window)
        max_main_kv = jnp.zeros((), jnp.float32)
        if spec.mode == "full":
            main_rows, index_keys, max_main_kv, memory = self.make_cache(x_BxTxd, context, memory)
            main_rows = checkpoint_name(main_rows, "shared_kv")
            index_keys = checkpoint_name(index_keys, "shared_kv")
            shared = SharedKV(main_rows, index_keys, None, None, None)
        if spec.mode in ("full", "reindex"):
            index_query = self.indexer.query(x_BxTxd, latent, angles)
            if memory is not None:
                shared = self._recall(index_query, shared, context, memory)
            else:
                shared = self._choose(index_query, shared, context)
        out, lse = self._attend(q, window, shared, context, own_window=memory is None)
        lesson = None
        if self.teacher and spec.ratio:
            lesson = teach(
                q,
                jnp.logaddexp(lse, self.sink),
                shared.main_rows,
                shared.indices,
                shared.index_query,
                shared.index_keys,
                context.main[spec.ratio],
                self.kernels,
            )
        if spec.mode in ("full", "reindex") and shared.indices is not None:
            self.sow("intermediates", "indices", shared.indices)
        if spec.pool == "make" and shared.pool is not None:
            self.sow("intermediates", "pool_blocks", shared.pool.blocks)
        self.sow("intermediates", "q", q)
        if spec.mode == "full":
            self.sow("intermediates", "comp_kv", shared.main_rows)
        self.sow("intermediates", "o_rot", out)
        projected = self.output(out, angles)
        return AttentionResult(projected, shared, lesson, max_main_kv, memory)

    def _choose(self, query: IndexQuery, shared: SharedKV, context: Context) -> SharedKV:
        """The selection among the sequence's own entries."""
        cfg, spec = self.config, self.spec
        shared = shared._replace(index_query=query if self.teacher else None)
        if cfg.dense_selection:
            return shared
        indices, pool = select(
            cfg,
            query,
            shared.index_keys,
            context.main[spec.ratio],
            make_pool=spec.pool == "make",
            pool=shared.pool if spec.pool == "use" else None,
            implementation=self.kernels.indexer,
        )
        return shared._replace(indices=indices, pool=pool)

    def _recall(
        self, query: IndexQuery, shared: SharedKV, context: Context, memory: Memory
    ) -> SharedKV:
        """The selection among cached entries, and their rows."""
        cfg, spec = self.config, self.spec
        visible, pool = context.main[spec.ratio], shared.pool
        if cfg.dense_selection:
            entries = memory.entries(spec.ratio)
            rows = memory.cache.main_rows(spec.kv_source).read(0, entries)
            return SharedKV(rows, None, None, None, None)
        # Many queries read every key through their pools together.
        few = spec.pool == "use" and (
            visible.hi.shape[1] * pool.blocks.shape[-1] * pool.size < memory.entries(spec.ratio)
        )
        if few:
            keys = memory.cache.index_keys(spec.kv_source)
            indices = select_in_pool(cfg, query, keys, visible, pool, self.kernels.indexer)
        else:
            indices, pool = select(
                cfg,
                query,
                memory.index_keys(spec.kv_source),
                visible,
                make_pool=spec.pool == "make",
                pool=pool if spec.pool == "use" else None,
                implementation=self.kernels.indexer,
            )
        rows, places = memory.selected(spec.kv_source, indices)
        return SharedKV(rows, None, places, pool, None)

    def _attend(
        self,
        q: jax.Array,
        window: jax.Array,
        shared: SharedKV | None,
        context: Context,
        *,
        own_window: bool,
    ) -> tuple[jax.Array, jax.Array]:
        cfg, spec = self.config, self.spec
        window_range = context.window[spec.part]
        main: dict[str, Any] = {}
        rows = indices = None
        if spec.ratio:
            rows, indices = shared.main_rows, shared.indices
            if indices is None:
                visible = context.main[spec.ratio]
                main = {"main_lo": visible.lo, "main_hi": visible.hi}
        return ops.sparse_attention(
            q,
            window,
            window_range.lo,
            window_range.hi,
            rows,
            indices,
            self.sink,
            window=cfg.sliding_window,
            own_window=own_window,
            implementation=self.kernels.sparse_attention,
            **main,
        )
