"""The model configuration: published field names, validation, and the layer schedule as data.

`ModelConfig` keeps the key names of the published `config.json`; what follows from them (layer
modes, scan groups, the encoder's length) is derived and never stored. Only the standard library is
imported, so that accounting tools and the data pipeline can read a configuration without JAX.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import operator
from collections.abc import Iterable, Mapping
from typing import Any

from v41flash import config_checks
from v41flash.config_checks import ConfigError

__all__ = [
    "ConfigError",
    "LayerGroup",
    "LayerSpec",
    "ModelConfig",
    "QuantizationConfig",
    "VisionConfig",
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """What one layer is.

    Attributes:
      index: layer number, from 0.
      mode: "window" (sliding window only), "full" (makes the global KV and index keys, selects),
        "reindex" (selects anew among existing ones) or "reuse" (reads KV and selection).
      ratio: tokens per global entry that the layer reads; 0 for a window layer.
      kv_source: the Full layer whose KV is read (the layer itself for "full"), None for "window".
      index_source: the layer whose selection is read (itself for "full" and "reindex"), or None.
      engram: position in `engram_layer_ids` of the Engram that runs before this layer, or None.
      pool: "make" where the candidate pool is built, "use" where selection is restricted to it.
      part: "encoder" or "decoder".
    """

    index: int
    mode: str
    ratio: int
    kv_source: int | None
    index_source: int | None
    engram: int | None
    pool: str | None
    part: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerGroup:
    """Consecutive equal units (a head layer and the Reuse layers after it), scanned as one.

    Attributes:
      name: "group_0", "group_1", ... in order of depth.
      first: the head layer of the first unit.
      reuse: Reuse layers after the head in every unit.
      repeats: number of units.
      start: index of the group's first layer.
    """

    name: str
    first: LayerSpec
    reuse: int
    repeats: int
    start: int

    @property
    def num_layers(self) -> int:
        """Layers in the whole group."""
        return self.repeats * (1 + self.reuse)


@dataclasses.dataclass(frozen=True, kw_only=True)
class VisionConfig:
    """The image encoder (published `vision_config`). Sizes in patches, tokens or pixels."""

    num_hidden_layers: int
    hidden_size: int
    num_attention_heads: int
    intermediate_size: int
    patch_size: int
    rope_theta: float
    downsample_ratio: int
    max_image_tokens: int
    min_pixels: int
    max_wh_ratio: float | None = None

    def __post_init__(self):
        _coerce_fields(self, "vision.")
        config_checks.check_vision(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantizationConfig:
    """How a published checkpoint stores its weights; no part of the maths."""

    quant_method: str
    weight_block_size: tuple[int, ...]
    scale_fmt: str
    activation_scheme: str = "dynamic"
    fmt: str | None = None
    expert_dtype: str | None = None

    def __post_init__(self):
        _coerce_fields(self, "quantization_config.")
        config_checks.check_quantization(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A V4.1-Flash model. Construction raises `ConfigError` where the fields do not fit together.

    Names up to `quantization_config` are those of the published file, with `rope_scaling` flattened
    to `rope_*`; the rest are ours. `compress_ratios` covers the draft blocks too: its length is
    `num_hidden_layers + num_nextn_predict_layers`, and layers use the first `num_hidden_layers`.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int = 1
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_lora_rank: int
    o_groups: int
    sliding_window: int
    compress_ratios: tuple[int, ...]
    kv_source_layer_ids: tuple[int, ...]
    index_source_layer_ids: tuple[int, ...]
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    # None (or -1, which becomes None): no candidate pool.
    candidate_source_layer_id: int | None
    candidate_topk_blocks: int
    candidate_block_size: int

    n_routed_experts: int
    n_shared_experts: int = 1
    num_experts_per_tok: int
    moe_intermediate_size: int
    scoring_func: str = "sqrtsoftplus"
    topk_method: str = "noaux_tc"
    norm_topk_prob: bool = True
    routed_scaling_factor: float
    gate_temp: float = 1.0
    swiglu_limit: float

    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    rms_norm_eps: float
    hidden_act: str = "silu"
    attention_bias: bool = False
    tie_word_embeddings: bool = False

    max_position_embeddings: int
    rope_theta: float
    compress_rope_theta: float
    rope_factor: float
    rope_beta_fast: float
    rope_beta_slow: float
    rope_original_max_position_embeddings: int

    engram_layer_ids: tuple[int, ...] = ()
    engram_num_embeddings: tuple[int, ...] = ()
    engram_max_ngram_size: int = 0
    engram_n_heads: int = 0
    engram_head_dim: int = 0
    engram_vocab_size: int = 0
    engram_compressed_vocab_size: int = 0
    engram_pad_token_id: int = 0

    num_nextn_predict_layers: int = 0
    dspark_block_size: int = 0
    dspark_noise_token_id: int = 0
    dspark_target_layer_ids: tuple[int, ...] = ()
    dspark_markov_rank: int = 0
    dspark_n_routed_experts: int = 0
    dspark_num_experts_per_tok: int = 0

    bos_token_id: int
    eos_token_id: int
    pad_token_id: int
    image_token_id: int
    initializer_range: float = 0.02
    dtype: str = "bfloat16"
    vision: VisionConfig | None = None
    quantization_config: QuantizationConfig | None = None

    # Formats of the fake quantisers, which are part of the released forward pass.
    main_kv_format: str = "fp4"
    # What is rounded to `main_kv_format`: entries as the published model has them, entries before
    # their rotation, or entries over a scale that puts the largest of a batch at the format's
    # largest value. The last two are alternatives to train against; no cache holds them.
    main_kv_rounding: str = "after_rope"
    window_kv_format: str = "fp8"
    index_format: str = "mxfp4"
    use_candidate_pool: bool = True
    # Every visible global entry is selected: the indexer's warm-up.
    dense_selection: bool = False
    # Bounded replay: decoder windows start no earlier than the last multiple of this; 0 is off.
    replay_segment: int = 0
    hc_init_scale: float = 0.01
    hc_base_init: str = "zero"
    # A sublayer reads by coefficients that the one before it predicted; False: by its own, as
    # hyper-connections did before, which takes a second pass over the streams.
    hc_single_pass: bool = True
    # Images have selection biases of their own; False: one set for all tokens.
    router_bias_by_modality: bool = True
    # "packed": weights stay as published, FP8 and FP4 with scales (`v41flash.nn.linear`); no
    # training. `activation_format` rounds what they are multiplied with.
    weight_form: str = "expanded"
    activation_format: str = "none"
    # Engram tables are filled up with rows that nothing names to a multiple of this, so that they
    # can be split over devices: their sizes are sums of primes.
    engram_row_multiple: int = 1

    def __post_init__(self):
        if self.candidate_source_layer_id == -1:
            object.__setattr__(self, "candidate_source_layer_id", None)
        for name, nested in (("vision", VisionConfig), ("quantization_config", QuantizationConfig)):
            value = vars(self)[name]
            if value is not None and not isinstance(value, nested):
                raise ConfigError(name, value, f"must be a {nested.__name__} or None")
        _coerce_fields(self)
        config_checks.check_model(self)

    # -- The schedule ---------------------------------------------------------------------------

    @property
    def num_encoder_layers(self) -> int:
        """The last KV source is the first decoder layer (V4.1 report, causal encoder-decoder)."""
        return self.kv_source_layer_ids[-1]

    @functools.cached_property
    def layers(self) -> tuple[LayerSpec, ...]:
        """One `LayerSpec` per layer."""
        reindex = set(self.index_source_layer_ids) - set(self.kv_source_layer_ids)
        pooled = self.use_candidate_pool and bool(reindex)
        specs = []
        kv_source = index_source = None
        for i, ratio in enumerate(self.compress_ratios[: self.num_hidden_layers]):
            if ratio == 0:
                mode = "window"
            elif i in self.kv_source_layer_ids:
                mode, kv_source, index_source = "full", i, i
            elif i in reindex:
                mode, index_source = "reindex", i
            else:
                mode = "reuse"
            pool = None
            if pooled and i == self.candidate_source_layer_id:
                pool = "make"
            elif pooled and mode == "reindex":
                pool = "use"
            specs.append(
                LayerSpec(
                    index=i,
                    mode=mode,
                    ratio=ratio,
                    kv_source=kv_source,
                    index_source=index_source,
                    engram=self.engram_layer_ids.index(i) if i in self.engram_layer_ids else None,
                    pool=pool,
                    part="encoder" if i < self.num_encoder_layers else "decoder",
                )
            )
        return tuple(specs)

    @functools.cached_property
    def groups(self) -> tuple[LayerGroup, ...]:
        """Layers in order, as scan groups. A unit whose head has Engram stands alone."""
        units: list[tuple[LayerSpec, int]] = []
        for spec in self.layers:
            if spec.mode == "reuse":
                head, reuse = units[-1]
                units[-1] = (head, reuse + 1)
            else:
                units.append((spec, 0))

        def kind(head: LayerSpec, reuse: int) -> tuple:
            alone = head.index if head.engram is not None else None
            return head.mode, head.ratio, head.pool, head.part, reuse, alone

        merged: list[tuple[LayerSpec, int, int]] = []
        for head, reuse in units:
            if merged and kind(head, reuse) == kind(*merged[-1][:2]):
                first, _, repeats = merged[-1]
                merged[-1] = (first, reuse, repeats + 1)
            else:
                merged.append((head, reuse, 1))
        return tuple(
            LayerGroup(name=f"group_{i}", first=first, reuse=reuse, repeats=n, start=first.index)
            for i, (first, reuse, n) in enumerate(merged)
        )

    @property
    def ratios_in_use(self) -> tuple[int, ...]:
        """Compression ratios above 0 that layers read, ascending."""
        return tuple(sorted({spec.ratio for spec in self.layers if spec.ratio}))

    @property
    def num_engram_sites(self) -> int:
        """Layers with an Engram table."""
        return len(self.engram_layer_ids)

    @property
    def engram_table_rows(self) -> tuple[int, ...]:
        """Rows of each table as it is held."""
        multiple = self.engram_row_multiple
        return tuple(-(-rows // multiple) * multiple for rows in self.engram_num_embeddings)

    @property
    def engram_rows_per_token(self) -> int:
        """Table rows one token reads at one site: every n-gram order from 2 up, every head."""
        return max(self.engram_max_ngram_size - 1, 0) * self.engram_n_heads

    # -- Flat form (the `model` section of an experiment's configuration) -----------------------

    def to_dict(self) -> dict[str, Any]:
        """All fields, with `vision` and `quantization_config` as dicts or None."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ModelConfig:
        """Inverse of `to_dict`. Anything that `dict()` accepts will do, lists count as tuples.

        Raises:
          ConfigError: on an unknown key (the closest known one is named), a missing one, or values
            that do not make a model.
        """
        values = dict(values)
        for name, nested in (("vision", VisionConfig), ("quantization_config", QuantizationConfig)):
            if values.get(name) is not None and not isinstance(values[name], nested):
                values[name] = _build(nested, _object(name, values[name]), f"{name}.")
        return _build(cls, values)

    # -- Published form -------------------------------------------------------------------------

    @classmethod
    def from_hf(cls, published: Mapping[str, Any]) -> ModelConfig:
        """Reads the contents of a published `config.json` (nested `text_config`).

        Fields that the file does not know (formats, switches) get their defaults.

        Raises:
          ConfigError: on unknown or missing keys, on another model's file, or on a schedule that is
            not possible.
        """
        top = dict(published)
        text = top.pop("text_config", None)
        if text is not None:
            text = _object("text_config", text)
        if text is None or "kv_source_layer_ids" not in text:
            where = "text_config" if text is None else "text_config.kv_source_layer_ids"
            raise ConfigError(
                where,
                ...,
                "missing: not a V4.1-Flash config.json (V4-Flash files name no KV source layers,"
                " and that model is not supported)",
            )
        _expect(top, "model_type", _HF_MODEL_TYPE)
        _expect(text, "model_type", _HF_MODEL_TYPE + "_text", "text_config.")
        if "architectures" in top:
            _expect(top, "architectures", [_HF_ARCHITECTURE])

        values = {"dtype": top.pop("torch_dtype", "bfloat16")}
        rope = _object("text_config.rope_scaling", text.pop("rope_scaling", {}))
        _expect(rope, "rope_type", "yarn", "text_config.rope_scaling.")
        vision = top.pop("vision_config", None)
        if vision is not None:
            vision = _object("vision_config", vision)
            _expect(vision, "model_type", _HF_MODEL_TYPE + "_vision", "vision_config.")
            values["vision"] = _build(VisionConfig, vision, "vision_config.")
        quantization = top.pop("quantization_config", None)
        if quantization is not None:
            quantization = _object("quantization_config", quantization)
            values["quantization_config"] = _build(
                QuantizationConfig, quantization, "quantization_config."
            )
        sections = (
            (top, "", {name: name for name in _HF_TOP}),
            (text, "text_config.", {name: name for name in _HF_TEXT}),
            (rope, "text_config.rope_scaling.", {k: f"rope_{k}" for k in _HF_ROPE}),
        )
        for section, prefix, names in sections:
            for key, value in section.items():
                if key in names:
                    values[names[key]] = value
                elif key not in _HF_BOOKKEEPING:
                    raise _unknown(prefix + key, [prefix + name for name in names])
                elif _HF_BOOKKEEPING[key] is not None and value not in _HF_BOOKKEEPING[key]:
                    raise ConfigError(prefix + key, value, f"must be {_HF_BOOKKEEPING[key][0]!r}")
        return _build(cls, values)

    def to_hf(self) -> dict[str, Any]:
        """The published `config.json`: key names, nesting and JSON types.

        Fields of ours are not written, and keys that published files leave out at their usual value
        (`gate_temp`, `initializer_range`) only where they differ from it.
        """
        flat = dataclasses.asdict(self)
        usual = {"gate_temp": 1.0, "initializer_range": 0.02}
        text: dict[str, Any] = {"model_type": _HF_MODEL_TYPE + "_text"}
        for name in _HF_TEXT:
            if name not in usual or flat[name] != usual[name]:
                text[name] = _json_value(flat[name])
        if self.candidate_source_layer_id is None:
            text["candidate_source_layer_id"] = -1
        text["rope_scaling"] = {"rope_type": "yarn"} | {k: flat[f"rope_{k}"] for k in _HF_ROPE}
        out: dict[str, Any] = {
            "architectures": [_HF_ARCHITECTURE],
            "model_type": _HF_MODEL_TYPE,
            **{name: flat[name] for name in _HF_TOP},
            "text_config": text,
        }
        if self.quantization_config is not None:
            out["quantization_config"] = {
                k: _json_value(v) for k, v in flat["quantization_config"].items() if v is not None
            }
        if self.vision is not None:
            out["vision_config"] = {"model_type": _HF_MODEL_TYPE + "_vision", **flat["vision"]}
        return out


_HF_MODEL_TYPE = "deepseek_v41"
_HF_ARCHITECTURE = "DeepseekV41ForCausalLM"
_HF_TOP = ("dtype", "bos_token_id", "eos_token_id", "pad_token_id", "image_token_id")
_HF_ROPE = ("factor", "beta_fast", "beta_slow", "original_max_position_embeddings")
_OURS = (
    "main_kv_format",
    "main_kv_rounding",
    "window_kv_format",
    "index_format",
    "use_candidate_pool",
    "dense_selection",
    "replay_segment",
    "hc_init_scale",
    "hc_base_init",
    "hc_single_pass",
    "router_bias_by_modality",
    "weight_form",
    "activation_format",
    "engram_row_multiple",
)
_HF_TEXT = tuple(
    field.name
    for field in dataclasses.fields(ModelConfig)
    if field.name not in (*_HF_TOP, *_OURS, "vision", "quantization_config")
    and field.name not in {f"rope_{k}" for k in _HF_ROPE}
)
# Keys that tools add to a config.json and that say nothing about this model, with the values under
# which that is true (None: any).
_HF_BOOKKEEPING: dict[str, tuple | None] = {
    "_name_or_path": None,
    "auto_map": None,
    "transformers_version": None,
    "use_cache": None,
    "attention_dropout": (0.0,),
}


def _json_value(value):
    return list(value) if isinstance(value, tuple) else value


def _unknown(key: str, known: Iterable[str]) -> ConfigError:
    closest = difflib.get_close_matches(key, list(known), n=1, cutoff=0.0)
    return ConfigError(key, ..., f"unknown key; the closest known one is {closest[0]}")


def _expect(section: dict, key: str, value, prefix: str = "") -> None:
    found = section.pop(key, ...)
    if found != value:
        raise ConfigError(prefix + key, found, f"must be {value!r}")


def _object(name: str, value: Any) -> dict[str, Any]:
    try:
        return dict(value)
    except (TypeError, ValueError):
        raise ConfigError(name, value, "must be an object: names and their values") from None


def _build(cls, values: dict, prefix: str = ""):
    """Constructs a configuration class, naming unknown and missing keys."""
    fields = {field.name: field for field in dataclasses.fields(cls)}
    for key in values:
        if key not in fields:
            raise _unknown(prefix + str(key), [prefix + name for name in fields])
    for name, field in fields.items():
        if name not in values and field.default is dataclasses.MISSING:
            raise ConfigError(prefix + name, ..., f"missing; a {field.type} is needed")
    return cls(**values)


def _coerce_fields(config, prefix: str = "") -> None:
    """Brings values to their declared types where nothing is lost (list to tuple, int to float)."""
    for field in dataclasses.fields(config):
        value = _coerce(prefix + field.name, str(field.type), vars(config)[field.name])
        object.__setattr__(config, field.name, value)


def _coerce(name: str, declared: str, value):
    kind = declared.removesuffix(" | None")
    if value is None and kind != declared:
        return None
    is_number = not isinstance(value, (bool, str)) and hasattr(value, "__float__")
    if kind == "int" and is_number and hasattr(value, "__index__"):
        return operator.index(value)
    if kind == "float" and is_number:
        try:
            return float(value)
        except OverflowError:
            raise ConfigError(name, value, "must be within the range of a float") from None
    if kind == "bool" and isinstance(value, bool):
        return value
    if kind == "str" and isinstance(value, str):
        return value
    if kind == "tuple[int, ...]" and isinstance(value, (list, tuple)):
        return tuple(_coerce(name, "int", item) for item in value)
    if kind in ("VisionConfig", "QuantizationConfig"):
        return value
    readable = "tuple of ints" if kind.startswith("tuple") else kind
    raise ConfigError(name, value, f"must be of type {readable}")
