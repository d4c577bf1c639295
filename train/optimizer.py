"""The optimizer that `config.optimizer` describes, by the groups of the V4.1 report.

What a parameter is follows from its path, by the rules of `v41flash.optim.V41_RULES`: the labels
are matrix, table (embedding, head), engram_table, norm, vector (sinks, mHC base and scale) and
router_bias (moved by the load balancing rule, never by a gradient).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from train.settings import OptimizerSettings
from v41flash.optim import V41_RULES, MatrixSpec, Rule, v41_optimizer, warmup_constant_cosine
from v41flash.optim.axes import leaf_names
from v41flash.optim.partition import labels

# Queries [in, heads, head_dim] as one matrix.
_HEADS_JOINED = MatrixSpec(reduction=-3, output=(-2, -1), batch=...)


def path_names(path: Iterable[Any]) -> tuple[str, ...]:
    """The keys of a `jax.tree_util` path over nested dicts."""
    return tuple(str(entry.key) for entry in path)


def is_indexer(names: tuple[str, ...]) -> bool:
    """Whether a parameter belongs to an indexer, whose only gradient is that of the KL term."""
    return any("indexer" in name for name in names)


def kinds(params: Any) -> Any:
    """The tree of labels of a parameter tree."""
    return labels(V41_RULES)(params)


def is_vision(names: tuple[str, ...]) -> bool:
    """Whether a parameter is the image encoder's, but for its last norm: what may be frozen."""
    return names[:2] == ("images", "vision") and names[2:] != ("norm",)


def _map_vision(function: Callable[[jax.Array], jax.Array], tree: Any) -> Any:
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: function(leaf) if is_vision(path_names(path)) else leaf, tree
    )


def with_frozen_vision(params: Any) -> Any:
    """The parameters, those of the image encoder without a gradient."""
    return _map_vision(jax.lax.stop_gradient, params)


def without_vision(updates: Any) -> Any:
    """The updates, those of the image encoder zero: decay and momentum move nothing either."""
    return _map_vision(jnp.zeros_like, updates)


def _vision_mask(params: Any) -> Any:
    return jax.tree_util.tree_map_with_path(lambda path, _: is_vision(path_names(path)), params)


def schedule(settings: OptimizerSettings) -> optax.Schedule:
    """The learning rate as a function of the updates done so far."""
    return warmup_constant_cosine(
        settings.learning_rate,
        warmup_steps=settings.warmup_steps,
        decay_from=settings.decay_from,
        decay_until=settings.decay_until,
        final=settings.final_learning_rate,
    )


def clipped(params: Any) -> Any:
    """Mask of the parameters that the global-norm clip (and the logged norm) is about.

    The indexers stay out: their loss has its own scale, and a large KL gradient early in a run must
    not shrink the step of everything else.
    """
    return jax.tree_util.tree_map_with_path(
        lambda path, _: not is_indexer(path_names(path)), params
    )


def rules(name: str) -> tuple[Rule, ...]:
    """The path rules under `config.optimizer.name`, with labels of `v41_optimizer`."""
    result = []
    for rule in V41_RULES:
        if name in ("muon", "head_muon") and rule.label in ("table", "engram_table"):
            rule = Rule(rule.pattern, "vector")  # AdamW without decay
        if name == "muon" and rule.pattern.endswith("/wq_b"):
            rule = rule._replace(spec=_HEADS_JOINED)
        result.append(rule)
    return tuple(result)


def _adamw(settings: OptimizerSettings) -> optax.GradientTransformation:
    """Decay on matrices and norm weights, none on vectors and tables."""
    return optax.adamw(
        schedule(settings),
        b1=settings.beta1,
        b2=settings.beta2,
        eps=settings.eps,
        weight_decay=settings.weight_decay,
        mask=lambda params: jax.tree.map(lambda kind: kind in ("matrix", "norm"), kinds(params)),
    )


def build(settings: OptimizerSettings, params: Any = None) -> optax.GradientTransformation:
    """The transform that `settings.name` stands for, with the clip in front.

    Router biases stay as they are here: they have neither gradient nor decay (what moves them is
    `v41flash.nn.moe.update_router_bias`).

    Args:
        settings: `config.optimizer`.
        params: abstract parameters with shardings (`train.step.abstract_params`), by which Muon's
            matrices are spread over the devices; None: over one.
    """
    mesh = placed_at = None
    if params is not None:
        leaves = jax.tree.leaves(params)
        mesh = leaves[0].sharding.mesh
        specs = {
            name: leaf.sharding.spec for name, leaf in zip(leaf_names(params), leaves, strict=True)
        }
        placed_at = specs.__getitem__
    if settings.name == "adamw":
        transform = _adamw(settings)
    else:
        transform = v41_optimizer(
            schedule(settings),
            weight_decay=settings.weight_decay,
            muon_momentum=settings.muon_momentum,
            muon_rms=settings.update_rms,
            sinkhorn_beta=settings.sinkhorn_beta,
            sinkhorn_tau=settings.sinkhorn_tau,
            sinkhorn_gamma=settings.update_rms,
            engram_lr_factor=settings.engram_lr_factor,
            engram_capacity=settings.engram_capacity or None,
            adam_b1=settings.beta1,
            adam_b2=settings.beta2,
            adam_eps=settings.eps,
            mesh=mesh,
            placed_at=placed_at,
            rules=rules(settings.name),
        )
    if settings.vision_lr_factor != 1:
        slower = optax.masked(optax.scale(settings.vision_lr_factor), _vision_mask)
        transform = optax.chain(transform, slower)
    if not settings.clip_norm:
        return transform
    clip = optax.masked(optax.clip_by_global_norm(settings.clip_norm), clipped)
    return optax.chain(clip, transform)
