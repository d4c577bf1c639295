"""Operations of one warpgroup that Pallas's Mosaic GPU language lacks.

Arrays are one-dimensional, in the strided layout: thread t of the 128 holds the elements
`(row * 128 + t) * vec + lane_element` of every row. Each operation has a second form in plain JAX,
for interpret mode, which proves the logic around these operations; their own code is proved on a
GPU, and compiled without one in the tests.

Kernels that use them are compiled with lane semantics and without automatic barriers
(`COMPILER_PARAMS`): a thread finds in shared memory what it stored itself, and after `sync` what
others stored.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, scf, vector

from pallas_kernels._compat import llvm

THREADS = 128
COMPILER_PARAMS = plgpu.CompilerParams(
    lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
)
# Words of shared memory through which the warps tell each other what they counted: two turns of at
# most eight words a warp.
SCRATCH_WORDS = 2 * 8 * 4

_LANES, _WARPS = 32, 4
_SCALAR = plgpu.Layout.WG_SPLAT(())


def _layout(size: int, vec: int) -> plgpu.Layout:
    return plgpu.Layout.WG_STRIDED((size,), vec_size=vec)


@dataclasses.dataclass(frozen=True)
class Warpgroup:
    """The operations.

    Those that take a `turn` go through `scratch`: it is 0 or 1, and differs from that of the call
    before unless a `sync` lies between.

    Attributes:
        scratch: reference to `SCRATCH_WORDS` words of shared memory of this warpgroup's own.
        interpreted: whether the kernel runs in interpret mode.
    """

    scratch: jax.Array
    interpreted: bool

    def iota(self, size: int, vec: int) -> jax.Array:
        """i32 `[size]`: 0, 1, 2, ..."""
        if self.interpreted:
            return lax.iota(jnp.int32, size)
        return plgpu.broadcasted_iota(jnp.int32, (size,), 0, layout=_layout(size, vec))

    def full(self, size: int, vec: int, value: int) -> jax.Array:
        """i32 `[size]` of one value."""
        array = jnp.full((size,), value, jnp.int32)
        return array if self.interpreted else plgpu.layout_cast(array, _layout(size, vec))

    def load(self, ref, vec: int) -> jax.Array:
        """Loads a one-dimensional slice of shared or main memory, `vec` elements at a time."""
        if self.interpreted:
            return ref[...]
        (size,) = ref.shape
        signed = True if jnp.issubdtype(ref.dtype, jnp.integer) else None

        @plgpu.inline_mgpu(
            arg_types=(plgpu.RefType(),),
            return_type=plgpu.ShapeDtypeStruct((size,), ref.dtype, layout=_layout(size, vec)),
        )
        def load(_, ref):
            return mgpu.FragmentedArray.load_strided(ref, is_signed=signed, vec_size=vec)

        return load(ref)

    def store(self, ref, value: jax.Array, vec: int) -> None:
        """Stores an array whose layout has this `vec`."""
        if self.interpreted:
            ref[...] = value
            return

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), _layout(value.shape[0], vec)))
        def store(_, ref, value):
            value.store_untiled(ref)

        store(ref, value)

    def block_max(self, array: jax.Array, block: int) -> jax.Array:
        """The largest of every `block` elements; NaN loses against anything.

        Args:
            array: f32 `[size * block]`, its layout's `vec` being `block`.
            block: elements of a block.

        Returns:
            f32 `[size]`, its layout's `vec` being 1.
        """
        size = array.shape[0] // block
        if self.interpreted:
            blocks = array.reshape(size, block)
            return jnp.where(jnp.isnan(blocks), -jnp.inf, blocks).max(axis=1)

        @plgpu.inline_mgpu(
            arg_types=(_layout(size * block, block),),
            return_type=plgpu.ShapeDtypeStruct((size,), jnp.float32, layout=_layout(size, 1)),
        )
        def block_max(_, array):
            registers = [
                vector.broadcast(
                    ir.VectorType.get((1,), ir.F32Type.get()),
                    functools.reduce(arith.maxnumf, _elements(register)),
                )
                for register in array.registers.flat
            ]
            return mgpu.FragmentedArray(
                _registers=np.array(registers, dtype=object),
                _layout=_layout(size, 1).to_mgpu(),
                _is_signed=None,
            )

        return block_max(array)

    def sync(self) -> None:
        """Waits for the other threads; their stores to shared memory are seen afterwards."""
        if self.interpreted:
            return

        @plgpu.inline_mgpu()
        def sync(_):
            mgpu_utils.warpgroup_barrier()

        sync()

    def sum(self, array: jax.Array, turn: jax.Array, vec: int) -> jax.Array:
        """The sum of an i32 array."""
        if self.interpreted:
            return jnp.sum(array)
        return self._reduce("add", array, turn, vec)

    def max(self, array: jax.Array, turn: jax.Array, vec: int) -> jax.Array:
        """The largest element of an i32 array."""
        if self.interpreted:
            return jnp.max(array)
        return self._reduce("max", array, turn, vec)

    def _reduce(self, kind, array, turn, vec):
        @plgpu.inline_mgpu(
            arg_types=(_layout(array.shape[0], vec), plgpu.RefType(), _SCALAR),
            return_type=plgpu.ShapeDtypeStruct((), jnp.int32, layout=_SCALAR),
        )
        def reduce(_, array, scratch, turn):
            values = [value for register in array.registers.flat for value in _elements(register)]
            total = _reduce(kind, values, _shared_address(scratch), turn.registers.item())
            return mgpu.FragmentedArray.splat(total, (), is_signed=True)

        return reduce(array, self.scratch, turn)

    def compress(
        self,
        mask: jax.Array,
        arrays: Sequence[jax.Array],
        refs: Sequence[jax.Array],
        offset: jax.Array,
        turn: jax.Array,
        vec: int,
    ) -> jax.Array:
        """Appends the elements that a mask picks, in their order.

        Every thread has loaded what it needs of the stored-to places before any is overwritten.
        Their new content is seen after `sync`.

        Args:
            mask: boolean `[size]`.
            arrays: of 32-bit elements, `[size]`.
            refs: one for each of `arrays`, in shared memory.
            offset: i32, where the first picked element goes.
            turn: i32.
            vec: of the layout of mask and arrays.

        Returns:
            i32, one past where the last picked element went.
        """
        if self.interpreted:
            places = offset + jnp.cumsum(mask.astype(jnp.int32)) - 1
            for array, ref in zip(arrays, refs, strict=True):
                places = jnp.where(mask, places, ref.shape[0])
                ref[...] = ref[...].at[places].set(array, mode="drop")
            return offset + mask.astype(jnp.int32).sum()
        layout = _layout(mask.shape[0], vec)

        @plgpu.inline_mgpu(
            arg_types=(
                layout,
                [layout] * len(arrays),
                [plgpu.RefType()] * len(refs),
                _SCALAR,
                plgpu.RefType(),
                _SCALAR,
            ),
            return_type=plgpu.ShapeDtypeStruct((), jnp.int32, layout=_SCALAR),
        )
        def compress(_, mask, arrays, refs, offset, scratch, turn):
            end = _compress(
                [_elements(register) for register in mask.registers.flat],
                [[_elements(register) for register in a.registers.flat] for a in arrays],
                [_shared_address(ref) for ref in refs],
                offset.registers.item(),
                _shared_address(scratch),
                turn.registers.item(),
            )
            return mgpu.FragmentedArray.splat(end, (), is_signed=True)

        return compress(mask, list(arrays), list(refs), offset, self.scratch, turn)


def _compress(mask, arrays, addresses, offset, scratch, turn):
    """Emits `Warpgroup.compress` for one thread.

    Args:
        mask: one list of bits for each row of the layout.
        arrays: per array, one list of values for each row.
        addresses: of the places that the arrays go to, in bytes.
        offset: in elements.
        scratch: address, in bytes.
        turn: 0 or 1.

    Returns:
        The offset after the last element.
    """
    i32 = _i32()
    rows, vec = len(mask), len(mask[0])
    counts = [_sum([arith.extui(i32, bit) for bit in bits]) for bits in mask]
    # Several rows are counted in one word: a warp has at most 32 * vec elements of each, so that
    # eight bits hold the sums of one row over a warp where vec <= 4.
    bits = 8 if _LANES * vec < 256 else 16
    fields = 32 // bits
    upto = [
        _warp_scan(_sum([_shift_left(c, n * bits) for n, c in enumerate(counts[w : w + fields])]))
        for w in range(0, rows, fields)
    ]
    warp, four_warps = _exchange(upto, scratch, turn)

    starts = []
    for n, (word, four) in enumerate(zip(upto, four_warps, strict=True)):
        before = [
            arith.select(
                arith.cmpi(arith.CmpIPredicate.ugt, warp, _constant(w)), four[w], _constant(0)
            )
            for w in range(_WARPS - 1)
        ]
        # Sums over warps take more bits: pairs of fields, 16 bits apart.
        everyone, earlier = (
            [_sum([_pair(word, half, bits) for word in parts]) for half in range(16 // bits)]
            for parts in (four, before)
        )
        for field in range(min(fields, rows - n * fields)):
            half, at = field % (16 // bits), 16 * (field // (16 // bits))
            count = counts[n * fields + field]
            here = arith.subi(_field(word, field * bits, bits), count)
            starts.append(_sum([offset, _field(earlier[half], at, 16), here]))
            offset = arith.addi(offset, _field(everyone[half], at, 16))

    for row in range(rows):
        any_picked = arith.cmpi(arith.CmpIPredicate.ne, counts[row], _constant(0))
        with ir.InsertionPoint(scf.IfOp(any_picked).then_block):
            at = _shift_left(starts[row], 2)
            for element in range(vec):
                picked = mask[row][element]
                for array, address in zip(arrays, addresses, strict=True):
                    value = array[row][element]
                    value = value if value.type == i32 else arith.bitcast(i32, value)
                    _store_shared(arith.addi(address, at), value, picked)
                at = arith.addi(at, _shift_left(arith.extui(i32, picked), 2))
            scf.yield_([])
    return offset


def _reduce(kind, values, scratch, turn):
    """Emits `Warpgroup.sum` or `max` for one thread: of its values and those of all others."""
    combine = {"add": arith.addi, "max": arith.maxsi}[kind]
    mine = functools.reduce(combine, values)
    mine = _asm(_i32(), f"redux.sync.{kind}.s32 $0, $1, -1;", "=r,r", mine)
    _, (four,) = _exchange([mine], scratch, turn)
    return functools.reduce(combine, four)


def _exchange(words, scratch, turn):
    """Every warp tells every other what its last lane has.

    Args:
        words: of this thread, eight at most.
        scratch: address of `SCRATCH_WORDS`, in bytes.
        turn: 0 or 1.

    Returns:
        The number of this warp, and per word those of the four warps.
    """
    assert len(words) <= 8, "SCRATCH_WORDS is too small"
    address = arith.addi(scratch, _shift_left(turn, 7))
    thread = _asm(_i32(), "mov.u32 $0, %tid.x;", "=r")
    lane = arith.andi(thread, _constant(_LANES - 1))
    warp = arith.andi(arith.shrui(thread, _constant(5)), _constant(_WARPS - 1))
    is_last = arith.cmpi(arith.CmpIPredicate.eq, lane, _constant(_LANES - 1))
    mine = arith.addi(address, _shift_left(warp, 2))
    for n, word in enumerate(words):
        _store_shared(arith.addi(mine, _constant(16 * n)), word, is_last)
    mgpu_utils.warpgroup_barrier()
    four_warps = []
    for n in range(len(words)):
        four = _asm(
            ir.Type.parse("!llvm.struct<(i32, i32, i32, i32)>"),
            "ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];",
            "=r,=r,=r,=r,r",
            arith.addi(address, _constant(16 * n)),
        )
        four_warps.append([llvm.extractvalue(_i32(), four, [w]) for w in range(_WARPS)])
    return warp, four_warps


def _i32():
    return ir.IntegerType.get_signless(32)


def _constant(value: int):
    return arith.constant(_i32(), value)


def _sum(terms):
    total = terms[0]
    for term in terms[1:]:
        total = arith.addi(total, term)
    return total


def _shift_left(value, bits: int):
    return value if bits == 0 else arith.shli(value, _constant(bits))


def _field(word, at: int, bits: int):
    """The unsigned number in `bits` bits of a word."""
    return arith.andi(arith.shrui(word, _constant(at)), _constant((1 << bits) - 1))


def _pair(word, half: int, bits: int):
    """Two fields of a word, moved to its 16-bit halves: the even or the odd ones of four."""
    if bits == 16:
        return word
    return arith.andi(arith.shrui(word, _constant(8 * half)), _constant(0x00FF00FF))


def _elements(register):
    (size,) = ir.VectorType(register.type).shape
    return [vector.extract(register, dynamic_position=[], static_position=[n]) for n in range(size)]


def _shared_address(ref):
    return llvm.ptrtoint(_i32(), mgpu_utils.memref_ptr(ref))


def _asm(result, text: str, constraints: str, *operands):
    # Shuffles must not be moved into branches; older releases cannot say so, and do not move them.
    convergent = {"convergent": True} if hasattr(llvm.InlineAsmOp, "convergent") else {}
    return llvm.inline_asm(
        result, list(operands), text, constraints, has_side_effects=True, **convergent
    )


def _store_shared(address, value, predicate) -> None:
    _asm(
        ir.Type.parse("!llvm.void"),
        "@$2 st.shared.b32 [$0], $1;",
        "r,r,b",
        address,
        value,
        predicate,
    )


def _warp_scan(value):
    """The sum over this lane and those before it."""
    for distance in (1, 2, 4, 8, 16):
        value = _asm(
            _i32(),
            "{ .reg .u32 t; .reg .pred p; "
            f"shfl.sync.up.b32 t|p, $1, {distance}, 0, -1; "
            "mov.b32 $0, $1; @p add.u32 $0, t, $1; }",
            "=&r,r",
            value,
        )
    return value
