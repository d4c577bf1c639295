"""Engram look-up on a TPU: one copy a row, a tile of them always in flight.

A tile is all R rows of 32 tokens (128 where R is no multiple of 4). While the rows of one tile are
put in order and converted, the copies of the next are under way; their numbers lie in scalar
memory. A row that is out of range costs no copy.

Two layouts of the table can be copied row by row without a copy of the whole table first: float32
with c a multiple of 128, as it is; and packed rows of 256 channels as `to_layout` arranges them
once:

* elements int32[N/2, 128]: two rows beside each other, 64 words each; byte b of word w is channel
  64 b + w, so that a shift and a mask give 64 consecutive channels;
* scales int32[N/64, 128]: 64 rows' scales, two words each.

A packed row is thus read by two copies of 512 bytes, the smallest that a tiled array of 32-bit
words has; a row as stored, 264 bytes, cannot be copied by itself at all.

Only the gradient's rows that are named are not zero, but the gradient itself is as large as the
table; XLA's scatter-add writes it as well as a kernel could.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import tpu
from pallas_kernels.fp4 import reference as fp4

_CHANNELS = 256  # of packed rows
_BLOCK = 32  # channels of a scale
_SCALE_ROWS = 64  # rows whose scales share 128 words


class PackedTable(NamedTuple):
    """Packed rows as the kernel reads them, N padded to a multiple of 64.

    Attributes:
        elements: int32[N/2, 128].
        scales: int32[N/64, 128].
    """

    elements: jax.Array
    scales: jax.Array


def to_layout(table: jax.Array) -> PackedTable:
    """Arranges packed rows for the kernel.

    Args:
        table: uint8[N, 264], rows in the format "fp8" of `pallas_kernels.fp4`.

    Raises:
        ValueError: not such rows.
    """
    if table.dtype != jnp.uint8 or table.shape[1:] != (fp4.row_bytes("fp8", _CHANNELS),):
        raise ValueError(
            f"engram_gather: table is {table.dtype}{list(table.shape)}; must be"
            f" uint8[N, {fp4.row_bytes('fp8', _CHANNELS)}]"
        )
    table = jnp.pad(table, ((0, -table.shape[0] % _SCALE_ROWS), (0, 0)))
    count = table.shape[0]
    planes = table[:, :_CHANNELS].reshape(count, 4, _CHANNELS // 4)
    words = lax.bitcast_convert_type(jnp.moveaxis(planes, 1, 2), jnp.int32)
    scales = table[:, _CHANNELS:].reshape(count, 2, 4)
    return PackedTable(
        words.reshape(count // 2, tpu.LANES),
        lax.bitcast_convert_type(scales, jnp.int32).reshape(count // _SCALE_ROWS, tpu.LANES),
    )


def from_layout(table: PackedTable) -> jax.Array:
    """Packed rows uint8[N, 264] of `to_layout`, the rows that it added included."""
    words = table.elements.reshape(-1, _CHANNELS // 4)
    planes = jnp.moveaxis(lax.bitcast_convert_type(words, jnp.uint8), 2, 1)
    scales = lax.bitcast_convert_type(table.scales.reshape(-1, 2), jnp.uint8)
    count = words.shape[0]
    return jnp.concatenate([planes.reshape(count, -1), scales.reshape(count, -1)], axis=1)


def engram_gather(
    table: jax.Array | PackedTable,
    rows: jax.Array,
    dtype: jax.typing.DTypeLike | None = None,
    *,
    interpret: Any = None,
) -> jax.Array:
    """See `pallas_kernels.engram_gather.engram_gather`.

    Raises:
        NotImplementedError: not on a TPU; rows that cannot be copied one by one: packed ones as
            stored, other floats than float32, c no multiple of 128.
    """
    tpu.require("engram_gather", interpret)
    rows = jnp.asarray(rows)
    if isinstance(table, PackedTable):
        return _packed(jnp.dtype(dtype or jnp.float32), interpret, table, rows)
    table = jnp.asarray(table)
    if table.dtype == jnp.uint8:
        raise NotImplementedError("engram_gather: packed rows as stored; takes those of to_layout")
    if table.dtype != jnp.float32 or table.ndim != 2 or table.shape[1] % tpu.LANES:
        raise NotImplementedError(
            f"engram_gather: table is {table.dtype}{list(table.shape)}; takes float32[N, c] with c"
            f" a multiple of {tpu.LANES}"
        )
    return _floats(jnp.dtype(dtype or table.dtype), interpret, table, rows)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _floats(dtype: Any, interpret: Any, table: jax.Array, rows: jax.Array) -> jax.Array:
    width = table.shape[1]

    def store(buffers, refs, tile, count):
        for r in range(count):
            at = slice(r * tile, (r + 1) * tile)
            refs[-1][:, r * width : (r + 1) * width] = buffers[0][at].astype(dtype)

    return _gather((table,), (1,), table.shape[0], width, store, dtype, interpret, rows)


def _floats_forward(dtype, interpret, table, rows):
    return _floats(dtype, interpret, table, rows), (rows, table.shape[0])


def _floats_backward(dtype, interpret, residuals, grad):
    del dtype, interpret
    rows, count = residuals
    grad = grad.reshape(*rows.shape, -1).astype(jnp.float32)
    zeros = jnp.zeros((count, grad.shape[-1]), jnp.float32)
    # Out of range: one past the end, which is dropped; -1 would be the last row.
    named = jnp.where((rows >= 0) & (rows < count), rows, count)
    return zeros.at[named].add(grad, mode="drop"), None


_floats.defvjp(_floats_forward, _floats_backward)


def _packed(dtype: Any, interpret: Any, table: PackedTable, rows: jax.Array) -> jax.Array:
    half, spec = tpu.LANES // 2, fp4.FORMATS["fp8"]

    def store(buffers, refs, tile, count):
        elements, scales = buffers
        for first in range(0, count * tile, tpu.LANES):
            # The numbers of 128 rows, from lanes to all lanes of a sublane each.
            numbers = refs[0][first // tpu.LANES : first // tpu.LANES + 1]
            numbers = jnp.broadcast_to(numbers, (tpu.LANES, tpu.LANES)).T
            at = slice(first, first + tpu.LANES)
            words = elements[at]
            words = jnp.where(numbers[:, :half] % 2 == 1, words[:, half:], words[:, :half])
            # Beside each other: the scales of the lower and of the upper 32 channels of a plane.
            lane = lax.broadcasted_iota(jnp.int32, (tpu.LANES, tpu.LANES), 1)
            own = 2 * (numbers % _SCALE_ROWS)
            upper = lax.broadcasted_iota(jnp.int32, (tpu.LANES, half), 1) >= _BLOCK
            pair = [
                jnp.sum(jnp.where(lane == own + word, scales[at], 0), axis=1, keepdims=True)
                for word in (0, 1)
            ]
            planes = []
            for plane in range(4):
                word, shift = pair[plane // 2], 16 * (plane % 2)
                scale = jnp.where(upper, word >> (shift + 8), word >> shift) & 0xFF
                code = (words >> (8 * plane)) & 0xFF
                planes.append(fp4.decoded(code, fp4.decode_scale(scale, spec), spec))
            values = jnp.concatenate(planes, axis=1).astype(dtype)
            for start in range(0, tpu.LANES, tile):
                r, token = divmod(first + start, tile)
                span = min(tile, tpu.LANES)
                columns = slice(r * _CHANNELS, (r + 1) * _CHANNELS)
                refs[-1][token : token + span, columns] = values[start : start + span]

    total = 2 * table.elements.shape[0]
    divisors = (2, _SCALE_ROWS)
    return _gather(tuple(table), divisors, total, _CHANNELS, store, dtype, interpret, rows)


def _gather(tables, divisors, total, width, store, dtype, interpret, rows) -> jax.Array:
    """Runs the kernel.

    Args:
        tables: arrays [*, W] of 32-bit words in main memory.
        divisors: the row of `tables[i]` that holds row j is j // divisors[i].
        total: rows of the table.
        width: channels of a row.
        store: (buffers [R * tile, W] of the tables, refs, tile, R) -> None: writes the output block
            `refs[-1]` [tile, R * width]; row r of token t is at r * tile + t, its number in
            `refs[0]` [R * tile / 128, 128].
        dtype: of the output.
        interpret: parameters of interpret mode, or None.
        rows: int[..., R].
    """
    *lead, count = rows.shape
    tokens = math.prod(lead)
    tile = 32 if count % 4 == 0 else tpu.LANES
    tiles = -(-tokens // tile)
    tiles += tiles % 2  # two halves, so that a device of two cores uses both
    numbers = jnp.where((rows >= 0) & (rows < total), rows, -1).astype(jnp.int32)
    numbers = jnp.pad(
        numbers.reshape(tokens, count), ((0, tiles * tile - tokens), (0, 0)), constant_values=-1
    )
    numbers = jnp.moveaxis(numbers.reshape(tiles, tile, count), 2, 1)
    each = count * tile

    def kernel(lanes_ref, now_ref, next_ref, *refs):
        table_refs, (out_ref, *rest) = refs[: len(tables)], refs[len(tables) :]
        buffers, arrived = rest[:-1], rest[-1]
        step, slot = pl.program_id(1), pl.program_id(1) % 2

        def copies(index, r, slot):
            return [
                pltpu.make_async_copy(
                    table.at[pl.ds(index // divisor, 1)],
                    buffer.at[slot, pl.ds(r, 1)],
                    arrived.at[slot],
                )
                for table, buffer, divisor in zip(table_refs, buffers, divisors, strict=True)
            ]

        def start(index_ref, slot):
            def one(r, _):
                index = index_ref[0, r]

                @pl.when(index >= 0)
                def _():
                    for copy in copies(index, r, slot):
                        copy.start()

                @pl.when(index < 0)
                def _():
                    for buffer in buffers:
                        shape = (1, buffer.shape[-1])
                        buffer[slot, pl.ds(r, 1), :] = jnp.zeros(shape, buffer.dtype)

            lax.fori_loop(0, each, one, None)

        @pl.when(step == 0)
        def _():
            start(now_ref, slot)

        @pl.when(step + 1 < pl.num_programs(1))
        def _():
            start(next_ref, 1 - slot)

        def wait(r, _):
            index = now_ref[0, r]

            @pl.when(index >= 0)
            def _():
                for copy in copies(index, r, slot):
                    copy.wait()

        lax.fori_loop(0, each, wait, None)
        store([buffer.at[slot] for buffer in buffers], (lanes_ref, out_ref), tile, count)

    half = tiles // 2

    def scalars(ahead):
        def position(core, step):
            return core * half + jnp.minimum(step + ahead, half - 1), 0, 0

        return pl.BlockSpec((None, 1, each), position, memory_space=pltpu.SMEM)

    lanes = pl.BlockSpec((None, each // tpu.LANES, tpu.LANES), lambda c, s: (c * half + s, 0, 0))
    words = sum(table.shape[1] for table in tables)
    account = tpu.Account(
        vmem_bytes=2 * each * words * 4 + 2 * tile * count * width * dtype.itemsize + 8 * each,
        hbm_bytes=tiles * each * (4 * words + width * dtype.itemsize + 12),
        copies=tiles * each * len(tables),
    )
    out = pl.pallas_call(
        kernel,
        grid=(2, half),
        in_specs=[lanes, scalars(0), scalars(1)]
        + [pl.BlockSpec(memory_space=pl.ANY)] * len(tables),
        out_specs=pl.BlockSpec((tile, count * width), lambda c, s: (c * half + s, 0)),
        out_shape=jax.ShapeDtypeStruct((tiles * tile, count * width), dtype),
        scratch_shapes=[
            *(pltpu.VMEM((2, each, table.shape[1]), table.dtype) for table in tables),
            pltpu.SemaphoreType.DMA((2,)),
        ],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        cost_estimate=tpu.stated(f"gather of {tables[0].dtype} rows", account),
        interpret=False if interpret is None else interpret,
    )(
        numbers.reshape(tiles, each // tpu.LANES, tpu.LANES),
        numbers.reshape(tiles, 1, each),
        numbers.reshape(tiles, 1, each),
        *tables,
    )
    return out[:tokens].reshape(*lead, count * width)
