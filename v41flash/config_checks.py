"""What makes a `ModelConfig` possible: every check, one clear line each.

A configuration that passes here describes a model in which every mechanism is well defined; nothing
later in the code has to ask again.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from v41flash.config import ModelConfig, QuantizationConfig, VisionConfig

# Documents start at a multiple of this in a packed row: compression groups never straddle two.
DOCUMENT_ALIGNMENT = 8
# Nothing can be counted that has so many of it.
_TOO_MANY = 2**31
# Channels that share a scale in the FP8 and MXFP4 formats; FP4 has 16 and divides it.
QUANT_BLOCK = 32


class ConfigError(ValueError):
    """A configuration that is no model: names the field, its value and what would be right.

    A value of `...` means that there is none to show (an unknown or a missing key).
    """

    def __init__(self, field: str, value: Any, expected: str):
        super().__init__(field, value, expected)
        self.field = field
        self.value = value
        self.expected = expected

    def __str__(self):
        given = "" if self.value is ... else f" = {self.value!r}"
        return f"{self.field}{given}: {self.expected}"


_AT_LEAST_ONE = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "head_dim",
    "qk_rope_head_dim",
    "q_lora_rank",
    "o_lora_rank",
    "o_groups",
    "sliding_window",
    "index_n_heads",
    "index_head_dim",
    "index_topk",
    "n_routed_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "hc_mult",
    "hc_sinkhorn_iters",
    "max_position_embeddings",
    "rope_original_max_position_embeddings",
)
_NOT_NEGATIVE = (
    "candidate_topk_blocks",
    "candidate_block_size",
    "engram_max_ngram_size",
    "engram_n_heads",
    "engram_head_dim",
    "engram_vocab_size",
    "engram_compressed_vocab_size",
    "engram_pad_token_id",
    "num_nextn_predict_layers",
    "dspark_block_size",
    "dspark_noise_token_id",
    "dspark_markov_rank",
    "dspark_n_routed_experts",
    "dspark_num_experts_per_tok",
    "image_token_id",
    "replay_segment",
)
_POSITIVE = (
    "routed_scaling_factor",
    "gate_temp",
    "swiglu_limit",
    "hc_eps",
    "rms_norm_eps",
    "rope_theta",
    "compress_rope_theta",
    "rope_beta_fast",
    "rope_beta_slow",
    "initializer_range",
    "hc_init_scale",
)
# Fields with few possible values; one value means that the model is defined for that one only.
_ONE_OF: dict[str, tuple] = {
    "num_key_value_heads": (1,),
    "n_shared_experts": (1,),
    "scoring_func": ("sqrtsoftplus",),
    "topk_method": ("noaux_tc",),
    "norm_topk_prob": (True,),
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "tie_word_embeddings": (False,),
    # No float16: rms_norm_eps 1e-20 is zero there.
    "dtype": ("bfloat16", "float32"),
    "main_kv_format": ("fp4", "fp8", "none"),
    "main_kv_rounding": ("after_rope", "before_rope", "global_scale"),
    "window_kv_format": ("fp8", "none"),
    "index_format": ("mxfp4", "none"),
    "hc_base_init": ("zero", "identity"),
    "weight_form": ("expanded", "packed"),
    "activation_format": ("none", "fp8"),
}


def check_model(c: ModelConfig) -> None:
    """Raises `ConfigError` at the first thing that is wrong with `c`."""
    for name in _AT_LEAST_ONE:
        _at_least(c, name, 1)
    for name in _NOT_NEGATIVE:
        _at_least(c, name, 0)
    for name in _POSITIVE:
        _positive(name, vars(c)[name])
    for name, allowed in _ONE_OF.items():
        if vars(c)[name] not in allowed:
            choices = " or ".join(repr(value) for value in allowed)
            raise ConfigError(name, vars(c)[name], f"must be {choices}")
    _check_widths(c)
    _check_tokens(c)
    _check_sources(c)
    _check_ratios(c)
    _check_pool(c)
    _check_engram(c)
    _check_draft(c)
    if c.weight_form == "packed":
        _check_packed(c)
    elif c.activation_format != "none":
        raise ConfigError("activation_format", c.activation_format, "needs weight_form 'packed'")


def check_quantization(q: QuantizationConfig) -> None:
    """Raises `ConfigError` where weights are stored in a way that is not the published one."""
    allowed = {
        "quant_method": ("fp8",),
        "scale_fmt": ("ue8m0",),
        "fmt": (None, "e4m3"),
        "expert_dtype": (None, "fp4"),
    }
    for name, values in allowed.items():
        if vars(q)[name] not in values:
            choices = " or ".join(repr(value) for value in values)
            raise ConfigError(f"quantization_config.{name}", vars(q)[name], f"must be {choices}")
    block = q.weight_block_size
    if len(block) != 2 or min(block) < 1:
        name = "quantization_config.weight_block_size"
        raise ConfigError(name, block, "must be two sizes of at least 1")


def _check_packed(c: ModelConfig) -> None:
    """What packed weights are multiplied with is rounded in the blocks of their scales."""
    q = c.quantization_config
    if q is None or q.expert_dtype != "fp4" or q.weight_block_size[1] != QUANT_BLOCK:
        raise ConfigError(
            "weight_form",
            c.weight_form,
            f"needs a quantization_config with FP4 experts and blocks of {QUANT_BLOCK} channels",
        )
    widths = {
        "hidden_size": c.hidden_size,
        "q_lora_rank": c.q_lora_rank,
        "moe_intermediate_size": c.moe_intermediate_size,
        "o_groups * o_lora_rank": c.o_groups * c.o_lora_rank,
        "engram_head_dim": c.engram_head_dim,
    }
    for name, width in widths.items():
        if width % QUANT_BLOCK:
            raise ConfigError(name, width, f"must be a multiple of {QUANT_BLOCK} if packed")


def check_vision(v: VisionConfig) -> None:
    """Raises `ConfigError` at the first thing that is wrong with the image encoder."""
    for name in (
        "num_hidden_layers",
        "hidden_size",
        "num_attention_heads",
        "intermediate_size",
        "patch_size",
        "downsample_ratio",
        "min_pixels",
    ):
        _at_least(v, name, 1, "vision.")
    _positive("vision.rope_theta", v.rope_theta)
    if v.max_wh_ratio is not None:
        _positive("vision.max_wh_ratio", v.max_wh_ratio)
    if v.hidden_size % v.num_attention_heads or v.hidden_size // v.num_attention_heads % 4:
        raise ConfigError(
            "vision.hidden_size",
            v.hidden_size,
            "must be vision.num_attention_heads "
            f"({v.num_attention_heads}) times a multiple of 4 (rotary pairs for rows and columns)",
        )
    # One row of one image token, its newline, and the start and end tokens.
    _at_least(v, "max_image_tokens", 4, "vision.")


def _at_least(config, name: str, least: int, prefix: str = "") -> None:
    value = vars(config)[name]
    if value < least:
        raise ConfigError(prefix + name, value, f"must be at least {least}")
    if value >= _TOO_MANY:
        raise ConfigError(prefix + name, value, "must be below 2**31 (places are 32-bit)")


def _positive(name: str, value: float) -> None:
    if not (value > 0 and math.isfinite(value)):
        raise ConfigError(name, value, "must be a finite number above 0")


def _check_widths(c: ModelConfig) -> None:
    for name in ("head_dim", "index_head_dim"):
        if vars(c)[name] % QUANT_BLOCK:
            raise ConfigError(
                name,
                vars(c)[name],
                f"must be a multiple of {QUANT_BLOCK}, the block of the quantised cache formats",
            )
    rope = c.qk_rope_head_dim
    if rope % 2 or rope > min(c.head_dim, c.index_head_dim):
        raise ConfigError(
            "qk_rope_head_dim",
            rope,
            f"must be even and at most head_dim ({c.head_dim}) and index_head_dim"
            f" ({c.index_head_dim})",
        )
    if c.num_attention_heads % c.o_groups:
        raise ConfigError(
            "o_groups", c.o_groups, f"must divide num_attention_heads ({c.num_attention_heads})"
        )
    if c.num_experts_per_tok > c.n_routed_experts:
        raise ConfigError(
            "num_experts_per_tok",
            c.num_experts_per_tok,
            f"must be at most n_routed_experts ({c.n_routed_experts})",
        )
    if not (c.rope_factor >= 1 and math.isfinite(c.rope_factor)):
        raise ConfigError("rope_factor", c.rope_factor, "must be a finite number, at least 1")
    if c.rope_beta_fast <= c.rope_beta_slow:
        raise ConfigError(
            "rope_beta_fast", c.rope_beta_fast, f"must exceed rope_beta_slow ({c.rope_beta_slow})"
        )
    segment = c.replay_segment
    if segment and (segment % DOCUMENT_ALIGNMENT or segment < c.sliding_window):
        raise ConfigError(
            "replay_segment",
            segment,
            f"must be 0 (off) or a multiple of {DOCUMENT_ALIGNMENT} that is at least sliding_window"
            f" ({c.sliding_window})",
        )


def _check_tokens(c: ModelConfig) -> None:
    names = ["bos_token_id", "eos_token_id", "pad_token_id"]
    if c.vision is not None:
        names.append("image_token_id")
    if c.engram_layer_ids:
        names.append("engram_pad_token_id")
    if c.num_nextn_predict_layers:
        names.append("dspark_noise_token_id")
    for name in names:
        if not 0 <= vars(c)[name] < c.vocab_size:
            raise ConfigError(
                name, vars(c)[name], f"must be a token id below vocab_size ({c.vocab_size})"
            )


def _check_layer_ids(c: ModelConfig, name: str) -> None:
    ids = vars(c)[name]
    if any(not 0 <= i < c.num_hidden_layers for i in ids) or list(ids) != sorted(set(ids)):
        raise ConfigError(
            name,
            ids,
            "must be distinct ascending layer numbers below num_hidden_layers"
            f" ({c.num_hidden_layers})",
        )


def _check_sources(c: ModelConfig) -> None:
    for name in ("kv_source_layer_ids", "index_source_layer_ids"):
        _check_layer_ids(c, name)
    if not c.kv_source_layer_ids:
        raise ConfigError(
            "kv_source_layer_ids",
            c.kv_source_layer_ids,
            "must name at least one Full layer; the last one begins the decoder",
        )
    lacking = sorted(set(c.kv_source_layer_ids) - set(c.index_source_layer_ids))
    if lacking:
        raise ConfigError(
            "index_source_layer_ids",
            c.index_source_layer_ids,
            f"must contain every layer of kv_source_layer_ids; {lacking} is missing",
        )


def _check_ratios(c: ModelConfig) -> None:
    ratios, layers, drafts = c.compress_ratios, c.num_hidden_layers, c.num_nextn_predict_layers
    if len(ratios) != layers + drafts:
        raise ConfigError(
            "compress_ratios",
            ratios,
            f"must have num_hidden_layers + num_nextn_predict_layers = {layers} + {drafts} entries,"
            f" has {len(ratios)}",
        )
    possible = [m for m in range(1, DOCUMENT_ALIGNMENT + 1) if DOCUMENT_ALIGNMENT % m == 0]
    for i, ratio in enumerate(ratios):
        if ratio != 0 and ratio not in possible:
            raise ConfigError(
                "compress_ratios",
                ratios,
                f"entry {i} is {ratio}; must be 0 or divide the {DOCUMENT_ALIGNMENT} tokens on"
                f" which documents start ({possible})",
            )
    if any(ratios[layers:]):
        raise ConfigError(
            "compress_ratios", ratios, f"the last {drafts} entries (draft blocks) must be 0"
        )
    source = None
    for i, ratio in enumerate(ratios[:layers]):
        if ratio == 0:
            for name in ("kv_source_layer_ids", "index_source_layer_ids"):
                if i in vars(c)[name]:
                    raise ConfigError(
                        name,
                        vars(c)[name],
                        f"layer {i} has compress ratio 0 (window only) and can be no source",
                    )
            if source is not None:
                raise ConfigError(
                    "compress_ratios",
                    ratios,
                    f"layer {i} is 0 after layer {i - 1} had {ratios[i - 1]}; window-only layers"
                    " come before all others",
                )
            continue
        if i in c.kv_source_layer_ids:
            source = i
        elif source is None:
            kind = "Reindex" if i in c.index_source_layer_ids else "Reuse"
            raise ConfigError(
                "kv_source_layer_ids",
                c.kv_source_layer_ids,
                f"layer {i} (compress ratio {ratio}) would be a {kind} layer before any Full layer;"
                " name a source at or before it, or give it ratio 0",
            )
        if ratio != ratios[source]:
            raise ConfigError(
                "compress_ratios",
                ratios,
                f"layer {i} has {ratio}, but reads the cache of layer {source}, which has"
                f" {ratios[source]}; they must be equal",
            )


def _check_pool(c: ModelConfig) -> None:
    source = c.candidate_source_layer_id
    reindex = sorted(set(c.index_source_layer_ids) - set(c.kv_source_layer_ids))
    last = c.kv_source_layer_ids[-1]
    if source is None:
        if reindex:
            raise ConfigError(
                "candidate_source_layer_id",
                None,
                f"layers {reindex} are Reindex layers and need a candidate pool; must be {last},"
                " the last KV source (use_candidate_pool=False lets them score every entry)",
            )
        return
    if source != last:
        what = "an earlier KV source" if source in c.kv_source_layer_ids else "not a KV source"
        raise ConfigError(
            "candidate_source_layer_id",
            source,
            f"is {what}; must be {last}, the last of kv_source_layer_ids, or None",
        )
    early = [i for i in reindex if i < source]
    if early:
        raise ConfigError(
            "index_source_layer_ids",
            c.index_source_layer_ids,
            f"{early} are Reindex layers before the candidate pool of layer {source} exists; they"
            f" must be KV sources, or lie after layer {source}",
        )
    for name in ("candidate_topk_blocks", "candidate_block_size"):
        _at_least(c, name, 1)
    blocks, size = c.candidate_topk_blocks, c.candidate_block_size
    # The newest block may hold a single visible entry.
    if blocks * size - size + 1 < c.index_topk:
        need = 1 + math.ceil((c.index_topk - 1) / size)
        raise ConfigError(
            "candidate_topk_blocks",
            blocks,
            f"{blocks} blocks of candidate_block_size {size} may hold only"
            f" {blocks * size - size + 1} visible entries, fewer than index_topk ({c.index_topk});"
            f" must be at least {need}",
        )


def _check_engram(c: ModelConfig) -> None:
    _check_layer_ids(c, "engram_layer_ids")
    sites = len(c.engram_layer_ids)
    if len(c.engram_num_embeddings) != sites:
        raise ConfigError(
            "engram_num_embeddings",
            c.engram_num_embeddings,
            f"must have one entry for each of engram_layer_ids {c.engram_layer_ids}",
        )
    if not sites:
        return
    for i in c.engram_layer_ids:
        if c.compress_ratios[i] and i not in c.index_source_layer_ids:
            raise ConfigError(
                "engram_layer_ids",
                c.engram_layer_ids,
                f"layer {i} is a Reuse layer; must be window-only, Full or Reindex layers",
            )
    if not all(0 < rows < _TOO_MANY for rows in c.engram_num_embeddings):
        raise ConfigError(
            "engram_num_embeddings",
            c.engram_num_embeddings,
            "must be above 0 and below 2**31 (places are 32-bit)",
        )
    _at_least(c, "engram_max_ngram_size", 2)
    for name in ("engram_row_multiple", "engram_n_heads", "engram_head_dim", "engram_vocab_size"):
        _at_least(c, name, 1)
    if not 1 <= c.engram_compressed_vocab_size <= c.vocab_size:
        raise ConfigError(
            "engram_compressed_vocab_size",
            c.engram_compressed_vocab_size,
            f"must be from 1 to vocab_size ({c.vocab_size})",
        )


def _check_draft(c: ModelConfig) -> None:
    if not c.num_nextn_predict_layers:
        return
    for name in (
        "dspark_block_size",
        "dspark_markov_rank",
        "dspark_n_routed_experts",
        "dspark_num_experts_per_tok",
    ):
        _at_least(c, name, 1)
    _check_layer_ids(c, "dspark_target_layer_ids")
    if not c.dspark_target_layer_ids:
        raise ConfigError(
            "dspark_target_layer_ids", (), "must name at least one layer that draft blocks read"
        )
    if c.dspark_num_experts_per_tok > c.dspark_n_routed_experts:
        raise ConfigError(
            "dspark_num_experts_per_tok",
            c.dspark_num_experts_per_tok,
            f"must be at most dspark_n_routed_experts ({c.dspark_n_routed_experts})",
        )
