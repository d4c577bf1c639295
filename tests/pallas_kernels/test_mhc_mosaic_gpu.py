"""Hyper-connections' GPU kernels: interpreted against XLA's form, and compiled for a GPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import hopper as hopper_device
from pallas_kernels import mhc
from pallas_kernels._compat import InterpretGPUParams
from pallas_kernels.mhc import mosaic_gpu, reference
from pallas_kernels.mhc.cases import CASES
from tests.pallas_kernels.test_mhc_mosaic_tpu import arrays, cotangents_of, with_gradients

ON_GPU = jax.default_backend() == "gpu"
EPS = 1e-6


def kernel(sweeps):
    interpret = None if ON_GPU else InterpretGPUParams(detect_races=True)
    return functools.partial(mosaic_gpu.sinkhorn, sweeps=sweeps, eps=EPS, interpret=interpret)


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def agree(actual, expected):
    assert actual.shape == expected.shape and actual.dtype == expected.dtype
    np.testing.assert_allclose(actual, expected, rtol=0, atol=3e-6 * np.abs(expected).max())


@pytest.mark.parametrize(
    "n, tokens, sweeps",
    [(4, 130, 20), (2, 1, 2), (2, 5, 1), pytest.param(8, 3, 2, marks=pytest.mark.slow)],
)
def test_forward_and_gradient(n, tokens, sweeps):
    logits, grads = 3 * normal(n, n, tokens), normal(n, n, tokens, seed=1)
    both = jax.jit(with_gradients(kernel(sweeps)))
    ours = both(grads, logits)
    expected = functools.partial(reference.sinkhorn, sweeps=sweeps, eps=EPS)
    jax.tree.map(agree, ours, jax.jit(with_gradients(expected))(grads, logits))
    np.testing.assert_allclose(ours[0].sum(axis=0), 1, atol=1e-4)
    again = both(grads, logits)
    jax.tree.map(np.testing.assert_array_equal, again, ours)


def test_under_vmap():
    logits, grads = normal(3, 2, 2, 5), normal(3, 2, 2, 5, seed=1)
    one = jax.jit(with_gradients(kernel(2)))
    ours = jax.jit(jax.vmap(with_gradients(kernel(2))))(grads, logits)
    one_by_one = [one(g, x) for g, x in zip(grads, logits, strict=True)]
    jax.tree.map(lambda a, *b: np.testing.assert_array_equal(a, np.stack(b)), ours, *one_by_one)
    # One of both arguments alone.
    ours = jax.jit(jax.vmap(with_gradients(kernel(2)), in_axes=(0, None)))(grads, logits[0])[1][0]
    expected = [one(g, logits[0])[1][0] for g in grads]
    np.testing.assert_array_equal(ours, np.stack(expected))


@pytest.mark.parametrize(
    "op",
    [*(pytest.param(op, marks=pytest.mark.slow) for op in ("coefficients", "read")), "write_read"],
)
def test_whole_ops(op, monkeypatch):
    monkeypatch.setattr(hopper_device, "require", lambda *_, **__: None)
    args, keywords = arrays(op, CASES["two_sweeps"], np.float32)
    expected = functools.partial(getattr(reference, op), **keywords)
    ours = functools.partial(getattr(mhc, op), implementation="mosaic_gpu", **keywords)
    if not ON_GPU:
        ours = functools.partial(
            getattr(mosaic_gpu, op), interpret=InterpretGPUParams(), **keywords
        )
    grads = cotangents_of(expected, args)
    jax.tree.map(
        agree,
        jax.jit(with_gradients(ours))(grads, *args),
        jax.jit(with_gradients(expected))(grads, *args),
    )


@pytest.mark.parametrize("n, sweeps", [(4, 20), (4, 56), (2, 1)])
def test_compiles_for_hopper(hopper, n, sweeps):
    shape = jax.ShapeDtypeStruct((n, n, 300), jnp.float32)
    run = with_gradients(functools.partial(mosaic_gpu.sinkhorn, sweeps=sweeps, eps=EPS))
    text = hopper.compile(run, shape, shape).as_text()
    assert text.count("mosaic_gpu") >= 2


@pytest.mark.parametrize("n, sweeps", [(9, 2), (4, 57)])
def test_declines_what_does_not_fit(n, sweeps):
    with pytest.raises(NotImplementedError, match="mhc"):
        mosaic_gpu.sinkhorn(jnp.zeros((n, n, 3)), sweeps, EPS)


@pytest.mark.skipif(ON_GPU, reason="there is one")
def test_declines_without_a_gpu():
    args, keywords = arrays("read", CASES["two_sweeps"], np.float32)
    with pytest.raises(NotImplementedError, match="needs a GPU"):
        mhc.read(*args, implementation="mosaic_gpu", **keywords)
