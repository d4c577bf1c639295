"""Bringing chosen index keys into shared memory, and packed ones from there into registers.

Hopper's copy engine takes no list of rows, and its copies of single rows are slow to issue. So
every lane of the warpgroup copies a few words by itself (cp.async), into the tiled and swizzled
places that wgmma expects. Packed rows keep their form; lanes read from them the fragments of
wgmma's left operand.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, memref, vector
from jax.extend.mlir.dialects import math as mlir_math

from pallas_kernels._compat import llvm
from pallas_kernels.indexer.mosaic_gpu_lanes import TILE_KEYS

_WARPGROUP = 128
_SCALAR = plgpu.Layout.WG_SPLAT(())
_WGMMA = plgpu.Layout.WGMMA
# Packed elements become bfloat16 by moving bits, 2^-126 of their value; 2^126 does not fit beside
# every scale, so 2^62 is put into the keys and 2^64 into the weights.
PACKED_WEIGHT = 2.0**64
_PACKED_EXPONENT = 62


def _i32(value: int):
    return mgpu.c(value, ir.IntegerType.get_signless(32))


def _i64(value: int):
    return mgpu.c(value, ir.IntegerType.get_signless(64))


def _wide(value):
    return arith.extsi(ir.IntegerType.get_signless(64), value)


def _index(value):
    return arith.index_cast(ir.IndexType.get(), value)


def _asm(text: str, constraints: str, arguments: list, result=None):
    """Inline PTX that is neither moved nor dropped."""
    result = ir.Type.parse("!llvm.void") if result is None else result
    return llvm.inline_asm(
        result, arguments, text, constraints, asm_dialect=0, has_side_effects=True
    )


def _shared_address(ref):
    return llvm.ptrtoint(ir.IntegerType.get_signless(32), mgpu_utils.memref_ptr(ref))


def _global_address(ref):
    return llvm.ptrtoint(ir.IntegerType.get_signless(64), mgpu_utils.memref_ptr(ref))


def _copy(target, source, size: int, valid) -> None:
    """Copies `size` bytes, or writes zeros where not `valid`."""
    taken = arith.select(valid, _i32(size), _i32(0))
    kind = "cg" if size == 16 else "ca"
    _asm(f"cp.async.{kind}.shared.global [$0], [$1], {size}, $2;", "r,l,r", [target, source, taken])


def _both(*conditions):
    result = conditions[0]
    for condition in conditions[1:]:
        result = arith.andi(result, condition)
    return result


def _less(a, b):
    return arith.cmpi(arith.CmpIPredicate.slt, a, b)


def _at_least(a, b):
    return arith.cmpi(arith.CmpIPredicate.sge, a, b)


def _quotient(value, divisor: int):
    """value // divisor of a small non-negative i32."""
    return arith.divui(value, _i32(divisor))


@dataclasses.dataclass(frozen=True)
class Runs:
    """How entries are listed.

    Attributes:
        size: consecutive entries that one listed start stands for; 1, 8 or 64.
    """

    size: int

    @property
    def per_tile(self) -> int:
        """Starts that make 64 entries."""
        return TILE_KEYS // self.size

    def entry(self, starts, row, bounds):
        """(entry, valid) of row `row` of a tile whose starts are in shared memory."""
        lo, hi = (bound.registers.item() for bound in bounds)
        start = memref.load(starts, [_index(_quotient(row, self.size))])
        entry = arith.addi(start, arith.remui(row, _i32(self.size)))
        valid = _both(_at_least(start, _i32(0)), _at_least(entry, lo), _less(entry, hi))
        return entry, valid

    def entries(self, starts_smem, bounds):
        """(entries, valid) of all rows of a tile, in interpret mode."""
        starts = jnp.repeat(starts_smem[...], self.size)
        entries = starts + jnp.arange(TILE_KEYS) % self.size
        return entries, (starts >= 0) & (entries >= bounds[0]) & (entries < bounds[1])


def fetch_starts(starts_gmem, starts_smem, runs: Runs, interpret: bool) -> None:
    """Begins to copy the starts of one tile; part of the next group that is closed."""
    if interpret:
        starts_smem[...] = starts_gmem[...]
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType()))
    def copy(_, source, target):
        thread = mgpu.thread_idx()
        lane = arith.remui(thread, _i32(_WARPGROUP))
        offset = arith.muli(lane, _i32(4))
        true = arith.constant(ir.IntegerType.get_signless(1), 1)
        with mgpu.when(_less(lane, _i32(runs.per_tile))):
            _copy(
                arith.addi(_shared_address(target), offset),
                arith.addi(_global_address(source), _wide(offset)),
                4,
                true,
            )

    copy(starts_gmem, starts_smem)


def close_group(interpret: bool) -> None:
    """Ends a group of copies."""
    if interpret:
        return

    @plgpu.inline_mgpu()
    def commit(_):
        _asm("cp.async.commit_group;", "", [])

    commit()


def wait_groups(pending: int, interpret: bool) -> None:
    """Waits until at most `pending` groups are on their way; then all lanes see what arrived."""
    if interpret:
        return

    @plgpu.inline_mgpu()
    def wait(_):
        _asm(f"cp.async.wait_group {pending};", "", [])
        mgpu.commit_shared()

    wait()


def fetch_rows(keys_gmem, starts_smem, bounds, rows_smem, runs: Runs, interpret: bool) -> None:
    """Begins to copy the keys of one tile.

    Args:
        keys_gmem: bfloat16 or float8 `[G, Di]` of one batch row; a row has a multiple of 128 bytes.
        starts_smem: i32 `[64 // size]`.
        bounds: i32 scalars lo and hi; entries outside `lo <= j < hi` count as absent.
        rows_smem: `[64, Di]`, in tiles of 8 rows and 128 bytes with 128-byte swizzle; zeros where
            absent.
        runs: how entries are listed.
        interpret: run on whole arrays.
    """
    if interpret:
        _interpret_rows(keys_gmem, starts_smem, bounds, rows_smem, runs)
        return
    row_bytes = keys_gmem.shape[1] * keys_gmem.dtype.itemsize
    chunks = row_bytes // 16
    transforms = (
        plgpu.TilingTransform((8, 128 // keys_gmem.dtype.itemsize)),
        plgpu.SwizzleTransform(128),
    )

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), plgpu.RefType(), (_SCALAR, _SCALAR), plgpu.RefType(transforms))
    )
    def copy(_, keys, starts, bounds, target):
        lane = arith.remui(mgpu.thread_idx(), _i32(_WARPGROUP))
        chunk = arith.remui(lane, _i32(chunks))
        base = _shared_address(target)
        source = _global_address(keys)
        rows_at_once = _WARPGROUP // chunks
        for step in range(TILE_KEYS // rows_at_once):
            row = arith.addi(_quotient(lane, chunks), _i32(step * rows_at_once))
            entry, valid = runs.entry(starts, row, bounds)
            offset = arith.muli(_wide(entry), _i64(row_bytes))
            offset = arith.addi(offset, _wide(arith.muli(chunk, _i32(16))))
            # Tiles of 8 rows and 128 bytes follow each other; a row's eight 16-byte chunks are
            # permuted by the row's number.
            inside = arith.remui(row, _i32(8))
            number = arith.muli(_quotient(row, 8), _i32(row_bytes // 128))
            number = arith.addi(number, _quotient(chunk, 8))
            place = arith.addi(arith.muli(number, _i32(1024)), arith.muli(inside, _i32(128)))
            swizzled = arith.xori(arith.remui(chunk, _i32(8)), inside)
            place = arith.addi(place, arith.muli(swizzled, _i32(16)))
            offset = arith.select(valid, offset, _i64(0))
            _copy(arith.addi(base, place), arith.addi(source, offset), 16, valid)

    copy(keys_gmem, starts_smem, bounds, rows_smem)


def fetch_scales(
    scales_gmem, starts_smem, bounds, scales_smem, runs: Runs, interpret: bool
) -> None:
    """Begins to copy the scales, f32 `[G]`, of one tile's keys to `[64]`; 0 where absent."""
    if interpret:
        _interpret_rows(scales_gmem, starts_smem, bounds, scales_smem, runs)
        return

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), plgpu.RefType(), (_SCALAR, _SCALAR), plgpu.RefType())
    )
    def copy(_, scales, starts, bounds, target):
        lane = arith.remui(mgpu.thread_idx(), _i32(_WARPGROUP))
        target, source = _shared_address(target), _global_address(scales)
        with mgpu.when(_less(lane, _i32(TILE_KEYS))):
            entry, valid = runs.entry(starts, lane, bounds)
            offset = arith.select(valid, arith.muli(_wide(entry), _i64(4)), _i64(0))
            place = arith.addi(target, arith.muli(lane, _i32(4)))
            _copy(place, arith.addi(source, offset), 4, valid)

    copy(scales_gmem, starts_smem, bounds, scales_smem)


def fetch_packed(keys_gmem, starts_smem, bounds, rows_smem, runs: Runs, interpret: bool) -> None:
    """Begins to copy the packed keys of one tile.

    Args:
        keys_gmem: i32 `[G, words]` of one batch row: E2M1 elements, then a word of four scales. For
            runs of several entries, starts that are multiples of 4 and the array itself must lie at
            16-byte boundaries.
        starts_smem: i32 `[64 // size]`.
        bounds: i32 scalars lo and hi; entries outside `lo <= j < hi` count as absent. Of a run, all
            or nothing is copied.
        rows_smem: i32 `[64, words]`.
        runs: how entries are listed.
        interpret: run on whole arrays.
    """
    if interpret:
        _interpret_rows(keys_gmem, starts_smem, bounds, rows_smem, runs)
        return
    entries, words = keys_gmem.shape
    # Words that one lane copies at a time: rows are 68 bytes, which 16 divide only four by four.
    width = 1 if runs.size == 1 else 4

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), plgpu.RefType(), plgpu.RefType()),
    )
    def copy(_, keys, starts, target):
        lane = arith.remui(mgpu.thread_idx(), _i32(_WARPGROUP))
        target, source = _shared_address(target), _global_address(keys)
        run_words = runs.size * words

        def one(number):
            run = _quotient(number, run_words // width)
            within = arith.muli(arith.remui(number, _i32(run_words // width)), _i32(4 * width))
            start = memref.load(starts, [_index(run)])
            # The last run may reach beyond the array: what lies there is not read.
            available = arith.muli(arith.subi(_i32(entries), start), _i32(4 * words))
            valid = _both(_at_least(start, _i32(0)), _less(within, available))
            offset = arith.addi(arith.muli(_wide(start), _i64(4 * words)), _wide(within))
            offset = arith.select(valid, offset, _i64(0))
            place = arith.muli(number, _i32(4 * width))
            _copy(arith.addi(target, place), arith.addi(source, offset), 4 * width, valid)

        whole, rest = divmod(TILE_KEYS * words // width, _WARPGROUP)
        for step in range(whole):
            one(arith.addi(lane, _i32(step * _WARPGROUP)))
        if rest:
            with mgpu.when(_less(lane, _i32(rest))):
                one(arith.addi(lane, _i32(whole * _WARPGROUP)))

    copy(keys_gmem, starts_smem, rows_smem)


@dataclasses.dataclass(frozen=True)
class Copies:
    """The order in which tiles are brought in, `stages - 1` tiles ahead of their use.

    Copies that are closed as a group arrive together: the keys of one tile, and the starts of the
    tile whose keys the group after the next but `stages - 3` will bring.

    Attributes:
        stages: tiles whose keys have a place in shared memory; there are twice as many for starts.
        runs: how entries are listed.
        interpret: of the kernel.
    """

    stages: int
    runs: Runs
    interpret: bool

    def _group(self, tile, used, fetch_starts, fetch_keys) -> None:
        pl.when(tile < used)(lambda: fetch_keys(tile))
        later = tile + self.stages - 1
        pl.when(later < used)(lambda: fetch_starts(later))
        close_group(self.interpret)

    def begin(self, first, used, fetch_starts, fetch_keys) -> None:
        """Starts the copies that come before tile `first`; `used` is one past the last tile."""
        # Not a number: of such the tracer checks bounds, also where nothing is fetched.
        first = jnp.int32(first)
        for i in range(self.stages - 1):
            pl.when(first + i < used)(functools.partial(fetch_starts, first + i))
        close_group(self.interpret)
        wait_groups(0, self.interpret)
        for i in range(self.stages - 1):
            self._group(first + i, used, fetch_starts, fetch_keys)

    def advance(self, tile, used, fetch_starts, fetch_keys) -> None:
        """Waits for `tile` and starts the next copies."""
        wait_groups(self.stages - 2, self.interpret)
        self._group(tile + self.stages - 1, used, fetch_starts, fetch_keys)


def permute_channels(q: jax.Array) -> jax.Array:
    """Brings channels `[.., 128]` into the order in which `unpack_rows` delivers them."""
    parts = q.reshape(*q.shape[:-1], 4, 4, 2, 4)  # scale group, word, half of the word, nibble
    rest = tuple(range(q.ndim - 1))
    parts = parts.transpose(*rest, *(q.ndim - 1 + i for i in (1, 3, 0, 2)))
    return parts.reshape(q.shape)


def unpack_rows(rows_smem, interpret: bool) -> jax.Array:
    """Packed keys of a tile as wgmma's left operand: bfloat16 `[64, 128]`, 2^-64 of their values.

    The channels are those that `permute_channels` permutes: lane c of a row's four lanes takes the
    16 bytes of scale group c, and nibbles n and n + 4 of a word become a pair.
    """
    if interpret:
        nibbles = jnp.arange(8) * 4
        codes = ((rows_smem[:, :16][..., None] >> nibbles) & 15).reshape(TILE_KEYS, 128)
        magnitude = codes & 7
        value = jnp.where(
            magnitude < 2,
            magnitude * 0.5,
            jnp.exp2(magnitude // 2 - 1.0) * (1 + 0.5 * (magnitude & 1)),
        )
        value = jnp.where(codes & 8, -value, value)
        exponents = (rows_smem[:, 16:] >> (jnp.arange(4) * 8)) & 255
        scale = jnp.where(exponents < 255, jnp.exp2(exponents - 191.0), jnp.nan)
        value = value * jnp.repeat(scale, 32, axis=1)
        return permute_channels(value).astype(jnp.bfloat16)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(),),
        return_type=plgpu.ShapeDtypeStruct((TILE_KEYS, 128), jnp.bfloat16, layout=_WGMMA),
    )
    def unpack(_, words):
        i32 = ir.IntegerType.get_signless(32)
        pair = ir.VectorType.get((2,), ir.BF16Type.get())
        lane = arith.remui(mgpu.thread_idx(), _i32(_WARPGROUP))
        column = arith.remui(lane, _i32(4))
        first = arith.addi(
            arith.muli(_quotient(lane, 32), _i32(16)), _quotient(arith.remui(lane, _i32(32)), 4)
        )
        layout = mgpu.WGMMA_LAYOUT
        out = np.empty(layout.registers_shape((TILE_KEYS, 128)), dtype=object)
        flat = out.reshape(16, 2)
        for half in range(2):
            row = arith.addi(first, _i32(8 * half))
            scale = memref.load(words, [_index(row), mgpu.c(16, ir.IndexType.get())])
            scale = arith.shrui(scale, arith.muli(column, _i32(8)))
            scale = arith.andi(scale, _i32(255))
            scale = arith.minui(arith.addi(scale, _i32(_PACKED_EXPONENT)), _i32(255))
            scale = arith.muli(scale, _i32(0x00800080))
            for i in range(4):
                at = arith.addi(arith.muli(column, _i32(4)), _i32(i))
                word = memref.load(words, [_index(row), _index(at)])
                upper = arith.shrui(word, _i32(8))
                for x in range(4):
                    # A nibble's sign and magnitude go to places 6 bits apart. A product with two
                    # bits makes both copies, and runs beside the masks on another pipe.
                    source, left = (word, 12 - 4 * x) if x < 2 else (upper, 20 - 4 * x)
                    nibbles = arith.andi(source, _i32(0x000F000F << (12 - left)))
                    copies = arith.muli(nibbles, _i32((1 << left) + (1 << (left - 6))))
                    both = arith.andi(copies, _i32(0x81C081C0 - 2**32))
                    product = llvm.inline_asm(
                        i32, [both, scale], "mul.rn.bf16x2 $0, $1, $2;", "=r,r,r", asm_dialect=0
                    )
                    flat[4 * i + x, half] = mgpu_utils.bitcast(product, pair)
        return mgpu.FragmentedArray(_registers=out, _layout=layout, _is_signed=None)

    return unpack(rows_smem)


def store_scores(
    accumulator: jax.Array,
    w: jax.Array,
    starts_smem,
    bounds,
    scales_smem,
    absent: float,
    ref,
    runs: Runs,
    interpret: bool,
) -> None:
    """Writes the scores of a tile's entries for one query.

    Args:
        accumulator: f32 `[64, Hi]`, dot products.
        w: f32 `[Hi]`, in the accumulator's column layout.
        starts_smem: i32 `[64 // size]`.
        bounds: i32 scalars lo and hi; entries outside `lo <= j < hi` count as absent.
        scales_smem: f32 `[64]`, factors of the scores, or None.
        absent: score of absent entries.
        ref: f32 `[64]` in global memory.
        runs: how entries are listed.
        interpret: run on whole arrays.
    """
    heads = accumulator.shape[1]
    scaled = scales_smem is not None
    if interpret:
        scores = (jnp.maximum(accumulator, 0) * w).sum(axis=1)
        if scaled:
            scores = scores * scales_smem[...]
        _, valid = runs.entries(starts_smem, bounds)
        ref[...] = jnp.where(valid, scores, absent)
        return

    @plgpu.inline_mgpu(
        arg_types=(
            _WGMMA,
            _WGMMA.reduce(0),
            plgpu.RefType(),
            (_SCALAR, _SCALAR),
            plgpu.RefType(),
            *[plgpu.RefType()] * scaled,
        )
    )
    def store(_, accumulator, w, starts, bounds, ref, scales=None):
        f32 = ir.F32Type.get()
        lane = arith.remui(mgpu.thread_idx(), _i32(_WARPGROUP))
        first = arith.addi(
            arith.muli(_quotient(lane, 32), _i32(16)), _quotient(arith.remui(lane, _i32(32)), 4)
        )
        writes = arith.cmpi(arith.CmpIPredicate.eq, arith.remui(lane, _i32(4)), _i32(0))
        dots = accumulator.registers.reshape(heads // 8, 2)
        weights = w.registers.reshape(-1)
        for half in range(2):
            total = mgpu.c(0.0, f32)
            for block in range(heads // 8):
                for i in range(2):
                    at = dict(dynamic_position=[], static_position=ir.DenseI64ArrayAttr.get([i]))
                    dot = vector.extract(dots[block, half], **at)
                    weight = arith.mulf(vector.extract(weights[block], **at), mgpu.c(0.5, f32))
                    dot = arith.addf(dot, mlir_math.absf(dot))
                    total = mlir_math.fma(dot, weight, total)
            for distance in (2, 1):  # the order of the dense kernel, for equal sums
                total = arith.addf(total, mgpu_utils.shfl_bfly(total, distance))
            row = arith.addi(first, _i32(8 * half))
            _, valid = runs.entry(starts, row, bounds)
            if scaled:
                total = arith.mulf(total, memref.load(scales, [_index(row)]))
            score = arith.select(valid, total, mgpu.c(absent, f32))
            with mgpu.when(writes):
                memref.store(score, ref, [_index(row)])

    store(accumulator, w, starts_smem, bounds, ref, *[scales_smem] * scaled)


def _interpret_rows(keys_gmem, starts_smem, bounds, rows_smem, runs):
    entries, valid = runs.entries(starts_smem, bounds)

    def one(row, _):
        key = keys_gmem[jnp.where(valid[row], entries[row], 0)]
        rows_smem[row] = jnp.where(valid[row], key, jnp.zeros_like(key))
        return _

    jax.lax.fori_loop(0, TILE_KEYS, one, 0)


def store_absent(absent: float, ref, interpret: bool) -> None:
    """Writes `absent` to f32 `[64]` in global memory."""
    if interpret:
        ref[...] = jnp.full(TILE_KEYS, absent, jnp.float32)
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def store(_, ref):
        lane = arith.remui(mgpu.thread_idx(), _i32(_WARPGROUP))
        with mgpu.when(_less(lane, _i32(TILE_KEYS))):
            memref.store(mgpu.c(absent, ir.F32Type.get()), ref, [_index(lane)])

    store(ref)


def add_rows(sums: jax.Array, starts_smem, bounds, ref, runs: Runs) -> None:
    """Adds f32 `[64, Di]`, one row per entry of a tile, to the entries of `ref`, f32 `[G, Di]`."""
    dim = sums.shape[1]

    @plgpu.inline_mgpu(arg_types=(_WGMMA, plgpu.RefType(), (_SCALAR, _SCALAR), plgpu.RefType()))
    def add(_, sums, starts, bounds, ref):
        lane = arith.remui(mgpu.thread_idx(), _i32(_WARPGROUP))
        first = arith.addi(
            arith.muli(_quotient(lane, 32), _i32(16)), _quotient(arith.remui(lane, _i32(32)), 4)
        )
        column = arith.muli(arith.remui(lane, _i32(4)), _i32(8))
        base = _global_address(ref)
        values = sums.registers.reshape(dim // 8, 2)
        for half in range(2):
            row = arith.addi(first, _i32(8 * half))
            entry, valid = runs.entry(starts, row, bounds)
            place = arith.addi(arith.muli(_wide(entry), _i64(4 * dim)), _wide(column))
            place = arith.addi(base, place)
            with mgpu.when(valid):
                for block in range(dim // 8):
                    pair = [
                        vector.extract(
                            values[block, half],
                            dynamic_position=[],
                            static_position=ir.DenseI64ArrayAttr.get([i]),
                        )
                        for i in range(2)
                    ]
                    target = arith.addi(place, _i64(32 * block))
                    _asm("red.global.add.v2.f32 [$0], {$1, $2};", "l,f,f", [target, *pair])

    add(sums, starts_smem, bounds, ref)
