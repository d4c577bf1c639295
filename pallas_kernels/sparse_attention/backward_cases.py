"""Benchmarks of the backward of sparse_attention alone: A6, with `out` and `lse` given."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from pallas_kernels import hopper, tpu
from pallas_kernels.measure import Benchmark, Variant
from pallas_kernels.sparse_attention import mosaic_gpu_backward, mosaic_tpu_backward, reference
from pallas_kernels.sparse_attention.forward_cases import indices as indices_of

QUERIES, DIM, WINDOW, SELECTED = 4096, 512, 128, 512
# Heads, main rows, and how many of their rows neighbouring queries share: none but by chance, or
# about 90 %.
BENCHMARKS = {
    "A6": (64, 8192, "random"),
    "A6_64k": (64, 65536, "random"),
    "A6_local": (64, 8192, "local"),
    "A6_h16": (16, 8192, "random"),
    "A6_h16_local": (16, 8192, "local"),
}


def _by_xla(q, window_rows, lo, hi, main_rows, indices, sink, out, lse, d_out, d_lse):
    del out, lse

    def forward(q, window_rows, main_rows, sink):
        args = q, window_rows, lo, hi, main_rows, indices, sink
        return reference.sparse_attention(*args, window=WINDOW)

    _, pullback = jax.vjp(forward, q, window_rows, main_rows, sink)
    return pullback((d_out.astype(q.dtype), d_lse))


def _on_gpu(*arguments):
    hopper.require("sparse_attention", jax_release=(0, 11))
    return mosaic_gpu_backward.backward(*arguments, window=WINDOW, scale=DIM**-0.5)


def _on_tpu(*arguments):
    tpu.require("sparse_attention")
    return mosaic_tpu_backward.backward(*arguments, window=WINDOW, scale=DIM**-0.5)


IMPLEMENTATIONS = {"mosaic_gpu": _on_gpu, "mosaic_tpu": _on_tpu, "xla": _by_xla}


def benchmark(name: str) -> Benchmark:
    """All gradients of random cotangents, against the reference in float32."""
    heads, rows, kind = BENCHMARKS[name]
    keys = jax.random.split(jax.random.key(0), 6)

    def normal(key, *shape, dtype=jnp.bfloat16):
        return jax.random.normal(keys[key], shape, dtype)

    q, d_out = (normal(i, 1, QUERIES, heads, DIM) for i in range(2))
    window_rows, main_rows = normal(2, 1, QUERIES, DIM), normal(3, 1, rows, DIM)
    sink, d_lse = normal(4, heads, dtype=jnp.float32), normal(5, 1, QUERIES, heads)
    end = jnp.arange(1, QUERIES + 1, dtype=jnp.int32)[None]
    indices = jnp.asarray(indices_of(rows, kind, QUERIES, SELECTED))[None]
    visible = window_rows, jnp.maximum(end - WINDOW, 0), end, main_rows, indices, sink
    result = jax.jit(functools.partial(reference.sparse_attention, window=WINDOW))(q, *visible)
    variant = Variant(
        IMPLEMENTATIONS.__getitem__,
        (q, *visible, *result, d_out, d_lse.astype(jnp.float32)),
        # Five products: logits, their gradient, and what queries, keys and values get.
        flops=10.0 * QUERIES * heads * (SELECTED + WINDOW) * DIM,
        bytes=0.0,
        tolerance=1e-2,
    )

    def exact(*arguments):
        return _by_xla(*(x if x.dtype == jnp.int32 else x.astype(jnp.float32) for x in arguments))

    return Benchmark(reference=exact, variants={"backward": variant})
