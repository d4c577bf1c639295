"""A model's parameters in the form that serving reads: one tree per layer, matrices in the compute
dtype.

Training stacks the parameters of scanned layers. A decode step reads few of a layer's experts;
slicing a stack would copy all of them first, so serving holds every layer apart.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from v41flash.checkpoints import names
from v41flash.config import ModelConfig
from v41flash.text.device_hash import DeviceHasher
from v41flash.text.engram_hash import EngramHasher

# Below these the model computes in float32, or reads vectors that it does not round.
_FLOAT32 = {"hc_attn", "hc_ffn", "router", "sink", "q_norm", "kv_norm", "norm", "k_norm"}
_FLOAT32 |= {"q_weight", "k_weight"}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Weights:
    """Everything that a step needs beside the state of its sequences; a pytree.

    Attributes:
        embed: [V, d].
        head: float32 [d, V].
        norm: float32 [d].
        layers: parameters of `v41flash.nn.block.Block`, one tree per layer.
        token_map: int32 [V], canonical id of every token; None without Engram.
        hasher: Engram hashing; None without Engram.
        images: parameters of `v41flash.nn.vision.Images`; None without an image encoder.
        draft: parameters of `v41flash.nn.dspark.DSpark`; None: no speculation.
    """

    embed: jax.Array
    head: jax.Array
    norm: jax.Array
    layers: tuple[Any, ...]
    token_map: jax.Array | None
    hasher: DeviceHasher | None
    images: Any
    draft: Any

    @classmethod
    def create(
        cls,
        config: ModelConfig,
        params: Any,
        token_map: np.ndarray | None = None,
        draft: Any = None,
    ) -> Weights:
        """Takes the parameter tree of `v41flash.nn.ced.CED` apart.

        Args:
            config: the model.
            params: its parameters.
            token_map: int [V], canonical id of every token (`v41flash.text.canonical`), for models
                with Engram. May be shorter than the vocabulary: ids that no tokenizer has count as
                the pad.
            draft: parameters of the draft head, or None.

        Raises:
            ValueError: the map is missing, or does not fit the model; a draft head that reads
                layers which prefill leaves out.
        """
        first, targets = config.num_encoder_layers, config.dspark_target_layer_ids
        if draft is not None and min(targets) < first:
            raise ValueError(
                f"dspark_target_layer_ids {targets}: must be layers of the decoder, from {first} on"
            )
        ids = hasher = None
        if config.num_engram_sites:
            ids, hasher = _hashing(config, token_map)
        draft = jax.tree.map(jnp.asarray, draft)
        return cls(**_backbone(config, params), token_map=ids, hasher=hasher, draft=draft)

    def with_params(self, config: ModelConfig, params: Any) -> Weights:
        """The same with other parameters of the model: tokens and hashing stay, a draft does not.

        Args:
            config: the model that these weights were made for.
            params: as for `create`.
        """
        return dataclasses.replace(self, **_backbone(config, params), draft=None)


def _backbone(config: ModelConfig, params: Any) -> dict[str, Any]:
    """The fields of `Weights` that a parameter tree gives."""
    layers = []
    for spec in config.layers:
        keys, index = names.place(config, spec.index)
        stacked = params[keys[0]][keys[1]]
        layers.append(_cast(stacked, index, config.dtype, spec.ratio))
    return {
        "embed": jnp.asarray(params["embed"], config.dtype),
        "head": jnp.asarray(params["head"], jnp.float32),
        "norm": jnp.asarray(params["norm"], jnp.float32),
        "layers": tuple(layers),
        "images": jax.tree.map(jnp.asarray, params.get("images")),
    }


def _cast(tree: Any, index: tuple[int, ...], dtype: str, ratio: int) -> Any:
    """One layer out of a stack, matrices in the compute dtype: what the model rounds them to in
    every product anyway."""

    def cast(path: Any, leaf: Any) -> jax.Array:
        if leaf.dtype == jnp.uint8:  # packed
            return jnp.asarray(leaf[index])
        keys = {key.key for key in path}
        pooling = "compressor" in keys and ratio > 1
        return jnp.asarray(leaf[index], jnp.float32 if pooling or keys & _FLOAT32 else dtype)

    return jax.tree_util.tree_map_with_path(cast, tree)


def _hashing(config: ModelConfig, token_map: Any) -> tuple[jax.Array, DeviceHasher]:
    if token_map is None:
        raise ValueError("token_map is missing: a model with Engram hashes canonical ids")
    if len(token_map) > config.vocab_size:
        raise ValueError(
            f"token_map has {len(token_map)} ids: must be at most vocab_size {config.vocab_size}"
        )
    if np.max(token_map) >= config.engram_compressed_vocab_size:
        raise ValueError(
            f"token_map reaches {np.max(token_map)}: must be below engram_compressed_vocab_size"
            f" {config.engram_compressed_vocab_size}"
        )
    pad = int(token_map[config.engram_pad_token_id])
    ids = np.full(config.vocab_size, pad, np.int32)
    ids[: len(token_map)] = token_map
    hasher = DeviceHasher.create(EngramHasher.from_config(config, pad))
    return jnp.asarray(ids), jax.tree.map(jnp.asarray, hasher)
