"""Linear maps: weight gradients keep the precision of their accumulation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from v41flash.nn.linear import contract

SIZES = dict(b=2, t=700, d=6, r=5, h=3, k=4, g=2, n=1400)
SPECS = ("btd,dr->btr", "btr,rhk->bthk", "btgk,gkr->btgr", "btgr,grd->btd", "nd,dr->nr")


@pytest.mark.parametrize("spec", SPECS)
def test_float32_weights_of_bfloat16_activations(spec):
    """Against float64 sums of the same rounded values; bfloat16 sums would be off by 2^-9."""
    operands, out = spec.split("->")
    ours, theirs = operands.split(",")
    rng = np.random.default_rng(0)
    x, weight, grad = (rng.normal(size=[SIZES[a] for a in axes]) for axes in (ours, theirs, out))
    x, grad = (jnp.asarray(a, jnp.bfloat16) for a in (x, grad))
    weight = jnp.asarray(weight, jnp.float32)
    y, vjp = jax.vjp(lambda x, w: contract(spec, x, w), x, weight)
    grad_x, grad_weight = vjp(grad)
    assert (y.dtype, grad_x.dtype, grad_weight.dtype) == (x.dtype, x.dtype, weight.dtype)

    x64, grad64 = (np.asarray(a, np.float64) for a in (x, grad))
    rounded = np.asarray(weight.astype(jnp.bfloat16), np.float64)
    expected = np.einsum(f"{ours},{out}->{theirs}", x64, grad64)
    scale = np.einsum(f"{ours},{out}->{theirs}", abs(x64), abs(grad64))
    assert (abs(np.asarray(grad_weight, np.float64) - expected) <= 1e-6 * scale).all()
    for value, product, a in (
        (y, spec, x64),
        (grad_x, f"{out},{theirs}->{ours}", grad64),
    ):
        error = abs(np.asarray(value, np.float64) - np.einsum(product, a, rounded))
        # Loose, because XLA for the CPU may round every partial sum of a batched product.
        assert (error <= 2**-6 * np.einsum(product, abs(a), abs(rounded))).all()


def test_equal_dtypes_stay_in_that_dtype():
    for dtype in (jnp.float32, jnp.bfloat16):
        x, weight = jnp.ones((2, 3), dtype), jnp.ones((3, 4), dtype)
        y, vjp = jax.vjp(lambda x, w: contract("nd,dr->nr", x, w), x, weight)
        assert {a.dtype for a in (y, *vjp(y))} == {np.dtype(dtype)}
