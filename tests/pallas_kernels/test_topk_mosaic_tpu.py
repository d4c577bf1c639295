"""The top-k kernel for TPUs: interpreted against a stable NumPy sort, and compiled for each
generation."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.topk import cases, mosaic_tpu, topk, topk_blocks
from tests.pallas_kernels.test_topk import numpy_topk
from tests.pallas_kernels.test_topk_mosaic_gpu import scores_like


@functools.cache
def program(function, shape, *static, **keywords):
    """One of `mosaic_tpu`, jitted, of scores and any arrays of a number for each row."""
    run = functools.partial(function, interpret=pltpu.InterpretParams(detect_races=True))

    def call(scores, *rows, **named):
        return run(scores, *static, *rows, **keywords, **named)

    return jax.jit(call)


@pytest.mark.parametrize("kind", ["normal", "few values", "equal"])
def test_equals_stable_sort(kind, interpreted):
    scores, lengths = scores_like(kind, (3, 300)), np.int32((300, 129, 7))
    result = program(mosaic_tpu.topk, (3, 300), 20, order="index")(scores, lengths)
    np.testing.assert_array_equal(result, numpy_topk(scores, 20, lengths, "index"))


def test_special_scores(interpreted):
    special = np.float32([np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0, -1e38, 3e38, 1.0])
    scores = np.random.default_rng(0).choice(special, size=(3, 300))
    lengths = np.int32((300, 0, 1))
    result = program(mosaic_tpu.topk, (3, 300), 20, order="index")(scores, lengths)
    np.testing.assert_array_equal(result, numpy_topk(scores, 20, lengths, "index"))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["normal", "few values"])
def test_blocks_and_the_first(kind, interpreted):
    scores, first = scores_like(kind, (2, 1500)), np.int32((3, -1))
    lengths = np.int32((1500, 1021))
    run = program(mosaic_tpu.topk_blocks, (2, 1500), 30, 8)
    result = run(scores, lengths, first=first)
    best = np.where(np.arange(1500) < lengths[:, None], scores, -np.inf)
    best = np.nan_to_num(best, nan=-np.inf, posinf=np.inf, neginf=-np.inf)
    best = np.pad(best, [(0, 0), (0, 4)], constant_values=-np.inf).reshape(2, -1, 8).max(axis=-1)
    best[0, 3] = np.inf
    np.testing.assert_array_equal(result, numpy_topk(best, 30, order="index"))


@pytest.mark.slow
@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("order", ["score", "index"])
@pytest.mark.parametrize("name", cases.CASES)
def test_cases(name, order, ties, interpreted):
    scores, k, lengths = cases.arguments(cases.CASES[name], ties=ties)
    run = program(mosaic_tpu.topk, scores.shape, k, order=order)
    result = run(scores) if lengths is None else run(scores, lengths)
    np.testing.assert_array_equal(result, numpy_topk(scores, k, lengths, order))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["normal", "few values", "ascending", "outliers"])
def test_group_maxima_and_several_readings(kind, interpreted):
    scores, lengths = scores_like(kind, (9, 20000)), np.full(9, 20000, np.int32)
    lengths[8] = 9000  # alone among its eight rows: the last reading is skipped
    result = program(mosaic_tpu.topk, (9, 20000), 40, order="index")(scores, lengths)
    np.testing.assert_array_equal(result, numpy_topk(scores, 40, lengths, "index"))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["normal", "few values"])
def test_rows_cut_into_segments(kind, interpreted, monkeypatch):
    monkeypatch.setattr(mosaic_tpu, "_SEGMENT", 200)
    scores, lengths = scores_like(kind, (2, 1030)), np.int32((1030, 600))
    run = program(mosaic_tpu.topk, (2, 1030), 30)
    np.testing.assert_array_equal(run(scores, lengths), numpy_topk(scores, 30, lengths))
    blocks = program(mosaic_tpu.topk_blocks, (2, 1030), 30, 2)
    np.testing.assert_array_equal(blocks(scores, lengths), topk_blocks(scores, 30, 2, lengths))
    first = blocks(scores, lengths, first=np.int32((514, 3)))
    assert np.asarray(first)[0].max() == 514 and 3 in np.asarray(first)[1]


@pytest.mark.slow
@pytest.mark.parametrize("block", [2, 16, 128])
def test_blocks_equal_the_reference(block, interpreted):
    scores, lengths = scores_like("few values", (2, 1000)), np.int32((1000, 333))
    result = program(mosaic_tpu.topk_blocks, (2, 1000), 6, block)(scores, lengths)
    np.testing.assert_array_equal(result, topk_blocks(scores, 6, block, lengths))


@pytest.mark.slow
def test_leading_axes_vmap_and_bfloat16(interpreted):
    scores = scores_like("normal", (2, 2, 40)).astype(jnp.bfloat16)
    run = functools.partial(
        mosaic_tpu.topk, k=3, order="index", interpret=pltpu.InterpretParams(detect_races=True)
    )
    result = jax.jit(jax.vmap(run))(scores)
    expected = numpy_topk(scores.astype(np.float32), 3, order="index")
    np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize(
    "shape, k, block",
    [
        ((16, 16384), 512, 1),
        pytest.param((300, 5001), 300, 1, marks=pytest.mark.slow),
        pytest.param((3, 37), 5, 1, marks=pytest.mark.slow),
        pytest.param((2048, 131072), 512, 1, marks=pytest.mark.slow),
        pytest.param((1, 2**20), 512, 1, marks=pytest.mark.slow),
        pytest.param((256, 2**20), 2048, 8, marks=pytest.mark.slow),
    ],
)
def test_compiles(tpu, shape, k, block):
    def run(scores, lengths):
        if block > 1:
            return topk_blocks(scores, k, block, lengths, implementation="mosaic_tpu")
        return topk(scores, k, lengths, order="index", implementation="mosaic_tpu")

    shapes = jax.ShapeDtypeStruct(shape, jnp.float32), jax.ShapeDtypeStruct(shape[:1], jnp.int32)
    compiled = tpu.compile(run, *shapes)
    assert "tpu_custom_call" in compiled.as_text()
    if shape[0] >= 8:  # fewer rows are cut
        assert compiled.memory_analysis().temp_size_in_bytes < 4 * np.prod(shape)


def test_compiles_in_a_loop_that_stacks_its_results(tpu):
    """Of more scores than fit a kernel's share of vector memory unless it asks for more."""

    def run(scores, lengths):
        call = functools.partial(topk, k=512, order="index", implementation="mosaic_tpu")
        return jax.lax.map(lambda rows: call(rows[0], lengths=rows[1]), (scores, lengths))

    size = (2, 1, 256)
    scores = jax.ShapeDtypeStruct((*size, 524288), jnp.float32)
    compiled = tpu.compile(run, scores, jax.ShapeDtypeStruct(size, jnp.int32))
    assert "tpu_custom_call" in compiled.as_text()


def test_account():
    # C1: one reading of the scores, and the keys of eight rows in vector memory.
    used = mosaic_tpu.account(2048, 131072, 512)
    assert used.hbm_bytes == 4 * 2048 * (131072 + 512)
    assert 4 * 8 * 131072 < used.vmem_bytes < 6 * 8 * 131072
    assert 500 < used.flops / (2048 * 131072) < 1000


@pytest.mark.parametrize(
    "shape, k, dtype, reason",
    [
        ((2, 256), 4097, jnp.float32, "k from 1 to 4096"),
        ((2, 0), 5, jnp.float32, "at least one score"),
        ((2, 256), 5, jnp.float16, "float32 and bfloat16"),
    ],
)
def test_declines(shape, k, dtype, reason):
    with pytest.raises(NotImplementedError, match=reason):
        mosaic_tpu.topk(jnp.zeros(shape, dtype), k, interpret=pltpu.InterpretParams())


def test_declines_other_blocks_and_other_platforms():
    with pytest.raises(NotImplementedError, match="not 3"):
        mosaic_tpu.topk_blocks(jnp.zeros((2, 9)), 2, 3, interpret=pltpu.InterpretParams())
    with pytest.raises(NotImplementedError, match="needs a TPU, the platform is cpu"):
        topk(jnp.zeros((2, 256)), 5, implementation="mosaic_tpu")
