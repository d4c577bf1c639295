"""The compressor of a Full layer: m tokens become one latent entry of the shared cache."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp

from pallas_kernels.rms_norm import rms_norm
from v41flash.config import ModelConfig
from v41flash.nn.linear import contract
from v41flash.sharding import partitioned


class Compressor(nn.Module):
    """Pools groups of `ratio` consecutive tokens by a channel-wise softmax gate, then normalises.

    With ratio 1 there is no gate: the latent is the normalised projection.
    """

    config: ModelConfig
    ratio: int

    @nn.compact
    def __call__(self, x_BxTxd: jax.Array) -> jax.Array:
        """Compresses the attention input.

        Args:
            x_BxTxd: [B, T, d]; groups are rows (0..m-1), (m..2m-1), ... A trailing partial group is
                left out.

        Returns:
            latent [B, T // m, D] in the dtype of x, not yet rotated.
        """
        cfg, m = self.config, self.ratio
        shape = (cfg.hidden_size, cfg.head_dim)
        init = partitioned(nn.initializers.truncated_normal(cfg.initializer_range), ("embed", None))
        wkv = self.param("wkv", init, shape, jnp.float32)
        norm = self.param(
            "norm", partitioned(nn.initializers.ones, (None,)), shape[1:], jnp.float32
        )
        if m == 1:
            pooled = contract("btd,dk->btk", x_BxTxd, wkv)
        else:
            wgate = self.param("wgate", init, shape, jnp.float32)
            groups = x_BxTxd.shape[1] // m
            # The published run promotes the compressor to float32 where it pools.
            x32 = x_BxTxd[:, : groups * m].astype(jnp.float32)
            grouped = (x_BxTxd.shape[0], groups, m, cfg.head_dim)
            kv = contract("btd,dk->btk", x32, wkv).reshape(grouped)
            score = contract("btd,dk->btk", x32, wgate).reshape(grouped)
            pooled = jnp.sum(kv * nn.softmax(score, axis=2), axis=2).astype(x_BxTxd.dtype)
        return rms_norm(pooled, norm, cfg.rms_norm_eps)
