"""Mixture of experts: sqrt-softplus routing without auxiliary-loss bias, one shared expert.

Every token goes to its top-k experts; none is dropped. The router's selection biases get no
gradient: after each step `update_router_bias` moves them towards equal load, text and image tokens
apart.

On a mesh every device routes its own tokens; `v41flash.nn.experts` takes them to their experts.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from pallas_kernels import grouped_matmul, split_products
from v41flash import exchange, layout
from v41flash.config import ModelConfig
from v41flash.kernels import Kernels
from v41flash.nn import experts as experts_lib
from v41flash.nn import linear
from v41flash.nn.context import Context
from v41flash.nn.linear import contract
from v41flash.sharding import constrain, on_shards, partitioned


class Routing(NamedTuple):
    """Routing of the tokens of a batch.

    Attributes:
        experts: int32 [B, T, k].
        weights: float32 [B, T, k], normalised and scaled.
        balance_loss: float32 scalar, sequence-wise.
    """

    experts: jax.Array
    weights: jax.Array
    balance_loss: jax.Array


class Router(nn.Module):
    """`s = sqrt(softplus(x W))`; the top-k of `s + bias` are chosen, weights come from `s`."""

    config: ModelConfig

    @nn.compact
    def __call__(self, x_BxTxd: jax.Array, context: Context) -> Routing:
        """Routes the tokens of x [B, T, d]; see `Routing`."""
        cfg = self.config
        experts, k = cfg.n_routed_experts, cfg.num_experts_per_tok
        normal = nn.initializers.truncated_normal(cfg.initializer_range)
        zeros = partitioned(nn.initializers.zeros, (None,))
        weight = self.param(
            "weight", partitioned(normal, ("embed", None)), (cfg.hidden_size, experts), jnp.float32
        )
        logits = split_products.einsum("btd,de->bte", x_BxTxd, weight) / cfg.gate_temp
        scores = _affinities(logits)
        bias = jax.lax.stop_gradient(self.param("bias", zeros, (experts,), jnp.float32))
        is_image = context.is_image
        if cfg.vision is not None:
            bias_vl = jax.lax.stop_gradient(self.param("bias_vl", zeros, (experts,), jnp.float32))
            if is_image is not None and cfg.router_bias_by_modality:
                bias = jnp.where(is_image[..., None], bias_vl, bias)
        chosen = _largest(jax.lax.stop_gradient(scores) + bias, k)
        weights = jnp.take_along_axis(scores, chosen, axis=-1)
        weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + 1e-20)
        weights = weights * cfg.routed_scaling_factor

        selected = jnp.sum(jax.nn.one_hot(chosen, experts, dtype=jnp.float32), axis=2)
        selected = selected * context.valid[..., None]
        apart = is_image is not None and cfg.router_bias_by_modality
        image = is_image if apart else jnp.zeros_like(context.valid)
        self._record("bias", jnp.sum(selected * ~image[..., None], axis=(0, 1)))
        if cfg.vision is not None:
            self._record("bias_vl", jnp.sum(selected * image[..., None], axis=(0, 1)))
        self.sow("intermediates", "scores", scores)
        self.sow("intermediates", "topk_idx", chosen)
        self.sow("intermediates", "topk_w", weights)
        balance = self._balance_loss(scores, selected, context.valid)
        return Routing(chosen, weights, balance)

    def _record(self, name: str, load: jax.Array) -> None:
        self.sow("router_load", name, load, init_fn=lambda: 0.0, reduce_fn=lambda _, new: new)

    def _balance_loss(self, scores: jax.Array, selected: jax.Array, valid: jax.Array) -> jax.Array:
        """sum_i f_i P_i per row, mean over rows that hold tokens (DeepSeek-V3, eq. 17-20)."""
        cfg = self.config
        tokens = jnp.sum(valid, axis=1)
        length = jnp.maximum(tokens, 1)[:, None]
        frequency = jnp.sum(selected, axis=1) * cfg.n_routed_experts
        frequency = frequency / (cfg.num_experts_per_tok * length)
        total = jnp.sum(scores, axis=-1, keepdims=True)
        share = scores / jnp.where(total > 0, total, 1.0)
        probability = jnp.sum(share * valid[..., None], axis=1) / length
        per_row = jnp.sum(frequency * probability, axis=-1)
        return jnp.sum(per_row) / jnp.maximum(jnp.sum(tokens > 0), 1)


def _affinities(logits: jax.Array) -> jax.Array:
    """sqrt(softplus(logits)). Below -100 it is 0 in float32, and so is its gradient here, where the
    root's own would be infinite."""
    squares = jax.nn.softplus(logits)
    positive = squares > 0
    return jnp.where(positive, jnp.sqrt(jnp.where(positive, squares, 1.0)), 0.0)


def _largest(scores: jax.Array, k: int) -> jax.Array:
    """int32 [B, T, k], the experts of the largest of scores [B, T, E]; of equal ones the first."""
    token = ("batch", "length", None)
    return on_shards(lambda _, scores: jax.lax.top_k(scores, k)[1], (token,), list(token))(scores)


class MoE(nn.Module):
    """Routed experts plus the shared expert, all SwiGLU with clamped gate and input."""

    config: ModelConfig
    kernels: Kernels

    @nn.compact
    def __call__(self, x_BxTxd: jax.Array, context: Context) -> tuple[jax.Array, jax.Array]:
        """Applies the experts.

        Args:
            x_BxTxd: [B, T, d] normalised input.
            context: of the batch.

        Returns:
            (out [B, T, d], balance loss float32 scalar).
        """
        cfg = self.config
        experts, d, hidden = cfg.n_routed_experts, cfg.hidden_size, cfg.moe_intermediate_size
        shared = cfg.n_shared_experts * hidden
        weight, of_experts = functools.partial(linear.weight, self), {"storage": "expert"}
        # w1 (gate) and w3 (input) of an expert lie side by side: one matrix product serves both.
        axes = ("embed", None, "expert_hidden")
        pairs = layout.expert_pairs(experts, hidden, d)
        w13 = weight("w13", pairs, "experts", *axes, **of_experts)
        down = layout.experts(experts, d, hidden)
        w2 = weight("w2", down, "experts", "expert_hidden", "embed", **of_experts)
        shared_w13 = weight("shared_w13", layout.pair(shared, d), *axes)
        shared_w2 = weight("shared_w2", layout.linear(d, shared), "expert_hidden", "embed")

        routing = Router(cfg, name="router")(x_BxTxd, context)
        routed = self._routed(x_BxTxd, routing, w13, w2)
        # Over two axes: jax 0.10 on the CPU lacks the bfloat16 weight gradient of "nd,djf->njf".
        up = contract("btd,djf->btjf", x_BxTxd, shared_w13)
        own = contract("btf,fd->btd", self._swiglu(up.reshape(*up.shape[:2], -1), None), shared_w2)
        out = (own.astype(jnp.float32) + routed).astype(x_BxTxd.dtype)
        out = constrain(out, "batch", "length", None)
        return out, routing.balance_loss

    def _routed(
        self,
        x_BxTxd: jax.Array,
        routing: Routing,
        w13: jax.Array | linear.Packed,
        w2: jax.Array | linear.Packed,
    ) -> jax.Array:
        """float32 [B, T, d], the sum of every token's experts."""
        leaves, structure = jax.tree.flatten((w13, w2))
        if isinstance(w13, linear.Packed):
            # Elements and scales of each.
            names = [
                *[("experts", None, "expert_hidden", None)] * 2,
                *[("experts", "embed", "expert_hidden")] * 2,
            ]
        else:
            names = [
                ("experts", "embed", None, "expert_hidden"),
                ("experts", "expert_hidden", "embed"),
            ]

        def local(axes, x, chosen, weights, *parts):
            held = tuple(
                exchange.gathered(part, axes.get("embed", ()), name.index("embed"), x.dtype)
                if "embed" in name
                else part
                for part, name in zip(parts, names, strict=True)
            )

            def products(rows, weight, held, sizes):
                w13, w2 = jax.tree.unflatten(structure, held)
                up = self._grouped(rows, w13, sizes)
                return self._grouped(self._swiglu(up, weight), w2, sizes)

            k = chosen.shape[-1]
            out = experts_lib.routed(
                products,
                axes["experts"],
                x.reshape(-1, x.shape[-1]),
                chosen.reshape(-1, k),
                weights.reshape(-1, k),
                held,
            )
            if axes["expert_hidden"]:
                out = jax.lax.psum(out, axes["expert_hidden"])
            return out.reshape(x.shape)

        token = ("batch", "length", None)
        run = on_shards(local, (token, token, token, *names), list(token))
        return run(x_BxTxd, routing.experts, routing.weights, *leaves)

    def _grouped(
        self, x: jax.Array, weight: jax.Array | linear.Packed, sizes: jax.Array
    ) -> jax.Array:
        """Rows of x, sorted by expert, times their expert's weight."""
        scales = None
        if isinstance(weight, linear.Packed):
            x = weight.round_input(x)
            weight, scales = (
                part.reshape(part.shape[0], -1, part.shape[-1])
                for part in (weight.elements, weight.scales)
            )
        else:
            weight = weight.reshape(*weight.shape[:2], -1)
        return grouped_matmul.grouped_matmul(
            x, weight, sizes, scales, implementation=self.kernels.grouped_matmul
        )

    def _swiglu(self, up: jax.Array, weight: jax.Array | None) -> jax.Array:
        limit = self.config.swiglu_limit
        gate, value = jnp.split(up.astype(jnp.float32), 2, axis=-1)
        hidden = jax.nn.silu(jnp.minimum(gate, limit)) * jnp.clip(value, -limit, limit)
        if weight is not None:
            hidden = hidden * weight[:, None]
        return hidden.astype(up.dtype)


def update_router_bias(params: Any, router_load: Any, speed: float) -> Any:
    """Moves every router's selection biases towards equal load.

    Args:
        params: the model's parameters.
        router_load: the `router_load` collection of the step: tokens per expert, [.., E], at the
            paths of the biases; summed over all microbatches and hosts.
        speed: step size.

    Returns:
        params with `bias += speed * sign(mean(load) - load)`.
    """
    if not isinstance(router_load, dict):
        return params + speed * jnp.sign(
            jnp.mean(router_load, axis=-1, keepdims=True) - router_load
        )
    moved = {
        name: update_router_bias(params[name], load, speed) for name, load in router_load.items()
    }
    return {**params, **moved}
