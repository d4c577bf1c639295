"""Other people's code for the same work, for `python -m pallas_kernels.bench --rivals`."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import optax

from pallas_kernels import fp4
from pallas_kernels.grouped_matmul import cases as moe_cases
from pallas_kernels.indexer import cases as indexer_cases
from pallas_kernels.measure import Foreign, Variant
from pallas_kernels.newton_schulz import HYBRID, cases
from pallas_kernels.sparse_attention import forward_cases
from pallas_kernels.topk import cases as topk_cases


def optax_muon(name: str) -> dict[str, Variant]:
    """optax.contrib.scale_by_muon with the same schedule, its momentum in and out."""
    work = cases.benchmark(name).rivals["loop bfloat16"]
    (x,) = work.arguments
    x = x.reshape(-1, *x.shape[-2:])
    specs = optax.contrib.MuonDimensionNumbers(reduction_axis=1, output_axis=2)

    def variant(dtype, tolerance):
        transform = optax.contrib.scale_by_muon(
            ns_coeffs=HYBRID, ns_steps=len(HYBRID), eps=1e-20, weight_dimension_numbers=specs
        )

        def update(x):
            gradient = x.astype(dtype)
            update, _ = transform.update(gradient, transform.init(gradient))
            return update.astype(jnp.float32)

        return Variant(lambda _: update, (x,), work.flops, work.bytes, tolerance)

    return {
        "optax bfloat16": variant(jnp.bfloat16, 0.05),
        "optax float32": variant(jnp.float32, 0.01),
    }


def torch_topk(name: str) -> dict[str, Foreign]:
    """torch.topk of the same scores; among equal scores it takes any."""
    import torch

    case = topk_cases.BENCHMARKS[name]
    if case.block > 1:
        return {}
    scores = torch.from_dlpack(topk_cases.scores(name))

    def rival(ordered):
        return Foreign(
            start=lambda: torch.topk(scores, case.k, dim=-1, sorted=ordered),
            wait=lambda _: torch.cuda.synchronize(),
            convert=lambda found: jnp.sort(jnp.from_dlpack(found.indices.int()), axis=-1),
            flops=0.0,
            bytes=float(4 * scores.numel() + 4 * case.shape[0] * case.k),
            tolerance=1e-3,
        )

    return {"torch.topk": rival(False), "torch.topk sorted": rival(True)}


def flash_mla(name: str) -> dict[str, Foreign]:
    """FlashMLA's kernel for Hopper, of the wheel sgl-flash-mla 1.0.0.

    It gathers window rows by index like the others, from one table of all sequences, and reads
    bfloat16 rows alone: what is packed for our kernel it gets unpacked.
    """
    work = forward_cases.BENCHMARKS.get(name)
    if work is None or work.heads not in (64, 128):
        return {}
    import torch

    positional = forward_cases.arguments(name)
    q, window_rows, lo, hi, main_rows, chosen, sink = positional

    def to_torch(x):
        return torch.from_dlpack(jax.block_until_ready(x))

    parts, places = [window_rows], [_window_places(lo, hi, window_rows.shape[1], work.window)]
    if main_rows is not None:
        if work.packed:
            main_rows = jax.jit(lambda x: fp4.unpack(x, "fp4", jnp.bfloat16))(main_rows)
        parts.append(main_rows)
        places.append(chosen + window_rows.shape[1])
    rows = jnp.concatenate(parts, axis=1)
    first = jnp.arange(work.batch, dtype=jnp.int32)[:, None, None] * rows.shape[1]
    places = jnp.concatenate(places, axis=-1)
    places = jnp.where(places >= 0, places + first, -1)
    queries = work.batch * work.queries
    tensors = (
        to_torch(q.reshape(queries, work.heads, work.dim)),
        to_torch(rows.reshape(-1, 1, work.dim)),
        to_torch(places.reshape(queries, 1, -1)),
    )
    attn_sink = to_torch(sink)

    def start():
        import flash_mla

        return flash_mla.flash_mla_sparse_fwd(
            *tensors, work.dim**-0.5, work.dim, attn_sink=attn_sink, use_legacy=True
        )

    def convert(result):
        out, _, lse = result
        shape = work.batch, work.queries, work.heads
        out = jnp.from_dlpack(out.contiguous()).reshape(*shape, work.dim)
        return out, jnp.from_dlpack(lse.contiguous()).reshape(shape)

    floor = forward_cases.floor(name, positional)
    return {
        "FlashMLA": Foreign(
            start, lambda _: torch.cuda.synchronize(), convert, **floor, tolerance=1e-2
        )
    }


def _window_places(lo, hi, rows: int, window: int):
    place = lo[..., None] + jnp.arange(window, dtype=jnp.int32)
    return jnp.where((place < hi[..., None]) & (place < rows), place, -1)


def deep_gemm(name: str) -> dict[str, Foreign]:
    """DeepGEMM's index scores in FP8 for Hopper, of the wheel sgl-deep-gemm."""
    work = indexer_cases.BENCHMARKS[name]
    if work.function != "scores" or work.batch != 1:
        return {}
    import torch

    variant = indexer_cases.benchmark(name).variants["on_grid"]
    q, w, k, lo, hi = (jax.block_until_ready(x[0]) for x in variant.arguments)

    def to_torch(x):
        return torch.from_dlpack(x)

    q8, k8 = (to_torch(x.astype(jnp.float32)).to(torch.float8_e4m3fn) for x in (q, k))
    scales = torch.ones(k8.shape[0], device=k8.device)
    weights, first, last = to_torch(w), to_torch(lo), to_torch(hi)

    def start():
        import deep_gemm

        return deep_gemm.fp8_mqa_logits(
            q8, (k8, scales), weights, first, last, max_seqlen_k=work.entries
        )

    def convert(logits):
        logits = torch.from_dlpack(logits)[:, : k8.shape[0]].float().contiguous()
        return jnp.from_dlpack(logits)[None]

    return {
        "DeepGEMM FP8": Foreign(
            start,
            lambda _: torch.cuda.synchronize(),
            convert,
            flops=variant.flops,
            bytes=variant.bytes,
            tolerance=1e-3,
            fp8=True,
        )
    }


def torch_grouped_mm(name: str) -> dict[str, Foreign | Variant]:
    """torch's grouped product, and the one in jax for Hopper with the tiles that its authors try
    first; both of the forward product."""
    if name.endswith(("_rows", "_weights")):
        return {}
    import torch
    from jax.experimental.pallas.ops.gpu.ragged_dot_mgpu import ragged_dot

    work = moe_cases.benchmark(name).variants["bfloat16"]
    x, w, sizes, _ = work.arguments
    ours = [torch.from_dlpack(jax.block_until_ready(a)) for a in (x, w, jnp.cumsum(sizes))]
    rows, weights, offsets = ours[0], ours[1], ours[2].int()

    def theirs(x, w, sizes, _):
        tiles = dict(block_m=128, block_n=128, block_k=64)
        return ragged_dot(x, w, group_sizes=sizes, max_concurrent_steps=4, grid_block_n=1, **tiles)

    return {
        "torch._grouped_mm": Foreign(
            lambda: torch._grouped_mm(rows, weights, offs=offsets),
            lambda _: torch.cuda.synchronize(),
            jnp.from_dlpack,
            flops=work.flops,
            bytes=work.bytes,
            tolerance=0.02,
        ),
        "jax ragged_dot_mgpu": dataclasses.replace(work, function=lambda _: theirs),
    }


RIVALS = {
    "grouped_matmul": torch_grouped_mm,
    "indexer": deep_gemm,
    "newton_schulz": optax_muon,
    "sparse_attention": flash_mla,
    "topk": torch_topk,
}
