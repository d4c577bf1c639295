"""FLOPs of a training step, and the matrix-product ceiling they are measured against.

MFU = (6 x activated parameters x tokens + 3 x attention and index FLOPs) / time / ceiling. Only
tokens of documents count, padding does not; the optimizer and recomputation count as time alone.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from train.optimizer import path_names
from v41flash.config import ModelConfig

_ROUTED = ("w13", "w2")


def activated_parameters(config: ModelConfig, params: Any) -> int:
    """Parameters that one token is multiplied with.

    Layers and head count, tables that are only looked up (embedding, Engram) do not, nor does what
    only images pass through; of the routed experts, the chosen ones. This is the convention of the
    published 16B.

    Args:
        config: the model.
        params: its (abstract) parameter tree.
    """
    total = 0
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        names = path_names(path)
        count = math.prod(leaf.shape)
        if names[-1] in ("embed", "table") or names[0] == "images":
            continue
        if names[-2:-1] == ("ffn",) and names[-1] in _ROUTED:
            count = count * config.num_experts_per_tok // config.n_routed_experts
        total += count
    return total


def attention_flops(config: ModelConfig, length: int) -> np.ndarray:
    """Forward FLOPs of attention and index scores, all layers, for a query at each position.

    Args:
        config: the model.
        length: number of positions.

    Returns:
        f64[length]; entry p is for a query at position p of its document.
    """
    position = np.arange(length, dtype=np.float64)
    in_window = np.minimum(position + 1, config.sliding_window)
    pooled = config.candidate_topk_blocks * config.candidate_block_size
    total = np.zeros(length)
    for layer in config.layers:
        keys = in_window
        if layer.ratio:
            visible = (position + 1) // layer.ratio
            selected = visible
            if not config.dense_selection:
                selected = np.minimum(visible, config.index_topk)
            keys = keys + selected
            if layer.mode in ("full", "reindex"):
                scored = np.minimum(visible, pooled) if layer.pool == "use" else visible
                total += 2.0 * config.index_n_heads * config.index_head_dim * scored
        total += 4.0 * config.num_attention_heads * config.head_dim * keys
    return total


def image_flops(config: ModelConfig, batch: Mapping[str, np.ndarray]) -> float:
    """Forward FLOPs of the images of a batch: encoder, attention within each image, aligner.

    Args:
        config: the model.
        batch: with the arrays of `v41flash.nn.vision.ImageBatch` as image_*; without, 0.
    """
    if "image_source" not in batch:
        return 0.0
    vision, segments = config.vision, batch["image_segments"]
    width, each = vision.hidden_size, vision.downsample_ratio**2
    patches = (batch["image_places"][..., 0] >= 0).sum(-1)
    slots = np.arange(segments[..., 0].size).reshape(segments.shape[:-1])
    image = slots[..., None] * (1 + segments.max()) + segments
    of_image = np.bincount(image.ravel(), weights=patches.ravel())
    block = 4 * width**2 + 3 * width * vision.intermediate_size
    a_patch = 3 * vision.patch_size**2 * width + vision.num_hidden_layers * block
    a_token = each * width * config.hidden_size + config.hidden_size**2
    attention = 4.0 * vision.num_hidden_layers * width * np.sum(of_image**2)
    return float(2 * a_patch * patches.sum() + attention + 2 * a_token * (segments > 0).sum())


def matmul_ceiling(size: int = 8192, products: int = 8) -> float | None:
    """Measured bf16 matrix-product rate of one device in FLOP/s; None on the CPU.

    The best of three timings of a chain of `products` square products of random data.
    """
    if jax.default_backend() == "cpu":
        return None

    @jax.jit
    def chain(x, w):
        for _ in range(products):
            x = jnp.matmul(x, w)
        return x

    device = jax.local_devices()[0]
    keys = jax.random.split(jax.random.key(0))
    x, w = (
        jax.device_put(jax.random.normal(key, (size, size), jnp.bfloat16) / size**0.5, device)
        for key in keys
    )
    chain(x, w).block_until_ready()
    best = math.inf
    for _ in range(3):
        start = time.perf_counter()
        chain(x, w).block_until_ready()
        best = min(best, time.perf_counter() - start)
    return products * 2.0 * size**3 / best
