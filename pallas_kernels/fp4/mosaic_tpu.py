"""The quantisation formats on a TPU: rows of whole lanes, the arithmetic of the reference.

Elementwise, a kernel calls the functions of `reference` on [rows, channels] tiles, so that bytes
and values are the reference's by construction. What differs is how lanes meet:

* the maximum of a block of 16 or 32 channels is a butterfly of lane rotations, after which every
  channel of the block has it, and its scale;
* taking every 16th lane, or putting two lanes' nibbles into one byte, is a product with a matrix of
  zeros and powers of two on the matrix unit. Bytes are exact in bfloat16 and sums of one or two of
  them in float32, so nothing is rounded; the same matrices turned undo it.

XLA gives blocks an axis of their own, of which a register of 128 lanes holds one block.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import tpu
from pallas_kernels.fp4 import reference
from pallas_kernels.fp4.reference import Format

_TILE = 256
# Rows whose values fit the registers: the sublanes of a tile of bytes.
_GROUP = 32
# Beyond it the matrices that move lanes, channels^2 / 2, outgrow the work.
_MOST_CHANNELS = 1024


def fake_quantize(x: jax.Array, fmt: str, *, interpret: Any = None) -> jax.Array:
    """See `pallas_kernels.fp4.fake_quantize`.

    Raises:
        NotImplementedError: not on a TPU, channels that are no multiple of 128 or more than 1024,
            or a dtype other than float32 and bfloat16.
    """
    spec = _accept("fp4.fake_quantize", x, fmt, interpret)

    def kernel(x_ref, out_ref):
        def group(rows):
            bits = reference.bits_of(x_ref[rows, :].astype(jnp.float32))
            value = reference.quantized(bits, _scale_bytes(bits, spec), spec)
            out_ref[rows, :] = value.astype(out_ref.dtype)

        _over_groups(x_ref.shape[0], group)

    return _call(f"fake_quantize {fmt}", kernel, (x,), (), x.shape[-1], x.dtype, interpret)


def pack(x: jax.Array, fmt: str, *, interpret: Any = None) -> jax.Array:
    """See `pallas_kernels.fp4.pack`, and `fake_quantize` for what it declines."""
    spec = _accept("fp4.pack", x, fmt, interpret)
    channels = x.shape[-1]
    matrices = [_every(channels, spec.block)]
    if spec.element_bits == 4:
        matrices.append(_every(channels, 2, (1, 16)))

    def kernel(x_ref, *refs):
        every_ref, *pair_ref, out_ref, code_ref, byte_ref = refs

        def group(rows):
            bits = reference.bits_of(x_ref[rows, :].astype(jnp.float32))
            byte = _scale_bytes(bits, spec)
            code_ref[rows, :] = _exact(reference.codes(bits, byte, spec))
            byte_ref[rows, :] = _exact(byte)

        _over_groups(x_ref.shape[0], group)
        code = code_ref[...]
        if pair_ref:
            code = _product(code, pair_ref[0])
        scales = _product(byte_ref[...], every_ref)
        packed = jnp.concatenate([code.astype(jnp.float32), scales], axis=1)
        out_ref[...] = packed.astype(jnp.int32).astype(jnp.uint8)

    width, dtype = reference.row_bytes(fmt, channels), jnp.dtype(jnp.uint8)
    scratch = [channels, channels]
    return _call(f"pack {fmt}", kernel, (x,), matrices, width, dtype, interpret, scratch)


def unpack(
    rows: jax.Array, fmt: str, dtype: Any = jnp.float32, *, interpret: Any = None
) -> jax.Array:
    """See `pallas_kernels.fp4.unpack`, and `fake_quantize` for what it declines."""
    tpu.require("fp4.unpack", interpret)
    split = reference.split_of(rows, fmt)

    def parts(ref):
        values = ref[...].astype(jnp.int32)
        return values[:, :split], values[:, split:]

    return _decode("unpack", (rows,), parts, split, fmt, dtype, interpret)


def decode(
    elements: jax.Array,
    scales: jax.Array,
    fmt: str,
    dtype: Any = jnp.float32,
    *,
    interpret: Any = None,
) -> jax.Array:
    """See `pallas_kernels.fp4.decode`, and `fake_quantize` for what it declines."""
    tpu.require("fp4.decode", interpret)
    reference.check_parts(elements, scales, fmt)

    def parts(elements_ref, scales_ref):
        return elements_ref[...].astype(jnp.int32), scales_ref[...].astype(jnp.int32)

    arrays = (elements, scales)
    return _decode("decode", arrays, parts, elements.shape[-1], fmt, dtype, interpret)


def _decode(op, arrays, parts, element_bytes, fmt, dtype, interpret) -> jax.Array:
    spec = reference.format_of(fmt)
    channels = element_bytes * 8 // spec.element_bits
    _accept_width(f"fp4.{op}", channels)
    matrices = [_every(channels, spec.block, np.ones(spec.block)).T]
    if spec.element_bits == 4:
        matrices += [_every(channels, 2, (1, 0)).T, _every(channels, 2, (0, 1)).T]

    def kernel(*refs):
        code, byte = parts(*refs[: len(arrays)])
        spread_ref, *nibble_refs = refs[len(arrays) : -1]
        if nibble_refs:
            low, high = (_exact(part) for part in (code & 15, code >> 4))
            code = _product(low, nibble_refs[0]) + _product(high, nibble_refs[1])
            code = code.astype(jnp.int32)
        byte = _product(_exact(byte), spread_ref).astype(jnp.int32)
        value = reference.decoded(code, reference.decode_scale(byte, spec), spec)
        refs[-1][...] = value.astype(dtype)

    return _call(f"{op} {fmt}", kernel, arrays, matrices, channels, jnp.dtype(dtype), interpret)


def _accept(op: str, x: jax.Array, fmt: str, interpret: Any) -> Format:
    tpu.require(op, interpret)
    reference.row_bytes(fmt, x.shape[-1])
    if x.dtype not in (jnp.float32, jnp.bfloat16):
        raise NotImplementedError(f"{op}: values of {x.dtype}")
    _accept_width(op, x.shape[-1])
    return reference.format_of(fmt)


def _accept_width(op: str, channels: int) -> None:
    if channels % tpu.LANES or channels > _MOST_CHANNELS:
        raise NotImplementedError(
            f"{op}: {channels} channels; takes multiples of {tpu.LANES} up to {_MOST_CHANNELS}"
        )


def _scale_bytes(bits: jax.Array, spec: Format) -> jax.Array:
    """The scale byte of each channel's block."""
    raw = bits & reference.MAGNITUDE
    lane = lax.broadcasted_iota(jnp.int32, raw.shape, 1)
    width = raw.shape[1]
    distance = 1
    while distance < spec.block:
        # Lanes that differ in this bit alone exchange what they have.
        other = jnp.where(
            lane & distance == 0,
            pltpu.roll(raw, width - distance, 1),
            pltpu.roll(raw, distance, 1),
        )
        raw = jnp.maximum(raw, other)
        distance *= 2
    return reference.scale_byte(raw, spec)


def _every(channels: int, period: int, weights: Any = (1,)) -> np.ndarray:
    """[channels, channels / period] that adds up a period's first channels by their weights."""
    matrix = np.zeros((channels // period, period, channels // period), np.float32)
    index = np.arange(channels // period)
    for offset, weight in enumerate(weights):
        matrix[index, offset, index] = weight
    return matrix.reshape(channels, channels // period)


def _exact(values: jax.Array) -> jax.Array:
    """Bytes i32 as bfloat16, which has them all."""
    return values.astype(jnp.float32).astype(jnp.bfloat16)


def _product(values: jax.Array, matrix_ref: Any) -> jax.Array:
    return jnp.dot(values, matrix_ref[...], preferred_element_type=jnp.float32)


def _over_groups(rows: int, group) -> None:
    size = min(_GROUP, rows)

    def step(g, _):
        group(pl.ds(pl.multiple_of(g * size, size), size))

    lax.fori_loop(0, rows // size, step, None)


def _call(what, kernel, arrays, matrices, width, dtype, interpret, scratch=()) -> jax.Array:
    """Runs a kernel over tiles of rows.

    Args:
        what: names it.
        kernel: of references to tiles, to all of `matrices`, to the output's tile, and to scratch.
        arrays: [..., *], cut into tiles of rows.
        matrices: exact in bfloat16.
        width: of the output's rows.
        dtype: of the output.
        interpret: parameters of interpret mode, or None.
        scratch: widths of bfloat16 scratch tiles.
    """
    lead = arrays[0].shape[:-1]
    count = math.prod(lead)
    tile = min(_TILE, -(-count // _GROUP) * _GROUP)
    tiles = -(-count // tile)
    arrays = [array.reshape(count, array.shape[-1]) for array in arrays]
    matrices = [jnp.asarray(matrix, jnp.bfloat16) for matrix in matrices]

    def rows(columns):
        return pl.BlockSpec((tile, columns), lambda i: (i, 0))

    per_row = sum(a.shape[1] * a.dtype.itemsize for a in arrays) + width * dtype.itemsize
    held = sum(2 * matrix.size for matrix in matrices)
    account = tpu.Account(
        vmem_bytes=2 * tile * per_row + 2 * held + 2 * tile * sum(scratch),
        hbm_bytes=count * per_row + held,
        flops=2 * tile * tiles * sum(matrix.size for matrix in matrices),
    )
    out = pl.pallas_call(
        kernel,
        grid=(tiles,),
        in_specs=[rows(array.shape[1]) for array in arrays]
        + [pl.BlockSpec(matrix.shape, lambda i: (0, 0)) for matrix in matrices],
        out_specs=rows(width),
        out_shape=jax.ShapeDtypeStruct((count, width), dtype),
        scratch_shapes=[pltpu.VMEM((tile, columns), jnp.bfloat16) for columns in scratch],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
        cost_estimate=tpu.stated(what, account),
        interpret=False if interpret is None else interpret,
    )(*arrays, *matrices)
    return out.reshape(*lead, width)
