"""Benchmarks of the forward of sparse_attention: prefill (A1, A5) and decoding (A8, A9)."""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import fp4
from pallas_kernels.measure import Benchmark, Variant, repeated
from pallas_kernels.sparse_attention import mosaic_gpu, reference, sparse_attention
from pallas_kernels.tuning import Tuning

# Of a call that takes less time than it takes to start one.
_REPEATS = 50


@dataclasses.dataclass(frozen=True)
class Work:
    """Shapes of one benchmark.

    Attributes:
        queries: T; with two or fewer the call is timed inside of a loop.
        rows: G; 0 for a layer that has only its window.
        batch: B.
        heads: H.
        packed: main rows in FP4.
        kind: of `indices`.
        dim: D.
        window: W; every query sees as many rows.
        selected: K.
    """

    queries: int
    rows: int
    batch: int = 1
    heads: int = 64
    packed: bool = False
    kind: str = "random"
    dim: int = 512
    window: int = 128
    selected: int = 512

    @property
    def keys(self) -> int:
        """Of one query."""
        return self.window + (self.selected if self.rows else 0)

    @property
    def repeats(self) -> int:
        """As `measure.Variant` has it."""
        return _REPEATS if self.queries <= 2 else 1


_TINY = {"batch": 4, "heads": 4, "dim": 64, "window": 32, "selected": 32}
BENCHMARKS = {
    "small": Work(512, 512, **_TINY),
    "small_window": Work(512, 0, **_TINY),
    "A1": Work(4096, 8192),
    "A1_64k": Work(4096, 65536),
    "A1_512k": Work(4096, 2**19),
    "A1_64k_local": Work(4096, 65536, kind="local"),
    "A1q": Work(4096, 8192, packed=True),
    "A1q_64k": Work(4096, 65536, packed=True),
    "A1q_512k": Work(4096, 2**19, packed=True),
    "A1q_64k_local": Work(4096, 65536, packed=True, kind="local"),
    "A5": Work(4096, 0),
    "A8": Work(1, 8192, batch=128, packed=True),
    "A8_2": Work(2, 8192, batch=128, packed=True),
    "A9": Work(1, 32768, packed=True),
    "A9_16": Work(1, 32768, batch=16, packed=True),
    # What one layer of configs/small.py runs.
    "small_step": Work(8192, 4096, batch=2, heads=16),
}


def indices(rows: int, kind: str, queries: int, selected: int) -> np.ndarray:
    """Ascending i32 `[queries, selected]`, distinct in each query.

    Args:
        rows: that there are.
        kind: "random", each query's drawn alone; or "local", where neighbours share about 90 %.
        queries: T.
        selected: K.
    """
    rng = np.random.default_rng(0)
    if kind == "random":
        chosen = [rng.choice(rows, selected, replace=False, shuffle=False) for _ in range(queries)]
        return np.sort(np.asarray(chosen, np.int32))
    # A comb of which each query moves one tooth in ten.
    comb, tooth = rows // selected, np.arange(selected)
    moved = (np.arange(queries)[:, None] + tooth) // 10 % comb
    return (tooth * comb + moved).astype(np.int32)


def arguments(name: str) -> tuple:
    """Positional arguments of `sparse_attention`, normal and in bfloat16, on the device."""
    work = BENCHMARKS[name]
    keys = iter(jax.random.split(jax.random.key(0), 4))

    def normal(*shape):
        return jax.random.normal(next(keys), (*shape, work.dim), jnp.bfloat16)

    q = normal(work.batch, work.queries, work.heads)
    window_rows = normal(work.batch, work.window + work.queries - 1)
    lo = jnp.broadcast_to(jnp.arange(work.queries, dtype=jnp.int32), q.shape[:2])
    main_rows = chosen = None
    if work.rows:
        # A sequence at a time: many in float32 are more than a GPU holds.
        make = functools.partial(jax.lax.map, functools.partial(_rows, work))
        main_rows = jax.jit(make)(jax.random.split(next(keys), work.batch))
        chosen = indices(work.rows, work.kind, work.batch * work.queries, work.selected)
        chosen = jnp.asarray(chosen.reshape(work.batch, work.queries, -1))
    sink = jax.random.normal(jax.random.key(1), (work.heads,), jnp.float32)
    return q, window_rows, lo, lo + work.window, main_rows, chosen, sink


def _rows(work: Work, key: jax.Array) -> jax.Array:
    rows = jax.random.normal(key, (work.rows, work.dim), jnp.bfloat16)
    return fp4.pack(rows, "fp4") if work.packed else rows


def _exact(work: Work, *positional):
    positional = [
        x.astype(jnp.float32) if x is not None and x.dtype == jnp.bfloat16 else x
        for x in positional
    ]
    return reference.sparse_attention(*positional, window=work.window)


def floor(name: str, positional: tuple) -> dict[str, float]:
    """FLOPs of both products, and bytes that cross to and from main memory at the least."""
    work = BENCHMARKS[name]
    q, window_rows, _, _, main_rows, chosen, _ = positional
    bytes_ = 2 * q.nbytes + window_rows.nbytes
    if work.rows:
        touched = min(math.prod(chosen.shape), work.batch * work.rows)
        bytes_ += chosen.nbytes + touched * main_rows.shape[-1] * main_rows.dtype.itemsize
    flops = 4.0 * work.batch * work.queries * work.heads * work.keys * work.dim
    return {"flops": flops, "bytes": float(bytes_)}


def benchmark(name: str) -> Benchmark:
    """Out and lse of bfloat16 against float32."""
    work = BENCHMARKS[name]
    positional = arguments(name)

    def function(implementation):
        call = functools.partial(
            sparse_attention, window=work.window, implementation=implementation
        )
        return repeated(call, work.repeats)

    variant = Variant(
        function,
        positional,
        **floor(name, positional),
        tolerance=1e-2,
        repeats=work.repeats,
    )
    return Benchmark(functools.partial(_exact, work), {"bfloat16": variant})


def tuning(name: str) -> Tuning:
    """Registers of the warpgroups and, for few queries, blocks that share the keys of one."""
    work = BENCHMARKS[name]
    positional = arguments(name)
    items = work.batch * work.queries * -(-work.heads // 64)
    kind = mosaic_gpu.kind_of(positional[4])

    def function(config):
        call = functools.partial(
            mosaic_gpu.forward, window=work.window, scale=work.dim**-0.5, config=config
        )
        return repeated(call, work.repeats)

    few = items < mosaic_gpu.TuningConfig.blocks
    return Tuning(
        mosaic_gpu.TABLE,
        mosaic_gpu.shape_class(kind, items),
        [
            mosaic_gpu.TuningConfig(score, 160, 512 - 2 * 160 - score, shares=shares)
            for shares in ((1, 2, 5, 10) if few else (1,))
            for score in ((104, 128) if few else (96, 104, 112, 120, 128))
        ],
        function,
        positional,
        tolerance=1e-2,
        repeats=work.repeats,
    )
