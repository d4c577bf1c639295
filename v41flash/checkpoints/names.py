"""Where each parameter of the model stands among the published tensor names.

Published weights are [out, in] per layer; ours keep head and group axes, lie [in, ..., out]
(`v41flash.layout`), and are stacked over the scanned layers of a group. `parameters` lists every
parameter with the tensors that it is made of; `to_params` builds a tree of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from v41flash import layout
from v41flash.config import ConfigError, LayerGroup, LayerSpec, ModelConfig, VisionConfig
from v41flash.layout import Layout

Read = Callable[[str], np.ndarray]

# Trees of parameters: the text model (`nn.ced.CED`) and the draft head (`nn.dspark.DSpark`).
MODEL, DRAFT = "params", "draft"


class Source(NamedTuple):
    """What one parameter of one layer is made of.

    Attributes:
        path: keys of the parameter below its layer.
        names: published tensors, in the order of `layout.stack`.
        layout: how the parameter lies in them.
    """

    path: tuple[str, ...]
    names: tuple[str, ...]
    layout: Layout

    def build(self, *tensors: np.ndarray) -> np.ndarray:
        """The parameter of the tensors `names`."""
        stacked = np.stack(tensors).reshape(*self.layout.stack, *tensors[0].shape)
        return self.layout.ours(stacked)


def _single(path: str, name: str, how: Layout) -> Source:
    return Source(tuple(path.split("/")), (name,), how)


def _attention_sources(config: ModelConfig, prefix: str) -> Iterator[Source]:
    c = config
    rank, d, heads, dim = c.q_lora_rank, c.hidden_size, c.num_attention_heads, c.head_dim
    groups, o_rank = c.o_groups, c.o_lora_rank
    layouts = {
        "wq_a.weight": layout.linear(rank, d),
        "q_norm.weight": layout.plain(rank),
        "wq_b.weight": layout.heads(heads, dim, rank),
        "wkv.weight": layout.linear(dim, d),
        "kv_norm.weight": layout.plain(dim),
        "wo_a.weight": layout.groups_in(groups, o_rank, heads // groups * dim),
        "wo_b.weight": layout.groups_out(groups, o_rank, d),
    }
    for name, how in layouts.items():
        yield _single(f"attn/{name.removesuffix('.weight')}", f"{prefix}attn.{name}", how)
    yield _single("attn/sink", f"{prefix}attn.attn_sink", layout.plain(heads))


def _selection_sources(config: ModelConfig, spec: LayerSpec, prefix: str) -> Iterator[Source]:
    d, dim, index_dim = config.hidden_size, config.head_dim, config.index_head_dim
    index_heads = config.index_n_heads
    layouts = {}
    if spec.mode == "full":
        layouts["compressor/wkv"] = layout.linear(dim, d)
        if spec.ratio > 1:
            layouts["compressor/wgate"] = layout.linear(dim, d)
        layouts["compressor/norm"] = layout.plain(dim)
        layouts["indexer/wk"] = layout.linear(index_dim, dim)
        layouts["indexer/k_norm"] = layout.plain(index_dim)
    if spec.mode in ("full", "reindex"):
        layouts["indexer/wq_b"] = layout.heads(index_heads, index_dim, config.q_lora_rank)
        layouts["indexer/weights_proj"] = layout.linear(index_heads, d)
    for path, how in layouts.items():
        yield _single(f"attn/{path}", f"{prefix}attn.{path.replace('/', '.')}.weight", how)


def _residual_sources(config: ModelConfig, prefix: str) -> Iterator[Source]:
    n, d = config.hc_mult, config.hidden_size
    coefficients = (2 + n) * n
    layouts = {
        "fn": layout.plain(coefficients, n * d),
        "base": layout.plain(coefficients),
        "scale": layout.plain(3),
    }
    for part in ("attn", "ffn"):
        for name, how in layouts.items():
            yield _single(f"hc_{part}/{name}", f"{prefix}hc_{part}_{name}", how)
        yield _single(f"hc_{part}/norm", f"{prefix}{part}_norm.weight", layout.plain(d))


def _expert_sources(config: ModelConfig, prefix: str, experts: int) -> Iterator[Source]:
    d, hidden = config.hidden_size, config.moe_intermediate_size
    gate, shared = f"{prefix}ffn.gate", f"{prefix}ffn.shared_experts"
    yield _single("ffn/router/weight", f"{gate}.weight", layout.linear(experts, d))
    for name in ("bias", "bias_vl") if config.vision is not None else ("bias",):
        yield _single(f"ffn/router/{name}", f"{gate}.{name}", layout.plain(experts))
    routed = [f"{prefix}ffn.experts.{e}" for e in range(experts)]
    pairs = tuple(f"{expert}.{name}.weight" for expert in routed for name in ("w1", "w3"))
    down = tuple(f"{expert}.w2.weight" for expert in routed)
    yield Source(("ffn", "w13"), pairs, layout.expert_pairs(experts, hidden, d))
    yield Source(("ffn", "w2"), down, layout.experts(experts, d, hidden))
    hidden *= config.n_shared_experts
    pairs = (f"{shared}.w1.weight", f"{shared}.w3.weight")
    yield Source(("ffn", "shared_w13"), pairs, layout.pair(hidden, d))
    yield _single("ffn/shared_w2", f"{shared}.w2.weight", layout.linear(d, hidden))


def _engram_sources(config: ModelConfig, site: int, prefix: str) -> Iterator[Source]:
    n, d, width = config.hc_mult, config.hidden_size, config.engram_head_dim
    if config.engram_row_multiple > 1:
        value, right = config.engram_row_multiple, "must be 1 where tables are the published ones"
        raise ConfigError("engram_row_multiple", value, right)
    table = layout.plain(config.engram_num_embeddings[site], width)
    wkv = layout.heads(n + 1, d, config.engram_rows_per_token * width)
    yield _single("engram/table", f"{prefix}engram.embed.weight", table)
    yield _single("engram/wkv", f"{prefix}engram.wkv.weight", wkv)
    for name in ("q_weight", "k_weight"):
        yield _single(f"engram/{name}", f"{prefix}engram.{name}", layout.plain(n, d))


def layer_sources(config: ModelConfig, spec: LayerSpec) -> Iterator[Source]:
    """Sources of every parameter of one layer."""
    prefix = f"layers.{spec.index}."
    yield from _residual_sources(config, prefix)
    yield from _attention_sources(config, prefix)
    yield from _selection_sources(config, spec, prefix)
    yield from _expert_sources(config, prefix, config.n_routed_experts)
    if spec.engram is not None:
        yield from _engram_sources(config, spec.engram, prefix)


def _top_sources(config: ModelConfig) -> Iterator[Source]:
    vocab, d = config.vocab_size, config.hidden_size
    yield _single("embed", "embed.weight", layout.plain(vocab, d))
    yield _single("head", "head.weight", layout.linear(vocab, d))
    yield _single("norm", "norm.weight", layout.plain(d))


def draft_sources(config: ModelConfig) -> Iterator[Source]:
    """Sources of every parameter of the draft head."""
    c, d, rank = config, config.hidden_size, config.dspark_markov_rank
    for block in range(c.num_nextn_predict_layers):
        prefix = f"mtp.{block}."
        parts = (
            _residual_sources(c, prefix),
            _attention_sources(c, prefix),
            _expert_sources(c, prefix, c.dspark_n_routed_experts),
        )
        for part in parts:
            for source in part:
                yield source._replace(path=(f"block_{block}", *source.path))
    if c.num_nextn_predict_layers:
        joined = layout.linear(d, len(c.dspark_target_layer_ids) * d)
        yield _single("main_proj", "mtp.0.main_proj.weight", joined)
        yield _single("main_norm", "mtp.0.main_norm.weight", layout.plain(d))
        last = f"mtp.{c.num_nextn_predict_layers - 1}."
        yield _single("norm", f"{last}norm.weight", layout.plain(d))
        table = layout.plain(c.vocab_size, rank)
        yield _single("markov_embed", f"{last}markov_head.embed.weight", table)
        head = layout.linear(c.vocab_size, rank)
        yield _single("markov_head", f"{last}markov_head.head.weight", head)
        confidence = layout.linear(1, d + rank)
        yield _single("confidence", f"{last}confidence_head.proj.weight", confidence)


def _vision_block_sources(vision: VisionConfig, block: int) -> Iterator[Source]:
    width, hidden, heads = vision.hidden_size, vision.intermediate_size, vision.num_attention_heads
    dim = width // heads
    layouts = {
        ("attn_norm", "norm1.weight"): layout.plain(width),
        ("mlp_norm", "norm2.weight"): layout.plain(width),
        ("wqkv", "attn.wqkv.weight"): Layout((3, heads, dim, width), (3, 0, 1, 2), rows=3),
        ("wqkv_bias", "attn.wqkv.bias"): Layout((3, heads, dim), (0, 1, 2), rows=3),
        ("wo", "attn.wo.weight"): Layout((width, heads, dim), (1, 2, 0)),
        ("wo_bias", "attn.wo.bias"): layout.plain(width),
        ("w13", "mlp.w1.weight"): layout.heads(2, hidden, width),
        ("w2", "mlp.w2.weight"): layout.linear(width, hidden),
    }
    for (path, name), how in layouts.items():
        yield _single(f"images/vision/blocks/{path}", f"vision.blocks.{block}.{name}", how)


def _image_sources(config: ModelConfig) -> Iterator[Source]:
    """The image encoder without its blocks, the aligner, the vectors that delimit an image."""
    vision, d = config.vision, config.hidden_size
    width, patches = vision.hidden_size, vision.downsample_ratio**2
    pixels = 3 * vision.patch_size**2
    layouts = {
        ("vision/patch_embed", "vision.patch_embed.proj.weight"): layout.linear(width, pixels),
        ("vision/patch_embed_bias", "vision.patch_embed.proj.bias"): layout.plain(width),
        ("vision/norm", "vision.norm.weight"): layout.plain(width),
        # Unfolded channel-major: [d, width * patches] -> [width, patches, d].
        ("aligner/w1", "aligner.w1.weight"): Layout((d, width, patches), (1, 2, 0)),
        ("aligner/w1_bias", "aligner.w1.bias"): layout.plain(d),
        ("aligner/w2", "aligner.w2.weight"): layout.linear(d, d),
        ("aligner/w2_bias", "aligner.w2.bias"): layout.plain(d),
    }
    for name in ("start", "newline", "end"):
        layouts[(name, f"image_{name}")] = layout.plain(d)
    for (path, name), how in layouts.items():
        yield _single(f"images/{path}", name, how)


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


class Parameter(NamedTuple):
    """A parameter of a tree, with all of its published tensors.

    Attributes:
        tree: MODEL or DRAFT.
        path: keys in the tree.
        lead: sizes of the axes that it is stacked over in front.
        sources: index on the leading axes -> source of that layer; all have one layout.
    """

    tree: str
    path: tuple[str, ...]
    lead: tuple[int, ...]
    sources: dict[tuple[int, ...], Source]

    @property
    def layout(self) -> Layout:
        """Of every layer."""
        return next(iter(self.sources.values())).layout

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole parameter."""
        return (*self.lead, *self.layout.shape)


def parameters(config: ModelConfig) -> Iterator[Parameter]:
    """Every parameter of every tree."""
    stacked: dict[tuple[str, ...], dict[tuple[int, ...], Source]] = {}
    for source in _top_sources(config):
        stacked[source.path] = {(): source}
    for spec in config.layers:
        keys, index = place(config, spec.index)
        for source in layer_sources(config, spec):
            stacked.setdefault((*keys, *source.path), {})[index] = source
    if config.vision is not None:
        for source in _image_sources(config):
            stacked[source.path] = {(): source}
        for block in range(config.vision.num_hidden_layers):
            for source in _vision_block_sources(config.vision, block):
                stacked.setdefault(source.path, {})[(block,)] = source
    for path, sources in stacked.items():
        lead = tuple(1 + max(axis) for axis in zip(*sources, strict=True))
        yield Parameter(MODEL, path, lead, sources)
    for source in draft_sources(config):
        yield Parameter(DRAFT, source.path, (), {(): source})


def insert(tree: dict[str, Any], path: tuple[str, ...], leaf: Any) -> None:
    """Puts a leaf into nested dicts."""
    for key in path[:-1]:
        tree = tree.setdefault(key, {})
    tree[path[-1]] = leaf


def to_params(config: ModelConfig, read: Read, tree: str = MODEL) -> dict[str, Any]:
    """Builds a parameter tree from published tensors.

    Args:
        config: the model.
        read: returns the tensor of a published name as a NumPy array (dequantised).
        tree: MODEL or DRAFT.

    Returns:
        Nested dict of arrays, dtypes as read.
    """
    params: dict[str, Any] = {}
    for parameter in parameters(config):
        if parameter.tree != tree:
            continue
        built = {i: s.build(*map(read, s.names)) for i, s in parameter.sources.items()}
        whole = np.empty(parameter.shape, next(iter(built.values())).dtype)
        for index, array in built.items():
            whole[index] = array
        insert(params, parameter.path, whole)
    return params
