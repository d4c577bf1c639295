"""The claims of the paper, each as a variant against its alternative, at a small scale.

    python -m eval.main --sweep=configs/sweeps/claims.py --workdir=DIR --slots=8 [--seeds=0,1,2,3]

Every variant is `configs/claims.py` with a few keys changed: equal data, equal steps, and, where a
claim is about what a mechanism is worth, equal parameters and equal activated parameters
(`tests/configs/test_claims.py` counts them). The seeds of a variant train side by side in one
process, which compiles once; held-out numbers under other settings of the same parameters (a
smaller pool, another cache format, a bounded replay) come from the same process. docs/evaluation.md
says how long it takes, and how to spread it.

What is claimed to cost nothing may cost `_MARGIN` bits per byte.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from configs import claims as base_config
from eval.sweep import Claim, Sweep, Training, Variant
from v41flash.accounting import parameters
from v41flash.config import ModelConfig

_MARGIN = 0.01
_BASE = Training("configs/claims.py", together=True)
_DIGITS = Training(
    "configs/digits.py",
    {"train.steps": 600, "optimizer.decay_from": 300, "optimizer.decay_until": 600},
    together=True,
)
_LAYERS = 8
_METRIC = "heldout_bits_per_byte"
_RATES = {"slow": 1e-3, "fast": 4e-3}


def _under(name: str) -> str:
    return f"{_METRIC}_under_{name}"


def _activated(model: ModelConfig) -> int:
    return sum(parameters.activated_decode(model).values())


def _total(model: ModelConfig) -> int:
    return sum(parameters.total(model).values())


def _with_equal_size(changes: dict[str, Any], *, total: bool) -> dict[str, Any]:
    """Adds the width of experts (and, for equal parameters, their number) that makes up for it."""
    base = ModelConfig.from_dict(base_config.get_config().model.to_dict())
    fields = {key.removeprefix("model."): value for key, value in changes.items()}
    best: tuple[float, dict[str, Any]] | None = None
    for hidden in range(base.moe_intermediate_size // 2, 2 * base.moe_intermediate_size, 4):
        for experts in range(4, 33) if total else (base.n_routed_experts,):
            sizes = dict(moe_intermediate_size=hidden, n_routed_experts=experts)
            model = dataclasses.replace(base, **fields, **sizes)
            miss = abs(_activated(model) / _activated(base) - 1)
            if total:
                miss = max(miss, abs(_total(model) / _total(base) - 1))
            if best is None or miss < best[0]:
                best = miss, {f"model.{key}": value for key, value in sizes.items()}
    return changes | best[1]


def _model(name: str, group: str, changes: dict[str, Any], **fields: Any) -> Variant:
    overrides = {f"model.{key}": value for key, value in changes.items()}
    return Variant(name, _BASE.but(overrides, **fields), group=group)


def _base() -> Variant:
    also = {
        "pool_40": {"model.candidate_topk_blocks": 5},
        "pool_128": {"model.candidate_topk_blocks": 16},
        "pool_all": {"model.use_candidate_pool": False},
        "replay_32": {"model.replay_segment": 32},
        "replay_64": {"model.replay_segment": 64},
        "replay_128": {"model.replay_segment": 128},
    }
    return Variant("base", dataclasses.replace(_BASE, also=also), group="base")


def _schedules() -> list[Variant]:
    every = tuple(range(1, _LAYERS))
    own = dict(kv_source_layer_ids=every, index_source_layer_ids=every)
    return [
        _model(
            "own_decoder_kv",
            "encoder-decoder",
            dict(kv_source_layer_ids=(1, 4, 6), candidate_source_layer_id=6),
        ),
        _model("full_everywhere", "sharing", dict(candidate_source_layer_id=7, **own)),
        _model("reuse_only", "sharing", dict(index_source_layer_ids=(1, 4))),
        _model("reindex_everywhere", "sharing", dict(index_source_layer_ids=(1, 4, 5, 6, 7))),
        _model("m_1", "compression", dict(compress_ratios=(0, 1, 1, 1, 1, 1, 1, 1))),
        _model("m_4", "compression", dict(compress_ratios=(0, 4, 4, 4, 1, 1, 1, 1))),
        _model("pool_40", "candidate pool", dict(candidate_topk_blocks=5)),
        _model("pool_128", "candidate pool", dict(candidate_topk_blocks=16)),
        _model("pool_all", "candidate pool", dict(use_candidate_pool=False)),
    ]


def _formats() -> list[Variant]:
    group = "format of the shared cache"
    rounded = {fmt: {"model.main_kv_format": fmt} for fmt in ("fp8", "fp4")}
    replayed = {"replay_64": {"model.replay_segment": 64}}
    return [
        _model("kv_bf16", group, dict(main_kv_format="none"), also=rounded),
        _model("kv_fp8", group, dict(main_kv_format="fp8")),
        _model("kv_before_rope", group, dict(main_kv_rounding="before_rope")),
        _model("kv_global_scale", group, dict(main_kv_rounding="global_scale")),
        _model("replay_trained", "bounded replay", dict(replay_segment=64), also=replayed),
    ]


def _mechanisms() -> list[Variant]:
    plain = {"model.hc_mult": 1}
    no_engram = {"model.engram_layer_ids": (), "model.engram_num_embeddings": ()}

    def variant(name: str, group: str, overrides: dict[str, Any]) -> Variant:
        return Variant(name, _BASE.but(overrides), group=group)

    return [
        _model("two_pass", "residual streams", dict(hc_single_pass=False)),
        variant("plain_residual", "residual streams", _with_equal_size(plain, total=False)),
        variant("no_engram", "Engram", _with_equal_size(no_engram, total=True)),
    ]


def _optimizers() -> list[Variant]:
    variants = []
    for speed, rate in _RATES.items():
        for name in ("v41", "head_muon", "muon", "adamw"):
            overrides = {"optimizer.name": name, "optimizer.learning_rate": rate}
            variants.append(Variant(f"{name}_{speed}", _BASE.but(overrides), group="optimizers"))
    return variants


def _images() -> list[Variant]:
    shared = {"model.router_bias_by_modality": False}
    group = "router biases of images"
    return [
        Variant("biases_by_modality", _DIGITS, group=group),
        Variant("one_set_of_biases", _DIGITS.but(shared), group=group),
    ]


def _structure_claims() -> list[Claim]:
    free = dict(kind="no worse", margin=_MARGIN)
    size = dict(equal=("activated",))
    sharing = "one cache for many layers costs nothing against one for each"
    reindex = "Reindex and Reuse layers together are worth it"
    ratio = "m = 2 is as good as m = 1, and better than m = 4"
    pool = "a small candidate pool costs nothing"
    streams = "hyper-connections in a single pass"
    return [
        Claim(
            "the decoder can live on the encoder's KV (causal encoder-decoder)",
            "base",
            "own_decoder_kv",
            **free,
            **size,
        ),
        Claim(sharing, "base", "full_everywhere", **free),
        Claim(reindex, "base", "reuse_only", **size),
        Claim(reindex, "base", "reindex_everywhere", **free, **size),
        Claim(ratio, "base", "m_1", **free, **size),
        Claim(ratio, "base", "m_4", **size),
        *(Claim(pool, name, "pool_all", **free, **size) for name in ("pool_40", "base")),
        *(
            Claim(f"{pool}: at inference", "base", "base", metric, _under("pool_all"), **free)
            for metric in (_under("pool_40"), _METRIC, _under("pool_128"))
        ),
        Claim(f"{streams} cost nothing against two", "base", "two_pass", **free, **size),
        Claim(f"{streams} are better than a plain residual", "base", "plain_residual", **size),
        Claim(
            "Engram is better than as many parameters in experts",
            "base",
            "no_engram",
            equal=("parameters", "activated"),
        ),
    ]


def _precision_claims() -> list[Claim]:
    free = dict(kind="no worse", margin=_MARGIN)
    trained = "a cache in FP4 or FP8 costs nothing where training knows it"
    rounding = "FP4 after the rotation and without a global scale"
    replay = "bounded replay costs little"
    return [
        Claim(trained, "base", "kv_bf16", **free),
        Claim(trained, "kv_fp8", "kv_bf16", **free),
        Claim(
            "training with FP4 is better than rounding later",
            "base",
            "kv_bf16",
            other_metric=_under("fp4"),
        ),
        Claim("FP8 needs no training", "kv_bf16", "kv_bf16", _under("fp8"), _METRIC, **free),
        Claim(f"{rounding}: no worse than before it", "base", "kv_before_rope", **free),
        Claim(f"{rounding}: no worse than with one", "base", "kv_global_scale", **free),
        *(
            Claim(replay, "base", "base", _under(f"replay_{length}"), _METRIC, **free)
            for length in (32, 64, 128)
        ),
        Claim(
            "training with replays is better than replaying later",
            "replay_trained",
            "base",
            _under("replay_64"),
        ),
    ]


def _learning_claims() -> list[Claim]:
    heads, tables = "head-wise Muon is better than whole-matrix Muon", "Sinkhorn-balanced tables"
    claims = [
        Claim(
            "router biases of their own make images better",
            "biases_by_modality",
            "one_set_of_biases",
            "heldout_loss",
        )
    ]
    for speed in _RATES:
        claims += [
            Claim(heads, f"head_muon_{speed}", f"muon_{speed}"),
            Claim(
                f"{tables} are no worse than Adam's",
                f"v41_{speed}",
                f"head_muon_{speed}",
                kind="no worse",
                margin=_MARGIN,
            ),
            Claim("the whole recipe is better than AdamW", f"v41_{speed}", f"adamw_{speed}"),
        ]
    return claims


def get_sweep() -> Sweep:
    """The sweep."""
    variants = [
        _base(),
        *_schedules(),
        *_formats(),
        *_mechanisms(),
        *_optimizers(),
        *_images(),
    ]
    claims = [*_structure_claims(), *_precision_claims(), *_learning_claims()]
    return Sweep(
        tuple(variants), seeds=(0, 1), metric=_METRIC, claims=tuple(claims), shown=("max_main_kv",)
    )
