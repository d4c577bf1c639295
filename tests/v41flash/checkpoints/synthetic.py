"""Folders in the published layout of any configuration, with random weights, written in pieces."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import ml_dtypes
import numpy as np

from v41flash import presets
from v41flash.checkpoints import inventory
from v41flash.checkpoints.inventory import Tensor
from v41flash.checkpoints.tensor_files import Item, write
from v41flash.config import ModelConfig, QuantizationConfig
from v41flash.text.engram_hash import table_primes

QUANTIZATION = QuantizationConfig(
    quant_method="fp8",
    activation_scheme="dynamic",
    weight_block_size=(32, 32),
    scale_fmt="ue8m0",
    expert_dtype="fp4",
)
_PIECE_BYTES = 32 << 20


def reduced(table_start: int, experts: int) -> ModelConfig:
    """The published widths in seven layers of every kind, with a draft head of one block.

    Args:
        table_start: least modulus of the Engram tables, of 24 times as many rows each.
        experts: of a layer.
    """
    primes = table_primes(table_start, 4, 8, 2)
    rows = tuple(sum(sum(order) for order in site) for site in primes)
    vision = dataclasses.replace(presets.v41_flash().vision, num_hidden_layers=2)
    return presets.v41_flash(
        num_hidden_layers=7,
        compress_ratios=(0, 2, 2, 1, 1, 1, 1, 0),
        kv_source_layer_ids=(1, 3),
        index_source_layer_ids=(1, 3, 5),
        candidate_source_layer_id=3,
        n_routed_experts=experts,
        engram_layer_ids=(0, 3),
        engram_num_embeddings=rows,
        engram_vocab_size=table_start,
        num_nextn_predict_layers=1,
        dspark_target_layer_ids=(4, 5, 6),
        dspark_n_routed_experts=16,
        vision=vision,
    )


def _pieces(tensor: Tensor, seed: int) -> Iterator[np.ndarray]:
    rng = np.random.default_rng(seed)
    rows = tensor.shape[0]
    row = max(tensor.bytes // rows, 1)
    step = max(_PIECE_BYTES // row, 1)
    for first in range(0, rows, step):
        shape = (min(step, rows - first), *tensor.shape[1:])
        if tensor.dtype == "F8_E8M0":
            yield rng.integers(118, 124, shape, np.uint8)
        elif tensor.dtype in ("F8_E4M3", "I8"):
            values = rng.integers(0, 256, shape, np.uint8)
            if tensor.dtype == "F8_E4M3":
                values[values & 0x7F == 0x7F] = 0  # NaN
            yield values
        else:
            dtype = np.float32 if tensor.dtype == "F32" else ml_dtypes.bfloat16
            yield (rng.standard_normal(shape, np.float32) * np.float32(0.1)).astype(dtype)


def make(folder: Path, config: ModelConfig, shard_bytes: int = 1 << 40) -> int:
    """Writes a folder; returns the size of its largest file."""
    folder.mkdir(parents=True)
    shards: list[list[Tensor]] = [[]]
    for tensor in inventory.inventory(config):
        size = sum(other.bytes for other in shards[-1])
        if shards[-1] and size + tensor.bytes > shard_bytes:
            shards.append([])
        shards[-1].append(tensor)
    weight_map, sizes = {}, []
    for number, tensors in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        items = [
            Item(*tensor[:1], tensor.dtype, tensor.shape, _pieces(tensor, len(weight_map) + i))
            for i, tensor in enumerate(tensors)
        ]
        write(folder / name, items)
        weight_map |= dict.fromkeys((tensor.name for tensor in tensors), name)
        sizes.append((folder / name).stat().st_size)
    index = {"metadata": {"total_size": inventory.totals(config)[0]}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(config.to_hf()))
    return max(sizes)
