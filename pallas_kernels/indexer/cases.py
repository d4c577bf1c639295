"""Named argument sets of the indexer, for tests and benchmarks."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import fp4, indexer
from pallas_kernels.indexer import mosaic_gpu_dense as dense
from pallas_kernels.indexer import mosaic_gpu_gather as gather
from pallas_kernels.indexer import mosaic_tpu_backward, mosaic_tpu_dense, mosaic_tpu_pool
from pallas_kernels.indexer.mosaic_gpu_lanes import TILE_KEYS
from pallas_kernels.indexer.mosaic_tpu_tiles import Tiling
from pallas_kernels.measure import Benchmark, Variant
from pallas_kernels.packed_rows import ranges
from pallas_kernels.tpu import Account
from pallas_kernels.tuning import Tuning


@dataclasses.dataclass(frozen=True)
class Case:
    """Shapes of one selection.

    Attributes:
        documents: lengths of the documents of each batch row; there are as many rows.
        queries: T, the last T tokens of the row are asked about.
        tokens: length of the row, at least T.
        ratio: tokens per entry.
        top_k: entries to select.
        heads: Hi.
        dim: Di.
        pool: (blocks, size) to be made, or None.
    """

    documents: tuple[tuple[int, ...], ...]
    queries: int
    tokens: int
    ratio: int
    top_k: int
    heads: int = 2
    dim: int = 32
    pool: tuple[int, int] | None = None


# Small shapes. The pools leave out most blocks; some documents start inside of a block of the row.
CASES = {
    "packed": Case(((19, 3, 9), (43,)), queries=43, tokens=43, ratio=2, top_k=4),
    "pool": Case(((25, 3, 26), (61,)), queries=67, tokens=67, ratio=1, top_k=5, pool=(3, 3)),
    "pool_of_pairs": Case(((25, 3, 26), (61,)), 67, 67, ratio=2, top_k=5, pool=(2, 4)),
    "few_entries": Case(((7,), (9,)), queries=9, tokens=9, ratio=2, top_k=11, pool=(9, 2)),
    "later_chunk": Case(((75,), (40, 27)), 11, 75, ratio=1, top_k=6, pool=(4, 8)),
    "decode": Case(((64,), (51,)), queries=1, tokens=64, ratio=1, top_k=6, pool=(3, 8)),
}


@dataclasses.dataclass(frozen=True)
class Work:
    """What one benchmark times.

    Attributes:
        function: "select", "scores", "scores_at" or "gradients" (of scores_at).
        batch, queries, entries: B, T, G.
        causal: query t sees `(t + 1) * entries // queries` entries, not all.
        make_pool: P blocks of 8 to be made.
        pool: P blocks of 8, random ones, to be searched.
        packed: keys are packed.
        on_grid: the promise of `select`.
    """

    function: str
    batch: int
    queries: int
    entries: int
    causal: bool = False
    make_pool: int = 0
    pool: int = 0
    packed: bool = False
    on_grid: bool = False


HEADS, DIM, TOP_K, BLOCK = 32, 128, 512, 8
BENCHMARKS = {
    "small": Work("select", 1, 64, 512),
    "B2": Work("scores", 1, 2048, 65536),
    "B2_8k": Work("scores", 1, 8192, 65536),
    "B3": Work("select", 1, 4096, 131072),
    "B5": Work("select", 1, 4096, 65536, pool=2048),
    "B5_1m": Work("select", 1, 4096, 2**20, pool=2048),
    "B6": Work("select", 64, 1, 131072, packed=True),
    # What a step of configs/small.py runs, for one of its two sequences.
    "small_encoder": Work("select", 1, 8192, 4096, causal=True),
    "small_decoder": Work("select", 1, 8192, 8192, causal=True, make_pool=256),
    "small_pool": Work("select", 1, 8192, 8192, pool=256),
    "small_loss": Work("scores_at", 1, 8192, 8192),
    "small_gradients": Work("gradients", 1, 8192, 8192),
}


def arguments(case: Case, dtype: Any = np.float32, seed: int = 0, ties: bool = False) -> tuple:
    """Random arguments of one case.

    Args:
        case: the shapes.
        dtype: of queries and keys (anything NumPy casts to, `ml_dtypes.bfloat16` too).
        seed: of the values.
        ties: small integers instead of normal values: scores are exact in any order of summation,
            and many are equal.

    Returns:
        q, w, k, lo, hi of `select`, as NumPy arrays.
    """
    rng = np.random.default_rng(seed)
    batch, asked = len(case.documents), slice(case.tokens - case.queries, None)
    visible = [ranges(documents, case.tokens, 1, case.ratio) for documents in case.documents]
    lo, hi = (np.stack([r[i][asked] for r in visible]) for i in (2, 3))

    def values(*shape):
        if ties:
            return rng.integers(-1, 2, size=shape) * (rng.random(shape) < 0.3)
        return rng.normal(size=shape)

    q = values(batch, case.queries, case.heads, case.dim).astype(dtype)
    w = values(batch, case.queries, case.heads).astype(np.float32)
    k = values(batch, case.tokens // case.ratio, case.dim).astype(dtype)
    return q, w, k, lo, hi


def benchmark(name: str) -> Benchmark:
    """The work in bfloat16, and with the promise that values lie on the grid of "mxfp4".

    Values are small integers: scores are exact however they are summed, also in FP8, and so results
    must equal the reference's. FLOPs are those of the dot products that are needed; bytes count
    where the keys alone take longer than those.
    """
    work = BENCHMARKS[name]
    keys = jax.random.split(jax.random.key(0), 5)
    shape = (work.batch, work.queries)

    def integers(key, shape, largest, dtype=jnp.bfloat16):
        return jax.random.randint(key, shape, -largest, largest + 1).astype(dtype)

    q = integers(keys[0], (*shape, HEADS, DIM), 3)
    w = integers(keys[1], (*shape, HEADS), 64, jnp.float32)
    k = integers(keys[2], (work.batch, work.entries, DIM), 3)
    k = fp4.pack(k, "mxfp4") if work.packed else k
    lo = jnp.zeros(shape, jnp.int32)
    hi = jnp.full(shape, work.entries, jnp.int32)
    if work.causal:
        hi = jnp.broadcast_to((jnp.arange(work.queries) + 1) * work.entries // work.queries, shape)
    scored = float(hi.sum())
    inputs = [q, w, k, lo, hi]
    if work.pool:
        # One block of every stretch, at random.
        stretch = work.entries // BLOCK // work.pool
        place = jax.random.randint(keys[3], (*shape, work.pool), 0, stretch)
        inputs.append(jnp.arange(work.pool, dtype=jnp.int32) * stretch + place)
        scored = float(work.batch * work.queries * work.pool * BLOCK)
    listed = work.function in ("scores_at", "gradients")
    if listed:
        indices = jax.random.randint(keys[3], (*shape, TOP_K), 0, work.entries)
        inputs = [q, w, k, jnp.sort(indices, axis=-1)]
        scored = float(indices.size)
    if work.function == "gradients":
        inputs.append(integers(keys[4], indices.shape, 2, jnp.float32))

    def select(q, w, k, lo, hi, blocks=None, **keywords):
        keywords |= dict(top_k=TOP_K)
        if work.make_pool:
            indices, made = indexer.select(
                q, w, k, lo, hi, make_pool=(work.make_pool, BLOCK), **keywords
            )
            return indices, made.blocks
        pool = None if blocks is None else indexer.Pool(blocks, BLOCK)
        return indexer.select(q, w, k, lo, hi, pool=pool, **keywords)[0]

    def gradients(q, w, k, indices, g, **keywords):
        _, vjp = jax.vjp(lambda *a: indexer.scores_at(*a, indices, **keywords), q, w, k)
        return vjp(g)

    function = {
        "select": select,
        "scores": indexer.scores,
        "scores_at": indexer.scores_at,
        "gradients": gradients,
    }[work.function]

    def variant(on_grid):
        return Variant(
            lambda name: functools.partial(function, implementation=name, on_grid=on_grid),
            tuple(inputs),
            flops=2.0 * scored * HEADS * DIM * (3 if work.function == "gradients" else 1),
            bytes=float(k.nbytes) if work.packed else 0.0,
            # Gradients of integers are rounded to bfloat16 between their two products.
            tolerance=5e-3 if work.function == "gradients" else 0.0,
            fp8=on_grid,
        )

    variants = {"bfloat16": variant(False)}
    if not (work.packed or listed):
        variants["on_grid"] = variant(True)
    return Benchmark(functools.partial(function, implementation="xla"), variants)


def tuning(name: str) -> Tuning | None:
    """Dense scores (B2 bfloat16, B3 FP8 maxima), gathered ones (B5 FP8, B6 packed); else None."""
    if name not in ("B2", "B3", "B5", "B6"):
        return None
    q, w, k, lo, hi, *blocks = benchmark(name).variants["bfloat16"].arguments
    scales = None
    if name in ("B3", "B5"):
        q, k = q.astype(jnp.float8_e4m3fn), k.astype(jnp.float8_e4m3fn)
        scales = jnp.ones(k.shape[:2], jnp.float32)
    if name in ("B2", "B3"):
        results = dict(full=name == "B2", maxima=name == "B3")
        candidates = [
            dense.TuningConfig(stages=stages, take_turns=turns, early=early)
            for stages in (4, 6, 8)
            for turns, early in ((False, 0), (True, 0), (True, 64), (True, 128))
        ]
        return Tuning(
            dense.TABLE,
            dense.shape_class(k.dtype, name == "B2"),
            candidates,
            lambda config: functools.partial(
                dense.dense_scores, scales=scales, config=config, **results
            ),
            (q, w, k, lo, hi),
        )
    size = BLOCK if blocks else TILE_KEYS
    starts = blocks[0] * size if blocks else jnp.arange(0, k.shape[1], size, dtype=jnp.int32)
    return Tuning(
        gather.TABLE,
        gather.shape_class(size, k.dtype),
        [
            gather.TuningConfig(stages=stages, tiles=tiles)
            for stages in (2, 3, 4)
            for tiles in (None, 32, 64, 128)
        ],
        lambda config: functools.partial(
            gather.gathered_scores,
            size=size,
            absent=-jnp.inf,
            scales=scales,
            config=config,
        ),
        (q, w, k, jnp.broadcast_to(starts, (*q.shape[:2], starts.shape[-1])), lo, hi),
    )


def tpu_accounts() -> dict[str, Account]:
    """What the TPU kernels take for the benchmarks, in bfloat16."""
    on_tpu, backward = mosaic_tpu_dense, mosaic_tpu_backward

    def tiling(name):
        work = BENCHMARKS[name]
        row = (fp4.row_bytes("mxfp4", DIM), jnp.uint8) if work.packed else (DIM, jnp.bfloat16)
        return Tiling.of(
            jax.ShapeDtypeStruct((work.batch, work.queries, HEADS, DIM), jnp.dtype("bfloat16")),
            jax.ShapeDtypeStruct((work.batch, work.entries, row[0]), jnp.dtype(row[1])),
        )

    pool, loss = BENCHMARKS["B5"], BENCHMARKS["small_loss"]
    return {
        "B2, scores of 2048 x 65536": on_tpu.dense_account(tiling("B2")),
        "B3, scores of 4096 x 131072": on_tpu.dense_account(tiling("B3")),
        "B5, pools of 2048 blocks, 4096 queries": mosaic_tpu_pool.account(
            pool.queries, HEADS, DIM, pool.pool, jnp.bfloat16
        ),
        "B6, decoding, 64 x 131072 packed keys": on_tpu.few_account(tiling("B6")),
        "512 listed of 8192, 8192 queries": on_tpu.listed_account(tiling("small_loss"), TOP_K),
        "the same, lists spread": backward.spread_account(loss.queries, TOP_K, loss.entries),
        "the same, dq and dw": backward.query_account(tiling("small_loss")),
        "the same, dk": backward.key_account(tiling("small_loss")),
    }
