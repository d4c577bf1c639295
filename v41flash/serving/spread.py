"""Steps of serving on a mesh: every device has sequences of its own.

What belongs to a sequence (its pages, windows, the tokens of its incomplete groups) lies on one
device and never travels. Experts and the rows of Engram tables are split over all devices of the
`expert` axis, and tokens and rows are exchanged as in training; all other weights are on every
device. Page numbers count within a device's own pool.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.layout import Format, Layout
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from v41flash import sharding
from v41flash.serving import forward, prefill
from v41flash.serving.forward import Model, Tail
from v41flash.serving.state import State, commit
from v41flash.serving.weights import Weights

AXIS = "expert"
_SPLIT = PartitionSpec(AXIS)
_EXPERTS = ("w13", "w2", "w13_scale", "w2_scale")


def decode_step(
    model: Model, weights: Weights, state: State, tokens: jax.Array
) -> tuple[State, jax.Array]:
    """One token of every sequence.

    Args:
        model: the model.
        weights: of it.
        state: of B sequences.
        tokens: int32 [B], the newest of each.

    Returns:
        (state, the likeliest next tokens int32 [B]).
    """
    new = jnp.ones_like(tokens)
    step = forward.all_layers(model, weights, state, tokens[:, None], new)
    state = commit(weights, state, step.pending, new)
    logits = forward.logits(weights, step.hidden[:, 0])
    return state, jnp.argmax(logits, axis=-1).astype(jnp.int32)


def prefill_step(
    model: Model, weights: Weights, state: State, tail: Tail, tokens: jax.Array
) -> tuple[State, Tail]:
    """The encoder over the next tokens int32 [B, T] of every sequence, see `prefill`."""
    new = jnp.full(tokens.shape[0], tokens.shape[1], jnp.int32)
    tail, state = prefill.encoder_chunk(model, weights, state, tail, tokens, new)
    return state, tail


def weight_specs(weights: Weights) -> Weights:
    """Where weights lie: a PartitionSpec for each array."""

    def spec(path: Any, leaf: Any) -> PartitionSpec:
        del leaf
        names = [entry.key for entry in path if isinstance(entry, jax.tree_util.DictKey)]
        expert = names[:1] == ["ffn"] and names[-1] in _EXPERTS
        return _SPLIT if expert or names == ["engram", "table"] else PartitionSpec()

    return jax.tree_util.tree_map_with_path(spec, weights)


def state_specs(state: Any) -> Any:
    """Where what belongs to sequences lies, likewise; of a `State`, a `Tail` or plain arrays."""

    def spec(path: Any, leaf: Any) -> PartitionSpec:
        # Window rows are [layers, sequences, ...].
        layered = leaf.ndim == 4 and jax.tree_util.keystr(path).endswith("coder.rows")
        return PartitionSpec(None, AXIS) if layered else _SPLIT

    return jax.tree_util.tree_map_with_path(spec, state)


def place(mesh: Mesh, specs: Any) -> Any:
    """Shardings of specs."""
    is_spec = lambda leaf: isinstance(leaf, PartitionSpec)  # noqa: E731
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=is_spec)


def on_mesh(function: Callable[..., Any], model: Model, mesh: Mesh, *arguments: Any) -> Any:
    """Jits a step for a mesh; the state that goes in is given up.

    Args:
        function: `decode_step` or `prefill_step`.
        model: the model.
        mesh: whose `expert` axis has all devices.
        *arguments: weights, state and the rest as the step takes them; shapes will do. On TPUs they
            have to lie as `placed_on_tpus` says.

    Returns:
        The jitted function of `arguments`.
    """
    weights, state, *rest = arguments
    specs = (weight_specs(weights), *map(state_specs, (state, *rest)))
    # Both steps return the state, and what replaces their next argument.
    results = specs[1:3]

    def local(*arguments: Any) -> Any:
        with sharding.inside({"experts": (AXIS,), "table_rows": (AXIS,)}):
            return function(model, *arguments)

    run = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=results, check_vma=False)
    layouts = {}
    if mesh.devices.flat[0].platform == "tpu":
        inputs = tuple(placed_on_tpus(mesh, *pair) for pair in zip(specs, arguments, strict=True))
        layouts = dict(in_shardings=inputs, out_shardings=inputs[1:3])
    return jax.jit(run, donate_argnums=1, **layouts)


def placed_on_tpus(mesh: Mesh, specs: Any, tree: Any) -> Any:
    """How arguments of a step lie on TPUs: shardings, and packed rows one after the other.

    A compiler that may choose puts the rows of a table beside each other, lays every table out anew
    before it reads one, and a cache once more when it has added one.
    """

    def one(sharding: NamedSharding, leaf: Any) -> Any:
        # Pages of a cache [pages, tokens, bytes], and Engram tables [rows, bytes].
        rows = leaf.ndim == 3 if isinstance(tree, State | Tail) else leaf.ndim == 2
        packed = rows and leaf.dtype == jnp.uint8 and sharding.spec == _SPLIT
        return Format(Layout(tuple(range(leaf.ndim))), sharding) if packed else sharding

    return jax.tree.map(one, place(mesh, specs), tree)
