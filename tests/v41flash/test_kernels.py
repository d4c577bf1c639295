"""The choice of implementations, and that it reaches the ops."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import fp4
from v41flash import quant
from v41flash.kernels import Kernels

CHOICE = Kernels(indexer=("fast", "xla"), fp4="xla")


def test_strict_leaves_the_first_name_of_every_tuple():
    assert CHOICE.indexer == ("fast", "xla")
    strict = dataclasses.replace(CHOICE, strict=True)
    assert strict == Kernels(indexer="fast", fp4="xla", strict=True)
    assert hash(strict) == hash(Kernels(indexer="fast", fp4="xla", strict=True))


def test_rounding_runs_the_implementation_asked_for(monkeypatch):
    x = jnp.linspace(-3, 3, 64)
    monkeypatch.setitem(fp4.FAKE_QUANTIZE_IMPLEMENTATIONS, "negate", lambda x, fmt: -x)
    np.testing.assert_array_equal(quant.fake_quantize(x, "fp8", ("negate", "xla")), -x)
    rounded = fp4.fake_quantize(x, "fp8")
    np.testing.assert_array_equal(quant.fake_quantize(x, "fp8", "xla"), rounded)
    with pytest.raises(ValueError, match="fp4.fake_quantize: no implementation 'triton'"):
        quant.fake_quantize(x, "fp8", "triton")


@pytest.mark.parametrize("fmt", ["fp4", "mxfp4", "fp8", "none"])
def test_gradients_pass_through(fmt):
    x, grad = np.random.default_rng(0).normal(size=(2, 3, 64)).astype(np.float32)
    _, vjp = jax.vjp(lambda x: quant.fake_quantize(x, fmt), x)
    np.testing.assert_array_equal(vjp(grad)[0], grad)
