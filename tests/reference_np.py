"""An independent float64 NumPy forward pass of one document, layer by layer, plainly.

Weights come under their published names and orientation ([out, in]). Nothing here imports the
model: that both say the same is the point.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

Weights = Mapping[str, np.ndarray]


class Trace(NamedTuple):
    """What `forward` returns.

    Attributes:
        logits: [T, V].
        streams: of every layer, [T, n, d] as it reads them (after its Engram write).
        selections: index-source layer -> bool [T, G], entries it selects.
        margin: smallest distance of any router, top-k or pool decision from going the other way.
    """

    logits: np.ndarray
    streams: list[np.ndarray]
    selections: dict[int, np.ndarray]
    margin: float


# -- Number formats: round to nearest, ties to even -----------------------------------------------


def round_e2m1(x):
    """The nearest of 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives."""
    magnitude = np.minimum(np.abs(x), 6.0)
    step = np.exp2(np.floor(np.log2(np.maximum(magnitude, 1.0))) - 1)
    return np.sign(x) * np.minimum(np.rint(magnitude / step) * step, 6.0)


def round_e4m3(x):
    """The nearest OCP E4M3 number, saturating at 448."""
    magnitude = np.minimum(np.abs(x), 448.0)
    step = np.exp2(np.floor(np.log2(np.maximum(magnitude, 2.0**-6))) - 3)
    return np.sign(x) * np.minimum(np.rint(magnitude / step) * step, 448.0)


def fake_quantize(x, fmt):
    """Quantises and dequantises the last axis in "fp4", "mxfp4" or "fp8"; "none" does nothing."""
    if fmt == "none":
        return x
    block, floor, largest = {
        "fp4": (16, 6 * 2.0**-9, 6),
        "mxfp4": (32, 6 * 2.0**-126, 6),
        "fp8": (32, 1e-4, 448),
    }[fmt]
    blocks = x.reshape(*x.shape[:-1], x.shape[-1] // block, block)
    scale = np.maximum(np.abs(blocks).max(-1, keepdims=True), floor) / largest
    scale = round_e4m3(scale) if fmt == "fp4" else np.exp2(np.ceil(np.log2(scale)))
    element = round_e4m3 if fmt == "fp8" else round_e2m1
    return (element(np.clip(blocks / scale, -largest, largest)) * scale).reshape(x.shape)


# -- Small pieces ---------------------------------------------------------------------------------


def rms_norm(x, weight=1.0, eps=1e-20):
    """RMSNorm over the last axis."""
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def frequencies(config, compressed):
    """Rotation frequencies: of layers that read a compressed cache (YaRN), or of the others."""
    dim = config.qk_rope_head_dim
    i = np.arange(dim // 2)
    base = config.compress_rope_theta if compressed else config.rope_theta
    plain = base ** (-2.0 * i / dim)
    if not compressed:
        return plain

    def turns(beta):
        length = config.rope_original_max_position_embeddings
        return dim * math.log(length / (beta * 2 * math.pi)) / (2 * math.log(base))

    low = max(math.floor(turns(config.rope_beta_fast)), 0)
    high = min(math.ceil(turns(config.rope_beta_slow)), dim - 1)
    ramp = np.clip((i - low) / max(high - low, 1e-3), 0, 1)
    return plain / config.rope_factor * ramp + plain * (1 - ramp)


def rotate(x, positions, freqs, inverse=False):
    """Turns the last channels, adjacent pairs as complex numbers. x is [T, ..., D]."""
    angle = np.multiply.outer(positions, freqs) * (-1 if inverse else 1)
    turn = np.exp(1j * angle).reshape(len(x), *(1,) * (x.ndim - 2), len(freqs))
    channels = 2 * len(freqs)
    pairs = x[..., -channels:].reshape(*x.shape[:-1], len(freqs), 2)
    turned = (pairs[..., 0] + 1j * pairs[..., 1]) * turn
    turned = np.stack([turned.real, turned.imag], -1).reshape(*x.shape[:-1], channels)
    return np.concatenate([x[..., :-channels], turned], -1)


def softmax(x, axis=-1):
    """Softmax over one axis."""
    e = np.exp(x - x.max(axis, keepdims=True))
    return e / e.sum(axis, keepdims=True)


def sigmoid(x):
    """Logistic function."""
    return 1 / (1 + np.exp(-x))


# -- Hyper-connections ----------------------------------------------------------------------------


def coefficients(streams, fn, base, scale, *, sweeps, eps=1e-6):
    """(pre [T, n], post [T, n], comb [T, n, n]) from streams [T, n, d]."""
    n = streams.shape[1]
    mixes = rms_norm(streams.reshape(len(streams), -1)) @ fn.T
    pre = sigmoid(mixes[:, :n] * scale[0] + base[:n]) + eps
    post = 2 * sigmoid(mixes[:, n : 2 * n] * scale[1] + base[n : 2 * n])
    comb = softmax((mixes[:, 2 * n :] * scale[2] + base[2 * n :]).reshape(-1, n, n)) + eps
    comb = comb / (comb.sum(-2, keepdims=True) + eps)
    for _ in range(sweeps - 1):
        comb = comb / (comb.sum(-1, keepdims=True) + eps)
        comb = comb / (comb.sum(-2, keepdims=True) + eps)
    return pre, post, comb


def read(streams, pre, weight):
    """Normed mix [T, d] of the streams."""
    return rms_norm(np.einsum("tn,tnd->td", pre, streams), weight)


def write(out, streams, post, comb):
    """New streams; comb[j, k] moves old stream j into new stream k."""
    return post[:, :, None] * out[:, None] + np.einsum("tjk,tjd->tkd", comb, streams)


# -- Attention ------------------------------------------------------------------------------------


def compress(x, weights, prefix, ratio):
    """Latents [T // ratio, D] of a Full layer, before rotation."""
    groups = len(x) // ratio
    grouped = x[: groups * ratio].reshape(groups, ratio, x.shape[-1])
    latent = grouped @ weights[f"{prefix}wkv.weight"].T
    if ratio > 1:
        gate = softmax(grouped @ weights[f"{prefix}wgate.weight"].T, axis=1)
        latent = latent * gate
    return rms_norm(latent.sum(1), weights[f"{prefix}norm.weight"])


def pool_mask(scores, visible, blocks, size):
    """Entries [T, G] in the candidate pool, and the distance of the choice from another one."""
    length, entries = scores.shape
    count = -(-entries // size)
    best = np.full((length, count * size), -np.inf)
    best[:, :entries] = scores
    best = best.reshape(length, count, size).max(-1)
    best[np.arange(count) == ((visible - 1) // size)[:, None]] = np.inf
    kept, margin = largest(best, blocks)
    return np.repeat(kept, size, axis=-1)[:, :entries], margin


def largest(scores, k):
    """Mask of the k largest above -inf, and the smallest gap to the next one.

    The lower index wins among equals: exact ties (ReLU makes many zeros) are no gap.
    """
    order = np.argsort(-scores, axis=-1, kind="stable")
    ranked = np.take_along_axis(scores, order, -1)
    mask = np.zeros(scores.shape, bool)
    np.put_along_axis(mask, order[:, :k], ranked[:, :k] > -np.inf, -1)
    if k >= scores.shape[-1]:
        return mask, np.inf
    contested = np.isfinite(ranked[:, k - 1]) & (ranked[:, k] > -np.inf)
    gaps = (ranked[:, k - 1] - np.where(contested, ranked[:, k], 0))[contested]
    return mask, gaps[gaps > 0].min(initial=np.inf)


def attention(x, layer, config, weights, shared):
    """One attention sublayer on x [T, d]; `shared` is handed down the stack and changed."""
    spec = config.layers[layer]
    prefix = f"layers.{layer}.attn."
    length, heads, dim = len(x), config.num_attention_heads, config.head_dim
    positions = np.arange(length)
    freqs = frequencies(config, spec.ratio > 0)

    def project(value, name):
        return value @ weights[f"{prefix}{name}.weight"].T

    latent = rms_norm(project(x, "wq_a"), weights[f"{prefix}q_norm.weight"])
    q = rotate(project(latent, "wq_b").reshape(length, heads, dim), positions, freqs)
    keys = rotate(rms_norm(project(x, "wkv"), weights[f"{prefix}kv_norm.weight"]), positions, freqs)
    keys = fake_quantize(keys, config.window_kv_format)
    # A replay that starts at s leaves query i the window keys in [max(s, i - W + 1), i].
    segment = config.replay_segment if spec.part == "decoder" else 0
    start = positions // segment * segment if segment else np.zeros_like(positions)
    first = np.maximum(start, positions - config.sliding_window + 1)
    mask = (positions >= first[:, None]) & (positions <= positions[:, None])
    if spec.ratio:
        visible = (positions + 1) // spec.ratio
        firsts = positions[: length // spec.ratio * spec.ratio : spec.ratio]
        if spec.mode == "full":
            entry = compress(x, weights, f"{prefix}compressor.", spec.ratio)
            rotated = rotate(entry, firsts, freqs)
            shared["kv"] = fake_quantize(rotated, config.main_kv_format)
            key = rms_norm(project(entry, "indexer.wk"), weights[f"{prefix}indexer.k_norm.weight"])
            shared["keys"] = fake_quantize(rotate(key, firsts, freqs), config.index_format)
        if spec.mode in ("full", "reindex"):
            index_q = project(latent, "indexer.wq_b").reshape(length, config.index_n_heads, -1)
            index_q = fake_quantize(rotate(index_q, positions, freqs), config.index_format)
            head_weight = project(x, "indexer.weights_proj")
            head_weight = head_weight * (config.index_head_dim * config.index_n_heads) ** -0.5
            dots = np.maximum(np.einsum("thd,gd->thg", index_q, shared["keys"]), 0)
            scores = np.einsum("thg,th->tg", dots, head_weight)
            scores = np.where(np.arange(len(firsts)) < visible[:, None], scores, -np.inf)
            if spec.pool == "make":
                blocks = config.candidate_topk_blocks, config.candidate_block_size
                shared["pool"], margin = pool_mask(scores, visible, *blocks)
                shared["margins"].append(margin)
            elif spec.pool == "use":
                scores = np.where(shared["pool"], scores, -np.inf)
            shared["selected"], margin = largest(scores, config.index_topk)
            if config.dense_selection:
                shared["selected"] = scores > -np.inf
            shared["margins"].append(margin)
            shared["selections"][layer] = shared["selected"]
        keys = np.concatenate([keys, shared["kv"]])
        mask = np.concatenate([mask, shared["selected"]], axis=1)
    logits = np.einsum("thd,kd->thk", q, keys) * dim**-0.5
    logits = np.where(mask[:, None], logits, -np.inf)
    sink = np.broadcast_to(weights[f"{prefix}attn_sink"][:, None], (length, heads, 1))
    p = softmax(np.concatenate([logits, sink], -1))[..., :-1]
    out = rotate(np.einsum("thk,kd->thd", p, keys), positions, freqs, inverse=True)
    groups = config.o_groups
    wo_a = weights[f"{prefix}wo_a.weight"].reshape(groups, -1, heads * dim // groups)
    out = np.einsum("tgd,grd->tgr", out.reshape(length, groups, -1), wo_a)
    return project(out.reshape(length, -1), "wo_b")


# -- Mixture of experts, Engram -------------------------------------------------------------------


def swiglu(x, weights, prefix, limit, weight=1.0):
    """One expert; the routing weight comes in before the last matrix."""
    gate = np.minimum(x @ weights[f"{prefix}w1.weight"].T, limit)
    value = np.clip(x @ weights[f"{prefix}w3.weight"].T, -limit, limit)
    return (gate * sigmoid(gate) * value * weight) @ weights[f"{prefix}w2.weight"].T


class Routed(NamedTuple):
    """Of T tokens: out [T, d], chosen experts [T, k], their weights, all scores, the margin."""

    out: np.ndarray
    chosen: np.ndarray
    weights: np.ndarray
    scores: np.ndarray
    margin: float


def moe(x, config, weights, prefix, image=None):
    """Shared plus routed experts on x [T, d], token by token."""
    scores = np.sqrt(np.logaddexp(0, x @ weights[f"{prefix}gate.weight"].T / config.gate_temp))
    bias = weights[f"{prefix}gate.bias"]
    if image is not None:
        bias = np.where(image[:, None], weights[f"{prefix}gate.bias_vl"], bias)
    mask, margin = largest(scores + bias, config.num_experts_per_tok)
    chosen = np.stack([np.flatnonzero(row) for row in mask])
    weight = np.take_along_axis(scores, chosen, -1)
    weight = weight / (weight.sum(-1, keepdims=True) + 1e-20) * config.routed_scaling_factor
    out = swiglu(x, weights, f"{prefix}shared_experts.", config.swiglu_limit)
    for t, j in np.ndindex(chosen.shape):
        name = f"{prefix}experts.{chosen[t, j]}."
        out[t] += swiglu(x[t], weights, name, config.swiglu_limit, weight[t, j])
    return Routed(out, chosen, weight, scores, margin)


def engram(streams, rows, weights, prefix, image=None):
    """(streams after the write, gate [T, n]) for table rows [T, R]."""
    length, n, d = streams.shape
    memory = weights[f"{prefix}embed.weight"][rows].reshape(length, -1)
    projected = (memory @ weights[f"{prefix}wkv.weight"].T).reshape(length, n + 1, d)
    key, value = projected[:, :n], projected[:, n:]
    query = rms_norm(streams, weights[f"{prefix}q_weight"])
    score = np.sum(query * rms_norm(key, weights[f"{prefix}k_weight"]), axis=-1) * d**-0.5
    gate = sigmoid(np.copysign(np.sqrt(np.maximum(np.abs(score), 1e-6)), score))
    if image is not None:
        gate = np.where(image[:, None], 0, gate)
    return streams + gate[..., None] * value, gate


# -- The stack ------------------------------------------------------------------------------------


def forward(
    tokens: np.ndarray, engram_rows: np.ndarray | None, weights: Weights, config: Any
) -> Trace:
    """The text model on one document.

    Args:
        tokens: [T].
        engram_rows: [T, sites, R], or None without Engram.
        weights: published name -> float64 array.
        config: `ModelConfig`; its formats and selection switches are followed.

    Returns:
        `Trace`.
    """
    n, sweeps = config.hc_mult, config.hc_sinkhorn_iters
    streams = np.repeat(weights["embed.weight"][tokens][:, None], n, axis=1)
    pre = np.tile(np.eye(n)[0], (len(tokens), 1))
    shared: dict[str, Any] = {"margins": [], "selections": {}}
    entering = []
    for spec in config.layers:
        prefix = f"layers.{spec.index}."
        if spec.engram is not None:
            rows = engram_rows[:, spec.engram]
            streams, _ = engram(streams, rows, weights, f"{prefix}engram.")
        entering.append(streams)

        def connection(part, prefix=prefix):
            return (weights[f"{prefix}hc_{part}_{name}"] for name in ("fn", "base", "scale"))

        next_pre, post, comb = coefficients(streams, *connection("attn"), sweeps=sweeps)
        pre = pre if config.hc_single_pass else next_pre
        x = read(streams, pre, weights[f"{prefix}attn_norm.weight"])
        out = attention(x, spec.index, config, weights, shared)
        streams, pre = write(out, streams, post, comb), next_pre
        next_pre, post, comb = coefficients(streams, *connection("ffn"), sweeps=sweeps)
        pre = pre if config.hc_single_pass else next_pre
        x = read(streams, pre, weights[f"{prefix}ffn_norm.weight"])
        routed = moe(x, config, weights, f"{prefix}ffn.")
        shared["margins"].append(routed.margin)
        streams, pre = write(routed.out, streams, post, comb), next_pre
    logits = read(streams, pre, weights["norm.weight"]) @ weights["head.weight"].T
    return Trace(logits, entering, shared["selections"], min(shared["margins"]))
