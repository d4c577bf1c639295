"""The indexer's TPU kernels: interpreted against NumPy, compiled for each generation, and what
`select` makes of them."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import indexer
from pallas_kernels.indexer import cases, mosaic_tpu, mosaic_tpu_pool, reference
from pallas_kernels.indexer.cases import CASES
from pallas_kernels.indexer.mosaic_tpu_backward import dense_gradients, spread
from pallas_kernels.indexer.mosaic_tpu_dense import dense_scores, listed, listed_scores
from pallas_kernels.indexer.mosaic_tpu_pool import pool_scores
from pallas_kernels.topk.reference import topk as reference_topk
from tests.pallas_kernels.test_indexer import numpy_scores, numpy_select

TOLERANCE = dict(rtol=1e-4, atol=1e-3)


def data(kind, queries, entries, heads=4, dim=128, seed=0):
    """(q, w, k, lo, hi) of two rows, and what k stands for; the last of several queries sees
    nothing."""
    rng = np.random.default_rng(seed)
    dtype = np.float32 if kind == "float32" else ml_dtypes.bfloat16
    q = rng.normal(size=(2, queries, heads, dim)).astype(dtype)
    w = rng.normal(size=(2, queries, heads)).astype(np.float32)
    if kind == "packed":
        codes = rng.integers(0, 16, size=(2, entries, dim))
        scales = rng.integers(122, 130, size=(2, entries, dim // 32))
        k = np.concatenate([codes[..., 0::2] | codes[..., 1::2] << 4, scales], -1).astype(np.uint8)
        values = np.float64([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
        keys = values[codes] * np.exp2(np.repeat(scales, 32, axis=-1) - 127.0)
    else:
        k = rng.normal(size=(2, entries, dim)) * np.exp2(rng.integers(-3, 4, (2, entries, 1)))
        k = k.astype(dtype)
        keys = k.astype(np.float64)
    lo = rng.integers(0, entries // 2, size=(2, queries)).astype(np.int32)
    hi = (lo + rng.integers(1, entries // 2 + 9, size=(2, queries))).astype(np.int32)
    if queries > 1:
        hi[:, -1] = lo[:, -1]
    return (q, w, k, lo, hi), keys


def at_entries(scores, entry):
    """Scores `[B, T, G]` of entries `[B, T, K]`, 0 outside of them."""
    valid = (entry >= 0) & (entry < scores.shape[-1])
    return np.where(valid, np.take_along_axis(scores, np.where(valid, entry, 0), axis=-1), 0)


@pytest.mark.parametrize(
    "kind, queries, entries, heads",
    [
        ("packed", 11, 140, 1),
        ("packed", 1, 140, 4),
        pytest.param("packed", 11, 600, 4, marks=pytest.mark.slow),
        pytest.param("float32", 2, 1300, 3, marks=pytest.mark.slow),
        pytest.param("bfloat16", 130, 70, 4, marks=pytest.mark.slow),
        pytest.param("float32", 9, 1300, 8, marks=pytest.mark.slow),
    ],
)
def test_all_entries(kind, queries, entries, heads, interpreted):
    (q, w, k, lo, hi), keys = data(kind, queries, entries, heads)
    run = jax.jit(functools.partial(dense_scores, interpret=interpreted))
    at = np.arange(entries)
    visible = (at >= lo[..., None]) & (at < hi[..., None])
    expected = np.where(visible, numpy_scores(q, w, keys), -np.inf)
    np.testing.assert_allclose(run(q, w, k, lo, hi), expected, **TOLERANCE)


@pytest.mark.parametrize(
    "kind, queries, entries, heads",
    [
        ("bfloat16", 3, 600, 1),
        pytest.param("packed", 130, 140, 4, marks=pytest.mark.slow),
        pytest.param("float32", 20, 1030, 3, marks=pytest.mark.slow),
    ],
)
def test_listed_entries(kind, queries, entries, heads, interpreted):
    (q, w, k, *_), keys = data(kind, queries, entries, heads)
    rng = np.random.default_rng(1)
    indices = rng.integers(-2, entries + 3, size=(2, queries, 150)).astype(np.int32)
    indices[0, 1] = -1
    run = jax.jit(functools.partial(listed_scores, interpret=interpreted))
    expected = at_entries(numpy_scores(q, w, keys), indices)
    np.testing.assert_allclose(run(q, w, k, indices), expected, **TOLERANCE)


def random_blocks(shape, entries, count, seed=0):
    """Ascending blocks of 8 for every query of `shape`, as many as they happen to have."""
    rng = np.random.default_rng(seed)
    blocks = np.full((*shape, count), -1, np.int32)
    for at in np.ndindex(shape):
        held = rng.integers(0, count + 1)
        blocks[at][:held] = np.sort(rng.choice(-(-entries // 8), held, replace=False))
    return blocks


@pytest.mark.parametrize(
    "kind, queries, entries, heads, count",
    [
        ("bfloat16", 1, 100, 4, 9),
        pytest.param("float32", 9, 301, 3, 20, marks=pytest.mark.slow),
        pytest.param("bfloat16", 8, 700, 8, 40, marks=pytest.mark.slow),
    ],
)
def test_blocks_of_a_pool(kind, queries, entries, heads, count, interpreted, monkeypatch):
    monkeypatch.setattr(mosaic_tpu_pool, "_UNIT", 4)
    (q, w, k, *_), keys = data(kind, queries, entries, heads)
    blocks = random_blocks((2, queries), entries, count)
    blocks[0, 0, :5] = np.arange(5)
    blocks[1, 0] = -1
    run = jax.jit(functools.partial(pool_scores, interpret=interpreted))
    entry = (blocks[..., None] * 8 + np.arange(8)).reshape(2, queries, -1)
    held = np.repeat(blocks >= 0, 8, axis=-1) & (entry < entries)
    expected = at_entries(numpy_scores(q, w, keys), np.where(held, entry, -1))
    result = np.where(held, run(q, w, k, blocks), 0)
    np.testing.assert_allclose(result, expected, **TOLERANCE)


def test_a_list_is_spread(interpreted):
    rng = np.random.default_rng(0)
    indices = rng.integers(-1, 300, size=(1, 9, 128)).astype(np.int32)  # some more than once
    g = rng.normal(size=indices.shape).astype(np.float32)
    expected = np.zeros((1, 9, 384), np.float64)
    for at in np.argwhere(indices >= 0):
        expected[0, at[1], indices[tuple(at)]] += g[tuple(at)]
    result = jax.jit(functools.partial(spread, entries=300, interpret=interpreted))(indices, g)
    np.testing.assert_allclose(result, expected, rtol=1e-6, atol=1e-6)


def numpy_gradients(q, w, k, g):
    """Of `sum(g * scores)`, in float64."""
    q, w, k, g = (np.asarray(x, np.float64) for x in (q, w, k, g))
    dots = np.einsum("bthd,bgd->bthg", q, k)
    dw = np.einsum("bthg,btg->bth", np.maximum(dots, 0), g)
    of_dots = (dots > 0) * w[..., None] * g[:, :, None]
    dq = np.einsum("bthg,bgd->bthd", of_dots, k)
    return dq, dw, np.einsum("bthg,bthd->bgd", of_dots, q)


def check_gradients(kind, function, inputs, g, expected):
    """The vjp of `function` of `inputs` (q, w and, unless packed, k)."""
    _, vjp = jax.vjp(function, *(jnp.asarray(x) for x in inputs))
    for result, of, exact in zip(vjp(jnp.asarray(g)), inputs, expected, strict=False):
        assert result.dtype == of.dtype
        error = np.linalg.norm(np.asarray(result, np.float64) - exact)
        assert error <= (1e-5 if kind == "float32" else 5e-3) * np.linalg.norm(exact)


@pytest.mark.parametrize(
    "kind, queries, entries, heads",
    [
        ("bfloat16", 9, 70, 1),
        pytest.param("bfloat16", 20, 600, 8, marks=pytest.mark.slow),
        pytest.param("packed", 9, 140, 2, marks=pytest.mark.slow),
        pytest.param("float32", 130, 140, 4, marks=pytest.mark.slow),
    ],
)
def test_gradients_of_all_entries(kind, queries, entries, heads, interpreted):
    (q, w, k, lo, hi), keys = data(kind, queries, entries, heads)
    g = np.random.default_rng(1).normal(size=(2, queries, entries)).astype(np.float32)
    at = np.arange(entries)
    visible = (at >= lo[..., None]) & (at < hi[..., None])
    expected = numpy_gradients(q, w, keys, np.where(visible, g, 0))
    g[~visible] = np.nan  # the gradient of what nobody looks at may be anything
    given = (k,) if kind == "packed" else ()
    run = jax.jit(lambda *args: mosaic_tpu.scores(*args, lo, hi, interpret=interpreted))
    inputs = (q, w) if kind == "packed" else (q, w, k)
    check_gradients(kind, lambda *a: run(*a, *given), inputs, g, expected)


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [None, 7])
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "packed"])
def test_gradients_of_listed_entries(kind, chunk, interpreted):
    (q, w, k, *_), keys = data(kind, 19, 200)
    rng = np.random.default_rng(1)
    indices = rng.integers(-2, 203, size=(2, 19, 60)).astype(np.int32)
    g = rng.normal(size=indices.shape).astype(np.float32)
    every = np.zeros((2, 19, 200))
    for at in np.argwhere((indices >= 0) & (indices < 200)):
        every[at[0], at[1], indices[tuple(at)]] += g[tuple(at)]
    given = (k,) if kind == "packed" else ()
    run = functools.partial(mosaic_tpu.scores_at, chunk=chunk, interpret=interpreted)
    inputs = (q, w) if kind == "packed" else (q, w, k)
    expected = numpy_gradients(q, w, keys, every)
    check_gradients(kind, lambda *a: run(*a, *given, indices), inputs, g, expected)


def double_of_pool(q, w, k, blocks, **_):
    entry = (blocks[..., None] * 8 + jnp.arange(8)).reshape(*blocks.shape[:2], -1)
    scores = reference.scores_at(q, w, k, entry)
    return jnp.where(jnp.repeat(blocks >= 0, 8, axis=-1), scores, jnp.nan)


def double_of_topk(scores, k, lengths, *, order, interpret):
    return reference_topk(scores, k, lengths, order=order)


def double_of_blocks(scores, k, block, lengths, *, first, interpret):
    scores = jnp.where(jnp.arange(scores.shape[-1]) < lengths[..., None], scores, -jnp.inf)
    missing = [(0, 0), (0, 0), (0, -scores.shape[-1] % block)]
    best = jnp.pad(scores, missing, constant_values=-jnp.inf)
    best = best.reshape(*scores.shape[:2], -1, block).max(axis=-1)
    return reference_topk(reference.block_ranks(best, first), k, order="index")


@pytest.fixture
def doubles(monkeypatch):
    """Plain JAX in place of the kernels."""
    monkeypatch.setattr(mosaic_tpu, "dense_scores", lambda *a, interpret: reference.scores(*a))
    monkeypatch.setattr(mosaic_tpu, "pool_scores", double_of_pool)
    monkeypatch.setattr(mosaic_tpu.selection, "topk", double_of_topk)
    monkeypatch.setattr(mosaic_tpu.selection, "topk_blocks", double_of_blocks)


ALIGNED = dataclasses.replace(CASES["later_chunk"], documents=((75,), (40, 27)), pool=(2, 8))
UNALIGNED = dataclasses.replace(
    CASES["pool"], documents=((24, 3, 26),), queries=40, tokens=80, ratio=2, pool=(2, 8)
)


def select_both(case, args, interpret):
    """Indices, the pool, and indices from it; the last None where blocks are not of 8."""

    def both(q, w, k, lo, hi):
        run = functools.partial(
            mosaic_tpu.select, q, w, k, lo, hi, top_k=case.top_k, interpret=interpret
        )
        indices, pool = run(make_pool=case.pool)
        if pool is None or pool.size != 8:
            return indices, pool, None
        return indices, pool, run(pool=pool)[0]

    return jax.jit(both)(*args)


def check_selection(case, args, interpret):
    everywhere, pools, inside = numpy_select(*args, case.top_k, case.pool)
    indices, pool, from_pool = select_both(case, args, interpret)
    np.testing.assert_array_equal(indices, everywhere)
    if case.pool:
        np.testing.assert_array_equal(pool.blocks, pools)
    if from_pool is not None:
        np.testing.assert_array_equal(from_pool, inside)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(ALIGNED, id="aligned"),
        pytest.param(UNALIGNED, id="unaligned", marks=pytest.mark.slow),
        pytest.param(CASES["packed"], id="no_pool"),
    ],
)
def test_select_puts_kernels_together(case, doubles):
    check_selection(case, cases.arguments(case, ties=True), pltpu.InterpretParams())


@pytest.mark.slow
@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("name", [*CASES, "aligned", "unaligned"])
def test_cases(name, ties, interpreted, monkeypatch):
    monkeypatch.setattr(mosaic_tpu_pool, "_UNIT", 4)
    case = {**CASES, "aligned": ALIGNED, "unaligned": UNALIGNED}[name]
    check_selection(case, cases.arguments(case, ties=ties), interpreted)


def shape(dtype, *sizes):
    return jax.ShapeDtypeStruct(sizes, dtype)


def inputs(kind, batch, queries, entries, heads=32, dim=128):
    dtype = jnp.float32 if kind == "float32" else jnp.bfloat16
    packed = shape(jnp.uint8, batch, entries, dim // 2 + dim // 32)
    return (
        shape(dtype, batch, queries, heads, dim),
        shape(jnp.float32, batch, queries, heads),
        packed if kind == "packed" else shape(dtype, batch, entries, dim),
    )


def test_kernels_compile(tpu):
    def every(q, w, k, rows, lo, hi, blocks, indices, g):
        places, ranges = listed(indices, k.shape[1])
        return (
            dense_scores(q, w, k, lo, hi),
            dense_scores(q[:, :1], w[:, :1], rows, lo[:, :1], hi[:, :1]),
            listed_scores(q, w, k, indices),
            pool_scores(q, w, k, blocks),
            dense_gradients(q, w, k, ranges, spread(places, g, k.shape[1])),
        )

    of_query = functools.partial(shape, jnp.int32, 1, 32)
    compiled = tpu.compile(
        every,
        *inputs("bfloat16", 1, 32, 1000, heads=8),
        inputs("packed", 1, 32, 1000)[2],
        of_query(),
        of_query(),
        of_query(64),
        of_query(128),
        shape(jnp.float32, 1, 32, 128),
    )
    assert compiled.as_text().count('custom_call_target="tpu_custom_call"') == 7


@pytest.mark.slow
@pytest.mark.parametrize(
    "work, kind",
    [
        ("pool made", "bfloat16"),
        ("pool", "bfloat16"),
        ("pool", "packed"),
        ("decode", "packed"),
        ("decode", "float32"),
        ("all", "float32"),
        ("listed", "bfloat16"),
    ],
)
def test_published_shapes_compile(work, kind, tpu):
    batch, queries, entries = (64, 1, 131072) if work == "decode" else (1, 1024, 16384)
    q, w, k = inputs(kind, batch, queries, entries)
    bounds = shape(jnp.int32, batch, queries), shape(jnp.int32, batch, queries)
    keywords = dict(implementation="mosaic_tpu")

    def select(q, w, k, lo, hi, blocks=None):
        if blocks is not None:
            pool = indexer.Pool(blocks, 8)
            return indexer.select(q, w, k, lo, hi, top_k=512, pool=pool, **keywords)[0]
        make = (1024, 8) if work == "pool made" else None
        indices, pool = indexer.select(q, w, k, lo, hi, top_k=512, make_pool=make, **keywords)
        return indices if pool is None else (indices, pool.blocks)

    def gradients(q, w, k, *rest):
        function = indexer.scores if work == "all" else indexer.scores_at
        wanted = (0, 1) if kind == "packed" else (0, 1, 2)

        def loss(*args):
            scores = function(*args, *rest, **keywords)
            return jnp.sum(jnp.where(scores > -jnp.inf, scores, 0) ** 2)

        return jax.grad(loss, argnums=wanted)(q, w, k)

    match work:
        case "pool":
            compiled = tpu.compile(select, q, w, k, *bounds, shape(jnp.int32, 1, queries, 1024))
        case "pool made" | "decode":
            compiled = tpu.compile(select, q, w, k, *bounds)
        case "all":
            compiled = tpu.compile(gradients, q, w, k, *bounds)
        case "listed":
            compiled = tpu.compile(gradients, q, w, k, shape(jnp.int32, 1, queries, 512))
    assert "tpu_custom_call" in compiled.as_text()


def test_accounts():
    stated = cases.tpu_accounts()
    pool = next(account for name, account in stated.items() if name.startswith("B5,"))
    # 4096 queries read 2048 blocks of 2 KiB each.
    assert pool.copies == 4096 * 2048
    assert 1.0 <= pool.hbm_bytes / (pool.copies * 2048) < 1.05
    decode = next(account for name, account in stated.items() if name.startswith("B6,"))
    assert 1.0 <= decode.hbm_bytes / (64 * 131072 * (68 + 4)) < 1.01


def test_declines():
    (q, w, k, lo, hi), _ = data("bfloat16", 2, 16)
    with pytest.raises(NotImplementedError, match="needs a TPU, the platform is cpu"):
        indexer.select(q, w, k, lo, hi, top_k=2, implementation="mosaic_tpu")
    interpret = pltpu.InterpretParams()
    pool = indexer.Pool(np.zeros((2, 2, 1), np.int32), 4)
    with pytest.raises(NotImplementedError, match="pool of blocks of 4"):
        mosaic_tpu.select(q, w, k, lo, hi, top_k=2, pool=pool, interpret=interpret)
    many = np.zeros((2, 65537, 128), ml_dtypes.bfloat16)
    with pytest.raises(NotImplementedError, match="65537 entries"):
        mosaic_tpu.scores_at(q, w, many, np.zeros((2, 2, 1), np.int32), interpret=interpret)
