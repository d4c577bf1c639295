"""Where each parameter of the model stands among the published tensor names.

Published weights are [out, in] per layer; ours keep head and group axes, lie [in, ..., out], and
are stacked over the scanned layers of a group. `to_params` builds the parameter tree from a
function that returns published tensors by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from v41flash.config import LayerGroup, LayerSpec, ModelConfig

Tensor = np.ndarray
Read = Callable[[str], Tensor]


class Source(NamedTuple):
    """How one parameter of one layer is made.

    Attributes:
        path: keys of the parameter below its layer.
        names: published tensors that it is made of.
        build: from those tensors, in order, to the parameter.
    """

    path: tuple[str, ...]
    names: tuple[str, ...]
    build: Callable[..., Tensor]


def _same(x: Tensor) -> Tensor:
    return x


def _transposed(x: Tensor) -> Tensor:
    return x.T


def _heads(heads: int) -> Callable[[Tensor], Tensor]:
    """[heads*dim, in] -> [in, heads, dim]."""
    return lambda x: x.reshape(heads, -1, x.shape[-1]).transpose(2, 0, 1)


def _groups_in(groups: int) -> Callable[[Tensor], Tensor]:
    """[groups*out, in] -> [groups, in, out]."""
    return lambda x: x.reshape(groups, -1, x.shape[-1]).transpose(0, 2, 1)


def _groups_out(groups: int) -> Callable[[Tensor], Tensor]:
    """[out, groups*in] -> [groups, in, out]."""
    return lambda x: x.T.reshape(groups, -1, x.shape[0])


def _fused(*pairs: Tensor) -> Tensor:
    """w1, w3 of one expert, each [hidden, d] -> [d, 2, hidden]."""
    return np.stack([w.T for w in pairs], axis=1)


def _expert_stack(build: Callable[..., Tensor], each: int) -> Callable[..., Tensor]:
    def stacked(*tensors: Tensor) -> Tensor:
        parts = [tensors[i : i + each] for i in range(0, len(tensors), each)]
        return np.stack([build(*part) for part in parts])

    return stacked


def layer_sources(config: ModelConfig, spec: LayerSpec) -> Iterator[Source]:
    """Sources of every parameter of one layer."""
    prefix = f"layers.{spec.index}."

    def source(path: str, name: str, build: Callable[..., Tensor] = _same) -> Source:
        return Source(tuple(path.split("/")), (prefix + name,), build)

    for part in ("attn", "ffn"):
        for name in ("fn", "base", "scale"):
            yield source(f"hc_{part}/{name}", f"hc_{part}_{name}")
        yield source(f"hc_{part}/norm", f"{part}_norm.weight")

    groups = config.o_groups
    yield source("attn/wq_a", "attn.wq_a.weight", _transposed)
    yield source("attn/q_norm", "attn.q_norm.weight")
    yield source("attn/wq_b", "attn.wq_b.weight", _heads(config.num_attention_heads))
    yield source("attn/wkv", "attn.wkv.weight", _transposed)
    yield source("attn/kv_norm", "attn.kv_norm.weight")
    yield source("attn/sink", "attn.attn_sink")
    yield source("attn/wo_a", "attn.wo_a.weight", _groups_in(groups))
    yield source("attn/wo_b", "attn.wo_b.weight", _groups_out(groups))
    if spec.mode == "full":
        yield source("attn/compressor/wkv", "attn.compressor.wkv.weight", _transposed)
        if spec.ratio > 1:
            yield source("attn/compressor/wgate", "attn.compressor.wgate.weight", _transposed)
        yield source("attn/compressor/norm", "attn.compressor.norm.weight")
        yield source("attn/indexer/wk", "attn.indexer.wk.weight", _transposed)
        yield source("attn/indexer/k_norm", "attn.indexer.k_norm.weight")
    if spec.mode in ("full", "reindex"):
        yield source("attn/indexer/wq_b", "attn.indexer.wq_b.weight", _heads(config.index_n_heads))
        yield source("attn/indexer/weights_proj", "attn.indexer.weights_proj.weight", _transposed)

    yield source("ffn/router/weight", "ffn.gate.weight", _transposed)
    yield source("ffn/router/bias", "ffn.gate.bias")
    if config.vision is not None:
        yield source("ffn/router/bias_vl", "ffn.gate.bias_vl")
    experts = [f"{prefix}ffn.experts.{e}" for e in range(config.n_routed_experts)]
    up = tuple(f"{e}.{w}.weight" for e in experts for w in ("w1", "w3"))
    down = tuple(f"{e}.w2.weight" for e in experts)
    yield Source(("ffn", "w13"), up, _expert_stack(_fused, 2))
    yield Source(("ffn", "w2"), down, _expert_stack(_transposed, 1))
    shared = f"{prefix}ffn.shared_experts"
    yield Source(("ffn", "shared_w13"), (f"{shared}.w1.weight", f"{shared}.w3.weight"), _fused)
    yield Source(("ffn", "shared_w2"), (f"{shared}.w2.weight",), _transposed)

    if spec.engram is not None:
        yield source("engram/table", "engram.embed.weight")
        yield source("engram/wkv", "engram.wkv.weight", _heads(config.hc_mult + 1))
        yield source("engram/q_weight", "engram.q_weight")
        yield source("engram/k_weight", "engram.k_weight")


class Place(NamedTuple):
    """Where a layer lies in the parameter tree: keys, and its index on the stacked leading axes."""

    keys: tuple[str, str]
    index: tuple[int, ...]


def place(config: ModelConfig, layer: int) -> Place:
    """The place of layer number `layer`."""
    for group in config.groups:
        if layer < group.start + group.num_layers:
            return _place_in(group, layer - group.start)
    raise ValueError(f"layer {layer}: the model has {config.num_hidden_layers}")


def _place_in(group: LayerGroup, offset: int) -> Place:
    repeat, inside = divmod(offset, 1 + group.reuse)
    index = (repeat,) if group.repeats > 1 else ()
    if inside == 0:
        return Place((group.name, "first"), index)
    return Place((group.name, "reuse"), (*index, inside - 1))


def _stack(parts: dict[tuple[int, ...], Tensor]) -> Tensor:
    """{index on leading axes: array} -> one array with those axes."""
    if () in parts:
        return parts[()]
    size = 1 + max(index[0] for index in parts)
    return np.stack(
        [_stack({i[1:]: x for i, x in parts.items() if i[0] == row}) for row in range(size)]
    )


def to_params(config: ModelConfig, read: Read) -> dict[str, Any]:
    """Builds the parameter tree of `v41flash.nn.ced.CED` from published tensors.

    Args:
        config: the model.
        read: returns the tensor of a published name as a NumPy array (dequantised).

    Returns:
        Nested dict of arrays, dtypes as read.
    """
    parts: dict[tuple[str, ...], dict[tuple[int, ...], Tensor]] = {}
    for spec in config.layers:
        keys, index = place(config, spec.index)
        for path, names, build in layer_sources(config, spec):
            parts.setdefault((*keys, *path), {})[index] = build(*map(read, names))
    params: dict[str, Any] = {
        "embed": read("embed.weight"),
        "head": read("head.weight").T,
        "norm": read("norm.weight"),
    }
    for path, stacked in parts.items():
        node = params
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = _stack(stacked)
    return params
