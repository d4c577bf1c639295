"""The optimizer that `config.optimizer` describes: AdamW with the groups of the V4.1 report.

What a parameter is follows from its path alone (`kind`), so the rules below hold for a scanned
stack of layers as for a single one.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import jax
import optax

from train.settings import OptimizerSettings
from v41flash.optim import warmup_constant_cosine

Kind = Literal["matrix", "norm", "vector", "table", "router_bias"]

# Names as the modules of v41flash.nn give them.
_VECTORS = ("bias", "base", "scale", "sink")
_TABLES = ("embed", "head", "table")
_ENGRAM_NORMS = ("q_weight", "k_weight")


def path_names(path: Iterable[Any]) -> tuple[str, ...]:
    """The keys of a `jax.tree_util` path over nested dicts."""
    return tuple(str(entry.key) for entry in path)


def is_indexer(names: tuple[str, ...]) -> bool:
    """Whether a parameter belongs to an indexer, whose only gradient is that of the KL term."""
    return any("indexer" in name for name in names)


def kind(names: tuple[str, ...]) -> Kind:
    """What the parameter at path `names` is.

    Returns:
        "router_bias" (moved by the load balancing rule, never by a gradient), "norm" (RMSNorm
        weights), "vector" (biases, mHC base and scale, sinks), "table" (embedding, head, Engram
        rows) or "matrix" (everything else).
    """
    last = names[-1]
    if "router" in names and last in ("bias", "bias_vl"):
        return "router_bias"
    if last in _VECTORS:
        return "vector"
    if last.endswith("norm") or last in _ENGRAM_NORMS:
        return "norm"
    if last in _TABLES:
        return "table"
    return "matrix"


def kinds(params: Any) -> Any:
    """The tree of kinds of a parameter tree."""
    return jax.tree_util.tree_map_with_path(lambda path, _: kind(path_names(path)), params)


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


def build(settings: OptimizerSettings) -> optax.GradientTransformation:
    """AdamW: decay on matrices and norm weights, none on vectors and tables; clip before it.

    Router biases stay as they are here: they have neither gradient nor decay (what moves them is
    `v41flash.nn.moe.update_router_bias`).
    """

    def decayed(params):
        return jax.tree.map(lambda name: name in ("matrix", "norm"), kinds(params))

    adamw = optax.adamw(
        schedule(settings),
        b1=settings.beta1,
        b2=settings.beta2,
        eps=settings.eps,
        weight_decay=settings.weight_decay,
        mask=decayed,
    )
    if not settings.clip_norm:
        return adamw
    return optax.chain(optax.masked(optax.clip_by_global_norm(settings.clip_norm), clipped), adamw)
