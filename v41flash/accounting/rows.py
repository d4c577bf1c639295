"""Every figure of a model by name, with unit and origin: what `python -m eval.accounting` prints.

Values are in base units (parameters, bytes, FLOPs, entries); names are dotted, the part before the
first dot is the section.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from v41flash.accounting import cache, comparisons, flops, parameters
from v41flash.checkpoints import inventory
from v41flash.config import ModelConfig

# Contexts of the FLOP rows.
CONTEXTS = (4_096, 16_384, 65_536, 262_144, 1_048_576)
_E4M3_MAX = 448.0
_E2M1_MAX = 6.0
_ACTIVATION_BYTES = {"bfloat16": 2, "float32": 4}


class Row(NamedTuple):
    """One figure.

    Attributes:
        value: a number, in `unit`.
        unit: base unit; "1" for ratios.
        source: what it is computed from.
    """

    value: float
    unit: str
    source: str


Rows = dict[str, Row]


def _shapes(config: ModelConfig) -> Rows:
    """Sizes of single parts."""
    first = {weight.name: weight for weight in inventory.layer_weights(config, config.layers[0])}
    prefix = f"layers.{config.layers[0].index}."
    own = "shapes of one layer"
    rows = {}
    small = 0
    for name, weight in first.items():
        if weight.component != "attention":
            continue
        if weight.kind == "matrix":
            label = name.removeprefix(prefix + "attn.").removesuffix(".weight")
            rows[f"layer.attention.{label}"] = Row(weight.parameters, "parameters", own)
        else:
            small += weight.parameters
    rows["layer.attention.small"] = Row(small, "parameters", "query norm, KV norm and sinks")
    attention = sum(w.parameters for w in first.values() if w.component == "attention")
    rows["layer.attention"] = Row(attention, "parameters", own)
    expert = 3 * config.hidden_size * config.moe_intermediate_size
    rows["layer.expert"] = Row(expert, "parameters", "three matrices of one expert")
    gate = config.n_routed_experts * (config.hidden_size + 1)
    rows["layer.gate"] = Row(gate, "parameters", "router weight and text bias of one layer")
    mhc = sum(w.parameters for w in first.values() if w.component == "mhc") // 2
    rows["layer.mhc_per_sublayer"] = Row(mhc, "parameters", "fn, base and scale of one sublayer")
    return rows


def _parameters(config: ModelConfig) -> Rows:
    counted = parameters.total(config)
    rows = {
        f"parameters.{name}": Row(count, "parameters", "tensor shapes from the configuration")
        for name, count in counted.items()
    }
    indexers = counted["index_keys"] + counted["index_queries"]
    layers = sum(counted[name] for name in parameters.LAYERS)
    tables = counted["embedding"] + counted["head"]
    backbone = layers + tables
    with_engram = backbone + counted["engram_projections"]
    vision = counted["vision"] + counted["aligner"]
    sums = {
        "indexers": (indexers, "index keys and queries"),
        "embedding_and_head": (tables, "both tables"),
        "backbone_layers": (layers, "layers and final norm"),
        "backbone": (backbone, "layers, embedding, head: what the published 552B counts"),
        "backbone_with_engram_projections": (with_engram, "the same and the Engram projections"),
        "backbone_with_vision": (with_engram + vision, "the same, image encoder and aligner"),
        "backbone_and_tables": (
            with_engram + counted["engram_tables"],
            "layers, embedding, head, all of Engram",
        ),
        "text_model": (
            sum(w.parameters for w in inventory.text_weights(config)),
            "everything but vision and draft blocks",
        ),
        "checkpoint": (sum(counted.values()), "everything"),
    }
    for name, (count, source) in sums.items():
        rows[f"parameters.{name}"] = Row(count, "parameters", source)
    return rows


def _activated(config: ModelConfig) -> Rows:
    rows = {}
    for phase, counted in (
        ("decode", parameters.activated_decode(config)),
        ("prefill", parameters.activated_prefill(config)),
    ):
        for name, count in counted.items():
            rows[f"activated.{phase}.{name}"] = Row(count, "parameters", "one token's share")
    embedding = parameters.total(config)["embedding"]
    decode = sum(parameters.activated_decode(config).values())
    layers = decode - parameters.activated_decode(config)["head"]
    prefill = sum(parameters.activated_prefill(config).values())
    sums = {
        "decode_layers": (layers, "all layers, chosen experts only"),
        "decode": (decode, "the same and the head: what the published 16B counts"),
        "decode_with_embedding": (decode + embedding, "the same and the embedding table"),
        "prefill": (prefill, "encoder and the decoder's cache: what the published 8B counts"),
        "prefill_with_embedding": (prefill + embedding, "the same and the embedding table"),
    }
    for name, (count, source) in sums.items():
        rows[f"activated.{name}"] = Row(count, "parameters", source)
    source = "activated.prefill / activated.decode_layers"
    rows["activated.prefill_share"] = Row(prefill / layers, "1", source)
    return rows


def _schedule(config: ModelConfig) -> Rows:
    layers = config.layers
    indexed = sum(spec.mode in ("full", "reindex") for spec in layers)
    candidates = config.candidate_topk_blocks * config.candidate_block_size
    share = candidates / config.max_position_embeddings
    return {
        "layers.total": Row(len(layers), "layers", "layer schedule"),
        "layers.encoder": Row(config.num_encoder_layers, "layers", "layer schedule"),
        "layers.with_indexer": Row(indexed, "layers", "Full and Reindex layers"),
        "layers.with_cache": Row(len(cache.cache_owners(config)), "layers", "Full layers"),
        "pool.candidates": Row(candidates, "entries", "blocks x block size"),
        "pool.share_of_longest_context": Row(share, "1", "of max_position_embeddings"),
    }


def _cache(config: ModelConfig) -> Rows:
    per_token = cache.entries_per_token(config)
    entry, key = cache.entry_bytes(config), cache.index_key_bytes(config)
    ours = cache.global_bytes_per_token(config)
    unshared = cache.unshared_bytes_per_token(config)
    longest = config.max_position_embeddings
    flash, pro = comparisons.V4_FLASH, comparisons.V4_PRO
    v4 = comparisons.global_bytes_per_token(flash)
    v4_kept = comparisons.persistent_bytes_per_token(flash)
    v3_2, v1 = comparisons.v3_2_bytes_per_token(), comparisons.v1_67b_bytes_per_token()
    unit = "bytes/token"
    return {
        "kv.entry": Row(entry, "bytes", f"{config.main_kv_format} row of head_dim channels"),
        "kv.index_key": Row(key, "bytes", f"{config.index_format} row of index_head_dim channels"),
        "kv.window_row": Row(
            cache.window_row_bytes(config), "bytes", f"{config.window_kv_format} row"
        ),
        "kv.entries_per_token": Row(per_token, "entries/token", "sum of 1 / m over Full layers"),
        "kv.main": Row(per_token * entry, unit, "entries per token x entry"),
        "kv.index": Row(per_token * key, unit, "entries per token x index key"),
        "kv.global": Row(ours, unit, "main and index"),
        "kv.global_at_longest_context": Row(
            cache.global_bytes(config, longest), "bytes", f"{longest} tokens"
        ),
        "kv.entries_without_sharing": Row(
            unshared / (entry + key), "entries/token", "every layer with a cache of its own"
        ),
        "kv.without_sharing": Row(unshared, unit, "every layer with a cache of its own"),
        "kv.sharing_ratio": Row(unshared / ours, "1", "kv.without_sharing / kv.global"),
        "kv.window_state": Row(
            cache.window_bytes(config), "bytes", "layers x window x row, constant per sequence"
        ),
        "kv.partial_group_state": Row(
            cache.partial_group_bytes(config), "bytes", "float32 keys and gates of m - 1 tokens"
        ),
        "kv.engram_lookback_state": Row(
            cache.lookback_bytes(config), "bytes", "32-bit ids of the longest n-gram but one"
        ),
        "kv.persistent": Row(
            cache.persistent_bytes_per_token(config), unit, "the global cache; no window entries"
        ),
        "v4_flash.kv.entry": Row(comparisons.entry_bytes(flash), "bytes", "V4 cache layout"),
        "v4_flash.kv.csa_layers": Row(flash.csa_layers, "layers", "its compress_ratios"),
        "v4_flash.kv.hca_layers": Row(flash.hca_layers, "layers", "its compress_ratios"),
        "v4_flash.kv.csa": Row(
            comparisons.csa_bytes_per_token(flash), unit, "layers x (entry + index key) / 4"
        ),
        "v4_flash.kv.hca": Row(
            comparisons.hca_bytes_per_token(flash), unit, "layers x entry / 128"
        ),
        "v4_flash.kv.global": Row(v4, unit, "CSA and HCA layers"),
        "v4_flash.kv.persistent": Row(
            v4_kept, unit, "its kv.global / V4_PERSISTENT_GLOBAL_SHARE: half is window entries"
        ),
        "v4_pro.kv.csa_layers": Row(pro.csa_layers, "layers", "its compress_ratios"),
        "v4_pro.kv.hca_layers": Row(pro.hca_layers, "layers", "its compress_ratios"),
        "v4_pro.kv.global": Row(
            comparisons.global_bytes_per_token(pro), unit, "by the rule of V4-Flash"
        ),
        "v3_2.kv.global": Row(v3_2, unit, "61 layers x (656 + 132)"),
        "v1_67b.kv.global": Row(v1, unit, "95 layers x K, V x 8 heads x 128 x 2 bytes"),
        "kv.v1_67b_ratio": Row(v1 / ours, "1", "v1_67b.kv.global / kv.global"),
        "kv.v3_2_ratio": Row(v3_2 / ours, "1", "v3_2.kv.global / kv.global"),
        "kv.v4_flash_ratio": Row(v4 / ours, "1", "v4_flash.kv.global / kv.global"),
        "kv.persistent_share_of_v4_flash": Row(
            ours / v4_kept, "1", "kv.persistent / v4_flash.kv.persistent"
        ),
    }


def _flops(config: ModelConfig) -> Rows:
    rows, weighted = {}, {}
    for context in CONTEXTS:
        costs = {
            "decode": flops.decode(config, context),
            "prefill": flops.prefill(config, context),
            "prefill_all_layers": flops.all_layers(config, context),
        }
        for phase, cost in costs.items():
            name = f"flops.{phase}.at_{context}"
            unit = "FLOP/token" if phase == "decode" else "FLOP/prompt"
            rows[name] = Row(flops.total(cost), unit, "all precisions alike")
            weighted[phase, context] = flops.weighted(cost)
            rows[f"{name}.weighted"] = Row(
                weighted[phase, context], unit, "BF16 / FP8 / FP4 by 1 / 0.5 / 0.25"
            )
        share = weighted["prefill", context] / weighted["prefill_all_layers", context]
        rows[f"flops.prefill_share.at_{context}"] = Row(
            share, "1", "weighted: encoder, cache and replay / all layers"
        )
    last = flops.decode(config, CONTEXTS[-1])
    for (component, precision), count in last.items():
        rows[f"flops.decode.at_{CONTEXTS[-1]}.{component}.{precision}"] = Row(
            count, "FLOP/token", "unweighted share"
        )
    rows["flops.decode_growth"] = Row(
        weighted["decode", CONTEXTS[-1]] / weighted["decode", CONTEXTS[0]],
        "1",
        f"weighted decode FLOPs at {CONTEXTS[-1]} / at {CONTEXTS[0]}",
    )
    return rows


def _traffic(config: ModelConfig) -> Rows:
    n, d = config.hc_mult, config.hidden_size
    one, two = (2 * n + 2) * d, (4 * n + 4) * d
    sublayers = 2 * config.num_hidden_layers
    size = _ACTIVATION_BYTES[config.dtype]
    return {
        "mhc.traffic": Row(one, "elements/token/sublayer", "one pass: (2n + 2) d"),
        "mhc.traffic_two_pass": Row(two, "elements/token/sublayer", "two passes: (4n + 4) d"),
        "mhc.traffic_ratio": Row(one / two, "1", "one pass / two"),
        "mhc.traffic_bytes": Row(one * sublayers * size, "bytes/token", "all sublayers"),
        "mhc.traffic_two_pass_bytes": Row(two * sublayers * size, "bytes/token", "all sublayers"),
    }


def _optimizer(config: ModelConfig) -> Rows:
    ours, adam = parameters.optimizer_bytes(config), parameters.adam_bytes(config)
    tables = ("embedding", "head", "engram_tables")
    ours_tables = parameters.optimizer_bytes(config, tables)
    adam_tables = parameters.adam_bytes(config, tables)
    recipe = "float32; one buffer for matrices and tables, two for the rest, text model"
    return {
        "optimizer.v41": Row(ours, "bytes", recipe),
        "optimizer.adam": Row(adam, "bytes", "two float32 buffers for every parameter"),
        "optimizer.ratio": Row(ours / adam, "1", "optimizer.v41 / optimizer.adam"),
        "optimizer.v41_tables": Row(ours_tables, "bytes", "embedding, head and Engram tables"),
        "optimizer.adam_tables": Row(adam_tables, "bytes", "the same with two buffers"),
        "optimizer.tables_ratio": Row(ours_tables / adam_tables, "1", "their ratio"),
    }


def _range(config: ModelConfig) -> Rows:
    return {
        "main_kv.bound": Row(
            math.sqrt(config.head_dim), "1", "RMSNorm and rotation: sqrt(head_dim), unit weights"
        ),
        "main_kv.format_range": Row(
            _E4M3_MAX * _E2M1_MAX, "1", "largest E4M3 scale x largest E2M1 value"
        ),
    }


def _checkpoint(config: ModelConfig) -> Rows:
    size, count = inventory.totals(config)
    source = "published layout, vision and draft blocks included"
    return {
        "checkpoint.bytes": Row(size, "bytes", source),
        "checkpoint.tensors": Row(count, "tensors", source),
    }


def _engram(config: ModelConfig) -> Rows:
    rows = {
        f"engram.layer_{layer}.rows": Row(count, "rows", "engram_num_embeddings")
        for layer, count in zip(config.engram_layer_ids, config.engram_num_embeddings, strict=True)
    }
    rows["engram.rows"] = Row(sum(config.engram_num_embeddings), "rows", "all tables")
    rows["engram.row_width"] = Row(config.engram_head_dim, "channels", "engram_head_dim")
    lookups = config.num_engram_sites * config.engram_rows_per_token
    rows["engram.rows_per_token"] = Row(lookups, "rows/token", "sites x orders x heads")
    return rows


def _v4(prefix: str, model: comparisons.V4) -> Rows:
    source = "its published configuration"
    rows = {
        f"{prefix}.parameters.{name}": Row(count, "parameters", source)
        for name, count in comparisons.parameters(model).items()
    }
    total, mtp = comparisons.total(model), comparisons.parameters(model)["mtp"]
    table = comparisons.parameters(model)["head"]
    active = comparisons.activated_layers(model)
    sums = {
        "layer.attention": (comparisons.attention_per_layer(model), "one layer"),
        "parameters.embedding_and_head": (2 * table, "both tables"),
        "parameters": (total, "without the MTP block"),
        "parameters_with_mtp": (total + mtp, "with the MTP block"),
        "activated.layers": (active, "all layers, chosen experts only"),
        "activated": (active + table, "the same and the head"),
        "activated.with_embedding": (active + 2 * table, "the same and the embedding table"),
    }
    for name, (count, text) in sums.items():
        rows[f"{prefix}.{name}"] = Row(count, "parameters", text)
    return rows


def rows(config: ModelConfig) -> Rows:
    """Every figure that follows from the configuration by plain arithmetic."""
    sections = (
        _parameters(config),
        _shapes(config),
        _activated(config),
        _schedule(config),
        _cache(config),
        _flops(config),
        _traffic(config),
        _optimizer(config),
        _range(config),
        _checkpoint(config),
        _engram(config),
        _v4("v4_flash", comparisons.V4_FLASH),
        _v4("v4_pro", comparisons.V4_PRO),
    )
    merged: Rows = {}
    for section in sections:
        merged.update(section)
    return merged
