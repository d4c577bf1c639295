"""Parameters: total and activated per token, by component, and what optimizers keep of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from v41flash.checkpoints import inventory
from v41flash.checkpoints.inventory import Weight
from v41flash.config import LayerSpec, ModelConfig

# What the layers consist of, Engram apart.
LAYERS = (
    "routed_experts",
    "shared_experts",
    "attention",
    "gates",
    "mhc",
    "compressors",
    "index_keys",
    "index_queries",
    "norms",
)
VISION = ("vision", "aligner", "image_vectors")
COMPONENTS = (
    *LAYERS,
    "embedding",
    "head",
    "engram_projections",
    "engram_tables",
    *VISION,
    "draft",
)
# What of a layer makes the shared cache; the rest of it is run by queries.
CACHE_SIDE = ("compressors", "index_keys")
# Looked up, never multiplied with.
_TABLES = ("embedding", "engram_tables")
# Buffers per parameter: one momentum for Muon and Sinkhorn-balanced updates, two for AdamW; the
# load balancing rule keeps nothing.
_V41_BUFFERS = {"matrix": 1, "table": 1, "norm": 2, "vector": 2, "router_bias": 0}
_ADAM_BUFFERS = 2
_BUFFER_BYTES = 4


def _sum(weights: Iterable[Weight]) -> Counter[str]:
    totals: Counter[str] = Counter()
    for weight in weights:
        totals[weight.component] += weight.parameters
    return totals


def total(config: ModelConfig) -> dict[str, int]:
    """Parameters of every component of `COMPONENTS`; "draft" is the whole of the DSpark blocks."""
    totals = _sum(inventory.text_weights(config))
    totals["draft"] = sum(weight.parameters for weight in inventory.draft_weights(config))
    if config.vision is not None:
        totals += _sum(inventory.vision_weights(config.vision, config.hidden_size))
    return {component: totals[component] for component in COMPONENTS}


def chosen_experts(config: ModelConfig, weight: Weight) -> int:
    """Copies of a weight that one token is multiplied with."""
    return config.num_experts_per_tok if weight.component == "routed_experts" else weight.copies


def _activated(config: ModelConfig, weights: Iterable[Weight]) -> Counter[str]:
    """One of the router's two biases applies to a token: `bias_vl` is not counted."""
    return _sum(
        weight._replace(copies=chosen_experts(config, weight))
        for weight in weights
        if weight.component not in _TABLES and not weight.name.endswith("bias_vl")
    )


def activated_decode(config: ModelConfig) -> dict[str, int]:
    """Parameters that a generated token is multiplied with: all layers, final norm and head.

    Tables that are only looked up (embedding, Engram) do not count; of the routed experts, the
    chosen ones do. This is the convention of the published 16B.
    """
    return dict(_activated(config, inventory.text_weights(config)))


def cache_source(config: ModelConfig) -> LayerSpec:
    """The decoder's Full layer, whose cache is made of the encoder's output."""
    return config.layers[config.num_encoder_layers]


def activated_prefill(config: ModelConfig) -> dict[str, int]:
    """Parameters that a prompt token is multiplied with: the encoder and the decoder's cache.

    No head: a prompt needs one prediction, not one a token. This is the convention of the published
    8B.
    """
    encoder = config.layers[: config.num_encoder_layers]
    weights = [weight for spec in encoder for weight in inventory.layer_weights(config, spec)]
    weights += [
        weight
        for weight in inventory.layer_weights(config, cache_source(config))
        if weight.component in CACHE_SIDE
    ]
    return dict(_activated(config, weights))


def optimizer_bytes(config: ModelConfig, components: Iterable[str] | None = None) -> int:
    """Bytes of float32 state under the V4.1 recipe, of the text model.

    Args:
        config: the model.
        components: only these; None: all.
    """
    wanted = set(COMPONENTS if components is None else components)
    return _BUFFER_BYTES * sum(
        weight.parameters * _V41_BUFFERS[weight.kind]
        for weight in inventory.text_weights(config)
        if weight.component in wanted
    )


def adam_bytes(config: ModelConfig, components: Iterable[str] | None = None) -> int:
    """The same if every parameter had Adam's two float32 buffers."""
    wanted = set(COMPONENTS if components is None else components)
    return (
        _BUFFER_BYTES
        * _ADAM_BUFFERS
        * sum(w.parameters for w in inventory.text_weights(config) if w.component in wanted)
    )
