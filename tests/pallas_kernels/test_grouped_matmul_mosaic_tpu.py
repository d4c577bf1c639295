"""The grouped matmul's TPU kernel: interpreted against a float64 loop, and compiled for TPUs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.grouped_matmul import grouped_matmul, mosaic_tpu
from pallas_kernels.grouped_matmul.cases import CASES, Case, arguments
from tests.pallas_kernels.test_grouped_matmul import loop

TOLERANCE = {"float32": 5e-6, "bfloat16": 2.0**-7}


def with_gradients(kernel, x, w, sizes, grad):
    y, transpose = jax.vjp(lambda x, w: kernel(x, w, sizes), x, w)
    return y, *transpose(grad)


def check(sizes, rows, dtype, interpret, *, inner=128, outer=256, weight_dtype=None):
    case = Case(sizes, rows=rows, inner=inner, outer=outer)
    x, w, sizes = arguments(case, jnp.dtype(dtype))
    w = w.astype(jnp.dtype(weight_dtype or dtype))
    x[sizes.sum() :] = np.nan
    grad = np.random.default_rng(1).normal(size=(rows, outer)).astype(x.dtype)
    kernel = functools.partial(mosaic_tpu.grouped_matmul, interpret=interpret)
    results = with_gradients(kernel, *map(jnp.asarray, (x, w, sizes, grad)))
    x[sizes.sum() :] = 0
    for actual, expected, like in zip(results, loop(x, w, sizes, grad), (x, x, w), strict=True):
        assert actual.dtype == like.dtype
        bound = TOLERANCE[dtype] * max(np.abs(expected).max(), 1.0)
        np.testing.assert_allclose(np.asarray(actual, np.float64), expected, rtol=0, atol=bound)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", CASES)
def test_every_case(interpreted, name, dtype):
    check(CASES[name].sizes, CASES[name].rows, dtype, interpreted)


@pytest.mark.slow
def test_several_tiles(interpreted):
    check((100, 0, 150, 61), 400, "bfloat16", interpreted, inner=256, weight_dtype="float32")


def test_tiles_divide_and_fit():
    for size in (128, 2304, 4608, 5120):
        for most in (128, 512, 1024, 5000):
            tile = mosaic_tpu._divisor(size, most)
            assert size % tile == 0 and tile % 128 == 0 and tile <= most
    assert [mosaic_tpu.rows_of_tile(24576, groups) for groups in (1, 48, 384)] == [512, 512, 128]


def test_what_is_declined():
    x, w, sizes = jnp.ones((4, 128)), jnp.ones((2, 128, 128)), jnp.array([1, 2])
    with pytest.raises(NotImplementedError, match="needs a TPU"):
        grouped_matmul(x, w, sizes, implementation="mosaic_tpu")
    kernel = functools.partial(mosaic_tpu.grouped_matmul, interpret=object())
    with pytest.raises(NotImplementedError, match="packed weights"):
        kernel(x, jnp.ones((2, 128, 64), jnp.uint8), sizes, jnp.ones((2, 128, 4), jnp.uint8))
    with pytest.raises(NotImplementedError, match="128 x 96; takes multiples of 128"):
        kernel(x, w[..., :96], sizes)
    with pytest.raises(ValueError, match=r"must be \[M,K\] and \[E,K,N\]"):
        kernel(x[:, :64], w, sizes)


def compile_for(tpu, rows, experts, inner, outer, gradients=True):
    kernel = functools.partial(grouped_matmul, implementation="mosaic_tpu")
    shapes = ((rows, inner), (experts, inner, outer), (rows, outer))
    x, w, grad = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes)
    sizes = jax.ShapeDtypeStruct((experts,), jnp.int32)
    if gradients:
        compiled = tpu.compile(functools.partial(with_gradients, kernel), x, w, sizes, grad)
    else:
        compiled = tpu.compile(kernel, x, w, sizes)
    calls = compiled.as_text().count('custom_call_target="tpu_custom_call"')
    assert calls == (3 if gradients else 1)


def test_compiles(tpu):
    compile_for(tpu, 300, 4, 256, 384, gradients=False)


@pytest.mark.slow
@pytest.mark.parametrize(("inner", "outer"), [(5120, 4608), (2304, 5120)])
def test_published_widths_compile(tpu, inner, outer):
    compile_for(tpu, 49152, 48, inner, outer)
