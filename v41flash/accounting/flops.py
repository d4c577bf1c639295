"""Forward FLOPs of prefill and decode against context length, by component and precision.

A multiplication and an addition count 2. Counted are matrix products, those of mHC's stream mixing
among them; elementwise work, normalisation, softmax, top-k, the weighting of index heads and
Sinkhorn iterations are not. Precision follows the published run: products of weights stored in FP8
or FP4 are FP8 (experts: FP8 activations times FP4 weights), index scores are FP4; attention over
keys, wo_a, router, compressor, index head weights and keys, mHC and head are BF16. Weighting BF16 /
FP8 / FP4 by 1 / 0.5 / 0.25 gives the equivalent BF16 FLOPs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from v41flash.accounting import parameters
from v41flash.checkpoints import inventory
from v41flash.checkpoints.inventory import Weight
from v41flash.config import LayerSpec, ModelConfig

PRECISION_WEIGHTS = {"bf16": 1.0, "fp8": 0.5, "fp4": 0.25}

# (component, precision) -> FLOPs.
Costs = Counter[tuple[str, str]]


class Keys(NamedTuple):
    """Keys that queries of one layer meet, summed over the queries.

    Attributes:
        window: sliding-window entries attended to.
        selected: global entries attended to.
        scored: index keys scored.
    """

    window: int
    selected: int
    scored: int


def _up_to(tokens: int, ratio: int, cap: int | None = None) -> int:
    """Sum of min(t // ratio, cap) over t = 1 .. tokens."""
    if cap is not None and tokens >= ratio * cap:
        rising = ratio * cap * (cap - 1) // 2
        return rising + (tokens - ratio * cap + 1) * cap
    groups, rest = divmod(tokens, ratio)
    return ratio * groups * (groups - 1) // 2 + groups * (rest + 1)


def keys(
    config: ModelConfig, spec: LayerSpec, start: int, stop: int, *, replay: bool = False
) -> Keys:
    """Keys of the queries at positions start .. stop - 1 of a document.

    Under `dense_selection`, the indexer's warm-up, every visible entry is attended to and scored.

    Args:
        config: the model.
        spec: the layer.
        start: first position.
        stop: one past the last.
        replay: windows reach back to `start` only (bounded replay).
    """

    def over(ratio: int, cap: int | None = None) -> int:
        return _up_to(stop, ratio, cap) - _up_to(start, ratio, cap)

    window = over(1, config.sliding_window)
    if replay:
        window = _up_to(stop - start, 1, config.sliding_window)
    if not spec.ratio:
        return Keys(window, 0, 0)
    dense = config.dense_selection
    pooled = config.candidate_topk_blocks * config.candidate_block_size
    scored = 0
    if spec.mode in ("full", "reindex"):
        scored = over(spec.ratio, pooled if spec.pool == "use" and not dense else None)
    return Keys(window, over(spec.ratio, None if dense else config.index_topk), scored)


def _precision(weight: Weight) -> str:
    eight_bits = weight.storage in ("expert", "linear") and not weight.name.endswith("wo_a.weight")
    return "fp8" if eight_bits else "bf16"


def _products(config: ModelConfig, weights: Iterable[Weight], tokens: float) -> Costs:
    """Every matrix times the activations of `tokens` tokens."""
    costs: Costs = Counter()
    for weight in weights:
        if weight.kind == "matrix":
            copies = parameters.chosen_experts(config, weight)
            used = weight._replace(copies=copies).parameters
            costs[weight.component, _precision(weight)] += 2.0 * tokens * used
    return costs


def cache_side(config: ModelConfig, spec: LayerSpec, tokens: int) -> Costs:
    """Making the shared cache of a Full layer: the compressor, and an index key per entry."""
    costs: Costs = Counter()
    for weight in inventory.layer_weights(config, spec):
        if weight.component == "compressors":
            costs += _products(config, [weight], tokens)
        elif weight.component == "index_keys":
            costs += _products(config, [weight], tokens / spec.ratio)
    return costs


def query_side(config: ModelConfig, spec: LayerSpec, tokens: int, met: Keys) -> Costs:
    """Everything else in a layer.

    Args:
        config: the model.
        spec: the layer.
        tokens: number of queries.
        met: keys that they meet, all together.
    """
    own = (w for w in inventory.layer_weights(config, spec))
    own = (weight for weight in own if weight.component not in parameters.CACHE_SIDE)
    costs = _products(config, own, tokens)
    n, d = config.hc_mult, config.hidden_size
    # Per sublayer: read n streams into one, mix n into n, write one into n.
    costs["mhc", "bf16"] += 2 * tokens * 2.0 * d * (n + n * n + n)
    head = 2.0 * config.num_attention_heads * config.head_dim
    costs["attention_core", "bf16"] += 2 * head * (met.window + met.selected)
    score = 2.0 * config.index_n_heads * config.index_head_dim
    costs["index_scores", "fp4"] += score * met.scored
    return costs


def head(config: ModelConfig, tokens: int = 1) -> Costs:
    """Logits of `tokens` tokens."""
    return Counter({("head", "bf16"): 2.0 * tokens * config.hidden_size * config.vocab_size})


def _layer(config: ModelConfig, spec: LayerSpec, start: int, stop: int) -> Costs:
    tokens = stop - start
    costs = query_side(config, spec, tokens, keys(config, spec, start, stop))
    return costs + cache_side(config, spec, tokens)


def decode(config: ModelConfig, context: int) -> Costs:
    """One generated token, the last of `context`: all layers and the head.

    What compressing a group costs is spread over the group's tokens.
    """
    costs = head(config)
    for spec in config.layers:
        costs += _layer(config, spec, context - 1, context)
    return costs


def all_layers(config: ModelConfig, length: int) -> Costs:
    """A document of `length` tokens through all layers, without the head: the exact prefill."""
    costs: Costs = Counter()
    for spec in config.layers:
        costs += _layer(config, spec, 0, length)
    return costs


def prefill(config: ModelConfig, length: int) -> Costs:
    """A prompt as it is served: the encoder and the decoder's cache for all of its tokens, the
    decoder's layers for the last `sliding_window` of them (decoder replay). Without the head.
    """
    costs: Costs = Counter()
    start = max(length - config.sliding_window, 0)
    for spec in config.layers:
        if spec.part == "encoder":
            costs += _layer(config, spec, 0, length)
            continue
        if spec.mode == "full":
            costs += cache_side(config, spec, length)
        met = keys(config, spec, start, length, replay=True)
        costs += query_side(config, spec, length - start, met)
    return costs


def attention(config: ModelConfig, length: int) -> float:
    """Attention and index-score FLOPs of a whole document, all layers: the share of a training
    step's forward pass that activated parameters do not account for.
    """
    costs = all_layers(config, length)
    return costs["attention_core", "bf16"] + costs["index_scores", "fp4"]


def total(costs: Costs) -> float:
    """FLOPs whatever their precision."""
    return float(sum(costs.values()))


def weighted(costs: Costs) -> float:
    """Equivalent BF16 FLOPs."""
    return float(sum(PRECISION_WEIGHTS[precision] * n for (_, precision), n in costs.items()))
