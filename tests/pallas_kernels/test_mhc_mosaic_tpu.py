"""Hyper-connections' TPU kernels: interpreted against XLA's form, and compiled for TPUs."""

import functools
import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import mhc
from pallas_kernels.mhc import mosaic_tpu, reference
from pallas_kernels.mhc.cases import CASES, Case, arguments

OPS = ("write_read", "read", "write", "mix", "coefficients")
# The kernel's gradients of bfloat16 streams are rounded once, XLA's after every part of the sum.
TOLERANCE = {"float32": 5e-6, "bfloat16": 2.0**-6}
CALL = 'custom_call_target="tpu_custom_call"'
SMALL = Case((1, 21), streams=2, channels=256, sinkhorn_iters=2)


def arrays(op, case, dtype):
    """(arguments by position, keywords) of an op."""
    named = arguments(case, dtype)
    sweeps = named.pop("sinkhorn_iters")
    names = inspect.signature(getattr(mhc, op)).parameters
    keywords = {"sinkhorn_iters": sweeps} if "sinkhorn_iters" in names else {}
    return [named[name] for name in names if name in named], keywords


def with_gradients(function):
    def run(cotangents, *args):
        results, transpose = jax.vjp(function, *args)
        return results, transpose(cotangents)

    return run


def cotangents_of(function, args):
    rng = np.random.default_rng(1)
    shapes = jax.eval_shape(function, *args)
    return jax.tree.map(lambda s: jnp.asarray(rng.normal(size=s.shape), s.dtype), shapes)


def check(op, case, dtype, interpret):
    args, keywords = arrays(op, case, jnp.dtype(dtype))
    expected_of = functools.partial(getattr(reference, op), **keywords)
    kernel = functools.partial(getattr(mosaic_tpu, op), interpret=interpret, **keywords)
    cotangents = cotangents_of(expected_of, args)
    ours = jax.jit(with_gradients(kernel))(cotangents, *args)
    theirs = jax.jit(with_gradients(expected_of))(cotangents, *args)
    for actual, expected in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert actual.dtype == expected.dtype and actual.shape == expected.shape
        expected = np.asarray(expected, np.float64)
        bound = TOLERANCE[dtype] * np.abs(expected).max()
        np.testing.assert_allclose(np.asarray(actual, np.float64), expected, rtol=0, atol=bound)


def test_whole_pass(interpreted):
    check("write_read", SMALL, "bfloat16", interpreted)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["whole_lanes", "eight_streams"])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("op", OPS)
def test_every_part(interpreted, op, dtype, name):
    check(op, CASES[name], dtype, interpreted)


@pytest.mark.slow
def test_two_sums_over_the_tokens(interpreted):
    """Enough tokens for several tiles in each half, the last of them not full."""
    case = Case((500,), streams=2, channels=128, sinkhorn_iters=1)
    check("write_read", case, "bfloat16", interpreted)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, "needs a TPU"),
        ({"channels": 96, "interpret": object()}, "no multiple of 128"),
        ({"dtype": jnp.float16, "interpret": object()}, "streams of float16"),
    ],
)
def test_what_is_declined(change, reason):
    case = Case((3,), streams=2, channels=change.get("channels", 128))
    args, _ = arrays("write", case, change.get("dtype", jnp.float32))
    with pytest.raises(NotImplementedError, match=reason):
        mosaic_tpu.write(*args, interpret=change.get("interpret"))


def compile_for(tpu, op, case, dtype):
    """Compiles an op with its gradients."""
    args, keywords = arrays(op, case, dtype)
    kernel = functools.partial(getattr(mhc, op), implementation="mosaic_tpu", **keywords)
    cotangents = cotangents_of(functools.partial(getattr(reference, op), **keywords), args)
    compiled = tpu.compile(with_gradients(kernel), cotangents, *args)
    assert compiled.as_text().count(CALL) == 2


def test_compiles(tpu):
    compile_for(tpu, "write_read", SMALL, jnp.bfloat16)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("op", OPS)
def test_every_part_compiles(tpu, op, dtype):
    compile_for(tpu, op, Case((1, 300), streams=4, channels=1024), jnp.dtype(dtype))


@pytest.mark.slow
@pytest.mark.parametrize("op", OPS)
def test_published_shape_compiles(tpu, op):
    compile_for(tpu, op, Case((1, 4096), streams=4, channels=5120), jnp.bfloat16)


@pytest.mark.slow
def test_streams_are_copied_at_the_ends_of_a_row_of_kernels_alone(tpu):
    """The model's [.., n, d] is not the kernels' [tokens, n d]; between kernels nothing is."""
    args, keywords = arrays("write_read", Case((1, 256), 2, 1024, 1), jnp.bfloat16)
    kernel = functools.partial(mhc.write_read, implementation="mosaic_tpu", **keywords)

    def in_a_row(count, streams, *rest):
        for _ in range(count):
            streams, x, _ = kernel(streams, *rest)
        return streams, x

    copies = []
    for count in (1, 3):
        text = tpu.compile(functools.partial(in_a_row, count), *args).as_text()
        assert text.count(CALL) == count
        found = re.findall(r"bf16\[([\d,]+)\]\S* (?:copy|reshape|transpose|fusion)\(", text)
        sizes = [np.prod([int(size) for size in shape.split(",")]) for shape in found]
        copies.append(sizes.count(256 * 2 * 1024))
    assert copies[0] == copies[1] <= 2


@pytest.mark.slow
def test_eight_streams_compile(tpu):
    compile_for(tpu, "write_read", Case((1, 512), streams=8, channels=2048), jnp.bfloat16)
