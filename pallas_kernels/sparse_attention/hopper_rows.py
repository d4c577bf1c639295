"""Gathering rows into swizzled shared memory on Hopper, by the 128 threads of a warpgroup.

The copy engine cannot gather single rows into the tiled, swizzled layout that wgmma reads, so
threads do: bfloat16 rows by 16-byte asynchronous copies, FP4 rows through registers, where they are
dequantised (E2M1 x E4M3 has at most six significant bits: exact in bfloat16).

A tile has 64 rows, and a quarter of its channels is one unit `[64, D / 4]` of shared memory, tiled
(8, 64) with a 128-byte swizzle: row r, channel c of it lies at

    (r // 8) * band + (c // 64) * 1024 + (r % 8) * 128 + ((c % 64 // 8) ^ (r % 8)) * 16,

band = D / 4 / 64 * 1024 bytes. Warp w copies rows 16 w .. 16 w + 15, `32 / per` of them a step,
`per` lanes to a row. Indices travel as i32[128]: thread t has that of row (t // 32) * 16 + t % 16.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith

from pallas_kernels._compat import llvm, nvvm
from pallas_kernels.sparse_attention import reference

TILE = 64
PARTS = 4  # units of a tile
# Parts in the order in which they are filled and read: whoever releases them in pairs (0, 1) and
# (2, 3) releases the first of each pair first.
ORDER = (0, 2, 1, 3)
SWIZZLED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))

_SCALAR = plgpu.Layout.WG_SPLAT(())
_NEGATIVE_INFINITY = 0xFF800000
# Twice 2^120 in bfloat16: what an E4M3 code, moved to the bits of a bfloat16, lacks in exponent.
_E4M3_BIAS = 0x7B807B80
# Eight E2M1 codes of $4, times the pair of equal scales $5, to four pairs of bfloat16. Permutations
# look up the upper and lower bytes of four magnitudes at a time (0, .5, 1, 1.5 | 2, 3, 4, 6), put
# signs onto the upper ones, and interleave the two.
_DEQUANTISE = """{
.reg .b32 m, u, h0, h1, l0, l1, s, x0, x1, x2, x3;
and.b32 m, $4, 0x77777777;
shr.u32 u, m, 16;
prmt.b32 h0, 0x3F3F3F00, 0x40404040, m;
prmt.b32 l0, 0xC0800000, 0xC0804000, m;
prmt.b32 h1, 0x3F3F3F00, 0x40404040, u;
prmt.b32 l1, 0xC0800000, 0xC0804000, u;
shl.b32 u, $4, 4;
prmt.b32 s, u, $4, 0xD9C8;
lop3.b32 h0, s, 0x80808080, h0, 0xEA;
prmt.b32 s, u, $4, 0xFBEA;
lop3.b32 h1, s, 0x80808080, h1, 0xEA;
prmt.b32 x0, l0, h0, 0x5140;
prmt.b32 x1, l0, h0, 0x7362;
prmt.b32 x2, l1, h1, 0x5140;
prmt.b32 x3, l1, h1, 0x7362;
mul.rn.bf16x2 $0, x0, $5;
mul.rn.bf16x2 $1, x1, $5;
mul.rn.bf16x2 $2, x2, $5;
mul.rn.bf16x2 $3, x3, $5;
}"""


def _i32() -> ir.Type:
    return ir.IntegerType.get_signless(32)


def _i64() -> ir.Type:
    return ir.IntegerType.get_signless(64)


def _c(value: int) -> ir.Value:
    """An i32 constant, given as any value of 32 bits."""
    return mgpu.c(value - (1 << 32) if value >= 1 << 31 else value, _i32())


def _wide(value: ir.Value | int) -> ir.Value:
    return mgpu.c(value, _i64()) if isinstance(value, int) else arith.extui(_i64(), value)


def _asm(ptx: str, *args: ir.Value, out=None, pure: bool = False):
    """Inline PTX; in the order of the program unless `pure`."""
    return mgpu.utils.inline_ptx(ptx, *args, result_types=out, has_side_effects=not pure)


def _global(ref: ir.Value) -> ir.Value:
    return llvm.ptrtoint(_i64(), mgpu.utils.memref_ptr(ref))


def _shared(ref: ir.Value) -> ir.Value:
    return llvm.ptrtoint(_i32(), mgpu.utils.memref_ptr(ref))


def _thread() -> ir.Value:
    return arith.andi(mgpu.thread_idx(), _c(127))


def _row_of(thread: ir.Value) -> ir.Value:
    """The row whose index a thread holds."""
    return arith.ori(arith.shli(arith.shrui(thread, _c(5)), _c(4)), arith.andi(thread, _c(15)))


def _strided(count: int, vector: int) -> plgpu.Layout:
    """Layout of i32[count * vector * 128]: `count` registers of `vector` words a thread."""
    return plgpu.Layout.WG_STRIDED((count * vector * 128,), vec_size=vector)


def _type(count: int, vector: int) -> plgpu.ShapeDtypeStruct:
    shape = (count * vector * 128,)
    return plgpu.ShapeDtypeStruct(shape, jnp.int32, layout=_strided(count, vector))


def _pack(words: list[list[ir.Value]]) -> mgpu.FragmentedArray:
    """One register per list of words, as `_type` describes it."""
    registers = []
    for row in words:
        register = llvm.mlir_undef(ir.VectorType.get((len(row),), _i32()))
        for i, word in enumerate(row):
            register = llvm.insertelement(register, word, _c(i))
        registers.append(register)
    layout = mgpu.WGStridedFragLayout((len(words) * len(words[0]) * 128,), len(words[0]))
    return mgpu.FragmentedArray(
        _registers=np.array(registers, dtype=object), _layout=layout, _is_signed=True
    )


def _word(array: mgpu.FragmentedArray, register: int, at: int = 0) -> ir.Value:
    return llvm.extractelement(array.registers[register], _c(at))


def _valid(index: ir.Value, count: int) -> ir.Value:
    return arith.cmpi(arith.CmpIPredicate.ult, index, _c(count))


class _Lanes:
    """Which rows of a unit and which part of them a thread copies.

    Attributes:
        steps: rows of a thread.
        column: which of the `per` parts of a row.
    """

    def __init__(self, per: int, dim: int):
        self._rows = 32 // per
        self._band = dim // PARTS // 64 * 1024
        self.steps = 16 // self._rows
        thread = _thread()
        lane = arith.andi(thread, _c(31))
        self._warp = arith.shrui(thread, _c(5))
        self.column = arith.andi(lane, _c(per - 1))
        self._row = arith.divui(lane, _c(per))

    def index(self, indices: ir.Value, step: int) -> ir.Value:
        """Index of the row of a step, from what the lanes of the warp hold."""
        source = arith.addi(self._row, _c(step * self._rows))
        return nvvm.shfl_sync(_c(0xFFFFFFFF), indices, source, _c(0x1F), nvvm.ShflKind.idx)

    def start(self, unit: ir.Value, block: ir.Value, chunk: ir.Value) -> ir.Value:
        """Address of 16-byte `chunk` (0 to 7) of a block of 64 channels, in the first row."""
        at = arith.addi(unit, arith.muli(self._warp, _c(2 * self._band)))
        at = arith.addi(at, arith.shli(block, _c(10)))
        at = arith.addi(at, arith.shli(self._row, _c(7)))
        return arith.addi(at, arith.shli(arith.xori(chunk, self._row), _c(4)))

    def at(self, start: ir.Value, step: int) -> ir.Value:
        """The same chunk in the row of a step: all but the swizzle is a constant further."""
        row = step * self._rows
        fixed = (row % 8) * 128 + row // 8 * self._band
        return arith.addi(arith.xori(start, _c((row % 8) << 4)), _c(fixed))


def indices_of(ref) -> jax.Array:
    """Indices i32[128] of the 64 rows named by i32[64] in global memory."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=_type(1, 1))
    def load(_, ref):
        offset = arith.shli(_row_of(_thread()), _c(2))
        at = arith.addi(_global(ref), _wide(offset))
        return _pack([[_asm("ld.global.nc.b32 $0, [$1];", at, out=_i32())]])

    return load(ref)


def indices_from(lo: jax.Array, hi: jax.Array) -> jax.Array:
    """Indices i32[128] of the 64 rows from `lo` on, -1 from `hi` on."""

    @plgpu.inline_mgpu(arg_types=(_SCALAR, _SCALAR), return_type=_type(1, 1))
    def count(_, lo, hi):
        row = arith.addi(lo.registers.item(), _row_of(_thread()))
        inside = arith.cmpi(arith.CmpIPredicate.slt, row, hi.registers.item())
        return _pack([[arith.select(inside, row, _c(0xFFFFFFFF))]])

    return count(lo, hi)


def write_bias(ref, indices: jax.Array, count: int) -> None:
    """Writes f32[64] to shared memory: 0 for rows with an index in [0, count), else -inf."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), _strided(1, 1)))
    def write(_, ref, indices):
        bias = arith.select(_valid(_word(indices, 0), count), _c(0), _c(_NEGATIVE_INFINITY))
        # Two threads hold each index, and both write.
        at = arith.addi(_shared(ref), arith.shli(_row_of(_thread()), _c(2)))
        _asm("st.shared.b32 [$0], $1;", at, bias)

    write(ref, indices)


def _clamped(indices: mgpu.FragmentedArray, count: int) -> ir.Value:
    """The index that a thread holds; row 0, which its bias hides, where it is none."""
    index = _word(indices, 0)
    return arith.select(_valid(index, count), index, _c(0))


def start_copy(rows, indices: jax.Array, unit, part: int, dim: int, count: int) -> None:
    """Starts copying one part of 64 bfloat16 rows `[count, dim]` into a unit; one group."""

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), _strided(1, 1), plgpu.RefType(SWIZZLED)),
    )
    def copy(_, rows, indices, unit):
        row_bytes = 2 * dim
        lanes = _Lanes(row_bytes // PARTS // 16, dim)
        index = _clamped(indices, count)
        offset = arith.addi(arith.shli(lanes.column, _c(4)), _c(part * row_bytes // PARTS))
        source = arith.addi(_global(rows), _wide(offset))
        block, chunk = arith.shrui(lanes.column, _c(3)), arith.andi(lanes.column, _c(7))
        start = lanes.start(_shared(unit), block, chunk)
        for step in range(lanes.steps):
            row = arith.muli(_wide(lanes.index(index, step)), _wide(row_bytes))
            _asm(
                "cp.async.cg.shared.global.L2::128B [$0], [$1], 16;",
                lanes.at(start, step),
                arith.addi(source, row),
            )
        _asm("cp.async.commit_group;")

    copy(rows, indices, unit)


def wait_copy(pending: int) -> None:
    """Waits until at most `pending` groups of the thread's copies are under way."""

    @plgpu.inline_mgpu()
    def wait(_):
        _asm(f"cp.async.wait_group {pending};")

    wait()


def _fp4_lanes(dim: int) -> tuple[int, int]:
    """Lanes to a part of a packed row, 16 channels each, and steps."""
    per = dim // PARTS // 16
    return per, 16 // (32 // per)


def load_fp4(rows, indices: jax.Array, dim: int, count: int):
    """Loads 64 packed rows `[count, dim / 2 + dim / 16]` into registers.

    Returns:
        For each part (words, scales), to be given to `store_fp4`.
    """
    width = dim // 2 + dim // 16
    per, steps = _fp4_lanes(dim)
    types = (_type(steps, 2), _type(steps, 1))

    # Not through the read-only path: such loads may be moved ahead of the fences of an earlier
    # tile, which would then wait for them.
    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), _strided(1, 1)), return_type=(types,) * PARTS)
    def load(_, rows, indices):
        lanes = _Lanes(per, dim)
        index = _clamped(indices, count)
        base = _global(rows)
        codes = arith.addi(base, _wide(arith.shli(lanes.column, _c(3))))
        scales = arith.addi(base, _wide(arith.addi(lanes.column, _c(dim // 2))))
        result = tuple(([], []) for _ in range(PARTS))
        for step in range(steps):
            row = arith.muli(_wide(lanes.index(index, step)), _wide(width))
            for part, (words, bytes_) in enumerate(result):
                at = arith.addi(arith.addi(codes, row), _wide(part * per * 8))
                ptx = "ld.global.L1::no_allocate.v2.b32 {$0, $1}, [$2];"
                words.append(list(_asm(ptx, at, out=[_i32()] * 2)))
                at = arith.addi(arith.addi(scales, row), _wide(part * per))
                bytes_.append([_asm("ld.global.L1::no_allocate.u8 $0, [$1];", at, out=_i32())])
        return tuple((_pack(words), _pack(bytes_)) for words, bytes_ in result)

    return load(rows, indices)


def store_fp4(unit, part, dim: int) -> None:
    """Dequantises one part of what `load_fp4` returned into a unit."""
    per, steps = _fp4_lanes(dim)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(SWIZZLED), (_strided(steps, 2), _strided(steps, 1)))
    )
    def store(_, unit, part):
        words, scales = part
        lanes = _Lanes(per, dim)
        # A lane has 16 channels, two chunks. Lanes of odd blocks write them in the other order, so
        # that eight neighbouring lanes write to all banks.
        block = arith.shrui(lanes.column, _c(2))
        odd = arith.andi(block, _c(1))
        swap = arith.cmpi(arith.CmpIPredicate.ne, odd, _c(0))
        chunk = arith.addi(arith.shli(arith.andi(lanes.column, _c(3)), _c(1)), odd)
        first = lanes.start(_shared(unit), block, chunk)
        second = arith.xori(first, _c(16))
        for step in range(steps):
            a, b = _word(words, step, 0), _word(words, step, 1)
            twice = arith.muli(_word(scales, step), _c((1 << 4) | (1 << 20)))
            scale = _asm("mul.rn.bf16x2 $0, $1, $2;", twice, _c(_E4M3_BIAS), out=_i32(), pure=True)
            for word, start in (
                (arith.select(swap, b, a), first),
                (arith.select(swap, a, b), second),
            ):
                pairs = _asm(_DEQUANTISE, word, scale, out=[_i32()] * 4, pure=True)
                at = lanes.at(start, step)
                _asm("st.shared.v4.b32 [$0], {$1, $2, $3, $4};", at, *pairs)

    store(unit, part)


class Tile:
    """One stage of shared memory on its way through the pipeline.

    Attributes:
        units: `[PARTS, 64, D / PARTS]`, swizzled.
        bias: f32 `[64]`: 0, or -inf where there is no key.
        wait_free: waits until a part may be overwritten.
        set_full: tells that a part is there.
    """

    def __init__(self, units, bias, wait_free: Callable[[int], None], set_full):
        self.units = units
        self.bias = bias
        self.wait_free = wait_free
        self._set_full = set_full

    def set_full(self, part: int) -> None:
        """Makes what this warpgroup wrote visible to wgmma, and tells."""
        plgpu.commit_smem()
        self._set_full(part)

    def copy(self, rows, indices: jax.Array, dim: int, count: int) -> None:
        """Fills the tile with bfloat16 rows."""
        for part in ORDER:
            self.wait_free(part)
            start_copy(rows, indices, self.units.at[part], part, dim, count)
        write_bias(self.bias, indices, count)
        for pending, part in zip(reversed(range(PARTS)), ORDER, strict=True):
            wait_copy(pending)
            self.set_full(part)

    def dequantise(self, data, indices: jax.Array, dim: int, count: int) -> None:
        """Fills the tile with what `load_fp4` returned."""
        for part in ORDER:
            self.wait_free(part)
            if part == ORDER[0]:
                write_bias(self.bias, indices, count)
            store_fp4(self.units.at[part], data[part], dim)
            self.set_full(part)

    def interpret(self, rows, fmt: str, indices: jax.Array, dim: int, count: int) -> None:
        """Fills the tile where there is no GPU; indices are i32[64]."""
        for part in ORDER:
            self.wait_free(part)
        valid = (indices >= 0) & (indices < count)
        chosen = reference.values(rows[...], fmt, jnp.bfloat16)[jnp.where(valid, indices, 0)]
        self.bias[...] = jnp.where(valid, 0.0, -jnp.inf)
        for part in ORDER:
            width = dim // PARTS
            self.units[part] = chosen[:, part * width : (part + 1) * width]
            self.set_full(part)


def differs_from_one(rows: jax.Array) -> jax.Array:
    """Whether any of a warp's rows of f32[64], in the layout of wgmma's rows, is not 1."""
    layout = plgpu.Layout.WGMMA.reduce(1)
    result = plgpu.ShapeDtypeStruct((), jnp.int32, layout=_SCALAR)

    @plgpu.inline_mgpu(arg_types=(layout,), return_type=result)
    def vote(_, rows):
        one = mgpu.c(1.0, ir.F32Type.get())
        mine = mgpu.c(0, ir.IntegerType.get_signless(1))
        for value in rows.registers.flat:
            if isinstance(value.type, ir.VectorType):
                value = llvm.extractelement(value, _c(0))
            mine = arith.ori(mine, arith.cmpf(arith.CmpFPredicate.UNE, value, one))
        any_ = _asm(
            "{.reg .pred p, q; setp.ne.u32 p, $1, 0; vote.sync.any.pred q, p, 0xffffffff;"
            " selp.u32 $0, 1, 0, q;}",
            arith.extui(_i32(), mine),
            out=_i32(),
        )
        return mgpu.FragmentedArray.splat(any_, (), is_signed=True)

    return vote(rows)
