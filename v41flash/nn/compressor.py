"""The compressor of a Full layer: m tokens become one latent entry of the shared cache."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp

from pallas_kernels import split_products
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

    def setup(self) -> None:
        """Declares the parameters."""
        cfg = self.config
        shape = (cfg.hidden_size, cfg.head_dim)
        init = partitioned(nn.initializers.truncated_normal(cfg.initializer_range), ("embed", None))
        ones = partitioned(nn.initializers.ones, (None,))
        self.wkv = self.param("wkv", init, shape, jnp.float32)
        self.norm = self.param("norm", ones, shape[1:], jnp.float32)
        if self.ratio > 1:
            self.wgate = self.param("wgate", init, shape, jnp.float32)

    def project(self, x_BxTxd: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """Projections of every token: what waits until its group is complete.

        Args:
            x_BxTxd: [B, T, d], the attention input.

        Returns:
            (kv [B, T, D], gate logits [B, T, D]), float32; with ratio 1 (kv in the dtype of x,
            None).
        """
        if self.ratio == 1:
            return contract("btd,dk->btk", x_BxTxd, self.wkv), None
        # The published run promotes the compressor to float32 where it pools.
        kv, gate = (
            split_products.einsum("btd,dk->btk", x_BxTxd, w) for w in (self.wkv, self.wgate)
        )
        return kv, gate

    def pool(self, kv_BxGxmxD: jax.Array, score_BxGxmxD: jax.Array | None) -> jax.Array:
        """Latents [B, G, D] of complete groups in `config.dtype`, not yet rotated."""
        cfg = self.config
        if score_BxGxmxD is None:
            pooled = kv_BxGxmxD[:, :, 0]
        else:
            pooled = jnp.sum(kv_BxGxmxD * nn.softmax(score_BxGxmxD, axis=2), axis=2)
        return rms_norm(pooled.astype(cfg.dtype), self.norm, cfg.rms_norm_eps)

    def __call__(self, x_BxTxd: jax.Array) -> jax.Array:
        """Compresses whole documents.

        Args:
            x_BxTxd: [B, T, d]; groups are rows (0..m-1), (m..2m-1), ... A trailing partial group is
                left out.

        Returns:
            latent [B, T // m, D] in `config.dtype`, not yet rotated.
        """
        groups = x_BxTxd.shape[1] // self.ratio
        kv, score = self.project(x_BxTxd[:, : groups * self.ratio])

        def grouped(x: jax.Array | None) -> jax.Array | None:
            return None if x is None else x.reshape(x.shape[0], groups, self.ratio, x.shape[-1])

        return self.pool(grouped(kv), grouped(score))
