"""Configurations, random weights and packed rows that the model's tests share."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np

from pallas_kernels.packed_rows import document_starts
from v41flash import presets
from v41flash.checkpoints import inventory, names
from v41flash.config import ModelConfig, VisionConfig
from v41flash.nn import ced
from v41flash.text.engram_hash import EngramHasher

# Halves the time that XLA takes to compile a model for the CPU; the result runs more slowly.
QUICK_COMPILE = {
    "xla_backend_optimization_level": "0",
    "xla_llvm_disable_expensive_passes": "True",
}
VISION = VisionConfig(
    num_hidden_layers=1,
    hidden_size=16,
    num_attention_heads=2,
    intermediate_size=16,
    patch_size=14,
    rope_theta=10_000.0,
    downsample_ratio=3,
    max_image_tokens=16,
    min_pixels=1,
)
NO_ROUNDING = {"main_kv_format": "none", "window_kv_format": "none", "index_format": "none"}


def scanned(**overrides) -> ModelConfig:
    """15 layers in which every kind of unit comes twice in a row, with Reuse layers."""
    return presets.tiny(
        num_hidden_layers=15,
        compress_ratios=(0,) + (2,) * 6 + (1,) * 8,
        kv_source_layer_ids=(1, 4, 7),
        index_source_layer_ids=(1, 4, 7, 9, 12),
        candidate_source_layer_id=7,
        engram_layer_ids=(0,),
        engram_num_embeddings=(304,),
        **overrides,
    )


def five_layers(**overrides) -> ModelConfig:
    """One unit of every kind: window (with Engram) | Full Reuse (m=2) | Full (m=1) | Reindex."""
    return presets.tiny(
        num_hidden_layers=5,
        compress_ratios=(0, 2, 2, 1, 1),
        kv_source_layer_ids=(1, 3),
        index_source_layer_ids=(1, 3, 4),
        candidate_source_layer_id=3,
        engram_layer_ids=(0,),
        engram_num_embeddings=(304,),
        **overrides,
    )


def three_layers(**overrides) -> ModelConfig:
    """Full (m=2) | Full (m=1, with Engram and pool) Reindex: an encoder and a decoder, no more."""
    return presets.tiny(
        num_hidden_layers=3,
        compress_ratios=(2, 1, 1),
        kv_source_layer_ids=(0, 1),
        index_source_layer_ids=(0, 1, 2),
        candidate_source_layer_id=1,
        engram_layer_ids=(1,),
        engram_num_embeddings=(304,),
        **overrides,
    )


def two_layers(**overrides) -> ModelConfig:
    """Full (m=2, with Engram and pool) | Reindex: every kind of parameter, little to compile."""
    return presets.tiny(
        num_hidden_layers=2,
        compress_ratios=(2, 2),
        kv_source_layer_ids=(0,),
        index_source_layer_ids=(0, 1),
        candidate_source_layer_id=0,
        engram_layer_ids=(0,),
        engram_num_embeddings=(304,),
        **overrides,
    )


def weight_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Published tensor name -> [out, in] shape of every tensor but the draft head's."""
    c, d = config, config.hidden_size
    wide, index_wide = c.num_attention_heads * c.head_dim, c.index_n_heads * c.index_head_dim
    n, hidden = c.hc_mult, c.moe_intermediate_size
    shapes = {"embed": (c.vocab_size, d), "head": (c.vocab_size, d), "norm": (d,)}
    for spec in c.layers:
        layer = f"layers.{spec.index}."
        own = {
            "attn_norm": (d,),
            "ffn_norm": (d,),
            "attn.wq_a": (c.q_lora_rank, d),
            "attn.q_norm": (c.q_lora_rank,),
            "attn.wq_b": (wide, c.q_lora_rank),
            "attn.wkv": (c.head_dim, d),
            "attn.kv_norm": (c.head_dim,),
            "attn.wo_a": (c.o_groups * c.o_lora_rank, wide // c.o_groups),
            "attn.wo_b": (d, c.o_groups * c.o_lora_rank),
            "ffn.gate": (c.n_routed_experts, d),
        }
        if spec.mode == "full":
            own["attn.compressor.wkv"] = (c.head_dim, d)
            if spec.ratio > 1:
                own["attn.compressor.wgate"] = (c.head_dim, d)
            own["attn.compressor.norm"] = (c.head_dim,)
            own["attn.indexer.wk"] = (c.index_head_dim, c.head_dim)
            own["attn.indexer.k_norm"] = (c.index_head_dim,)
        if spec.mode in ("full", "reindex"):
            own["attn.indexer.wq_b"] = (index_wide, c.q_lora_rank)
            own["attn.indexer.weights_proj"] = (c.index_n_heads, d)
        experts = [f"ffn.experts.{e}" for e in range(c.n_routed_experts)]
        for expert in (*experts, "ffn.shared_experts"):
            own |= {f"{expert}.{w}": (hidden, d) for w in ("w1", "w3")}
            own[f"{expert}.w2"] = (d, hidden)
        if spec.engram is not None:
            table = (c.engram_num_embeddings[spec.engram], c.engram_head_dim)
            own["engram.embed"] = table
            own["engram.wkv"] = ((n + 1) * d, c.engram_rows_per_token * c.engram_head_dim)
        shapes |= {layer + name: shape for name, shape in own.items()}
    shapes = {f"{name}.weight": shape for name, shape in shapes.items()}
    for spec in c.layers:
        layer = f"layers.{spec.index}."
        shapes[f"{layer}attn.attn_sink"] = (c.num_attention_heads,)
        for name in ("bias", "bias_vl")[: 2 if c.vision else 1]:
            shapes[f"{layer}ffn.gate.{name}"] = (c.n_routed_experts,)
        for part in ("attn", "ffn"):
            shapes[f"{layer}hc_{part}_fn"] = ((2 + n) * n, n * d)
            shapes[f"{layer}hc_{part}_base"] = ((2 + n) * n,)
            shapes[f"{layer}hc_{part}_scale"] = (3,)
        if spec.engram is not None:
            shapes |= {f"{layer}engram.{name}": (n, d) for name in ("q_weight", "k_weight")}
    if c.vision is not None:
        images = inventory.vision_weights(c.vision, d)
        shapes |= {weight.name: weight.shape for weight in images}
    return shapes


def random_weights(config: ModelConfig, seed: int = 0) -> dict[str, np.ndarray]:
    """float32 tensors under their published names, at scales that keep every mechanism busy."""
    rng = np.random.default_rng(seed)
    weights = {}
    for name, shape in weight_shapes(config).items():
        x = rng.normal(size=shape)
        if name.endswith(("norm.weight", "_scale", "q_weight", "k_weight")):
            x = 1 + 0.1 * x
        elif name.endswith(("_fn", "gate.bias", "gate.bias_vl")):
            x = 0.05 * x
        elif name.endswith("_base"):
            x = 0.5 * x
        elif len(shape) == 2 and not name.endswith("embed.weight"):
            x = x / np.sqrt(shape[1])
        weights[name] = x.astype(np.float32)
    return weights


def params_of(config: ModelConfig, weights: dict[str, np.ndarray]):
    """The model's parameter tree of published tensors."""
    return jax.tree.map(jax.numpy.asarray, names.to_params(config, weights.__getitem__))


def packed(documents, length: int):
    """(tokens, positions, segment_ids) int32 [1, length] of documents in one row; 0 on padding."""
    row = np.zeros((3, 1, length), np.int32)
    starts = document_starts([len(document) for document in documents])
    for number, (start, document) in enumerate(zip(starts, documents, strict=True)):
        here = slice(start, start + len(document))
        row[0, 0, here], row[1, 0, here] = document, np.arange(len(document))
        row[2, 0, here] = number + 1
    return tuple(row)


def hasher(config: ModelConfig) -> EngramHasher:
    """Engram hashing in which every token is its own canonical id."""
    return EngramHasher.from_config(config, pad_compressed_id=config.engram_pad_token_id)


def batch_inputs(config: ModelConfig, documents, length: int):
    """Model inputs of one document a row: tokens, positions, segment_ids, engram_rows."""
    rows = [packed([document], length) for document in documents]
    tokens, positions, segment_ids = (np.concatenate(x) for x in zip(*rows, strict=True))
    return tokens, positions, segment_ids, hasher(config).rows(tokens, positions)


def compiled_forward(config: ModelConfig, **attributes):
    """jitted (params, *inputs) -> (`Outputs`, float32 logits, intermediates)."""
    model = ced.CED(dataclasses.replace(config, dtype="float32"), **attributes)

    def forward(params, *inputs):
        outputs, state = model.apply({"params": params}, *inputs, mutable=["intermediates"])
        return outputs, ced.logits(params, outputs.hidden), state["intermediates"]

    return jax.jit(forward, compiler_options=QUICK_COMPILE)
