"""Single-pass manifold-constrained hyper-connections: the residual path of the model.

The hidden state is `hc_mult` parallel streams. A sublayer reads them through mixing weights that
were predicted one sublayer earlier, so the write of one sublayer, the coefficients of the next and
its read need the streams once. To keep that one pass whole across layer boundaries, the write of a
sublayer's output stays pending in the `Residual` until the next read.
"""

from __future__ import annotations

from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import Implementation
from v41flash.config import ModelConfig
from v41flash.kernels import Kernels
from v41flash.nn import ops
from v41flash.sharding import constrain, partitioned

STREAM_AXES = ("batch", "queries", None, None)


class Residual(NamedTuple):
    """Streams with the last sublayer's output still to be written.

    Attributes:
        streams: [B, T, n, d] before the pending write.
        out: [B, T, d], the pending output.
        post: float32 [B, T, n] and
        comb: float32 [B, T, n, n], its write coefficients; comb[j, k] moves old stream j to k.
        pre: float32 [B, T, n], coefficients of the next read.
    """

    streams: jax.Array
    out: jax.Array
    post: jax.Array
    comb: jax.Array
    pre: jax.Array

    @classmethod
    def start(cls, x_BxTxd: jax.Array, n: int) -> Residual:
        """n equal streams with nothing pending; the first read takes stream 0 alone."""
        batch, length, _ = x_BxTxd.shape
        streams = jnp.repeat(x_BxTxd[:, :, None], n, axis=2)
        post = jnp.zeros((batch, length, n), jnp.float32)
        comb = jnp.broadcast_to(jnp.eye(n, dtype=jnp.float32), (batch, length, n, n))
        pre = jnp.broadcast_to(jnp.eye(n, dtype=jnp.float32)[0], (batch, length, n))
        return cls(streams, jnp.zeros_like(x_BxTxd), post, comb, pre)

    def written(self, implementation: Implementation = None) -> jax.Array:
        """Streams [B, T, n, d] after the pending write."""
        return ops.write(self.streams, self.out, self.post, self.comb, implementation)


class HyperConnection(nn.Module):
    """Coefficients and read of one sublayer, with the RMSNorm in front of it.

    Without `hc_single_pass` the sublayer reads by its own coefficients, and the last one's read the
    final hidden state too.
    """

    config: ModelConfig
    kernels: Kernels

    @nn.compact
    def __call__(
        self, residual: Residual, streams: jax.Array | None = None
    ) -> tuple[jax.Array, Residual]:
        """Writes what is pending (unless done already) and reads the sublayer's input.

        Args:
            residual: the state that the previous sublayer left.
            streams: [B, T, n, d], the streams after the pending write where something (Engram) has
                come between; None to write here.

        Returns:
            (x [B, T, d], normed input of the sublayer; the residual whose `out` is yet to be set,
            its `pre` being that of the sublayer after this one).
        """
        cfg = self.config
        n, d = cfg.hc_mult, cfg.hidden_size
        coefficients = (2 + n) * n

        def base_init(_: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
            base = jnp.zeros(shape, dtype)
            if cfg.hc_base_init == "identity":
                # Softmax of these logits keeps about 0.95 of each stream where it is for n = 4.
                base = base.at[2 * n :].set(4.0 * jnp.eye(n, dtype=dtype).reshape(-1))
            return base

        normal = nn.initializers.normal(cfg.initializer_range)
        ones = nn.initializers.ones
        scale_init = nn.initializers.constant(cfg.hc_init_scale)
        f32 = jnp.float32
        fn = self.param("fn", partitioned(normal, (None, None)), (coefficients, n * d), f32)
        base = self.param("base", partitioned(base_init, (None,)), (coefficients,), f32)
        scale = self.param("scale", partitioned(scale_init, (None,)), (3,), f32)
        norm = self.param("norm", partitioned(ones, (None,)), (d,), f32)
        keywords = dict(
            sinkhorn_iters=cfg.hc_sinkhorn_iters,
            eps=cfg.hc_eps,
            norm_eps=cfg.rms_norm_eps,
            implementation=self.kernels.mhc,
        )
        if not cfg.hc_single_pass:
            streams = residual.written(self.kernels.mhc) if streams is None else streams
            _, made = ops.read(streams, residual.pre, fn, base, scale, norm, **keywords)
            x, _ = ops.read(streams, made.pre, fn, base, scale, norm, **keywords)
        elif streams is None:
            streams, x, made = ops.write_read(
                *residual[:4], residual.pre, fn, base, scale, norm, **keywords
            )
        else:
            x, made = ops.read(streams, residual.pre, fn, base, scale, norm, **keywords)
        streams = constrain(streams, *STREAM_AXES)
        # Whole again along `tensor`, or the weights that are split over it would be gathered.
        x = constrain(x, "batch", "length", None)
        for name, value in (("streams", streams), ("x", x), *made._asdict().items()):
            self.sow("intermediates", name, value)
        return x, Residual(streams, residual.out, made.post, made.comb, made.pre)
