"""The grouped matmul's Hopper kernels: interpreted against a loop over experts, and compiled."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels._compat import InterpretGPUParams
from pallas_kernels.grouped_matmul import grouped_matmul, mosaic_gpu
from pallas_kernels.grouped_matmul.mosaic_gpu import rows_by_weights
from pallas_kernels.grouped_matmul.mosaic_gpu_tile import TuningConfig
from pallas_kernels.grouped_matmul.mosaic_gpu_weights import weight_gradient
from tests.pallas_kernels.test_grouped_matmul import loop

ON_GPU = jax.default_backend() == "gpu"
slow = pytest.mark.slow
pytestmark = [
    pytest.mark.skipif(
        jax.__version_info__ < (0, 11), reason="the kernels are for jax 0.11 and later"
    ),
    pytest.mark.usefixtures("no_races"),
]
# (rows, K, N, sizes): groups that begin anywhere, empty ones, rows left over.
SHAPES = [
    (150, 64, 128, (13, 0, 100, 5)),
    # Two whole tiles for one block, each stored in one piece.
    (384, 64, 64, (256,)),
    pytest.param(40, 128, 64, (40, 0), marks=slow),
    pytest.param(301, 192, 320, (0, 170, 1, 0, 130), marks=slow),
    pytest.param(264, 64, 64, (0, 0, 0), marks=slow),
    pytest.param(256, 64, 64, (128, 128), marks=slow),
]


def settings():
    """A grid of few blocks where it is interpreted, in which each has several tiles."""
    if ON_GPU:
        return {}
    return dict(
        config=TuningConfig(stages=2, blocks=2), interpret=InterpretGPUParams(detect_races=True)
    )


def samples(rows, inner, outer, sizes):
    rng = np.random.default_rng(0)
    x, grad = (rng.normal(size=(rows, n)) for n in (inner, outer))
    w = rng.normal(size=(len(sizes), inner, outer))
    x, w, grad = (jnp.asarray(a, jnp.bfloat16) for a in (x, w, grad))
    # What no group has may be anything, also beside a group's last rows.
    used = sum(sizes)
    return x.at[used:].set(jnp.nan), w, jnp.asarray(sizes, jnp.int32), grad.at[used:].set(jnp.inf)


def agree(actual, expected, tolerance):
    assert actual.shape == expected.shape
    bound = tolerance * max(np.abs(expected).max(), 1.0)
    np.testing.assert_allclose(np.asarray(actual, np.float64), expected, rtol=0, atol=bound)


@pytest.mark.parametrize("rows, inner, outer, sizes", SHAPES)
def test_equals_a_loop(rows, inner, outer, sizes):
    x, w, sizes, grad = samples(rows, inner, outer, sizes)
    y, grad_x, grad_w = loop(x, w, sizes, grad)
    run = functools.partial(rows_by_weights, **settings())
    agree(run(x, w, sizes, transposed=False), y, 2.0**-8)
    agree(run(grad, w, sizes, transposed=True), grad_x, 2.0**-8)
    ours = weight_gradient(x, grad, sizes, jnp.float32, **settings())
    assert ours.dtype == jnp.float32
    agree(ours, grad_w, 1e-5)


def test_as_an_op_under_vmap(monkeypatch):
    """Gradients through the op, a float32 weight's in float32; a batch is done one by one."""
    run = mosaic_gpu.grouped_matmul
    if not ON_GPU:
        table = types.SimpleNamespace(lookup=lambda *_: settings()["config"])
        monkeypatch.setattr(mosaic_gpu.tile, "TABLE", table)
        run = functools.partial(run, interpret=InterpretGPUParams())
    x, w, sizes, grad = samples(136, 64, 64, (60, 76))
    w = w.astype(jnp.float32)
    both = jnp.stack([x, 2 * x])

    def of(x):
        y, transpose = jax.vjp(lambda x, w: run(x, w, sizes), x, w)
        return y, *transpose(grad)

    y, grad_x, grad_w = jax.jit(jax.vmap(of))(both)
    assert grad_w.dtype == jnp.float32
    for factor, *ours in zip((1, 2), y, grad_x, grad_w, strict=True):
        expected = loop(factor * x, w, sizes, grad)
        for actual, wanted, bound in zip(ours, expected, (2.0**-8, 2.0**-8, 1e-5), strict=True):
            agree(actual, wanted, bound)


@pytest.mark.parametrize("outer", [512, *(pytest.param(n, marks=slow) for n in (192, 64))])
def test_compiles_for_hopper(recent_hopper, outer):
    shape = jax.ShapeDtypeStruct
    x, sizes = shape((1000, 320), jnp.bfloat16), shape((6,), jnp.int32)
    grad = shape((1000, outer), jnp.bfloat16)
    for transposed, left, w in (
        (False, x, shape((6, 320, outer), jnp.bfloat16)),
        (True, grad, shape((6, 320, outer), jnp.bfloat16)),
    ):
        run = functools.partial(rows_by_weights, transposed=transposed)
        assert "mosaic_gpu" in recent_hopper.compile(run, left, w, sizes).as_text()
    for dtype in (jnp.float32, jnp.bfloat16):
        run = functools.partial(weight_gradient, dtype=dtype)
        assert "mosaic_gpu" in recent_hopper.compile(run, x, grad, sizes).as_text()


def test_too_many_stages_fail(recent_hopper):
    """Made wrong on purpose: more shared memory than there is."""
    shape = jax.ShapeDtypeStruct
    run = functools.partial(rows_by_weights, transposed=False, config=TuningConfig(stages=5))
    with pytest.raises(Exception, match="shared memory"):
        recent_hopper.compile(
            run,
            shape((256, 64), jnp.bfloat16),
            shape((2, 64, 256), jnp.bfloat16),
            shape((2,), jnp.int32),
        )


@pytest.mark.parametrize(
    "change, named",
    [
        (dict(x=jnp.ones((136, 64), jnp.float32), w=jnp.ones((2, 64, 64))), "float32"),
        (dict(w=jnp.ones((2, 64, 72), jnp.bfloat16)), "64 x 72"),
        (dict(x=jnp.ones((2, 64), jnp.bfloat16)), "2 rows"),
    ],
)
def test_declines(change, named):
    x, w, sizes, _ = samples(136, 64, 64, (60, 76))
    with pytest.raises(NotImplementedError, match=named):
        mosaic_gpu.grouped_matmul(
            **(dict(x=x, w=w, group_sizes=sizes) | change), interpret=InterpretGPUParams()
        )


@pytest.mark.skipif(ON_GPU, reason="there is one")
def test_declines_without_a_gpu():
    x, w, sizes, _ = samples(136, 64, 64, (60, 76))
    with pytest.raises(NotImplementedError, match="needs a GPU"):
        grouped_matmul(x, w, sizes, implementation="mosaic_gpu")
