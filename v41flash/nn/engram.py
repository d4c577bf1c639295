"""Engram: hashed n-gram memory, written into the streams in front of a layer.

The rows to look up depend on tokens alone (`v41flash.text.engram_hash`), so the data pipeline
brings them along with the batch, and they are looked up before the first layer runs (`prefetch`):
on a mesh they come from other devices, and a rematerialised layer must not fetch them again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from pallas_kernels import fp4
from v41flash import layout
from v41flash.config import ModelConfig
from v41flash.kernels import Kernels
from v41flash.nn import linear
from v41flash.nn.context import Context
from v41flash.nn.linear import contract
from v41flash.nn.lookup import look_up
from v41flash.sharding import local_shape, partitioned


class Engram(nn.Module):
    """Gated write of one value per token into all streams (V4.1 report, section 2.3).

    Attributes:
        config: the model.
        site: which of `config.engram_layer_ids` this is.
        kernels: implementations to run.
    """

    config: ModelConfig
    site: int
    kernels: Kernels

    @nn.compact
    def __call__(self, streams_BxTxnxd: jax.Array, context: Context) -> jax.Array:
        """Adds the memory's value to the streams.

        Args:
            streams_BxTxnxd: [B, T, n, d].
            context: of the batch; its `engram_rows[:, :, site]` are looked up, unless
                `engram_memory` has them.

        Returns:
            [B, T, n, d]; rows of image tokens come back as they went in.
        """
        cfg = self.config
        n, d, width = cfg.hc_mult, cfg.hidden_size, cfg.engram_head_dim
        ones = partitioned(nn.initializers.ones, (None, None))
        f32 = jnp.float32
        table = self._table()
        gathered = cfg.engram_rows_per_token * width
        wkv = linear.weight(self, "wkv", layout.heads(n + 1, d, gathered), "rank", None, None)
        q_weight = self.param("q_weight", ones, (n, d), f32)
        k_weight = self.param("k_weight", ones, (n, d), f32)

        if self.site in context.engram_memory:
            memory = context.engram_memory[self.site]
        else:
            rows = context.engram_rows[:, :, self.site]
            memory = look_up(table, rows, streams_BxTxnxd.dtype, self.kernels.engram_gather)
        projected = contract("btm,mnd->btnd", memory, wkv)
        key = projected[:, :, :n].astype(f32)
        value = projected[:, :, n:].astype(f32)
        x = streams_BxTxnxd.astype(f32)
        score = jnp.sum(x * (q_weight * k_weight) * key, axis=-1) * d**-0.5
        for side in (x, key):
            score = score * jax.lax.rsqrt(jnp.mean(jnp.square(side), -1) + cfg.rms_norm_eps)
        gate = jax.nn.sigmoid(_signed_sqrt(score))
        if context.is_image is not None:
            gate = jnp.where(context.is_image[..., None], 0.0, gate)
        self.sow("intermediates", "gate", gate)
        self.sow("intermediates", "x_before", streams_BxTxnxd)
        return (x + gate[..., None] * value).astype(streams_BxTxnxd.dtype)

    def _table(self) -> jax.Array:
        """float32 [N, c], or packed rows uint8 [N, bytes] as the published engine holds them."""
        cfg, axes = self.config, ("table_rows", None)
        rows, width = cfg.engram_table_rows[self.site], cfg.engram_head_dim
        if cfg.weight_form == "packed":
            zeros = nn.initializers.zeros
            shape = local_shape((rows, fp4.row_bytes("fp8", width)), axes)
            return self.param("table", partitioned(zeros, axes), shape, jnp.uint8)
        normal = nn.initializers.truncated_normal(cfg.initializer_range)
        shape = local_shape((rows, width), axes)
        return self.param("table", partitioned(normal, axes), shape, jnp.float32)


def prefetch(
    config: ModelConfig, params: Mapping[str, Any], rows: jax.Array, kernels: Kernels
) -> dict[int, jax.Array]:
    """Looks up the rows of all sites.

    Args:
        config: the model.
        params: of `v41flash.nn.ced.CED`.
        rows: int32 [B, T, sites, R].
        kernels: implementations to run.

    Returns:
        [B, T, R*c] in `config.dtype`, per site.
    """
    memory = {}
    for group in config.groups:
        site = group.first.engram
        if site is not None:
            table = params[group.name]["first"]["engram"]["table"]
            memory[site] = look_up(table, rows[:, :, site], config.dtype, kernels.engram_gather)
    return memory


def _signed_sqrt(score: jax.Array) -> jax.Array:
    """sign(s) * sqrt(max(|s|, 1e-6)), s = 0 counting as positive."""
    root = jnp.sqrt(jnp.maximum(jnp.abs(score), 1e-6))
    return jnp.where(score < 0, -root, root)
