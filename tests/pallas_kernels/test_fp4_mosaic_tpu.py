"""The quantisers' TPU kernels: interpreted, bit for bit those of XLA; and compiled for TPUs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import fp4
from pallas_kernels.fp4 import mosaic_tpu, reference
from pallas_kernels.fp4.cases import Case, arguments

CASES = {
    "fp4": Case("fp4", (3, 5, 512), spread=6.0),
    "fp4_wide_range": Case("fp4", (300, 128), spread=20.0),
    "mxfp4": Case("mxfp4", (3, 5, 2, 128), spread=6.0),
    "mxfp4_wide_range": Case("mxfp4", (40, 256), spread=40.0),
    "mxfp4_subnormal": Case("mxfp4", (5, 128), magnitude=2.0**-127, spread=2.0),
    "fp8": Case("fp8", (3, 5, 512), spread=6.0),
    "fp8_wide_range": Case("fp8", (40, 128), spread=20.0),
}

# One format in the quick tests.
QUICK = pytest.mark.parametrize(
    "fmt",
    ["fp4", *(pytest.param(fmt, marks=pytest.mark.slow) for fmt in ("mxfp4", "fp8"))],
)


def same(actual, expected):
    """Equal bits; any NaN equals another."""
    actual, expected = np.asarray(actual, np.float32), np.asarray(expected, np.float32)
    np.testing.assert_array_equal(np.isnan(actual), np.isnan(expected))
    bits = [np.where(np.isnan(x), 0, x).view(np.int32) for x in (actual, expected)]
    np.testing.assert_array_equal(*bits)


def check(case, interpret, dtype=jnp.bfloat16):
    x, fmt = arguments(case, dtype)
    x[..., 0, 3], x[..., -1, 40] = np.nan, -np.inf
    kernels = {
        op: functools.partial(getattr(mosaic_tpu, op), fmt=fmt, interpret=interpret)
        for op in ("fake_quantize", "pack", "unpack")
    }
    same(kernels["fake_quantize"](jnp.asarray(x)), reference.fake_quantize(jnp.asarray(x), fmt))
    rows = kernels["pack"](jnp.asarray(x))
    np.testing.assert_array_equal(rows, reference.pack(jnp.asarray(x), fmt))
    same(kernels["unpack"](rows, dtype=dtype), reference.unpack(rows, fmt, dtype))


def any_bytes(fmt, count, channels):
    size = (count, fp4.row_bytes(fmt, channels))
    return jnp.asarray(np.random.default_rng(0).integers(256, size=size), jnp.uint8)


@QUICK
def test_pack_and_unpack(interpreted, fmt):
    x, _ = arguments(Case(fmt, (5, 128), spread=8.0), jnp.bfloat16)
    x[0, 3], x[1, 40] = np.nan, -np.inf
    packed = mosaic_tpu.pack(jnp.asarray(x), fmt, interpret=interpreted)
    np.testing.assert_array_equal(packed, reference.pack(jnp.asarray(x), fmt))
    rows = any_bytes(fmt, 70, 128)
    same(mosaic_tpu.unpack(rows, fmt, interpret=interpreted), reference.unpack(rows, fmt))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_every_case(interpreted, name, dtype):
    check(CASES[name], interpreted, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("fmt", fp4.FORMATS)
def test_elements_apart_from_scales(interpreted, fmt):
    rows = any_bytes(fmt, 40, 256)
    split = reference.split_of(rows, fmt)
    parts = rows[:, :split], rows[:, split:]
    same(mosaic_tpu.decode(*parts, fmt, interpret=interpreted), reference.decode(*parts, fmt))


def test_what_is_declined():
    with pytest.raises(NotImplementedError, match="needs a TPU"):
        fp4.pack(jnp.ones((2, 128)), "fp4", implementation="mosaic_tpu")
    for channels in (96, 2048):
        with pytest.raises(NotImplementedError, match="takes multiples of 128 up to 1024"):
            mosaic_tpu.pack(jnp.ones((2, channels)), "fp4", interpret=object())
    with pytest.raises(NotImplementedError, match="values of float16"):
        mosaic_tpu.fake_quantize(jnp.ones((2, 128), jnp.float16), "fp4", interpret=object())
    with pytest.raises(ValueError, match="multiple of 9"):
        mosaic_tpu.unpack(jnp.ones((2, 32), jnp.uint8), "fp4", interpret=object())


def round_trip(x, *, fmt):
    rows = fp4.pack(x, fmt, implementation="mosaic_tpu")
    values = fp4.fake_quantize(x, fmt, implementation="mosaic_tpu")
    return rows, values, fp4.unpack(rows, fmt, x.dtype, implementation="mosaic_tpu")


@QUICK
def test_compiles(tpu, fmt):
    x = jax.ShapeDtypeStruct((300, 128), jnp.bfloat16)
    compiled = tpu.compile(functools.partial(round_trip, fmt=fmt), x)
    assert compiled.as_text().count('custom_call_target="tpu_custom_call"') == 3


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(("fmt", "channels"), [("fp4", 512), ("mxfp4", 128), ("fp8", 512)])
def test_published_shapes_compile(tpu, fmt, channels, dtype):
    x = jax.ShapeDtypeStruct((65536, channels), dtype)
    tpu.compile(functools.partial(round_trip, fmt=fmt), x)
