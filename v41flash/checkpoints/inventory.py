"""Every tensor of the published checkpoint layout, from a configuration alone.

`weights` lists what the model multiplies with or looks up, under its published name; `inventory`
says how each lies in the files: experts in four bits with a scale per 32 input channels, linear
weights in FP8 with a scale per block, Engram rows in FP8 with a scale per 32 channels, the rest in
bfloat16 or float32. Without a `quantization_config` there are no scales. Standard library only.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import NamedTuple

from v41flash.config import LayerSpec, ModelConfig, VisionConfig

DTYPE_BYTES = {"F8_E4M3": 1, "F8_E8M0": 1, "I8": 1, "BF16": 2, "F32": 4}
# Input channels that share a scale in the rows of experts and of Engram tables.
ROW_BLOCK = 32
_PIXEL_CHANNELS = 3
_HC_SCALES = 3


class Tensor(NamedTuple):
    """A tensor of a file: safetensors dtype, and the shape as stored (two FP4 values a byte)."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def bytes(self) -> int:
        """Bytes of its data."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


class Weight(NamedTuple):
    """A parameter, or `copies` of it that differ in the number of the expert.

    Attributes:
        name: published name; "{}" stands for the expert.
        shape: [out, in] of a linear weight, before any packing.
        component: part of the model that it is counted under.
        kind: "matrix", "table", "norm", "vector" or "router_bias": what an optimizer asks.
        storage: "expert", "linear", "rows", "bf16" or "f32".
        copies: how many there are.
    """

    name: str
    shape: tuple[int, ...]
    component: str
    kind: str
    storage: str
    copies: int = 1

    @property
    def parameters(self) -> int:
        """Numbers in all copies, scales not counted."""
        return self.copies * math.prod(self.shape)


def _norm(name: str, width: int, component: str) -> Weight:
    return Weight(name, (width,), component, "norm", "bf16")


def attention_weights(config: ModelConfig, prefix: str) -> Iterator[Weight]:
    """The projections, norms and sinks that every layer has; `prefix` ends before "attn."."""
    c, component = config, "attention"
    heads_dim = c.num_attention_heads * c.head_dim
    shapes = {
        "wq_a": (c.q_lora_rank, c.hidden_size),
        "wq_b": (heads_dim, c.q_lora_rank),
        "wkv": (c.head_dim, c.hidden_size),
        "wo_a": (c.o_groups * c.o_lora_rank, heads_dim // c.o_groups),
        "wo_b": (c.hidden_size, c.o_groups * c.o_lora_rank),
    }
    for name, shape in shapes.items():
        yield Weight(f"{prefix}attn.{name}.weight", shape, component, "matrix", "linear")
    yield _norm(f"{prefix}attn.q_norm.weight", c.q_lora_rank, component)
    yield _norm(f"{prefix}attn.kv_norm.weight", c.head_dim, component)
    sinks = (c.num_attention_heads,)
    yield Weight(f"{prefix}attn.attn_sink", sinks, component, "vector", "f32")


def _selection_weights(config: ModelConfig, spec: LayerSpec, prefix: str) -> Iterator[Weight]:
    """Compressor and indexer of a Full layer, index queries of a Reindex layer."""
    c = config
    if spec.mode == "full":
        for name in ("wkv", "wgate") if spec.ratio > 1 else ("wkv",):
            full = f"{prefix}attn.compressor.{name}.weight"
            yield Weight(full, (c.head_dim, c.hidden_size), "compressors", "matrix", "bf16")
        yield _norm(f"{prefix}attn.compressor.norm.weight", c.head_dim, "compressors")
        wk = (c.index_head_dim, c.head_dim)
        yield Weight(f"{prefix}attn.indexer.wk.weight", wk, "index_keys", "matrix", "bf16")
        yield _norm(f"{prefix}attn.indexer.k_norm.weight", c.index_head_dim, "index_keys")
    if spec.mode in ("full", "reindex"):
        component = "index_queries"
        queries = (c.index_n_heads * c.index_head_dim, c.q_lora_rank)
        yield Weight(f"{prefix}attn.indexer.wq_b.weight", queries, component, "matrix", "linear")
        heads = (c.index_n_heads, c.hidden_size)
        yield Weight(
            f"{prefix}attn.indexer.weights_proj.weight", heads, component, "matrix", "bf16"
        )


def _residual_weights(config: ModelConfig, prefix: str) -> Iterator[Weight]:
    """mHC and norm of both sublayers."""
    n, d = config.hc_mult, config.hidden_size
    coefficients = (2 + n) * n
    for part in ("attn", "ffn"):
        yield _norm(f"{prefix}{part}_norm.weight", d, "norms")
        yield Weight(f"{prefix}hc_{part}_fn", (coefficients, n * d), "mhc", "matrix", "f32")
        yield Weight(f"{prefix}hc_{part}_base", (coefficients,), "mhc", "vector", "f32")
        yield Weight(f"{prefix}hc_{part}_scale", (_HC_SCALES,), "mhc", "vector", "f32")


def expert_weights(config: ModelConfig, prefix: str, experts: int) -> Iterator[Weight]:
    """Router, `experts` routed experts and the shared one; `prefix` ends before "ffn."."""
    d, hidden = config.hidden_size, config.moe_intermediate_size
    gate = f"{prefix}ffn.gate."
    yield Weight(f"{gate}weight", (experts, d), "gates", "matrix", "bf16")
    for name in ("bias", "bias_vl") if config.vision is not None else ("bias",):
        yield Weight(f"{gate}{name}", (experts,), "gates", "router_bias", "f32")
    shared = config.n_shared_experts * hidden
    for name in ("w1", "w2", "w3"):
        shape = (d, hidden) if name == "w2" else (hidden, d)
        routed = f"{prefix}ffn.experts.{{}}.{name}.weight"
        yield Weight(routed, shape, "routed_experts", "matrix", "expert", experts)
        shape = (d, shared) if name == "w2" else (shared, d)
        common = f"{prefix}ffn.shared_experts.{name}.weight"
        yield Weight(common, shape, "shared_experts", "matrix", "linear")


def _engram_weights(config: ModelConfig, site: int, prefix: str) -> Iterator[Weight]:
    n, d, width = config.hc_mult, config.hidden_size, config.engram_head_dim
    rows = (config.engram_num_embeddings[site], width)
    yield Weight(f"{prefix}engram.embed.weight", rows, "engram_tables", "table", "rows")
    component = "engram_projections"
    wkv = ((n + 1) * d, config.engram_rows_per_token * width)
    yield Weight(f"{prefix}engram.wkv.weight", wkv, component, "matrix", "linear")
    for name in ("q_weight", "k_weight"):
        yield Weight(f"{prefix}engram.{name}", (n, d), component, "norm", "bf16")


def layer_weights(config: ModelConfig, spec: LayerSpec) -> Iterator[Weight]:
    """Everything in one layer of the text model."""
    prefix = f"layers.{spec.index}."
    yield from attention_weights(config, prefix)
    yield from _selection_weights(config, spec, prefix)
    yield from _residual_weights(config, prefix)
    yield from expert_weights(config, prefix, config.n_routed_experts)
    if spec.engram is not None:
        yield from _engram_weights(config, spec.engram, prefix)


def text_weights(config: ModelConfig) -> Iterator[Weight]:
    """The text model: embedding, layers, final norm, head."""
    table = (config.vocab_size, config.hidden_size)
    yield Weight("embed.weight", table, "embedding", "table", "bf16")
    for spec in config.layers:
        yield from layer_weights(config, spec)
    yield _norm("norm.weight", config.hidden_size, "norms")
    yield Weight("head.weight", table, "head", "table", "bf16")


def draft_weights(config: ModelConfig) -> Iterator[Weight]:
    """The DSpark blocks: window layers with experts of their own, and their heads."""
    c, d, last = config, config.hidden_size, config.num_nextn_predict_layers - 1
    for block in range(c.num_nextn_predict_layers):
        prefix = f"mtp.{block}."
        if block == 0:
            joined = (d, len(c.dspark_target_layer_ids) * d)
            yield Weight(f"{prefix}main_proj.weight", joined, "draft", "matrix", "linear")
            yield _norm(f"{prefix}main_norm.weight", d, "draft")
        yield from attention_weights(c, prefix)
        yield from _residual_weights(c, prefix)
        yield from expert_weights(c, prefix, c.dspark_n_routed_experts)
        if block == last:
            rank = c.dspark_markov_rank
            yield _norm(f"{prefix}norm.weight", d, "draft")
            for name, kind in (("embed", "table"), ("head", "matrix")):
                markov = f"{prefix}markov_head.{name}.weight"
                yield Weight(markov, (c.vocab_size, rank), "draft", kind, "bf16")
            confidence = f"{prefix}confidence_head.proj.weight"
            yield Weight(confidence, (1, d + rank), "draft", "matrix", "bf16")


def vision_weights(vision: VisionConfig, hidden_size: int) -> Iterator[Weight]:
    """Image encoder, aligner to `hidden_size`, and the vectors that delimit an image."""

    def linear(name: str, out: int, inner: int, component: str, bias: bool) -> Iterator[Weight]:
        yield Weight(f"{name}.weight", (out, inner), component, "matrix", "bf16")
        if bias:
            yield Weight(f"{name}.bias", (out,), component, "vector", "bf16")

    width, hidden = vision.hidden_size, vision.intermediate_size
    pixels = _PIXEL_CHANNELS * vision.patch_size**2
    yield from linear("vision.patch_embed.proj", width, pixels, "vision", True)
    for block in range(vision.num_hidden_layers):
        prefix = f"vision.blocks.{block}."
        for name in ("norm1", "norm2"):
            yield _norm(f"{prefix}{name}.weight", width, "vision")
        yield from linear(f"{prefix}attn.wqkv", 3 * width, width, "vision", True)
        yield from linear(f"{prefix}attn.wo", width, width, "vision", True)
        yield from linear(f"{prefix}mlp.w1", 2 * hidden, width, "vision", False)
        yield from linear(f"{prefix}mlp.w2", width, hidden, "vision", False)
    yield _norm("vision.norm.weight", width, "vision")
    unfolded = vision.downsample_ratio**2 * width
    yield from linear("aligner.w1", hidden_size, unfolded, "aligner", True)
    yield from linear("aligner.w2", hidden_size, hidden_size, "aligner", True)
    for name in ("start", "end", "newline"):
        yield Weight(f"image_{name}", (hidden_size,), "image_vectors", "vector", "bf16")


def weights(config: ModelConfig) -> Iterator[Weight]:
    """Every parameter of a checkpoint: text model, draft blocks, vision."""
    yield from text_weights(config)
    yield from draft_weights(config)
    if config.vision is not None:
        yield from vision_weights(config.vision, config.hidden_size)


@dataclasses.dataclass(frozen=True)
class Storage:
    """How a weight is stored: element bits (0: as it is) and the block that shares a scale."""

    bits: int
    block: tuple[int, int]

    @classmethod
    def of(cls, config: ModelConfig, weight: Weight) -> Storage:
        """Of a weight of a model."""
        quantization, storage = config.quantization_config, weight.storage
        if quantization is None or storage in ("bf16", "f32"):
            return cls(0, (1, 1))
        if storage == "expert" and quantization.expert_dtype == "fp4":
            return cls(4, (1, ROW_BLOCK))
        if storage == "rows":
            return cls(8, (1, ROW_BLOCK))
        return cls(8, quantization.weight_block_size)


def scale_name(weight: str) -> str:
    """The tensor of a quantised weight's scales."""
    return weight.removesuffix("weight") + "scale"


def stored(config: ModelConfig, weight: Weight) -> list[Tensor]:
    """A weight's tensors: itself, and its scales where it is quantised; "{}" still in the name."""
    name, shape, how = weight.name, weight.shape, Storage.of(config, weight)
    if not how.bits:
        as_is = config.dtype == "float32" and config.quantization_config is None
        return [Tensor(name, shape, "F32" if weight.storage == "f32" or as_is else "BF16")]
    out, inner = shape
    elements = Tensor(name, (out, inner * how.bits // 8), {8: "F8_E4M3", 4: "I8"}[how.bits])
    blocks = (-(-out // how.block[0]), -(-inner // how.block[1]))
    return [elements, Tensor(scale_name(name), blocks, "F8_E8M0")]


def inventory(config: ModelConfig) -> Iterator[Tensor]:
    """Every tensor of the published layout; `Tensor.bytes` adds up to the index's `total_size`."""
    for weight in weights(config):
        for tensor in stored(config, weight):
            if "{}" not in tensor.name:
                yield tensor
                continue
            for expert in range(weight.copies):
                yield tensor._replace(name=tensor.name.format(expert))


def by_name(config: ModelConfig) -> dict[str, Weight]:
    """Every parameter under its published name, each expert's as one of its own."""
    return {
        weight.name.format(number): weight._replace(name=weight.name.format(number), copies=1)
        for weight in weights(config)
        for number in range(weight.copies)
    }


def totals(config: ModelConfig) -> tuple[int, int]:
    """(bytes, tensors) of the whole checkpoint, without listing every expert."""
    size = count = 0
    for weight in weights(config):
        for tensor in stored(config, weight):
            size += weight.copies * tensor.bytes
            count += weight.copies
    return size, count
