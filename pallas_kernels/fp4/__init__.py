"""Block quantisation of cached rows: E2M1 and E4M3 elements with one scale a block.

| format | elements | scale | used for |
|---|---|---|---|
| "fp4" | E2M1 | E4M3 per 16 channels | main KV entries |
| "mxfp4" | E2M1 | E8M0 (a power of two) per 32 channels | index queries and keys |
| "fp8" | E4M3 | E8M0 per 32 channels | sliding-window KV entries |

The number formats are those of the OCP microscaling specification; how scales are chosen follows
the V4.1 report and the published inference code, bit for bit.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import Implementation, dispatch
from pallas_kernels.fp4 import mosaic_tpu, reference
from pallas_kernels.fp4.reference import FORMATS, Format, row_bytes

__all__ = [
    "DECODE_IMPLEMENTATIONS",
    "FAKE_QUANTIZE_IMPLEMENTATIONS",
    "FORMATS",
    "PACK_IMPLEMENTATIONS",
    "UNPACK_IMPLEMENTATIONS",
    "Format",
    "decode",
    "fake_quantize",
    "pack",
    "row_bytes",
    "unpack",
]

FAKE_QUANTIZE_IMPLEMENTATIONS = {
    "mosaic_tpu": mosaic_tpu.fake_quantize,
    "xla": reference.fake_quantize,
}
PACK_IMPLEMENTATIONS = {"mosaic_tpu": mosaic_tpu.pack, "xla": reference.pack}
UNPACK_IMPLEMENTATIONS = {"mosaic_tpu": mosaic_tpu.unpack, "xla": reference.unpack}
DECODE_IMPLEMENTATIONS = {"mosaic_tpu": mosaic_tpu.decode, "xla": reference.decode}


def fake_quantize(x: jax.Array, fmt: str, *, implementation: Implementation = None) -> jax.Array:
    """Quantises and dequantises the last axis.

    Every value is rounded to the nearest representable one, ties to even, under the scale of its
    block: "fp4" s = e4m3(max(amax, 6*2^-9) / 6); "mxfp4" s = 2^ceil(log2(max(amax, 6*2^-126) / 6));
    "fp8" s = 2^ceil(log2(max(amax, 1e-4) / 448)). Equals `unpack(pack(x))` exactly. The sign of a
    zero is kept. There is no straight-through gradient here: it is zero almost everywhere.

    Args:
        x: float[..., D], D a multiple of the format's block; computed in fp32.
        fmt: "fp4", "mxfp4" or "fp8".
        implementation: see `pallas_kernels.dispatch`.

    Returns:
        Array like `x` in shape and dtype. bfloat16 holds every result exactly. A block with a NaN
        or an infinity becomes NaN as a whole. Results below 2^-126 in magnitude ("mxfp4" only)
        are zero on backends that flush subnormals; rounding up from the largest floats is infinity.

    Raises:
        ValueError: unknown format, or D not a multiple of its block.
    """
    return dispatch("fp4.fake_quantize", FAKE_QUANTIZE_IMPLEMENTATIONS, implementation, x, fmt)


def pack(x: jax.Array, fmt: str, *, implementation: Implementation = None) -> jax.Array:
    """Quantises the last axis into packed rows.

    A row is all elements (E2M1: two a byte, the even channel in the low nibble), then one scale
    byte a block: D/2 + D/16 bytes for "fp4" (288 for 512 channels), D/2 + D/32 for "mxfp4" (68 for
    128), D + D/32 for "fp8" (528 for 512).

    Args:
        x: float[..., D], D a multiple of the format's block.
        fmt: "fp4", "mxfp4" or "fp8".
        implementation: see `pallas_kernels.dispatch`.

    Returns:
        uint8[..., row_bytes(fmt, D)]. The scale byte of a block with a NaN or an infinity is the
        format's NaN (0x7F for E4M3, 0xFF for E8M0).

    Raises:
        ValueError: unknown format, or D not a multiple of its block.
    """
    return dispatch("fp4.pack", PACK_IMPLEMENTATIONS, implementation, x, fmt)


def unpack(
    rows: jax.Array,
    fmt: str,
    dtype: jax.typing.DTypeLike = jnp.float32,
    *,
    implementation: Implementation = None,
) -> jax.Array:
    """Dequantises packed rows.

    Args:
        rows: uint8[..., row_bytes(fmt, D)], as `pack` makes them.
        fmt: "fp4", "mxfp4" or "fp8".
        dtype: of the result; the product of element and scale is exact in fp32 and bfloat16.
        implementation: see `pallas_kernels.dispatch`.

    Returns:
        dtype[..., D].

    Raises:
        ValueError: unknown format, rows not uint8, or a row length that no D gives.
    """
    return dispatch("fp4.unpack", UNPACK_IMPLEMENTATIONS, implementation, rows, fmt, dtype)


def decode(
    elements: jax.Array,
    scales: jax.Array,
    fmt: str,
    dtype: jax.typing.DTypeLike = jnp.float32,
    *,
    implementation: Implementation = None,
) -> jax.Array:
    """Dequantises elements whose scales lie apart from them, as in published weights.

    Args:
        elements: uint8[..., D * bits / 8].
        scales: uint8[..., D / block].
        fmt: "fp4", "mxfp4" or "fp8".
        dtype: of the result; the product of element and scale is exact in fp32 and bfloat16.
        implementation: see `pallas_kernels.dispatch`.

    Returns:
        dtype[..., D].

    Raises:
        ValueError: unknown format, not uint8, or shapes that do not fit each other.
    """
    return dispatch(
        "fp4.decode", DECODE_IMPLEMENTATIONS, implementation, elements, scales, fmt, dtype
    )
