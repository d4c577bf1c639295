"""One layer, and the units of layers that share a selection."""

from __future__ import annotations

from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from pallas_kernels.sparse_attention import RESULT
from v41flash.config import LayerGroup, LayerSpec, ModelConfig
from v41flash.kernels import Kernels
from v41flash.nn.context import Context
from v41flash.nn.csa2 import CSA2, SharedKV
from v41flash.nn.engram import Engram
from v41flash.nn.index_loss import Lesson, indexer_kl
from v41flash.nn.memory import Memory
from v41flash.nn.mhc import HyperConnection, Residual
from v41flash.nn.moe import MoE

# Residuals that a rematerialised layer keeps: its selection must not be scored and sorted again,
# and the shared cache is read by other layers anyway.
_KEEP = "selection", "shared_kv"

# Collection of which rows of a layer's outputs are not finite.
NONFINITE = "nonfinite"
# What layers leave beside their results, stacked where they are scanned.
RECORDS = {"router_load": 0, NONFINITE: 0, "intermediates": 0}


class Carry(NamedTuple):
    """State that runs through the layers of a unit.

    Attributes:
        residual: the residual streams.
        lesson: contribution of the unit's layers so far to the indexer's loss, or None.
        memory: caches that the layers read and write (serving), or None (training).
    """

    residual: Residual
    lesson: Lesson | None = None
    memory: Memory | None = None


class LayerAux(NamedTuple):
    """Scalars of a layer, float32; of a group they are sums, `max_main_kv` the largest."""

    balance_loss: jax.Array
    indexer_kl: jax.Array
    max_main_kv: jax.Array

    def reduce(self) -> LayerAux:
        """Folds a scanned axis."""
        return LayerAux(
            jnp.sum(self.balance_loss), jnp.sum(self.indexer_kl), jnp.max(self.max_main_kv)
        )

    def join(self, other: LayerAux) -> LayerAux:
        """Folds in the scalars of further layers."""
        return jax.tree.map(lambda *leaves: jnp.stack(leaves), self, other).reduce()


class Block(nn.Module):
    """Engram where it is due, attention, mixture of experts: one layer."""

    config: ModelConfig
    spec: LayerSpec
    kernels: Kernels
    teacher: bool

    def setup(self) -> None:
        """Declares the sublayers."""
        cfg, spec, kernels = self.config, self.spec, self.kernels
        if spec.engram is not None:
            self.engram = Engram(cfg, spec.engram, kernels)
        self.hc_attn = HyperConnection(cfg, kernels)
        self.attn = CSA2(cfg, spec, kernels, self.teacher)
        self.hc_ffn = HyperConnection(cfg, kernels)
        self.ffn = MoE(cfg, kernels)

    def read(self, residual: Residual, context: Context) -> tuple[jax.Array, Residual]:
        """Everything before attention: (its input x [B, T, d], the residual whose `out` is due)."""
        streams = None
        if self.spec.engram is not None:
            streams = self.engram(residual.written(self.kernels.mhc), context)
        return self.hc_attn(residual, streams)

    def fill(self, residual: Residual, context: Context, memory: Memory) -> tuple:
        """What prefill needs of the first decoder layer for every token: the global cache.

        Returns:
            (x, residual) of `read`, from which `finish` can go on, and the Memory.
        """
        x, residual = self.read(residual, context)
        return x, residual, self.attn.make_cache(x, context, memory)[-1]

    def finish(
        self, x: jax.Array, carry: Carry, shared: SharedKV | None, context: Context
    ) -> tuple[Carry, tuple[LayerAux, SharedKV | None]]:
        """Attention on the input x [B, T, d] of `read`, and everything after it.

        Args:
            x: attention input.
            carry: its residual is that of `read`.
            shared: caches and selection of the layers before.
            context: of the batch.

        Returns:
            (new carry, (scalars, what the layer hands on; None from a Reuse layer)).
        """
        attention = self.attn(x, shared, context, carry.memory)
        self.sow("intermediates", "attn_out", attention.out)
        self._record("attention", attention.out, context)
        x, residual = self.hc_ffn(carry.residual._replace(out=attention.out))
        out, balance_loss = self.ffn(x, context)
        self.sow("intermediates", "ffn_out", out)
        self._record("experts", out, context)
        lesson = attention.lesson
        if carry.lesson is not None:
            lesson = jax.tree.map(jnp.add, carry.lesson, lesson)
        aux = LayerAux(balance_loss, jnp.zeros(()), attention.max_main_kv)
        made = None if self.spec.mode == "reuse" else attention.shared
        return Carry(residual._replace(out=out), lesson, attention.memory), (aux, made)

    def _record(self, name: str, out: jax.Array, context: Context) -> None:
        """Leaves, where `NONFINITE` is asked for, int32 [B]: does a row hold numbers that are none?

        By row, so that on a mesh the layers need not wait for each other's sums.
        """
        if self.is_mutable_collection(NONFINITE) and not self.is_initializing():
            bad = jnp.any(~jnp.isfinite(out) & context.valid[..., None], axis=(1, 2))
            self.sow(
                NONFINITE,
                name,
                bad.astype(jnp.int32),
                init_fn=lambda: 0,
                reduce_fn=lambda _, new: new,
            )

    def __call__(
        self, carry: Carry, shared: SharedKV | None, context: Context
    ) -> tuple[Carry, tuple[LayerAux, SharedKV | None]]:
        """Runs the layer; arguments and results as for `finish`, from the residual streams on."""
        x, residual = self.read(carry.residual, context)
        return self.finish(x, carry._replace(residual=residual), shared, context)


class Unit(nn.Module):
    """A head layer and the `reuse` layers that go by its selection, with its indexer's loss."""

    config: ModelConfig
    group: LayerGroup
    kernels: Kernels
    indexer_loss: bool
    keep_shared: bool

    @nn.compact
    def __call__(
        self, residual: Residual, shared: SharedKV | None, context: Context
    ) -> tuple[Residual, tuple[LayerAux, SharedKV | None]]:
        """Runs the unit; SharedKV comes back where `keep_shared` asks for it."""
        cfg, head_spec = self.config, self.group.first
        teacher = self.indexer_loss and head_spec.mode != "window"
        # In a loop nothing can merge the recomputation with the first pass; outside one the
        # compiler would, and so keep everything, unless told not to.
        first = self._block(in_loop=self.group.repeats > 1)
        first = first(cfg, head_spec, self.kernels, teacher, name="first")
        carry, (aux, made) = first(Carry(residual), shared, context)
        if self.group.reuse:
            scanned = nn.scan(
                self._block(in_loop=True),
                variable_axes={"params": 0, **RECORDS},
                split_rngs={"params": True},
                in_axes=(nn.broadcast, nn.broadcast),
                length=self.group.reuse,
                metadata_params={nn.PARTITION_NAME: "layers"},
                check_constancy_invariants=False,
            )
            reuse = scanned(
                cfg, cfg.layers[self.group.start + 1], self.kernels, teacher, name="reuse"
            )
            carry, (reuse_aux, _) = reuse(carry, made, context)
            aux = aux.join(reuse_aux.reduce())
        if teacher:
            kl = indexer_kl(
                carry.lesson,
                1 + self.group.reuse,
                made.index_query,
                made.index_keys,
                made.indices,
                context.valid,
                self.kernels,
            )
            aux = aux._replace(indexer_kl=kl)
        return carry.residual, (aux, made if self.keep_shared else None)

    def _block(self, *, in_loop: bool) -> type[nn.Module]:
        # Initialisation wants the parameters alone; rematerialised code would not be dropped as
        # dead.
        if self.is_initializing():
            return Block
        names = _KEEP + (RESULT,) * self.kernels.keep_attention
        policy = jax.checkpoint_policies.save_only_these_names(*names)
        return nn.remat(Block, policy=policy, prevent_cse=not in_loop)
