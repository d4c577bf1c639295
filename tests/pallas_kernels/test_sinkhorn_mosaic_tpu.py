"""Sinkhorn's TPU kernels: interpreted against XLA's form, and compiled for TPUs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.sinkhorn import mosaic_tpu, reference, sinkhorn, sinkhorn_update
from pallas_kernels.sinkhorn.cases import Case, arguments
from pallas_kernels.tpu import accounts_of

WIDE = {
    "dense": Case((37, 128)),
    "few_rows": Case((300, 128), touched=0.1, spread=2.0),
    "masked": Case((64, 256), spread=5.0),
    "tiny": Case((64, 128), touched=0.5, scale=1e-24),
    "huge": Case((64, 128), scale=1e8),
    "batch": Case((2, 29, 128), touched=0.5, spread=1.0),
    "one_row": Case((1, 128)),
    "zero": Case((9, 128), touched=0.0),
}
KEYWORDS = dict(beta=0.95, tau=1e-3, iterations=11, eps=1e-20, dtype=None)


def check(case, interpret, momentum_dtype="float32", tolerance=2e-5, **changed):
    keywords = KEYWORDS | changed
    gradient, momentum = (x.astype(np.float32) for x in arguments(case))
    momentum = momentum.astype(jnp.dtype(momentum_dtype))
    kernel = functools.partial(mosaic_tpu.sinkhorn_update, interpret=interpret, **keywords)
    ours = jax.jit(kernel)(gradient, momentum)
    theirs = jax.jit(functools.partial(reference.sinkhorn_update, **keywords))(gradient, momentum)
    for got, want in zip(ours, theirs, strict=True):
        assert got.dtype == want.dtype
        want = np.asarray(want, np.float64)
        bound = tolerance * np.abs(want).max()
        np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=0, atol=bound)


def test_update(interpreted):
    """Three blocks, the last not full; one row step and column step between first and last."""
    check(WIDE["few_rows"], interpreted, iterations=5)


@pytest.mark.slow
@pytest.mark.parametrize("name", WIDE)
def test_every_case(interpreted, name):
    check(WIDE[name], interpreted)


@pytest.mark.slow
@pytest.mark.parametrize("iterations", [1, 3])
def test_iterations(interpreted, iterations):
    check(WIDE["few_rows"], interpreted, iterations=iterations)


@pytest.mark.slow
def test_bfloat16_between_the_passes(interpreted):
    check(WIDE["few_rows"], interpreted, "bfloat16", dtype="bfloat16")


@pytest.mark.slow
def test_two_halves(interpreted):
    """More rows than a block, in an even number of blocks."""
    check(Case((1500, 128), touched=0.7, spread=1.0), interpreted, iterations=3)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_matrix_alone(interpreted, dtype):
    matrix = arguments(WIDE["few_rows"])[0].astype(np.float32)
    keep = np.arange(len(matrix)) % 3 > 0
    keywords = dict(tau=1e-3, iterations=11, eps=1e-20, dtype=dtype)
    for rows in (None, jnp.asarray(keep)):
        got = mosaic_tpu.sinkhorn(matrix, keep=rows, interpret=interpreted, **keywords)
        want = reference.sinkhorn(jnp.asarray(matrix), keep=rows, **keywords)
        np.testing.assert_allclose(got, want, atol=2e-5 * np.abs(want).max())


def test_what_is_declined():
    with pytest.raises(NotImplementedError, match="needs a TPU"):
        sinkhorn(jnp.ones((8, 128)), implementation="mosaic_tpu")
    given = dict(tau=1e-3, iterations=1, eps=0.0, keep=None, interpret=object())
    for shape in ((8, 96), (8, 12800)):
        with pytest.raises(NotImplementedError, match="columns; takes multiples of 128"):
            mosaic_tpu.sinkhorn(jnp.ones(shape), dtype=None, **given)
    with pytest.raises(NotImplementedError, match="float16"):
        mosaic_tpu.sinkhorn(jnp.ones((8, 128)), dtype="float16", **given)


def compile_for(tpu, shape, **keywords):
    update = functools.partial(sinkhorn_update, implementation="mosaic_tpu", **keywords)
    matrix = jax.ShapeDtypeStruct(shape, jnp.float32)
    return tpu.compile(update, matrix, matrix)


def test_compiles(tpu):
    compiled = compile_for(tpu, (300, 128))
    assert compiled.as_text().count('custom_call_target="tpu_custom_call"') == 4


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
@pytest.mark.parametrize("shape", [(129280, 5120), (1048576, 256)])
def test_published_shapes_compile(tpu, shape, dtype):
    compiled = compile_for(tpu, shape, dtype=dtype)
    # What lies between the passes, and vectors; no copy of a matrix.
    matrix = np.prod(shape) * (2 if dtype else 4)
    assert compiled.memory_analysis().temp_size_in_bytes < 1.2 * matrix


def test_an_update_moves_44_bytes_an_element():
    shape = (4096, 1024)
    matrix = jax.ShapeDtypeStruct(shape, jnp.float32)
    update = functools.partial(sinkhorn_update, implementation="mosaic_tpu")
    (_, first), (_, columns), (_, both), (_, last) = accounts_of(update, matrix, matrix)
    moved = sum(account.hbm_bytes for account in (first, columns, both, both, both, both, last))
    assert 44 <= moved / np.prod(shape) < 44.5
