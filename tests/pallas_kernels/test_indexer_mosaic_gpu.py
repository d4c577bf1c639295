"""The indexer's Hopper kernels: their numbers in interpret mode, their compilation for a GPU, and
what `select` makes of them.

Interpret mode is slow, so every kernel runs there on a few tiles. How `select` puts kernels
together is tested on all cases with doubles of the kernels in plain JAX.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels import fp4, indexer
from pallas_kernels._compat import InterpretGPUParams
from pallas_kernels.indexer import mosaic_gpu, reference
from pallas_kernels.indexer.cases import BENCHMARKS, CASES, Case, Work, arguments, tuning
from pallas_kernels.indexer.mosaic_gpu_backward import gathered_gradients
from pallas_kernels.indexer.mosaic_gpu_dense import dense_scores
from pallas_kernels.indexer.mosaic_gpu_gather import TuningConfig, gathered_scores
from pallas_kernels.indexer.mosaic_gpu_rows import permute_channels

INTERPRET = InterpretGPUParams(detect_races=True)
pytestmark = pytest.mark.usefixtures("no_races")
interpreted = pytest.mark.skipif(
    jax.__version_info__ < (0, 11), reason="interpret mode of jax 0.10 has no transposed operands"
)


def data(queries, heads, entries, seed=0):
    """bfloat16 queries and keys, float32 weights, and float32 scores of every entry."""
    rng = np.random.default_rng(seed)
    q = rng.normal(size=(1, queries, heads, 128)).astype(ml_dtypes.bfloat16)
    w = rng.normal(size=(1, queries, heads)).astype(np.float32)
    k = rng.normal(size=(1, entries, 128)) * np.exp2(rng.integers(-3, 4, size=(1, entries, 1)))
    return q, w, k.astype(ml_dtypes.bfloat16)


def numpy_scores(q, w, k):
    q, k = np.asarray(q, np.float64), np.asarray(k, np.float64)
    dots = np.maximum(np.einsum("bthd,bgd->bthg", q, k), 0)
    return np.einsum("bth,bthg->btg", w.astype(np.float64), dots)


@interpreted
def test_dense_kernel_in_interpret_mode():
    heads, entries = 32, 100
    q, w, k = data(3, heads, entries)
    lo, hi = np.int32([[0, 70, 5]]), np.int32([[64, 100, 5]])
    run = functools.partial(dense_scores, full=True, maxima=True, interpret=INTERPRET)
    scores, maxima = jax.jit(run)(q, w, k, lo, hi)
    j = np.arange(entries)
    visible = (j >= lo[..., None]) & (j < hi[..., None])
    expected = np.where(visible, numpy_scores(q, w, k), -np.inf)
    np.testing.assert_allclose(scores, expected, rtol=1e-4, atol=1e-3)
    padded = np.pad(scores, [(0, 0), (0, 0), (0, 4)], constant_values=-np.inf)
    np.testing.assert_array_equal(maxima, padded.reshape(1, 3, 13, 8).max(axis=-1))


@interpreted
@pytest.mark.parametrize(
    "size, packed", [(1, False), pytest.param(8, True, marks=pytest.mark.slow)]
)
def test_gathering_kernel_in_interpret_mode(size, packed):
    heads, entries = 8, 128
    q, w, k = data(1, heads, entries)
    if packed:
        rows = fp4.pack(k, "mxfp4")
        k = fp4.unpack(rows, "mxfp4")
    starts = np.random.default_rng(1).integers(0, entries // size, size=(1, 1, 70 // size)) * size
    starts[0, 0, 2] = -1
    starts[0, 0, 3] = entries - size
    lo, hi = np.int32([[8]]), np.int32([[entries - 3]])
    run = functools.partial(
        gathered_scores, size=size, absent=-5.0, config=TuningConfig(2), interpret=INTERPRET
    )
    result = jax.jit(run)(q, w, rows if packed else k, starts.astype(np.int32), lo, hi)
    chosen = (starts[..., None] + np.arange(size)).reshape(1, 1, -1)
    valid = np.repeat(starts >= 0, size, axis=-1) & (chosen >= 8) & (chosen < entries - 3)
    every = numpy_scores(q, w, k)
    expected = np.where(valid, np.take_along_axis(every, np.maximum(chosen, 0), -1), -5.0)
    np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-3)


@interpreted
def test_backward_kernel_in_interpret_mode():
    entries, listed = 40, 70
    q, w, k = data(2, 8, entries)
    rng = np.random.default_rng(2)
    indices = rng.integers(-2, entries + 2, size=(1, 2, listed)).astype(np.int32)
    indices[0, 1, 3:] = -1
    g = rng.normal(size=indices.shape).astype(np.float32)
    results = jax.jit(functools.partial(gathered_gradients, interpret=INTERPRET))(
        q, w, k, indices, g
    )
    exact = [jnp.asarray(x, jnp.float32) for x in (q, w, k)]
    _, vjp = jax.vjp(lambda *a: reference.scores_at(*a, indices), *exact)
    for ours, expected in zip(results, vjp(g), strict=True):
        error = np.linalg.norm(np.asarray(ours, np.float32) - expected)
        assert error <= 5e-3 * np.linalg.norm(expected)


@interpreted
def test_gradients_that_cancel():
    """An entry listed 64 times, with gradients of which little is left in the sum."""
    q, w, k = data(1, 8, 3)
    indices = np.full((1, 1, 64), 1, np.int32)
    g = np.random.default_rng(3).normal(size=indices.shape).astype(np.float32)
    g -= 0.95 * g.mean()
    run = functools.partial(gathered_gradients, interpret=INTERPRET)
    dq = np.asarray(jax.jit(run)(q, w, k, indices, g)[0], np.float64)
    positive = np.einsum("bthd,d->bth", np.asarray(q, np.float64), k[0, 1].astype(np.float64)) > 0
    factors = g.astype(np.float64).sum() * w * positive
    expected = factors[..., None] * k[0, 1].astype(np.float64)
    assert np.linalg.norm(dq - expected) <= 2.0**-8 * np.linalg.norm(expected)


@interpreted
def test_backward_kernel_takes_fewer_entries_than_a_tile():
    shapes = shape(jnp.bfloat16, 1, 8, 32, 128), shape(jnp.float32, 1, 8, 32)
    keys, listed = shape(jnp.bfloat16, 1, 5, 128), shape(jnp.int32, 1, 8, 3)
    dq, dw, dk = jax.eval_shape(
        gathered_gradients, *shapes, keys, listed, shape(jnp.float32, 1, 8, 3)
    )
    assert (dq.shape, dw.shape, dk.shape) == ((1, 8, 32, 128), (1, 8, 32), keys.shape)


def test_packed_channels_and_queries_are_permuted_alike():
    channels = permute_channels(jnp.arange(128))
    assert sorted(np.asarray(channels)) == list(range(128))
    # A lane's 16 pairs are the nibbles n and n + 4 of the four words of its scale group.
    assert list(np.asarray(channels[:8])) == [0, 4, 32, 36, 64, 68, 96, 100]


def test_values_on_the_grid_are_exact_in_float8():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(64, 4, 32)) * np.exp2(rng.integers(-5, 6, size=(64, 4, 1)))
    x = fp4.fake_quantize(jnp.asarray(x.reshape(64, 128), jnp.bfloat16), "mxfp4")
    x = x.at[3].set(0)
    rows, scales = mosaic_gpu._float8(x)
    np.testing.assert_array_equal(rows.astype(jnp.float32) * scales[:, None], x)
    assert np.isfinite(np.asarray(rows, np.float32)).all()


def double_of_dense(q, w, k, lo, hi, *, scales=None, full=True, maxima=False, fill=True, **_):
    k = k.astype(jnp.float32)
    if scales is not None:
        k = k * scales[..., None]
    scores = reference.scores(q.astype(jnp.float32), w, k, lo, hi)
    if not fill:  # what nobody may look at
        scores = jnp.where(jnp.arange(k.shape[1]) // 8 > hi[..., None] // 8, jnp.inf, scores)
    padded = jnp.pad(scores, [(0, 0), (0, 0), (0, -k.shape[1] % 8)], constant_values=-jnp.inf)
    best = padded.reshape(*padded.shape[:2], -1, 8).max(axis=-1)
    return scores if full else None, best if maxima else None


def double_of_gather(q, w, k, starts, lo, hi, *, size, absent, **_):
    entries = (starts[..., None] + jnp.arange(size)).reshape(*starts.shape[:2], -1)
    valid = jnp.repeat(starts >= 0, size, axis=-1)
    valid &= (entries >= lo[..., None]) & (entries < hi[..., None])
    scores = reference.scores_at(q.astype(jnp.float32), w, k, jnp.where(valid, entries, -1))
    return jnp.where(valid, scores, absent)


@pytest.fixture
def doubles(monkeypatch):
    monkeypatch.setattr(mosaic_gpu, "dense_scores", double_of_dense)
    monkeypatch.setattr(mosaic_gpu, "gathered_scores", double_of_gather)


BLOCKS = Case(((25, 16, 26), (90,)), queries=90, tokens=90, ratio=1, top_k=3, pool=(3, 8))
UNALIGNED = Case(((24, 3, 26),), queries=80, tokens=80, ratio=2, top_k=3, pool=(2, 8))


@pytest.mark.parametrize(
    "case, way",
    [
        pytest.param(CASES["pool"], "packed_keys", id="pool_of_another_size"),
        pytest.param(CASES["decode"], "packed_keys", id="decode"),
        pytest.param(BLOCKS, "float8", id="maxima_in_float8"),
        pytest.param(UNALIGNED, "stored", id="blocks_at_any_entry"),
    ],
)
def test_select_equals_the_reference(case, way, doubles, monkeypatch):
    monkeypatch.setattr(mosaic_gpu, "DIRECT_ENTRIES", 10**6 if way == "stored" else 0)
    # Small integers and their sums are exact everywhere, and many scores are equal.
    case = dataclasses.replace(case, dim=128, heads=8)
    q, w, k, lo, hi = arguments(case, dtype=ml_dtypes.bfloat16, ties=True)
    if way == "packed_keys":
        k = fp4.pack(k, "mxfp4")
    keywords = dict(top_k=case.top_k)

    def both(select, *inputs, **options):
        indices, pool = select(*inputs, make_pool=case.pool, **keywords, **options)
        if pool is None:
            return [indices]
        inside, none = select(*inputs, pool=pool, **keywords, **options)
        assert none is None
        return [indices, pool.blocks, inside]

    def compare(*inputs):
        ours = both(mosaic_gpu.select, *inputs, interpret=INTERPRET, on_grid=way == "float8")
        return ours, both(reference.select, *inputs)

    for result, expected in zip(*jax.jit(compare)(q, w, k, lo, hi), strict=True):
        np.testing.assert_array_equal(result, expected)


def test_gradients_take_the_types_of_their_inputs(doubles, monkeypatch):
    def gradients(q, w, k, indices, g, **_):
        return jax.vjp(lambda *a: reference.scores_at(*a, indices), q, w, k)[1](g)

    monkeypatch.setattr(mosaic_gpu, "gathered_gradients", gradients)
    q, w, k = (jnp.asarray(x) for x in data(5, 8, 20))
    indices = np.random.default_rng(0).integers(-1, 21, size=(1, 5, 6)).astype(np.int32)

    @jax.jit
    def compare(q, w, k):
        def loss(module, *inputs, **options):
            return jnp.sum(module.scores_at(*inputs, indices, **options) ** 3)

        ours = functools.partial(loss, mosaic_gpu, interpret=INTERPRET)
        inputs = q, w, k.astype(jnp.float32)
        return [
            jax.grad(f, argnums=(0, 1, 2))(*inputs)
            for f in (ours, functools.partial(loss, reference))
        ]

    for ours, expected in zip(*compare(q, w, k), strict=True):
        assert ours.dtype == expected.dtype
        ours, expected = (np.asarray(x, np.float32) for x in (ours, expected))
        np.testing.assert_allclose(ours, expected, rtol=0.02, atol=0.01 * np.abs(expected).max())


@interpreted
@pytest.mark.parametrize(
    "name, work, shape_class",
    [
        ("B3", Work("select", 1, 16, 512), "dense maxima, float8_e4m3fn"),
        ("B5", Work("select", 1, 16, 1024, pool=64), "gathered runs of 8, float8_e4m3fn"),
        ("B6", Work("select", 2, 1, 4096, packed=True), "gathered runs of 64, uint8"),
    ],
)
def test_tuning(name, work, shape_class, monkeypatch):
    monkeypatch.setitem(BENCHMARKS, name, work)
    tuned = tuning(name)
    assert tuned.shape_class == shape_class
    # That of the table, or the default that stands for it, is among the candidates.
    assert tuned.table.lookup(shape_class, tuned.candidates[-1]) in tuned.candidates
    jax.eval_shape(tuned.function(tuned.candidates[-1]), *tuned.arguments)


def test_declines_what_it_does_not_take():
    q, w, k = data(2, 8, 16)
    lo, hi = np.zeros((1, 2), np.int32), np.full((1, 2), 16, np.int32)
    with pytest.raises(NotImplementedError, match="needs a GPU"):
        indexer.select(q, w, k, lo, hi, top_k=2, implementation="mosaic_gpu")
    for change, message in [
        (dict(q=q.astype(np.float32)), "queries in float32"),
        (dict(q=q[..., :64], k=k[..., :64]), "index head_dim 64"),
        (dict(q=q[:, :, :5], w=w[:, :, :5]), "5 heads"),
    ]:
        with pytest.raises(NotImplementedError, match=message):
            inputs = dict(q=q, w=w, k=k) | change
            mosaic_gpu.select(*inputs.values(), lo, hi, top_k=2, interpret=INTERPRET)


def shape(dtype, *sizes):
    return jax.ShapeDtypeStruct(sizes, dtype)


@pytest.mark.parametrize("kind", ["bfloat16", "float8"])
def test_dense_kernel_compiles_for_hopper(recent_hopper, kind):
    dtype = jnp.bfloat16 if kind == "bfloat16" else jnp.float8_e4m3fn
    inputs = [
        shape(dtype, 1, 64, 32, 128),
        shape(jnp.float32, 1, 64, 32),
        shape(dtype, 1, 1024, 128),
        shape(jnp.int32, 1, 64),
        shape(jnp.int32, 1, 64),
    ]
    if kind == "float8":
        inputs.append(shape(jnp.float32, 1, 1024))

    def run(q, w, k, lo, hi, scales=None):
        return dense_scores(q, w, k, lo, hi, scales=scales, full=True, maxima=True)

    recent_hopper.compile(run, *inputs)


@pytest.mark.parametrize("size, packed", [(1, False), (1, True), (8, False), (8, True), (64, True)])
def test_gathering_kernel_compiles_for_hopper(recent_hopper, size, packed):
    keys = shape(jnp.uint8, 1, 1024, 68) if packed else shape(jnp.bfloat16, 1, 1024, 128)
    recent_hopper.compile(
        functools.partial(gathered_scores, size=size, absent=0.0),
        shape(jnp.bfloat16, 1, 8, 32, 128),
        shape(jnp.float32, 1, 8, 32),
        keys,
        shape(jnp.int32, 1, 8, 128),
        shape(jnp.int32, 1, 8),
        shape(jnp.int32, 1, 8),
    )


@pytest.mark.parametrize("listed", [3, 512])
def test_backward_kernel_compiles_for_hopper(recent_hopper, listed):
    recent_hopper.compile(
        gathered_gradients,
        shape(jnp.bfloat16, 1, 8, 32, 128),
        shape(jnp.float32, 1, 8, 32),
        shape(jnp.bfloat16, 1, 1024, 128),
        shape(jnp.int32, 1, 8, listed),
        shape(jnp.float32, 1, 8, listed),
    )
