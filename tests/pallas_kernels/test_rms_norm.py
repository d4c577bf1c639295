"""RMSNorm against float64, and its written-out gradients against autodiff's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.rms_norm import rms_norm

EPS = 1e-20


def plain(x, weight):
    return weight * x / np.sqrt(np.mean(np.square(x), -1, keepdims=True) + EPS)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_is_float32_inside(dtype):
    rng = np.random.default_rng(1)
    x = jnp.asarray(rng.normal(size=(3, 7)) * [[1e-6], [1], [1e6]], dtype)
    weight = rng.normal(size=7).astype(np.float32)
    out = rms_norm(x, weight, EPS)
    assert out.dtype == dtype
    tolerance = 1e-6 if dtype == jnp.float32 else 2**-8
    expected = plain(np.asarray(x, np.float64), weight)
    np.testing.assert_allclose(np.asarray(out, np.float64), expected, rtol=tolerance, atol=1e-6)


@pytest.mark.parametrize("shape", [(5,), (4, 5), (2, 3, 5)])
def test_gradients(shape):
    rng = np.random.default_rng(2)
    x, grad = rng.normal(size=(2, *shape)).astype(np.float32)
    weight = rng.normal(size=5).astype(np.float32)

    def autodiff(x, weight):
        return weight * x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + EPS)

    ours = jax.vjp(lambda *a: rms_norm(*a, EPS), x, weight)[1](grad)
    theirs = jax.vjp(autodiff, x, weight)[1](grad)
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_a_float32_weight_of_bfloat16_rows_gets_a_float32_gradient():
    rng = np.random.default_rng(3)
    x, grad = jnp.asarray(rng.normal(size=(2, 4096, 8)), jnp.bfloat16)
    grad_x, grad_weight = jax.vjp(lambda *a: rms_norm(*a, EPS), x, jnp.ones(8))[1](grad)
    wide, wide_grad = np.asarray(x, np.float64), np.asarray(grad, np.float64)
    expected = np.sum(wide_grad * plain(wide, 1.0), axis=0)
    np.testing.assert_allclose(grad_weight, expected, atol=1e-6 * np.abs(wide_grad).sum(0).max())
    assert grad_x.dtype == jnp.bfloat16 and grad_weight.dtype == jnp.float32
