"""The top-k kernel: interpreted against a stable NumPy sort, and compiled for a GPU."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import hopper as hopper_device
from pallas_kernels._compat import InterpretGPUParams
from pallas_kernels.topk import mosaic_gpu, topk, topk_blocks
from pallas_kernels.topk.mosaic_gpu import TuningConfig
from tests.pallas_kernels.test_topk import numpy_topk

pytestmark = pytest.mark.usefixtures("no_races")
# Small enough that a row takes several tiles and fills the buffer more than once.
SMALL = TuningConfig(tile=256, room=320, segment=256)


def compiled(shape, k, *, lengths=False, order="index", config=SMALL):
    """The kernel in interpret mode, with its detection of races."""

    def run(scores, *lengths):
        parameters = InterpretGPUParams(detect_races=True)
        return mosaic_gpu.topk(
            scores, k, *lengths, order=order, config=config, interpret=parameters
        )

    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32)]
    shapes += [jax.ShapeDtypeStruct(shape[:-1], jnp.int32)] * lengths
    return jax.jit(run).lower(*shapes).compile()


def scores_like(kind, shape):
    rng = np.random.default_rng(0)
    scores = rng.normal(size=shape).astype(np.float32)
    match kind:
        case "few values":
            return rng.choice(np.float32([-np.inf, np.nan, -1, -0.0, 0.0, 2]), size=shape)
        case "equal":
            return np.full_like(scores, -1.5)
        case "nothing":
            return np.full_like(scores, -np.inf)
        case "ascending":
            return np.sort(scores)
        case "outliers":
            scores[..., ::100] *= 1e30
            scores[..., ::1000] = np.inf
            return scores
        case "equal but for a few":
            # Those that stay when the buffer fills equal the limit that is in force from then on.
            scores[...] = np.where(scores > 2, scores, -1)
            return scores
        case "sample deceives":
            # The sample's pieces are larger than the rest, of which most are needed.
            scores[...] = -np.abs(scores)
            for n in range(16):
                start = n * ((shape[-1] - 128) // 15)
                scores[..., start : start + 4] = 1
            return scores
    return scores


@pytest.fixture(scope="module")
def one_block():
    # Segments as long as the row.
    return compiled((2, 900), 60, lengths=True, config=TuningConfig(256, 320, segment=2048))


@pytest.mark.parametrize("lengths", [(900, 433), (256, 257), (60, 0), (1000, -1)])
def test_lengths(one_block, lengths):
    scores = scores_like("normal", (2, 900))
    lengths = np.int32(lengths)
    expected = numpy_topk(scores, 60, np.clip(lengths, 0, 900), "index")
    np.testing.assert_array_equal(one_block(scores, lengths), expected)


@pytest.mark.parametrize(
    "kind", ["few values", "equal", "nothing", "ascending", "equal but for a few"]
)
def test_hard_scores(one_block, kind):
    scores, lengths = scores_like(kind, (2, 900)), np.int32((900, 700))
    expected = numpy_topk(scores, 60, lengths, "index")
    np.testing.assert_array_equal(one_block(scores, lengths), expected)


@pytest.mark.parametrize("histogram", [False, True])
def test_sampled_threshold(histogram):
    config = TuningConfig(512, 576, segment=8192, histogram=histogram)
    function = compiled((1, 4500), 70, config=config)
    for kind in ("normal", "few values", "equal", "outliers", "sample deceives"):
        scores = scores_like(kind, (1, 4500))
        np.testing.assert_array_equal(function(scores), numpy_topk(scores, 70, order="index"))


def test_segments_and_order():
    function = compiled((1, 1024), 20, order="score")
    for kind in ("normal", "few values", "ascending"):
        scores = scores_like(kind, (1, 1024))
        np.testing.assert_array_equal(function(scores), numpy_topk(scores, 20))


def test_blocks():
    scores = scores_like("few values", (2, 1024))
    scores[0] += scores_like("normal", (1024,))
    run = functools.partial(mosaic_gpu.topk_blocks, config=SMALL, interpret=InterpretGPUParams())
    run = jax.jit(run, static_argnums=(1, 2))
    for lengths in ((1024, 1024), (1021, 70)):
        lengths = np.int32(lengths)
        expected = topk_blocks(scores, 30, 8, lengths)
        np.testing.assert_array_equal(run(scores, 30, 8, lengths), expected)


@pytest.mark.slow
def test_several_warpgroups(monkeypatch):
    monkeypatch.setattr(mosaic_gpu, "_MULTIPROCESSORS", 1)
    function = compiled((3, 300), 20, config=dataclasses.replace(SMALL, warpgroups=2))
    scores = scores_like("normal", (3, 300))
    np.testing.assert_array_equal(function(scores), numpy_topk(scores, 20, order="index"))


@pytest.mark.slow
def test_leading_axes_and_vmap():
    run = functools.partial(mosaic_gpu.topk, k=3, order="index", interpret=InterpretGPUParams())
    scores = scores_like("normal", (2, 2, 128))
    result = jax.jit(jax.vmap(lambda row: run(row)))(scores)
    np.testing.assert_array_equal(result, numpy_topk(scores, 3, order="index"))


@pytest.mark.parametrize(
    "shape, k, dtype, lengths",
    [
        ((300, 5000), 300, jnp.bfloat16, True),
        pytest.param((2048, 131072), 512, jnp.float32, False, marks=pytest.mark.slow),
        pytest.param((2, 50001), 512, jnp.float32, False, marks=pytest.mark.slow),
    ],
)
def test_compiles_for_hopper(hopper, monkeypatch, shape, k, dtype, lengths):
    monkeypatch.setattr(hopper_device, "require", lambda _: None)
    arguments = [jax.ShapeDtypeStruct(shape, dtype)]
    arguments += [jax.ShapeDtypeStruct(shape[:-1], jnp.int32)] * lengths
    compiled = hopper.compile(
        lambda scores, *lengths: topk(scores, k, *lengths, implementation="mosaic_gpu"), *arguments
    )
    assert "mosaic_gpu" in compiled.as_text()


@pytest.mark.slow
def test_teams_and_histograms_compile_for_hopper(hopper, monkeypatch):
    monkeypatch.setattr(hopper_device, "require", lambda _: None)
    config = TuningConfig(team=4, histogram=True)
    run = functools.partial(mosaic_gpu.topk, k=512, config=config)
    compiled = hopper.compile(run, jax.ShapeDtypeStruct((2, 65536), jnp.float32))
    assert "mosaic_gpu" in compiled.as_text()


def test_blocks_compile_for_hopper(hopper, monkeypatch):
    monkeypatch.setattr(hopper_device, "require", lambda _: None)
    compiled = hopper.compile(
        lambda scores: topk_blocks(scores, 2048, 8, implementation="mosaic_gpu"),
        jax.ShapeDtypeStruct((256, 2**20), jnp.float32),
    )
    assert "mosaic_gpu" in compiled.as_text()


@pytest.mark.parametrize(
    "shape, k, dtype, reason",
    [
        ((2, 256), 4097, jnp.float32, "k from 1 to 4096"),
        ((2, 100), 5, jnp.float32, "rows of at least 128"),
        ((2, 256), 5, jnp.float16, "float32 and bfloat16"),
    ],
)
def test_declines(monkeypatch, shape, k, dtype, reason):
    monkeypatch.setattr(hopper_device, "require", lambda _: None)
    with pytest.raises(NotImplementedError, match=reason):
        mosaic_gpu.topk(jnp.zeros(shape, dtype), k)


def test_declines_without_a_gpu():
    with pytest.raises(NotImplementedError, match="the platform is cpu"):
        topk(jnp.zeros((2, 256)), 5, implementation="mosaic_gpu")
