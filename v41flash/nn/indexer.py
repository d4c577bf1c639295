"""The indexer: a small attention that scores cache entries and selects the few to attend to.

A Full layer makes index keys and queries, a Reindex layer queries alone. Its inputs are detached:
top-k passes no gradient, so the indexer learns only from the KL loss of `v41flash.nn.index_loss`.
"""

from __future__ import annotations

from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from pallas_kernels import indexer as indexer_op
from pallas_kernels.chunking import chunk_size, map_queries
from pallas_kernels.indexer.reference import PACKED_FORMAT
from pallas_kernels.rms_norm import rms_norm
from v41flash import layout, quant
from v41flash.cache import PagedRows
from v41flash.config import ModelConfig
from v41flash.kernels import Kernels
from v41flash.nn import linear, ops, rope
from v41flash.nn.context import Ranges
from v41flash.nn.linear import contract
from v41flash.sharding import constrain, partitioned


class IndexQuery(NamedTuple):
    """Index queries [B, T, Hi, Di] and head weights float32 [B, T, Hi] of one layer."""

    q: jax.Array
    weights: jax.Array


class Indexer(nn.Module):
    """Index projections of one index-source layer; `owns_keys` on Full layers."""

    config: ModelConfig
    kernels: Kernels
    owns_keys: bool

    def setup(self) -> None:
        """Declares the parameters."""
        cfg = self.config
        heads, dim = cfg.index_n_heads, cfg.index_head_dim
        init = nn.initializers.truncated_normal(cfg.initializer_range)

        def weight(name: str, shape: tuple[int, ...], axes: tuple[str | None, ...]) -> jax.Array:
            return self.param(name, partitioned(init, axes), shape, jnp.float32)

        queries = layout.heads(heads, dim, cfg.q_lora_rank)
        self.wq_b = linear.weight(self, "wq_b", queries, "rank", "index_heads", None)
        self.weights_proj = weight("weights_proj", (cfg.hidden_size, heads), ("embed", None))
        if self.owns_keys:
            self.wk = weight("wk", (cfg.head_dim, dim), (None, None))
            ones = partitioned(nn.initializers.ones, (None,))
            self.k_norm = self.param("k_norm", ones, (dim,), jnp.float32)

    def keys(self, latent_BxGxD: jax.Array, angles: rope.RopeTable) -> jax.Array:
        """Index keys [B, G, Di] from the un-rotated latent, rotated and rounded."""
        latent_BxGxD = jax.lax.stop_gradient(latent_BxGxD)
        k = rms_norm(
            contract("bgk,kd->bgd", latent_BxGxD, self.wk), self.k_norm, self.config.rms_norm_eps
        )
        k = ops.shared_rows(rope.rotate(k, angles), self.config.index_format, self.kernels.fp4)
        self.sow("intermediates", "k", k)
        return k

    def query(
        self, x_BxTxd: jax.Array, q_latent_BxTxr: jax.Array, angles: rope.RopeTable
    ) -> IndexQuery:
        """Index queries and head weights from the attention input and the query latent."""
        cfg = self.config
        x_BxTxd, q_latent_BxTxr = jax.lax.stop_gradient((x_BxTxd, q_latent_BxTxr))
        q = contract("btr,rhd->bthd", q_latent_BxTxr, self.wq_b)
        q = rope.rotate(constrain(q, "batch", "length", "index_heads", None), angles)
        q = quant.fake_quantize(q, cfg.index_format, self.kernels.fp4)
        scale = (cfg.index_head_dim * cfg.index_n_heads) ** -0.5
        weights = contract("btd,dh->bth", x_BxTxd, self.weights_proj).astype(jnp.float32) * scale
        self.sow("intermediates", "q", q)
        self.sow("intermediates", "w", weights)
        return IndexQuery(q, weights)


def select(
    config: ModelConfig,
    query: IndexQuery,
    keys_BxGxDi: jax.Array,
    visible: Ranges,
    *,
    make_pool: bool,
    pool: indexer_op.Pool | None,
    implementation: indexer_op.Implementation,
) -> tuple[jax.Array, indexer_op.Pool | None]:
    """Picks at most `index_topk` visible entries for every query.

    Args:
        config: the model.
        query: of this layer.
        keys_BxGxDi: index keys of the cache that the layer reads.
        visible: entries visible to each query.
        make_pool: also keep the best blocks as candidate pool (the candidate source layer).
        pool: restrict the choice to this pool (the layers after it).
        implementation: of `pallas_kernels.indexer`.

    Returns:
        (indices int32 [B, T, K] ascending, -1 padded; the new pool, or `pool` as it came).
    """
    blocks = (config.candidate_topk_blocks, config.candidate_block_size)
    q, weights, keys = jax.lax.stop_gradient((query.q, query.weights, keys_BxGxDi))
    indices, made = ops.select(
        q,
        weights,
        keys,
        visible.lo,
        visible.hi,
        top_k=config.index_topk,
        pool=pool,
        make_pool=blocks if make_pool else None,
        on_grid=config.index_format == "mxfp4",
        implementation=implementation,
    )
    # Selections are residuals: a rematerialised layer must not score and sort again.
    indices = checkpoint_name(indices, "selection")
    if made is not None:
        pool = indexer_op.Pool(checkpoint_name(made.blocks, "selection"), made.size)
    return indices, pool


def select_in_pool(
    config: ModelConfig,
    query: IndexQuery,
    keys: PagedRows,
    visible: Ranges,
    pool: indexer_op.Pool,
    implementation: indexer_op.Implementation,
) -> jax.Array:
    """`select` among the candidates of a pool, of which alone the cached keys are read.

    Args:
        config: the model.
        query: of this layer.
        keys: index keys of the cache that the layer reads.
        visible: entries visible to each query; sequences start at entry 0.
        pool: of the candidate source layer.
        implementation: of `pallas_kernels.indexer`.

    Returns:
        Indices int32 [B, T, K] ascending, -1 padded.
    """
    batch, queries, heads, dim = query.q.shape
    candidates = pool.blocks.shape[-1] * pool.size

    def body(q: jax.Array, weights: jax.Array, hi: jax.Array, blocks: jax.Array) -> jax.Array:
        entry = (blocks[..., None] * pool.size + jnp.arange(pool.size)).reshape(*hi.shape, -1)
        held = (jnp.repeat(blocks, pool.size, axis=-1) >= 0) & (entry < hi[..., None])
        # Blocks ascend, -1 at the end, and only the last can reach beyond the newest visible
        # entry: what is held comes first. So every query has a key range of its own, from 0 on.
        count = jnp.sum(held, axis=-1, dtype=jnp.int32).reshape(-1, 1)
        entry = jnp.where(held, entry, -1)
        own = keys.gather(entry, packed=keys.format.fmt == PACKED_FORMAT)
        own = own.reshape(-1, candidates, own.shape[-1])
        q, weights = q.reshape(-1, 1, heads, dim), weights.reshape(-1, 1, heads)
        places, _ = indexer_op.select(
            q,
            weights,
            own,
            jnp.zeros_like(count),
            count,
            top_k=config.index_topk,
            on_grid=config.index_format == "mxfp4",
            implementation=implementation,
        )
        places = places.reshape(*hi.shape, -1)
        chosen = jnp.take_along_axis(entry, jnp.maximum(places, 0), axis=-1)
        return jnp.where(places >= 0, chosen, -1)

    chunk = chunk_size(queries, batch, 4 * candidates * max(heads, dim))
    return map_queries(body, (query.q, query.weights, visible.hi, pool.blocks), chunk)
