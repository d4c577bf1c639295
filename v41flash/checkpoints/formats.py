"""The number formats of published weights, in NumPy: bytes to values and back.

| storage | elements | scale (E8M0, a power of two) |
|---|---|---|
| "linear" | E4M3, a byte each | per block of `weight_block_size` |
| "rows" | E4M3 | per 32 channels of a row |
| "expert" | E2M1, two a byte, the even channel in the low nibble | per 32 channels of a row |

Every value of a sane file is exact in bfloat16. Quantising gives a block the scale that it is said
to have had before, where that holds all its values exactly, so that weights that were not changed
come back bit for bit; otherwise the scale is chosen as the published quantisers choose it.
"""

from __future__ import annotations

import numpy as np
from ml_dtypes import float4_e2m1fn, float8_e4m3fn

_E4M3 = np.arange(256, dtype=np.uint8).view(float8_e4m3fn).astype(np.float32)
_E2M1 = np.arange(16, dtype=np.uint8).view(float4_e2m1fn).astype(np.float32)
_PAIRS = np.stack([np.tile(_E2M1, 16), np.repeat(_E2M1, 16)], axis=-1)
_LARGEST = {8: 448.0, 4: 6.0}
# The least block maximum that a scale is computed from.
_FLOOR = {8: 1e-4, 4: 6 * 2.0**-126}
_BIAS = 127


def _exponents(scales: np.ndarray) -> np.ndarray:
    """float32 powers of two of E8M0 bytes; 255 is NaN."""
    powers = np.ldexp(np.float32(1), scales.astype(np.int32) - _BIAS)
    return np.where(scales == 255, np.float32(np.nan), powers)


def _spread(scales: np.ndarray, shape: tuple[int, ...], block: tuple[int, int]) -> np.ndarray:
    """A scale for each value of [out, in]."""
    for axis in range(2):
        if block[axis] > 1:
            scales = np.repeat(scales, block[axis], axis=axis)
    return scales[: shape[0], : shape[1]]


def decode(elements: np.ndarray, bits: int) -> np.ndarray:
    """float32 [out, in] of element bytes, 8 or 4 bits a value."""
    if bits == 8:
        return _E4M3[elements]
    return _PAIRS[elements].reshape(*elements.shape[:-1], 2 * elements.shape[-1])


def dequantize(
    elements: np.ndarray, scales: np.ndarray, bits: int, block: tuple[int, int]
) -> np.ndarray:
    """Values of a matrix.

    Args:
        elements: uint8 [out, in * bits / 8].
        scales: uint8 [ceil(out / block[0]), ceil(in / block[1])].
        bits: 8 (E4M3) or 4 (E2M1).
        block: rows and columns that share a scale.

    Returns:
        float32 [out, in].
    """
    values = decode(elements, bits)
    out, inner = values.shape
    if block[0] == 1 and inner % block[1] == 0:
        grouped = values.reshape(out, -1, block[1])
        return (grouped * _exponents(scales)[..., None]).reshape(out, inner)
    return values * _spread(_exponents(scales), values.shape, block)


def _block_maxima(values: np.ndarray, block: tuple[int, int]) -> np.ndarray:
    padding = [(0, -size % part) for size, part in zip(values.shape, block, strict=True)]
    padded = np.pad(np.abs(values), padding) if any(map(max, padding)) else np.abs(values)
    out, inner = padded.shape
    grouped = padded.reshape(out // block[0], block[0], inner // block[1], block[1])
    return grouped.max(axis=(1, 3))


def _chosen_scales(values: np.ndarray, bits: int, block: tuple[int, int]) -> np.ndarray:
    """2^ceil(log2(max(amax, floor) / largest)) as E8M0 bytes, by the published fp32 product."""
    amax = np.maximum(_block_maxima(values, block), np.float32(_FLOOR[bits]))
    quotient = amax.astype(np.float32) * np.float32(1 / _LARGEST[bits])
    # Adding all mantissa bits carries into the exponent unless they are zero.
    return ((quotient.view(np.int32) + 0x7FFFFF) >> 23).astype(np.uint8)


def _encode(
    values: np.ndarray, scales: np.ndarray, bits: int, block: tuple[int, int]
) -> np.ndarray:
    inverse = np.ldexp(np.float32(1), _BIAS - scales.astype(np.int32))
    scaled = values * _spread(inverse, values.shape, block)
    scaled = np.clip(scaled, -_LARGEST[bits], _LARGEST[bits])
    if bits == 8:
        return scaled.astype(float8_e4m3fn).view(np.uint8)
    codes = scaled.astype(float4_e2m1fn).view(np.uint8)
    return codes[:, 0::2] | (codes[:, 1::2] << 4)


def quantize(
    values: np.ndarray, kept: np.ndarray | None, bits: int, block: tuple[int, int]
) -> tuple[np.ndarray, np.ndarray]:
    """Elements and scales of a matrix; inverse of `dequantize` on its results.

    Args:
        values: float32 [out, in], finite.
        kept: scales that the blocks had before; None where there were none.
        bits: 8 or 4.
        block: rows and columns that share a scale.

    Returns:
        (elements, scales) as `dequantize` takes them, rounded to nearest, ties to even.
    """
    if kept is None:
        scales = _chosen_scales(values, bits, block)
        return _encode(values, scales, bits, block), scales
    elements = _encode(values, kept, bits, block)
    error = np.abs(dequantize(elements, kept, bits, block) - values)
    # NaN (the byte 255) counts as changed.
    changed = ~(_block_maxima(error, block) == 0)
    if not changed.any():
        return elements, kept
    scales = np.where(changed, _chosen_scales(values, bits, block), kept)
    return _encode(values, scales, bits, block), scales
