"""The quantisation formats by integer arithmetic: the definition every kernel is tested against.

Nothing here casts to a float8 or float4 type, divides, or relies on subnormals, because backends
differ in all three (saturation, approximate division, flushing). Powers of two are built from
exponent bits, every product is exact, and rounding is to nearest, ties to even.

Two facts carry the exactness. A power-of-two scale only sets the smallest step of the grid, so an
element is rounded in place to a multiple of `step`, itself a power of two. For an E4M3 scale s the
published rule rounds the quotient fl(x / s); a quotient lands on a rounding boundary t only where
x == t * s exactly (t * s has few bits, hence the next x differs from it by more than half a unit in
the last place of t), so comparing x with t * s gives the same code without a division.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

_EXPONENT = 0x7F800000
MAGNITUDE = 0x7FFFFFFF
_BIAS = 127


@dataclasses.dataclass(frozen=True)
class Format:
    """One block format.

    Attributes:
        block: channels that share one scale.
        element_bits: 4 (E2M1) or 8 (E4M3).
        amax_floor: smallest block maximum that the scale is computed from.
        reciprocal: fp32 reciprocal of the largest element, for power-of-two (E8M0) scales; None
            for E4M3 scales, which come from a division by 6.
    """

    block: int
    element_bits: int
    amax_floor: float
    reciprocal: float | None


FORMATS = {
    "fp4": Format(block=16, element_bits=4, amax_floor=6 * 2.0**-9, reciprocal=None),
    "mxfp4": Format(block=32, element_bits=4, amax_floor=6 * 2.0**-126, reciprocal=1 / 6),
    "fp8": Format(block=32, element_bits=8, amax_floor=1e-4, reciprocal=1 / 448),
}

# E2M1 code c is chosen from the boundary below it on; the boundary itself belongs to the even code.
_E2M1_BOUNDARIES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


def format_of(fmt: str) -> Format:
    """The format called `fmt`; ValueError for an unknown name."""
    if fmt not in FORMATS:
        raise ValueError(f"unknown quantisation format {fmt!r}; there is {', '.join(FORMATS)}")
    return FORMATS[fmt]


def row_bytes(fmt: str, channels: int) -> int:
    """Bytes of one packed row of `channels` channels."""
    spec = format_of(fmt)
    if channels <= 0 or channels % spec.block:
        raise ValueError(
            f"{fmt}: {channels} channels; the last axis must be a positive multiple of {spec.block}"
        )
    return channels * spec.element_bits // 8 + channels // spec.block


def bits_of(x: jax.Array) -> jax.Array:
    """Bits i32 of float32 values."""
    return lax.bitcast_convert_type(x, jnp.int32)


def float_of(bits: jax.Array) -> jax.Array:
    """float32 values of bits i32."""
    return lax.bitcast_convert_type(bits, jnp.float32)


def _blocks(x: jax.Array, spec: Format) -> jax.Array:
    x = x.astype(jnp.float32)
    return bits_of(x).reshape(*x.shape[:-1], x.shape[-1] // spec.block, spec.block)


def largest(bits: jax.Array) -> jax.Array:
    """Bits i32[..., 1] of the largest magnitude of each block."""
    # The integer maximum of magnitudes orders floats correctly, NaN above infinity.
    return jnp.max(bits & MAGNITUDE, axis=-1, keepdims=True)


def scale_byte(raw: jax.Array, spec: Format) -> jax.Array:
    """Scale byte i32 of blocks whose `largest` is `raw`: E8M0 (255 = NaN) or E4M3 (127 = NaN)."""
    finite = raw < _EXPONENT
    amax = jnp.maximum(raw, bits_of(jnp.float32(spec.amax_floor)))
    if spec.reciprocal is not None:
        quotient = bits_of(float_of(amax) * jnp.float32(spec.reciprocal))
        # Adding all mantissa bits carries into the exponent unless they are zero: ceil(log2).
        return jnp.where(finite, (quotient + 0x7FFFFF) >> 23, 255)
    exponent = amax >> 23
    mantissa = (amax & 0x7FFFFF) | 0x800000
    # amax / 6 = sixth * 2**(exponent - 157); the last bit is sticky, so that ties stay exact.
    sixth = (mantissa << 6) // 3
    sixth = sixth | (sixth * 3 != mantissa << 6)
    lead = 27 + (sixth >= 1 << 28)
    power = jnp.maximum(lead + exponent - 157, -6)
    drop = power - 3 - exponent + 157
    rounded = (sixth + (1 << (drop - 1)) - 1 + ((sixth >> drop) & 1)) >> drop
    code = jnp.minimum(((power + 7) << 3) + rounded - 8, 0x7E)
    return jnp.where(finite, code, 0x7F)


def decode_e4m3(code: jax.Array) -> jax.Array:
    """Magnitude f32 of E4M3 codes i32 0..127 (127 is NaN)."""
    normal = float_of((code + ((_BIAS - 7) << 3)) << 20)
    subnormal = code.astype(jnp.float32) * jnp.float32(2.0**-9)
    return jnp.where(code == 0x7F, jnp.nan, jnp.where(code < 8, subnormal, normal))


def decode_scale(byte: jax.Array, spec: Format) -> jax.Array:
    """Scales f32 of their bytes i32."""
    if spec.reciprocal is None:
        return decode_e4m3(byte)
    # 255 << 23 is infinity; E8M0 means NaN by it.
    return jnp.where(byte == 255, jnp.nan, float_of(byte << 23))


def steps(bits: jax.Array, byte: jax.Array, spec: Format) -> tuple[jax.Array, jax.Array]:
    """Rounds magnitudes under a power-of-two scale.

    Returns:
        (multiple, unit): |x| is rounded to multiple * 2**-mantissa_bits * unit, where unit, as i32
        bits, is the power of two below |x|, or that of the smallest normal element if greater.
    """
    mantissa_bits, min_exponent = (1, 0) if spec.element_bits == 4 else (3, -6)
    magnitude = bits & MAGNITUDE
    smallest = (jnp.minimum(byte, 254) + min_exponent) << 23
    unit = jnp.maximum(magnitude & _EXPONENT, smallest)
    inverse = float_of(jnp.uint32((2 * _BIAS + mantissa_bits) << 23).astype(jnp.int32) - unit)
    scaled = float_of(magnitude) * inverse
    if spec.amax_floor < 2.0**-100:
        # Backends read subnormals as zero, and here they can round to a normal number. An integer
        # conversion does not flush; 2**-149 is split into two normal factors.
        linear = magnitude.astype(jnp.float32) * jnp.float32(2.0**-75)
        scaled = jnp.where(magnitude < 1 << 23, linear * (inverse * jnp.float32(2.0**-74)), scaled)
    return lax.round(scaled, lax.RoundingMethod.TO_NEAREST_EVEN), unit


def e2m1_code(bits: jax.Array, scale: jax.Array) -> jax.Array:
    """E2M1 magnitude codes i32 of blocks under an E4M3 scale."""
    magnitude = float_of(bits & MAGNITUDE)
    code = jnp.zeros(bits.shape, jnp.int32)
    for index, boundary in enumerate(_E2M1_BOUNDARIES):
        edge = scale * jnp.float32(boundary)
        above = magnitude >= edge if index % 2 else magnitude > edge
        code = code + above.astype(jnp.int32)
    return code


def e2m1_value(code: jax.Array) -> jax.Array:
    """Magnitude f32 of E2M1 codes 0..7: 0, 0.5, 1, 1.5, 2, 3, 4, 6."""
    return jnp.where(code < 2, code.astype(jnp.float32) * 0.5, float_of((code + 252) << 22))


def quantized(bits: jax.Array, byte: jax.Array, spec: Format) -> jax.Array:
    """Values f32 that blocks are rounded to.

    Args:
        bits: i32, of float32 values.
        byte: i32, of the scale of their block.
        spec: the format.
    """
    if spec.reciprocal is None:
        scale = decode_scale(byte, spec)
        value = e2m1_value(e2m1_code(bits, scale)) * scale
    else:
        multiple, unit = steps(bits, byte, spec)
        fraction = 0.5 if spec.element_bits == 4 else 0.125
        value = multiple * jnp.float32(fraction) * float_of(unit)
        value = jnp.where(byte == 255, jnp.nan, value)
    return float_of(bits_of(value) | (bits & ~MAGNITUDE))


def codes(bits: jax.Array, byte: jax.Array, spec: Format) -> jax.Array:
    """Element codes i32 that blocks are rounded to; arguments as for `quantized`."""
    if spec.reciprocal is None:
        code = e2m1_code(bits, decode_scale(byte, spec))
    else:
        multiple, unit = steps(bits, byte, spec)
        mantissa_bits, min_exponent = (1, 0) if spec.element_bits == 4 else (3, -6)
        # The multiple holds the implicit leading one, which makes the exponent field one greater;
        # subnormal multiples lack it, and one that rounds up to the next power of two carries.
        exponent = (unit >> 23) - byte - min_exponent
        code = (exponent << mantissa_bits) + multiple.astype(jnp.int32)
        # A block with NaN or infinity is marked by its scale alone.
        code = jnp.where(byte == 255, 0, code)
    return code | jnp.where(bits < 0, 1 << (spec.element_bits - 1), 0)


def decoded(code: jax.Array, scale: jax.Array, spec: Format) -> jax.Array:
    """Values f32 of element codes i32 under scales f32."""
    if spec.element_bits == 4:
        magnitude, negative = e2m1_value(code & 7), code >> 3
    else:
        magnitude, negative = decode_e4m3(code & 0x7F), code >> 7
    return float_of(bits_of(magnitude * scale) | (negative << 31))


def split_of(rows: jax.Array, fmt: str) -> int:
    """Bytes of elements in packed rows, before the scales; ValueError where they are none."""
    spec = format_of(fmt)
    if rows.dtype != jnp.uint8:
        raise ValueError(f"{fmt}: packed rows are uint8, not {rows.dtype}")
    unit = spec.block * spec.element_bits // 8 + 1
    if not rows.shape[-1] or rows.shape[-1] % unit:
        raise ValueError(f"{fmt}: a row of {rows.shape[-1]} bytes; must be a multiple of {unit}")
    return rows.shape[-1] // unit * (unit - 1)


def check_parts(elements: jax.Array, scales: jax.Array, fmt: str) -> None:
    """ValueError unless there is a scale byte for each block of the elements."""
    spec = format_of(fmt)
    channels = elements.shape[-1] * 8 // spec.element_bits
    shape = (*elements.shape[:-1], channels // spec.block)
    if elements.dtype != jnp.uint8 or scales.dtype != jnp.uint8:
        raise ValueError(f"{fmt}: packed values are uint8, not {elements.dtype}, {scales.dtype}")
    if channels % spec.block or scales.shape != shape:
        raise ValueError(
            f"{fmt}: elements {elements.shape} and scales {scales.shape}: must be a scale for"
            f" every {spec.block} channels"
        )


def fake_quantize(x: jax.Array, fmt: str) -> jax.Array:
    """XLA definition of `fp4.fake_quantize`."""
    spec = format_of(fmt)
    row_bytes(fmt, x.shape[-1])
    bits = _blocks(x, spec)
    value = quantized(bits, scale_byte(largest(bits), spec), spec)
    return value.reshape(x.shape).astype(x.dtype)


def pack(x: jax.Array, fmt: str) -> jax.Array:
    """XLA definition of `fp4.pack`."""
    spec = format_of(fmt)
    row_bytes(fmt, x.shape[-1])
    bits = _blocks(x, spec)
    byte = scale_byte(largest(bits), spec)
    code = codes(bits, byte, spec).reshape(x.shape)
    if spec.element_bits == 4:
        code = code[..., 0::2] | (code[..., 1::2] << 4)
    return jnp.concatenate([code, byte[..., 0]], axis=-1).astype(jnp.uint8)


def decode(
    elements: jax.Array,
    scales: jax.Array,
    fmt: str,
    dtype: jax.typing.DTypeLike = jnp.float32,
) -> jax.Array:
    """XLA definition of `fp4.decode`."""
    check_parts(elements, scales, fmt)
    spec = format_of(fmt)
    shape, channels = scales.shape, scales.shape[-1] * spec.block
    code = elements.astype(jnp.int32)
    if spec.element_bits == 4:
        code = jnp.stack([code & 15, code >> 4], axis=-1)
    code = code.reshape(*shape, spec.block)
    scale = decode_scale(scales.astype(jnp.int32), spec)[..., None]
    return decoded(code, scale, spec).reshape(*shape[:-1], channels).astype(dtype)


def unpack(rows: jax.Array, fmt: str, dtype: jax.typing.DTypeLike = jnp.float32) -> jax.Array:
    """XLA definition of `fp4.unpack`."""
    split = split_of(rows, fmt)
    return decode(rows[..., :split], rows[..., split:], fmt, dtype)
