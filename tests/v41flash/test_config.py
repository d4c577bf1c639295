"""The model configuration: published values, the schedule, refusals, round trips."""

import dataclasses
import json
import pathlib
import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from v41flash.config import ConfigError, ModelConfig, QuantizationConfig, VisionConfig
from v41flash.presets import tiny, v41_flash

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"
GOLDEN_CONFIGS = ["layout_i", "layout_i/multimodal", "storage_i"]

# Typed from the published file, not from the code under test.
PUBLISHED_TEXT = {
    "vocab_size": 129280,
    "hidden_size": 5120,
    "num_hidden_layers": 40,
    "num_attention_heads": 64,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 1280,
    "o_lora_rank": 1024,
    "o_groups": 8,
    "sliding_window": 128,
    "compress_ratios": [0, 0]
    + [2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2]
    + [1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1]
    + [0, 0, 0],
    "kv_source_layer_ids": [2, 8, 14, 20],
    "index_source_layer_ids": [2, 8, 14, 20, 24, 28, 32, 36],
    "index_n_heads": 32,
    "index_head_dim": 128,
    "index_topk": 512,
    "candidate_source_layer_id": 20,
    "candidate_topk_blocks": 2048,
    "candidate_block_size": 8,
    "n_routed_experts": 384,
    "n_shared_experts": 1,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 2304,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 10.0,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "rms_norm_eps": 1e-20,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "max_position_embeddings": 1048576,
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 16,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": 65536,
    },
    "engram_layer_ids": [1, 14],
    "engram_num_embeddings": [384006168, 384016682],
    "engram_max_ngram_size": 4,
    "engram_n_heads": 8,
    "engram_head_dim": 256,
    "engram_vocab_size": 16000000,
    "engram_compressed_vocab_size": 99092,
    "engram_pad_token_id": 2,
    "num_nextn_predict_layers": 3,
    "dspark_block_size": 5,
    "dspark_noise_token_id": 128799,
    "dspark_target_layer_ids": [37, 38, 39],
    "dspark_markov_rank": 256,
    "dspark_n_routed_experts": 128,
    "dspark_num_experts_per_tok": 3,
    "model_type": "deepseek_v41_text",
}
PUBLISHED = {
    "architectures": ["DeepseekV41ForCausalLM"],
    "model_type": "deepseek_v41",
    "dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "image_token_id": 129264,
    "text_config": PUBLISHED_TEXT,
    "vision_config": {
        "model_type": "deepseek_v41_vision",
        "num_hidden_layers": 32,
        "hidden_size": 1024,
        "num_attention_heads": 16,
        "intermediate_size": 2816,
        "patch_size": 14,
        "rope_theta": 10000,
        "downsample_ratio": 3,
        "max_image_tokens": 1024,
        "min_pixels": 295936,
        "max_wh_ratio": None,
    },
    "quantization_config": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [32, 32],
        "scale_fmt": "ue8m0",
        "expert_dtype": "fp4",
    },
}


def golden_file(name: str) -> dict:
    return json.loads((GOLDEN / name / "config.json").read_text())


def summary(config: ModelConfig) -> list[tuple]:
    """The groups as (start, mode, ratio, pool, part, reuse, repeats)."""
    return [
        (g.start, g.first.mode, g.first.ratio, g.first.pool, g.first.part, g.reuse, g.repeats)
        for g in config.groups
    ]


def with_vision(**overrides) -> ModelConfig:
    return tiny(vision=dataclasses.replace(v41_flash().vision, **overrides))


# -- The published model ------------------------------------------------------------------------


def test_v41_flash_writes_the_published_file():
    assert v41_flash().to_hf() == PUBLISHED


def test_v41_flash_reads_the_published_file():
    assert ModelConfig.from_hf(json.loads(json.dumps(PUBLISHED))) == v41_flash()


def test_published_gate_temperature():
    assert v41_flash().gate_temp == 1.0
    published = json.loads(json.dumps(PUBLISHED))
    published["text_config"]["gate_temp"] = 2.0
    config = ModelConfig.from_hf(published)
    assert config.gate_temp == 2.0
    assert config.to_hf() == published


def test_v41_flash_layer_schedule():
    config = v41_flash()
    reuse5, reuse3 = ["reuse"] * 5, ["reuse"] * 3
    modes = (
        ["window"] * 2 + (["full"] + reuse5) * 3 + ["full"] + reuse3 + (["reindex"] + reuse3) * 4
    )
    assert [spec.mode for spec in config.layers] == modes
    assert [spec.index for spec in config.layers] == list(range(40))
    assert [spec.ratio for spec in config.layers] == [0] * 2 + [2] * 18 + [1] * 20
    assert [spec.part for spec in config.layers] == ["encoder"] * 20 + ["decoder"] * 20
    kv = [None] * 2 + [2] * 6 + [8] * 6 + [14] * 6 + [20] * 20
    assert [spec.kv_source for spec in config.layers] == kv
    index = [None] * 2 + [2] * 6 + [8] * 6 + [14] * 6
    index += [20] * 4 + [24] * 4 + [28] * 4 + [32] * 4 + [36] * 4
    assert [spec.index_source for spec in config.layers] == index
    assert {s.index: s.engram for s in config.layers if s.engram is not None} == {1: 0, 14: 1}
    pools = {s.index: s.pool for s in config.layers if s.pool is not None}
    assert pools == {20: "make", 24: "use", 28: "use", 32: "use", 36: "use"}


def test_v41_flash_derived_numbers():
    config = v41_flash()
    assert config.num_encoder_layers == 20
    assert config.ratios_in_use == (1, 2)
    assert config.num_engram_sites == 2
    assert config.engram_rows_per_token == 24


def test_v41_flash_groups():
    assert summary(v41_flash()) == [
        (0, "window", 0, None, "encoder", 0, 1),
        (1, "window", 0, None, "encoder", 0, 1),
        (2, "full", 2, None, "encoder", 5, 2),
        (14, "full", 2, None, "encoder", 5, 1),
        (20, "full", 1, "make", "decoder", 3, 1),
        (24, "reindex", 1, "use", "decoder", 3, 4),
    ]


@pytest.mark.parametrize(
    "name, expected",
    [
        (
            "layout_i",
            [
                (0, "window", 0, None, "encoder", 0, 1),
                (1, "window", 0, None, "encoder", 0, 1),
                (2, "full", 2, None, "encoder", 2, 1),
                (5, "full", 1, "make", "decoder", 1, 1),
                (7, "reindex", 1, "use", "decoder", 0, 1),
            ],
        ),
        (
            "storage_i",
            [
                (0, "window", 0, None, "encoder", 0, 1),
                (1, "full", 2, None, "encoder", 1, 1),
                (3, "full", 1, "make", "decoder", 1, 1),
                (5, "reindex", 1, "use", "decoder", 1, 1),
            ],
        ),
    ],
)
def test_golden_groups(name, expected):
    assert summary(ModelConfig.from_hf(golden_file(name))) == expected


def test_groups_without_engram_merge_further():
    config = v41_flash(engram_layer_ids=(), engram_num_embeddings=())
    assert summary(config)[:2] == [
        (0, "window", 0, None, "encoder", 0, 2),
        (2, "full", 2, None, "encoder", 5, 3),
    ]
    assert config.num_engram_sites == 0


def test_groups_stay_the_same_without_the_pool():
    # A stage of training switches the pool on: parameter names must not change with it.
    with_pool, without = v41_flash(), v41_flash(use_candidate_pool=False)
    assert all(spec.pool is None for spec in without.layers)
    assert [(g.name, g.start, g.repeats) for g in without.groups] == [
        (g.name, g.start, g.repeats) for g in with_pool.groups
    ]


def test_no_pool_is_made_where_nothing_uses_it():
    config = tiny(index_source_layer_ids=(1, 4))
    assert all(spec.pool is None for spec in config.layers)
    config = tiny(index_source_layer_ids=(1, 4), candidate_source_layer_id=-1)
    assert config.candidate_source_layer_id is None


def test_tiny_keeps_every_mechanism_alive():
    config = tiny()
    assert {spec.mode for spec in config.layers} == {"window", "full", "reindex", "reuse"}
    assert {spec.pool for spec in config.layers} == {None, "make", "use"}
    assert config.ratios_in_use == (1, 2)
    assert {spec.part for spec in config.layers if spec.mode == "full"} == {"encoder", "decoder"}
    assert config.num_engram_sites == 2
    assert config.index_topk < 16 // 2
    assert config.candidate_topk_blocks * config.candidate_block_size < 16


# -- Refusals -----------------------------------------------------------------------------------

REFUSED = [
    # The schedule.
    (
        "kv_source_layer_ids",
        "Reuse layer before any Full",
        dict(kv_source_layer_ids=(4,), index_source_layer_ids=(4, 6)),
    ),
    (
        "kv_source_layer_ids",
        "Reindex layer before any Full",
        dict(kv_source_layer_ids=(4,)),
    ),
    ("kv_source_layer_ids", "at least one Full", dict(kv_source_layer_ids=())),
    ("kv_source_layer_ids", "ascending", dict(kv_source_layer_ids=(4, 1))),
    ("kv_source_layer_ids", "below num_hidden_layers", dict(kv_source_layer_ids=(1, 8))),
    ("kv_source_layer_ids", "distinct", dict(kv_source_layer_ids=(1, 1, 4))),
    (
        "kv_source_layer_ids",
        "ratio 0",
        dict(kv_source_layer_ids=(0, 4), index_source_layer_ids=(0, 4)),
    ),
    ("index_source_layer_ids", "ratio 0", dict(index_source_layer_ids=(0, 1, 4, 6))),
    ("index_source_layer_ids", "[4] is missing", dict(index_source_layer_ids=(1, 6))),
    ("index_source_layer_ids", "below num_hidden_layers", dict(index_source_layer_ids=(1, 4, 9))),
    ("index_source_layer_ids", "before the candidate pool", dict(index_source_layer_ids=(1, 3, 4))),
    ("compress_ratios", "must be equal", dict(compress_ratios=(0, 2, 1, 2, 1, 1, 1, 1))),
    ("compress_ratios", "window-only layers", dict(compress_ratios=(0, 2, 2, 0, 1, 1, 1, 1))),
    ("compress_ratios", "8 + 0 entries, has 7", dict(compress_ratios=(0, 2, 2, 2, 1, 1, 1))),
    ("compress_ratios", "entry 1 is 3", dict(compress_ratios=(0, 3, 3, 3, 1, 1, 1, 1))),
    ("compress_ratios", "entry 4 is -1", dict(compress_ratios=(0, 2, 2, 2, -1, 1, 1, 1))),
    (
        "compress_ratios",
        "draft blocks",
        dict(num_nextn_predict_layers=1, compress_ratios=(0, 2, 2, 2, 1, 1, 1, 1, 1)),
    ),
    ("candidate_source_layer_id", "an earlier KV source", dict(candidate_source_layer_id=1)),
    ("candidate_source_layer_id", "not a KV source", dict(candidate_source_layer_id=6)),
    ("candidate_source_layer_id", "not a KV source", dict(candidate_source_layer_id=99)),
    ("candidate_source_layer_id", "need a candidate pool", dict(candidate_source_layer_id=None)),
    ("candidate_topk_blocks", "at least 3", dict(candidate_topk_blocks=2)),
    ("candidate_topk_blocks", "fewer than index_topk (6)", dict(index_topk=6)),
    ("candidate_topk_blocks", "at least 1", dict(candidate_topk_blocks=0)),
    ("candidate_block_size", "at least 1", dict(candidate_block_size=0)),
    # Widths.
    ("head_dim", "multiple of 32", dict(head_dim=48)),
    ("index_head_dim", "multiple of 32", dict(index_head_dim=40)),
    ("qk_rope_head_dim", "even", dict(qk_rope_head_dim=7)),
    ("qk_rope_head_dim", "at most head_dim (32)", dict(qk_rope_head_dim=34, index_head_dim=64)),
    ("qk_rope_head_dim", "index_head_dim (32)", dict(qk_rope_head_dim=34, head_dim=64)),
    ("o_groups", "divide num_attention_heads (4)", dict(o_groups=3)),
    ("num_experts_per_tok", "at most n_routed_experts (6)", dict(num_experts_per_tok=7)),
    ("rope_factor", "at least 1", dict(rope_factor=0.5)),
    ("rope_beta_fast", "exceed rope_beta_slow", dict(rope_beta_fast=1)),
    ("replay_segment", "multiple of 8", dict(replay_segment=12)),
    ("replay_segment", "at least sliding_window (32)", dict(replay_segment=16, sliding_window=32)),
    ("replay_segment", "at least 0", dict(replay_segment=-8)),
    # Values for which alone the model is defined.
    ("scoring_func", "'sqrtsoftplus'", dict(scoring_func="sigmoid")),
    ("topk_method", "'noaux_tc'", dict(topk_method="greedy")),
    ("norm_topk_prob", "True", dict(norm_topk_prob=False)),
    ("hidden_act", "'silu'", dict(hidden_act="gelu")),
    ("attention_bias", "False", dict(attention_bias=True)),
    ("tie_word_embeddings", "False", dict(tie_word_embeddings=True)),
    ("num_key_value_heads", "1", dict(num_key_value_heads=2)),
    ("n_shared_experts", "1", dict(n_shared_experts=2)),
    ("dtype", "'bfloat16' or 'float32'", dict(dtype="float16")),
    ("main_kv_format", "'fp4' or 'fp8' or 'none'", dict(main_kv_format="mxfp4")),
    ("main_kv_rounding", "'after_rope' or", dict(main_kv_rounding="never")),
    ("window_kv_format", "'fp8' or 'none'", dict(window_kv_format="fp4")),
    ("index_format", "'mxfp4' or 'none'", dict(index_format="fp4")),
    ("hc_base_init", "'zero' or 'identity'", dict(hc_base_init="one")),
    # Tokens.
    ("bos_token_id", "below vocab_size (256)", dict(bos_token_id=256)),
    ("eos_token_id", "below vocab_size (256)", dict(eos_token_id=-1)),
    ("pad_token_id", "below vocab_size (256)", dict(pad_token_id=300)),
    # Engram.
    ("engram_layer_ids", "Reuse layer", dict(engram_layer_ids=(1, 5))),
    ("engram_layer_ids", "below num_hidden_layers", dict(engram_layer_ids=(1, 8))),
    ("engram_layer_ids", "ascending", dict(engram_layer_ids=(4, 1))),
    ("engram_num_embeddings", "one entry for each", dict(engram_num_embeddings=(304,))),
    ("engram_num_embeddings", "above 0", dict(engram_num_embeddings=(304, 0))),
    ("engram_num_embeddings", "32-bit", dict(engram_num_embeddings=(304, 2**31))),
    ("engram_max_ngram_size", "at least 2", dict(engram_max_ngram_size=1)),
    ("engram_n_heads", "at least 1", dict(engram_n_heads=0)),
    ("engram_head_dim", "at least 1", dict(engram_head_dim=0)),
    ("engram_vocab_size", "at least 1", dict(engram_vocab_size=0)),
    ("engram_compressed_vocab_size", "1 to vocab_size", dict(engram_compressed_vocab_size=257)),
    ("engram_compressed_vocab_size", "1 to vocab_size", dict(engram_compressed_vocab_size=0)),
    ("engram_pad_token_id", "below vocab_size", dict(engram_pad_token_id=256)),
    # Types.
    ("hidden_size", "type int", dict(hidden_size=64.0)),
    ("hidden_size", "type int", dict(hidden_size="64")),
    ("hidden_size", "type int", dict(hidden_size=True)),
    ("hidden_size", "type int", dict(hidden_size=None)),
    ("swiglu_limit", "type float", dict(swiglu_limit="10")),
    ("use_candidate_pool", "type bool", dict(use_candidate_pool=1)),
    ("dtype", "type str", dict(dtype=32)),
    ("compress_ratios", "tuple of ints", dict(compress_ratios="0,2")),
    ("compress_ratios", "type int", dict(compress_ratios=(0, 2.5))),
    ("vision", "VisionConfig", dict(vision=3)),
]
AT_LEAST_ONE = [
    "vocab_size hidden_size num_hidden_layers num_attention_heads head_dim qk_rope_head_dim",
    "q_lora_rank o_lora_rank o_groups sliding_window index_n_heads index_head_dim index_topk",
    "n_routed_experts num_experts_per_tok moe_intermediate_size hc_mult hc_sinkhorn_iters",
    "max_position_embeddings rope_original_max_position_embeddings",
]
ABOVE_ZERO = [
    "routed_scaling_factor gate_temp swiglu_limit hc_eps rms_norm_eps rope_theta",
    "compress_rope_theta rope_beta_fast rope_beta_slow initializer_range hc_init_scale",
]


def check_line(error: ConfigError, field: str, words: str):
    message = str(error)
    assert message.startswith(field + (":" if error.value is ... else " = ")), message
    assert words in message
    assert "\n" not in message
    assert isinstance(error, ValueError)


@pytest.mark.parametrize("field, words, overrides", REFUSED)
def test_refused(field, words, overrides):
    with pytest.raises(ConfigError) as caught:
        tiny(**overrides)
    check_line(caught.value, field, words)
    assert repr(caught.value.value) in str(caught.value)


@pytest.mark.parametrize("field", " ".join(AT_LEAST_ONE).split())
@pytest.mark.parametrize("value", [0, -1])
def test_counts_are_positive(field, value):
    with pytest.raises(ConfigError, match=f"^{field} = {value}: must be at least 1$"):
        tiny(**{field: value})


@pytest.mark.parametrize("field", " ".join(ABOVE_ZERO).split())
@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_numbers_are_positive(field, value):
    with pytest.raises(ConfigError, match=f"^{field} = {value}: must be a finite number above 0$"):
        tiny(**{field: value})


DRAFT = dict(
    num_nextn_predict_layers=1,
    compress_ratios=(0, 2, 2, 2, 1, 1, 1, 1, 0),
    dspark_block_size=3,
    dspark_noise_token_id=9,
    dspark_target_layer_ids=(5, 6, 7),
    dspark_markov_rank=8,
    dspark_n_routed_experts=4,
    dspark_num_experts_per_tok=2,
)


def test_draft_blocks_are_accepted():
    assert len(tiny(**DRAFT).layers) == 8


@pytest.mark.parametrize(
    "field, value, words",
    [
        ("dspark_block_size", 0, "at least 1"),
        ("dspark_markov_rank", 0, "at least 1"),
        ("dspark_n_routed_experts", 0, "at least 1"),
        ("dspark_num_experts_per_tok", 0, "at least 1"),
        ("dspark_num_experts_per_tok", 5, "at most dspark_n_routed_experts (4)"),
        ("dspark_noise_token_id", 256, "below vocab_size"),
        ("dspark_target_layer_ids", (), "at least one layer"),
        ("dspark_target_layer_ids", (5, 8), "below num_hidden_layers"),
    ],
)
def test_draft_blocks_refused(field, value, words):
    with pytest.raises(ConfigError) as caught:
        tiny(**{**DRAFT, field: value})
    check_line(caught.value, field, words)


@pytest.mark.parametrize(
    "field, value, words",
    [
        ("num_hidden_layers", 0, "at least 1"),
        ("hidden_size", 1000, "multiple of 4"),
        ("num_attention_heads", 512, "multiple of 4"),
        ("patch_size", 0, "at least 1"),
        ("max_image_tokens", 3, "at least 4"),
        ("max_wh_ratio", 0.0, "above 0"),
        ("rope_theta", -1.0, "above 0"),
        ("intermediate_size", "big", "type int"),
    ],
)
def test_vision_refused(field, value, words):
    with pytest.raises(ConfigError) as caught:
        with_vision(**{field: value})
    assert str(caught.value).startswith(("vision." + field, "vision.hidden_size"))
    assert words in str(caught.value)


def test_image_token_matters_only_with_vision():
    assert tiny(image_token_id=129264).vision is None
    with pytest.raises(ConfigError, match="^image_token_id = 129264: "):
        tiny(image_token_id=129264, vision=v41_flash().vision)


def test_error_survives_pickling():
    error = pickle.loads(pickle.dumps(ConfigError("head_dim", 48, "must be a multiple of 32")))
    assert str(error) == "head_dim = 48: must be a multiple of 32"
    assert str(ConfigError("head_dim", ..., "missing")) == "head_dim: missing"


# -- The flat form ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config", [tiny(), v41_flash(), tiny(**DRAFT)], ids=["tiny", "v41", "draft"]
)
def test_flat_round_trip(config):
    flat = config.to_dict()
    assert set(flat) == {field.name for field in dataclasses.fields(ModelConfig)}
    assert ModelConfig.from_dict(flat) == config
    assert ModelConfig.from_dict(json.loads(json.dumps(flat))) == config
    assert hash(ModelConfig.from_dict(flat)) == hash(config)


def test_flat_form_from_a_config_dict():
    ml_collections = pytest.importorskip("ml_collections")
    section = ml_collections.ConfigDict(v41_flash().to_dict())
    section.index_topk = 256
    assert ModelConfig.from_dict(section) == v41_flash(index_topk=256)


@pytest.mark.parametrize(
    "change, field, words",
    [
        ({"index_top_k": 4}, "index_top_k", "closest known one is index_topk"),
        ({"no_such_key": 1}, "no_such_key", "unknown key; the closest known one is "),
        ({"vision": {"patch": 14}}, "vision.patch", "closest known one is vision.patch_size"),
        ({"vision": {}}, "vision.num_hidden_layers", "missing"),
        ({"quantization_config": {"fmt": "e4m3"}}, "quantization_config.quant_method", "missing"),
    ],
)
def test_flat_form_refused(change, field, words):
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_dict(tiny().to_dict() | change)
    check_line(caught.value, field, words)


def test_flat_form_names_what_is_missing():
    flat = tiny().to_dict()
    del flat["q_lora_rank"]
    with pytest.raises(ConfigError, match="^q_lora_rank: missing"):
        ModelConfig.from_dict(flat)


# -- The published form -------------------------------------------------------------------------


@pytest.mark.parametrize("name", GOLDEN_CONFIGS)
def test_golden_config_round_trip(name):
    published = golden_file(name)
    config = ModelConfig.from_hf(published)
    assert config.to_hf() == published
    assert ModelConfig.from_hf(config.to_hf()) == config
    text = published["text_config"]
    for key, value in text.items():
        if key not in ("model_type", "rope_scaling"):
            assert getattr(config, key) == (tuple(value) if isinstance(value, list) else value), key
    assert config.rope_factor == text["rope_scaling"]["factor"]
    assert (config.vision is None) == ("vision_config" not in published)


def test_from_hf_leaves_its_argument_alone():
    published = golden_file("storage_i")
    ModelConfig.from_hf(published)
    assert published == golden_file("storage_i")


def test_flat_inference_file_is_refused():
    flat = json.loads((GOLDEN / "layout_i" / "inference" / "config.json").read_text())
    with pytest.raises(ConfigError, match="^text_config: missing: not a V4.1-Flash config.json"):
        ModelConfig.from_hf(flat)


def test_v4_flash_file_is_refused():
    v4 = {
        "model_type": "deepseek_v4",
        "hidden_size": 4096,
        "num_hidden_layers": 43,
        "compress_ratios": [0, 0] + [4, 128] * 20 + [4, 0],
    }
    with pytest.raises(ConfigError, match="V4-Flash files name no KV source layers"):
        ModelConfig.from_hf(v4)
    with pytest.raises(ConfigError, match="^text_config.kv_source_layer_ids: missing.*V4-Flash"):
        ModelConfig.from_hf({"model_type": "deepseek_v41", "text_config": v4})


@pytest.mark.parametrize(
    "path, value, field, words",
    [
        ("extra", 1, "extra", "unknown key"),
        ("text_config.index_top_k", 1, "text_config.index_top_k", "text_config.index_topk"),
        ("text_config.main_kv_format", "fp8", "text_config.main_kv_format", "unknown key"),
        ("text_config.rope_scaling.mscale", 1, "text_config.rope_scaling.mscale", "unknown key"),
        ("text_config.rope_scaling.rope_type", "linear", "text_config.rope_scaling", "'yarn'"),
        ("text_config.attention_dropout", 0.1, "text_config.attention_dropout", "must be 0.0"),
        ("text_config.index_topk", 10**6, "candidate_topk_blocks", "fewer than index_topk"),
        ("vision_config.depth", 3, "vision_config.depth", "unknown key"),
        ("quantization_config.bits", 3, "quantization_config.bits", "unknown key"),
        ("model_type", "deepseek_v4", "model_type", "'deepseek_v41'"),
        ("architectures", ["LlamaForCausalLM"], "architectures", "DeepseekV41ForCausalLM"),
        ("text_config", 5, "text_config = 5", "must be an object"),
        ("text_config.rope_scaling", "yarn", "text_config.rope_scaling = 'yarn'", "an object"),
        ("vision_config", [1], "vision_config = [1]", "must be an object"),
        ("quantization_config", True, "quantization_config = True", "must be an object"),
    ],
)
def test_published_form_refused(path, value, field, words):
    published = json.loads(json.dumps(PUBLISHED))
    *parents, key = path.split(".")
    section = published
    for parent in parents:
        section = section[parent]
    section[key] = value
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_hf(published)
    assert str(caught.value).startswith(field)
    assert words in str(caught.value)


def test_published_form_names_what_is_missing():
    published = json.loads(json.dumps(PUBLISHED))
    del published["text_config"]["swiglu_limit"]
    with pytest.raises(ConfigError, match="^swiglu_limit: missing"):
        ModelConfig.from_hf(published)


def test_bookkeeping_keys_are_passed_over():
    published = json.loads(json.dumps(PUBLISHED))
    published |= {"transformers_version": "5.0.0", "_name_or_path": "x", "torch_dtype": "bfloat16"}
    published["text_config"] |= {"use_cache": True, "attention_dropout": 0.0}
    assert ModelConfig.from_hf(published) == v41_flash()


# -- Properties ---------------------------------------------------------------------------------


@st.composite
def schedules(draw) -> ModelConfig:
    """Any possible schedule, and some widths."""
    ratio = st.sampled_from([1, 2, 4, 8])
    windows = draw(st.integers(0, 3))
    ratios, kv, index = [0] * windows, [], []
    spans = draw(st.integers(1, 4))
    for span in range(spans):
        kv.append(len(ratios))
        index.append(len(ratios))
        ratios += [draw(ratio)] * draw(st.integers(1, 5))
        if span == spans - 1:
            later = draw(st.lists(st.booleans(), max_size=6))
            index += [len(ratios) + i for i, reindex in enumerate(later) if reindex]
            ratios += [ratios[-1]] * len(later)
    heads = list(range(windows)) + index
    engram = sorted(draw(st.sets(st.sampled_from(heads), max_size=2)))
    topk, size = draw(st.integers(1, 9)), draw(st.integers(1, 4))
    return tiny(
        num_hidden_layers=len(ratios),
        compress_ratios=ratios,
        kv_source_layer_ids=kv,
        index_source_layer_ids=index,
        candidate_source_layer_id=kv[-1] if len(index) > len(kv) or draw(st.booleans()) else None,
        index_topk=topk,
        candidate_block_size=size,
        candidate_topk_blocks=topk + draw(st.integers(0, 3)),
        engram_layer_ids=engram,
        engram_num_embeddings=[draw(st.integers(1, 2**31 - 1)) for _ in engram],
        swiglu_limit=draw(st.floats(1e-3, 1e3)),
        gate_temp=draw(st.floats(0.1, 10)),
        dtype=draw(st.sampled_from(["bfloat16", "float32"])),
        vision=draw(st.sampled_from([None, v41_flash().vision])),
        quantization_config=draw(st.sampled_from([None, v41_flash().quantization_config])),
    )


@settings(deadline=None, max_examples=60)
@given(schedules())
def test_any_schedule_round_trips(config):
    assert ModelConfig.from_hf(json.loads(json.dumps(config.to_hf()))) == config
    assert ModelConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


@settings(deadline=None, max_examples=60)
@given(schedules())
def test_groups_cover_the_layers_in_order(config):
    covered = []
    for number, group in enumerate(config.groups):
        assert group.name == f"group_{number}"
        assert group.start == len(covered) == group.first.index
        for _ in range(group.repeats):
            unit = config.layers[len(covered) : len(covered) + 1 + group.reuse]
            head, rest = unit[0], unit[1:]
            assert (head.mode, head.ratio, head.pool, head.part) == (
                group.first.mode,
                group.first.ratio,
                group.first.pool,
                group.first.part,
            )
            assert head.engram is None or group.repeats == 1
            assert all(spec.mode == "reuse" and spec.engram is None for spec in rest)
            covered += unit
        assert group.num_layers == group.repeats * (1 + group.reuse)
    assert tuple(covered) == config.layers


@settings(deadline=None, max_examples=60)
@given(schedules())
def test_every_layer_reads_what_exists(config):
    assert len(config.layers) == config.num_hidden_layers
    for spec in config.layers:
        if spec.mode == "window":
            assert spec.kv_source is None and spec.index_source is None and spec.ratio == 0
            continue
        source, selector = config.layers[spec.kv_source], config.layers[spec.index_source]
        assert source.mode == "full" and source.index <= spec.index
        assert source.ratio == spec.ratio
        assert selector.mode in ("full", "reindex")
        assert spec.kv_source <= selector.index <= spec.index
        assert (spec.part == "decoder") == (source.part == "decoder")


def test_configuration_classes_are_immutable():
    config = v41_flash()
    for part, name in (
        (config, "head_dim"),
        (config.vision, "patch_size"),
        (config.layers[0], "mode"),
    ):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(part, name, 1)
    assert isinstance(config.vision, VisionConfig)
    assert isinstance(config.quantization_config, QuantizationConfig)
    assert config.quantization_config.weight_block_size == (32, 32)
