"""Recorded values of a folder in the published storage, beyond those of its text model in float32.

* what its weights are, dequantised;
* the draft head, in float32;
* the published engine's own run, in bfloat16 with rounded activations, sublayer by sublayer: whole
  runs of a tiny random model drift apart at the first decision that falls the other way.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.v41flash.nn.samples import NO_ROUNDING, QUICK_COMPILE
from v41flash.checkpoints import leaves, names
from v41flash.checkpoints.published import Published
from v41flash.config import ModelConfig
from v41flash.kernels import Kernels
from v41flash.nn.context import make_context
from v41flash.nn.csa2 import CSA2
from v41flash.nn.dspark import DSpark, target_hidden
from v41flash.nn.moe import MoE

# Of the recorded sums, relative to the sum of magnitudes: float64 in another order.
_SUM_TOLERANCE = 1e-12
# Sublayers of the published engine: a row is equal where it differs by no more than bfloat16
# rounds, and few rows may have a selection that fell the other way.
_ROW_TOLERANCE = 2**-7
_UNEQUAL_ROWS = 0.05

Result = tuple[str, int, float, float, str]


def statistics(values: np.ndarray) -> np.ndarray:
    """Recorded of each weight: sum, sum of magnitudes, a weighted sum, first and last three."""
    x = values.astype(np.float64).reshape(-1)
    weighted = np.sum(x * (np.arange(x.size) % 11 - 5))
    return np.array([x.sum(), np.abs(x).sum(), weighted, *x[:3], *x[-3:]])


def check_weights(published: Published, recorded: pathlib.Path) -> tuple[int, float, float, str]:
    """Compares every weight, dequantised, with the statistics in `dequant_check.json`.

    Returns:
        (weights compared, worst error, its ratio to the tolerance, name of that weight).

    Raises:
        ValueError: a weight is recorded that the folder does not have.
    """
    worst = (0.0, 0.0, "")
    expected = json.loads(recorded.read_text())
    for name, facts in expected.items():
        if name not in published:
            raise ValueError(f"{recorded}: holds {name!r}, which the folder does not have")
        values = published.values(name)
        ours, theirs = statistics(values), np.asarray(facts["stats"])
        allowed = _SUM_TOLERANCE * np.array([1, 1, 5, 0, 0, 0, 0, 0, 0]) * theirs[1]
        error = np.abs(ours - theirs)
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = np.where(error == 0, 0, error / allowed).max()
        if list(values.shape) != facts["shape"] or np.isnan(ratio):
            ratio = np.inf
        if ratio >= worst[1]:
            worst = (float(error.max()), float(ratio), name)
    return len(expected), *worst


def packed_params(published: Published, tree: str = names.MODEL) -> dict[str, Any]:
    """The parameters of a tree as they are in the files."""
    params: dict[str, Any] = {}
    for leaf in leaves.leaves(published, leaves.PACKED):
        if leaf.path[0] == tree:
            whole = tuple(slice(None) for _ in leaf.shape)
            names.insert(params, leaf.path[1:], jnp.asarray(leaf.read(whole)))
    return params


# -- The draft head -------------------------------------------------------------------------------


def draft_hidden(published: Published, streams: Callable[[int], np.ndarray]) -> np.ndarray:
    """What the head sees of a run whose layers have these streams [T, n, d] before attention."""
    layers = published.config.dspark_target_layer_ids
    return np.asarray(target_hidden([jnp.asarray(streams(layer))[None] for layer in layers])[0])


def draft_values(
    published: Published, tokens: np.ndarray, hidden: np.ndarray
) -> Callable[[str], np.ndarray]:
    """Our value of a `spec.*` array; KeyError where there is none.

    Args:
        published: the folder.
        tokens: of the recorded run.
        hidden: of `draft_hidden`, in float32.
    """
    config = dataclasses.replace(published.config, dtype="float32", **NO_ROUNDING)
    model = DSpark(config)

    def read(name: str) -> np.ndarray:
        return published.values(name).astype(np.float32)

    params = {"params": names.to_params(config, read, names.DRAFT)}
    positions = jnp.arange(len(tokens))[None]
    rows = jax.jit(
        lambda hidden: model.apply(params, hidden, positions, method="context_rows"),
        compiler_options=QUICK_COMPILE,
    )(hidden[None])
    embed, head = read("embed.weight"), read("head.weight").T

    @functools.partial(jax.jit, compiler_options=QUICK_COMPILE)
    def step(position: jax.Array, past: Any, count: jax.Array) -> Any:
        token = jnp.asarray(tokens)[position][None]
        return model.apply(params, token, position[None], past, count[None], embed, head)

    @functools.cache
    def draft(prefix: int) -> Any:
        seen, size = prefix + 1, config.sliding_window
        count = min(seen, size)
        past = tuple(
            jnp.pad(row[:, seen - count : seen], ((0, 0), (size - count, 0), (0, 0)))
            for row in rows
        )
        return jax.device_get(step(jnp.int32(seen), past, jnp.int32(count)))

    def value(key: str) -> np.ndarray:
        if key == "main_hidden":
            return hidden
        place, _, name = key.partition(".")
        made = draft(int(place[1:]))
        if name == "draft_ids":
            return np.concatenate([tokens[int(place[1:]) + 1 :][:1], made.tokens[0]])
        if name == "argmax_gap":
            ordered = np.sort(made.logits[0], axis=-1)
            return ordered[:, -1] - ordered[:, -2]
        return {"logits": made.logits, "confidence": made.confidence}[name][0]

    return value


# -- The published engine's run -------------------------------------------------------------------


def check_engine(
    published: Published, arrays: Mapping[str, np.ndarray], length: int
) -> Iterator[Result]:
    """Feeds the recorded inputs of every sublayer to packed weights, and compares the outputs.

    Yields:
        (family, arrays, share of unequal rows, its ratio to what is allowed, worst array).
    """
    config = dataclasses.replace(
        published.config, weight_form=leaves.PACKED, activation_format="fp8"
    )
    unequal: dict[str, dict[str, float]] = defaultdict(dict)
    for key, ours in _sublayers(config, packed_params(published), arrays, length):
        theirs = arrays[key]
        if theirs.dtype.kind in "bi":
            same = (ours == theirs).all(-1)
        else:
            error = np.linalg.norm(ours - theirs, axis=-1)
            same = error <= _ROW_TOLERANCE * np.linalg.norm(theirs, axis=-1)
        unequal[key[4:]][key] = 1 - same.mean()
    for family, shares in unequal.items():
        where = max(shares, key=shares.get)
        yield family, len(shares), shares[where], shares[where] / _UNEQUAL_ROWS, where


def _sublayers(
    config: ModelConfig, params: Any, arrays: Mapping[str, np.ndarray], length: int
) -> Iterator[tuple[str, np.ndarray]]:
    """(key, our value) of what is recorded of each layer's sublayers."""
    # A multiple of 8, as every row of documents is.
    padded = -(-length // 8) * 8
    row = jnp.arange(padded)[None]
    context = make_context(config, row, (row < length).astype(jnp.int32), None)

    def given(key: str) -> jax.Array:
        x = np.pad(arrays[key], ((0, padded - length), (0, 0)))
        return jnp.asarray(x, jnp.bfloat16)[None]

    jit = functools.partial(jax.jit, compiler_options=QUICK_COMPILE)
    experts = MoE(config, Kernels())
    run_experts = jit(
        lambda params, x: experts.apply({"params": params}, x, context, mutable=["intermediates"])
    )
    shared = None
    for spec in config.layers:
        prefix = f"L{spec.index:02d}."
        keys, index = names.place(config, spec.index)
        own = jax.tree.map(lambda leaf: leaf[index], params[keys[0]][keys[1]])  # noqa: B023
        attention = CSA2(config, spec, Kernels())
        run_attention = jit(
            lambda params, x, shared: attention.apply({"params": params}, x, shared, context)  # noqa: B023
        )
        result = run_attention(own["attn"], given(f"{prefix}attn.in"), shared)
        yield f"{prefix}attn.out", np.asarray(result.out[0, :length], np.float32)
        shared = shared if spec.mode == "window" else result.shared
        if spec.mode in ("full", "reindex"):
            key = f"{prefix}idx.topk_mask"
            yield key, _mask(np.asarray(shared.indices[0, :length]), arrays[key].shape)
        (out, _), kept = run_experts(own["ffn"], given(f"{prefix}ffn.in"))
        yield f"{prefix}ffn.out", np.asarray(out[0, :length], np.float32)
        chosen = np.asarray(kept["intermediates"]["router"]["topk_idx"][0][0, :length])
        yield f"{prefix}ffn.topk_idx", np.sort(chosen, axis=-1)


def _mask(indices: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    mask = np.zeros((shape[0], shape[1] + 1), bool)
    np.put_along_axis(mask, np.where(indices < 0, shape[1], indices), True, axis=1)
    return mask[:, :-1]
