"""Quantisers against recorded bytes and a NumPy definition with true divisions and dtype casts."""

import functools
import json
from pathlib import Path

import hypothesis
import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels import fp4
from pallas_kernels.fp4.cases import CASES, arguments

UNIT = Path(__file__).parents[1] / "golden" / "unit"
RECORDED = {
    "fp4": ("fp4_main", "packed_u8", "scale_u8"),
    "mxfp4": ("fp4_index", "packed_u8", "scale_u8"),
    "fp8": ("fp8", "codes_u8", "scale_e8m0_u8"),
}
TINY = np.float32(2.0**-126)

jitted = {
    name: jax.jit(getattr(fp4, name), static_argnames=("fmt", *more))
    for name, more in (("fake_quantize", ()), ("pack", ()), ("unpack", ("dtype",)))
}


@functools.cache
def recorded():
    return dict(np.load(UNIT / "quantisers.npz"))


def same_bits(actual, expected):
    """Equality that tells -0.0 from 0.0."""
    actual, expected = np.asarray(actual, np.float32), np.asarray(expected, np.float32)
    np.testing.assert_array_equal(actual.view(np.int32), expected.view(np.int32))


def numpy_row(x, fmt):
    """(packed bytes, dequantised f32) of finite x, the published rule word for word."""
    block, low, top = {
        "fp4": (16, 6 * 2.0**-9, 6.0),
        "mxfp4": (32, 6 * 2.0**-126, 6.0),
        "fp8": (32, 1e-4, 448.0),
    }[fmt]
    v = np.asarray(x, np.float32).reshape(*x.shape[:-1], -1, block)
    amax = np.maximum(np.abs(v).max(-1, keepdims=True), np.float32(low))
    if fmt == "fp4":
        scale = np.minimum(amax / np.float32(6), 448).astype(ml_dtypes.float8_e4m3fn)
        scale_byte = scale.view(np.uint8)
        scale = scale.astype(np.float32)
    else:
        mantissa, exponent = np.frexp(amax * np.float32(1 / top))
        exponent = np.where(mantissa == 0.5, exponent - 1, exponent)
        scale_byte = (exponent + 127).astype(np.uint8)
        scale = np.ldexp(np.float32(1), exponent).astype(np.float32)
    quotient = np.clip(v / scale, -top, top)
    element = ml_dtypes.float8_e4m3fn if fmt == "fp8" else ml_dtypes.float4_e2m1fn
    rounded = quotient.astype(element)
    with np.errstate(over="ignore"):  # 6 * 2**126: rounding up from the largest floats is infinity.
        value = (rounded.astype(np.float32) * scale).reshape(x.shape)
    codes = rounded.view(np.uint8).reshape(x.shape)
    if fmt != "fp8":
        codes = (codes[..., 0::2] & 15) | (codes[..., 1::2] << 4)
    return np.concatenate([codes, scale_byte[..., 0]], -1), value


def without_subnormals(x):
    x = np.asarray(x, np.float32)
    return np.where(np.abs(x) < TINY, np.copysign(np.float32(0), x), x)


@pytest.mark.parametrize("jit", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("fmt", RECORDED)
def test_recorded_numbers(fmt, dtype, jit):
    numbers, labels = recorded(), json.loads((UNIT / "quantisers_labels.json").read_text())
    prefix, codes, scales = RECORDED[fmt]
    functions = jitted if jit else {name: getattr(fp4, name) for name in jitted}
    x = jnp.asarray(numbers["x"].astype(dtype))
    rows = functions["pack"](x, fmt=fmt)
    expected_rows = np.concatenate([numbers[f"{prefix}.{codes}"], numbers[f"{prefix}.{scales}"]], 1)
    wrong = (np.asarray(rows) != expected_rows).any(-1)
    assert not wrong.any(), [label for label, bad in zip(labels, wrong, strict=True) if bad]
    expected = numbers[f"{prefix}.dequant_{'f32' if dtype == 'float32' else 'bf16'}"]
    fake = functions["fake_quantize"](x, fmt=fmt)
    assert fake.dtype == dtype
    same_bits(fake, expected)
    same_bits(functions["unpack"](rows, fmt=fmt, dtype=jnp.dtype(dtype)), expected)


def test_recorded_scales_one_ulp_around_the_boundary():
    numbers = recorded()
    x = numbers["fp32_edge.x"]
    for fmt, name in (("fp8", "fp8_scale"), ("mxfp4", "fp4_index_scale")):
        byte = np.asarray(jitted["pack"](x, fmt=fmt))[:, -1].astype(np.int32)
        np.testing.assert_array_equal(np.ldexp(1.0, byte - 127), numbers[f"fp32_edge.{name}"][:, 0])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", CASES)
def test_fake_quantize_equals_definition(name, dtype):
    x, fmt = arguments(CASES[name], dtype)
    actual = jitted["fake_quantize"](x, fmt=fmt)
    assert actual.shape == x.shape and actual.dtype == dtype
    _, expected = numpy_row(x.astype(np.float32), fmt)
    same_bits(without_subnormals(actual), without_subnormals(expected))


@pytest.mark.parametrize("name", CASES)
def test_pack_equals_definition(name):
    x, fmt = arguments(CASES[name])
    rows = jitted["pack"](x, fmt=fmt)
    expected, value = numpy_row(x, fmt)
    assert rows.shape == (*x.shape[:-1], fp4.row_bytes(fmt, x.shape[-1]))
    assert rows.dtype == jnp.uint8
    np.testing.assert_array_equal(rows, expected)
    same_bits(without_subnormals(jitted["unpack"](rows, fmt=fmt)), without_subnormals(value))


finite = st.floats(width=32, allow_nan=False, allow_infinity=False, allow_subnormal=True)
# Quotients that land on rounding boundaries, or one ulp beside them, are rare among random floats.
boundary = st.builds(
    lambda t, s, e, ulps: np.nextafter(
        np.float32(t * s * 2.0**e), np.float32(ulps * np.inf if ulps else t * s * 2.0**e)
    ).item(),
    st.sampled_from([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, 17 / 16, 31 / 16, 448.0]),
    st.integers(8, 15),
    st.integers(-20, 8),
    st.sampled_from([-1, 0, 1]),
)


@hypothesis.settings(max_examples=300, deadline=None)
@hypothesis.given(
    x=hnp.arrays(np.float32, (2, 32), elements=st.one_of(finite, boundary, st.just(-0.0))),
    fmt=st.sampled_from(tuple(RECORDED)),
)
def test_any_finite_block(x, fmt):
    expected_rows, expected = numpy_row(x, fmt)
    rows = jitted["pack"](x, fmt=fmt)
    np.testing.assert_array_equal(rows, expected_rows)
    fake = jitted["fake_quantize"](x, fmt=fmt)
    same_bits(without_subnormals(fake), without_subnormals(expected))
    same_bits(fake, jitted["unpack"](rows, fmt=fmt))


def test_every_e4m3_scale_and_its_ties():
    """amax / 6 on each E4M3 value, half way to the next, and one ulp on both sides of either."""
    values = np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    points = np.concatenate([values, (values[1:] + values[:-1]) / 2]) * np.float32(6)
    points = np.concatenate(
        [points, np.nextafter(points, np.float32(0)), np.nextafter(points, np.float32(np.inf))]
    )
    x = np.zeros((len(points), 16), np.float32)
    x[:, 3] = points
    # All elements lie on or beside the boundaries of that scale.
    x[:, 4:11] = points[:, None] / 6 * np.float32([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    expected_rows, expected = numpy_row(x, "fp4")
    np.testing.assert_array_equal(jitted["pack"](x, fmt="fp4"), expected_rows)
    same_bits(jitted["fake_quantize"](x, fmt="fp4"), expected)


@pytest.mark.parametrize("fmt", RECORDED)
def test_zero_keeps_its_sign(fmt):
    x = np.zeros((1, 32), np.float32)
    x[0, ::3] = -0.0
    same_bits(jitted["fake_quantize"](x, fmt=fmt), x)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("fmt", RECORDED)
def test_a_block_that_is_not_finite_is_nan(fmt, bad):
    block = fp4.FORMATS[fmt].block
    x = np.ones((3, 2 * block), np.float32)
    x[1, 5] = bad
    rows = jitted["pack"](x, fmt=fmt)
    assert np.asarray(rows)[1, -2] == (0x7F if fmt == "fp4" else 0xFF)
    for values in (jitted["fake_quantize"](x, fmt=fmt), jitted["unpack"](rows, fmt=fmt)):
        isnan = np.isnan(np.asarray(values))
        assert isnan[1, :block].all() and not isnan[1, block:].any()
        assert not isnan[[0, 2]].any()


def test_row_bytes_are_the_published_ones():
    assert fp4.row_bytes("fp4", 512) == 288
    assert fp4.row_bytes("mxfp4", 128) == 68
    assert fp4.row_bytes("fp8", 512) == 528


def test_vmap_and_transposed_input():
    x = np.random.default_rng(0).normal(size=(3, 64, 5)).astype(np.float32)
    mapped = jax.jit(jax.vmap(functools.partial(fp4.fake_quantize, fmt="fp4"), in_axes=2))(x)
    same_bits(mapped, numpy_row(np.moveaxis(x, 2, 0), "fp4")[1])


@pytest.mark.parametrize("function", [fp4.fake_quantize, fp4.pack])
def test_bad_width(function):
    with pytest.raises(ValueError, match=r"fp8: 48 channels; .* multiple of 32"):
        function(np.ones((2, 48), np.float32), "fp8")
    with pytest.raises(ValueError, match="fp4: 0 channels"):
        function(np.ones((2, 0), np.float32), "fp4")


def test_bad_format_and_rows():
    with pytest.raises(ValueError, match="unknown quantisation format 'fp5'; there is fp4, mxfp4"):
        fp4.fake_quantize(np.ones((2, 32), np.float32), "fp5")
    with pytest.raises(ValueError, match="a row of 10 bytes; must be a multiple of 9"):
        fp4.unpack(np.zeros((2, 10), np.uint8), "fp4")
    with pytest.raises(ValueError, match="uint8, not int32"):
        fp4.unpack(np.zeros((2, 9), np.int32), "fp4")


@pytest.mark.parametrize("fmt", RECORDED)
def test_decode_takes_scales_that_lie_apart(fmt):
    rows = jnp.asarray(np.random.default_rng(0).integers(0, 256, (3, 5, fp4.row_bytes(fmt, 96))))
    rows = rows.astype(jnp.uint8)
    split = 96 * fp4.FORMATS[fmt].element_bits // 8
    decode = jax.jit(fp4.decode, static_argnums=2)
    decoded = decode(rows[..., :split], rows[..., split:], fmt)
    np.testing.assert_array_equal(decoded, jitted["unpack"](rows, fmt=fmt))
    with pytest.raises(ValueError, match="a scale for every"):
        fp4.decode(rows[..., :split], rows[..., split + 1 :], fmt)
    with pytest.raises(ValueError, match="uint8"):
        fp4.decode(rows[..., :split].astype(jnp.int8), rows[..., split:], fmt)
