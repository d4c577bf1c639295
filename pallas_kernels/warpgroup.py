"""Operations of warpgroups that Pallas's Mosaic GPU language lacks.

A warpgroup, or a team of those of one block, works on one-dimensional arrays. Each has its part of
them, in order, and that in the strided layout: thread t of its 128 holds the elements
`(row * 128 + t) * vec + lane_element` of every row of the part. Kernel code sees the part; the
sizes that it names are those of all parts together.

Each operation has a second form in plain JAX, for interpret mode and one warpgroup, which proves
the logic around these operations; their own code is proved on a GPU, and compiled without one in
the tests.

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
from jax.experimental import pallas as pl
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
# Words of shared memory for each warpgroup, through which the warps tell each other what they
# counted: two turns of at most eight words a warp.
SCRATCH_WORDS = 2 * 8 * 4

_LANES, _WARPS = 32, 4
_AXIS = "warpgroup"
_SCALAR = plgpu.Layout.WG_SPLAT(())


def _layout(size: int, vec: int) -> plgpu.Layout:
    return plgpu.Layout.WG_STRIDED((size,), vec_size=vec)


@dataclasses.dataclass(frozen=True)
class Warpgroup:
    """The operations.

    Those that take a `turn` go through `scratch`: it is 0 or 1, and differs from that of the call
    before unless a `sync` lies between.

    Attributes:
        scratch: reference to `SCRATCH_WORDS * team` words of shared memory, of their own.
        interpreted: whether the kernel runs in interpret mode.
        team: warpgroups that work together: all of a block, along its axis "warpgroup"; or 1.
    """

    scratch: jax.Array
    interpreted: bool
    team: int = 1

    @property
    def mine(self) -> jax.Array | int:
        """The number of this warpgroup in its team."""
        return 0 if self.team == 1 else lax.axis_index(_AXIS)

    def part(self, start: jax.Array | int, size: int):
        """This warpgroup's part of a slice, for indexing a reference."""
        mine = size // self.team
        return pl.ds(start + self.mine * mine, mine)

    def iota(self, size: int, vec: int) -> jax.Array:
        """i32 `[size]`: 0, 1, 2, ..."""
        size = size // self.team
        if self.interpreted:
            return lax.iota(jnp.int32, size)
        place = plgpu.broadcasted_iota(jnp.int32, (size,), 0, layout=_layout(size, vec))
        return place if self.team == 1 else place + self.mine * size

    def full(self, size: int, vec: int, value: int | float) -> jax.Array:
        """i32 or f32 `[size]` of one value, as that is."""
        size = size // self.team
        array = jnp.full((size,), value, jnp.float32 if isinstance(value, float) else jnp.int32)
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
            _barrier(self.team)

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
            address, turn = _shared_address(scratch), turn.registers.item()
            total = _reduce(kind, values, address, turn, self.team)
            return mgpu.FragmentedArray.splat(total, (), is_signed=True)

        return reduce(array, self.scratch, turn)

    def tally(self, counts: jax.Array, places: jax.Array, mask: jax.Array, vec: int) -> None:
        """Adds one to `counts[places]` for every element that a mask picks.

        Args:
            counts: reference to i32 in shared memory; what is added is seen after `sync`.
            places: i32 `[size]`.
            mask: boolean `[size]`.
            vec: of the layout of both.
        """
        if self.interpreted:
            hits = places[:, None] == lax.iota(jnp.int32, counts.shape[0])
            counts[...] += (hits & mask[:, None]).sum(axis=0, dtype=jnp.int32)
            return
        layout = _layout(places.shape[0], vec)

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), layout, layout))
        def tally(_, counts, places, mask):
            places, mask = (
                [value for register in array.registers.flat for value in _elements(register)]
                for array in (places, mask)
            )
            _tally(places, mask, _shared_address(counts))

        tally(counts, places, mask)

    def upper_bin(self, counts: jax.Array, want: jax.Array, turn: jax.Array):
        """The highest bin that has, with those above it, as many entries as wanted.

        Args:
            counts: i32 `[bins]`, one vector a thread; at least `want` in all.
            want: i32, at least 1.
            turn: i32.

        Returns:
            i32: the bin, the entries in it and above, and those above it alone.
        """
        if self.interpreted:
            upwards = jnp.cumsum(counts[::-1])[::-1]
            place = jnp.max(jnp.where(upwards >= want, lax.iota(jnp.int32, counts.shape[0]), 0))
            return place, upwards[place], upwards[place] - counts[place]
        scalar = plgpu.ShapeDtypeStruct((), jnp.int32, layout=_SCALAR)

        @plgpu.inline_mgpu(
            arg_types=(
                _layout(counts.shape[0], counts.shape[0] // THREADS),
                _SCALAR,
                plgpu.RefType(),
                _SCALAR,
            ),
            return_type=(scalar, scalar, scalar),
        )
        def upper_bin(_, counts, want, scratch, turn):
            found = _upper_bin(
                _elements(counts.registers.item()),
                want.registers.item(),
                _shared_address(scratch),
                turn.registers.item(),
                self.team,
            )
            return tuple(mgpu.FragmentedArray.splat(x, (), is_signed=True) for x in found)

        return upper_bin(counts, want, self.scratch, turn)

    def compress(
        self,
        mask: jax.Array,
        arrays: Sequence[jax.Array],
        ref: jax.Array,
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
            ref: i32 `[len(arrays), ...]` in shared memory: a row for the bits of each.
            offset: i32, where the first picked element goes.
            turn: i32.
            vec: of the layout of mask and arrays.

        Returns:
            i32, one past where the last picked element went.
        """
        if self.interpreted:
            places = offset + jnp.cumsum(mask.astype(jnp.int32)) - 1
            places = jnp.where(mask, places, ref.shape[1])
            for row, array in enumerate(arrays):
                bits = lax.bitcast_convert_type(array, jnp.int32)
                ref[row] = ref[row].at[places].set(bits, mode="drop")
            return offset + mask.astype(jnp.int32).sum()
        layout = _layout(mask.shape[0], vec)

        @plgpu.inline_mgpu(
            arg_types=(
                layout,
                [layout] * len(arrays),
                plgpu.RefType(),
                _SCALAR,
                plgpu.RefType(),
                _SCALAR,
            ),
            return_type=plgpu.ShapeDtypeStruct((), jnp.int32, layout=_SCALAR),
        )
        def compress(_, mask, arrays, ref, offset, scratch, turn):
            end = _compress(
                [_elements(register) for register in mask.registers.flat],
                [[_elements(register) for register in a.registers.flat] for a in arrays],
                _shared_address(ref),
                4 * ref.type.shape[1],
                offset.registers.item(),
                _shared_address(scratch),
                turn.registers.item(),
                self.team,
            )
            return mgpu.FragmentedArray.splat(end, (), is_signed=True)

        return compress(mask, list(arrays), ref, offset, self.scratch, turn)


def _compress(mask, arrays, address, pitch, offset, scratch, turn, team):
    """Emits `Warpgroup.compress` for one thread.

    Args:
        mask: one list of bits for each row of the layout.
        arrays: per array, one list of values for each row.
        address: of the place that the first array goes to, in bytes.
        pitch: from that of one array to that of the next, in bytes.
        offset: in elements.
        scratch: address, in bytes.
        turn: 0 or 1.
        team: number of warpgroups.

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
    warp, all_warps = _exchange(upto, scratch, turn, team)

    # A warpgroup's part follows those of the warpgroups before it; within the part rows come first,
    # warps second.
    group = arith.shrui(warp, _constant(2))
    within = arith.andi(warp, _constant(_WARPS - 1))
    groups = [[words[_WARPS * g : _WARPS * (g + 1)] for words in all_warps] for g in range(team)]
    if team > 1:
        sizes = [
            _sum(
                [
                    arith.addi(_field(pair, 0, 16), _field(pair, 16, 16))
                    for words in mine
                    for pair in _pairs(words, bits)
                ]
            )
            for mine in groups
        ]
        end = _sum([offset, *sizes])
        offset = _sum([offset, *_before(group, sizes)])

    starts = []
    for n, word in enumerate(upto):
        own = [_pick(group, [words[n][w] for words in groups]) for w in range(_WARPS)]
        # Sums over warps take more bits: pairs of fields, 16 bits apart.
        everyone, earlier = _pairs(own, bits), _pairs(_before(within, own), bits)
        for field in range(min(fields, rows - n * fields)):
            half, at = field % (16 // bits), 16 * (field // (16 // bits))
            count = counts[n * fields + field]
            here = arith.subi(_field(word, field * bits, bits), count)
            starts.append(_sum([offset, _field(earlier[half], at, 16), here]))
            offset = arith.addi(offset, _field(everyone[half], at, 16))
    if team == 1:
        end = offset

    for row in range(rows):
        any_picked = arith.cmpi(arith.CmpIPredicate.ne, counts[row], _constant(0))
        with ir.InsertionPoint(scf.IfOp(any_picked).then_block):
            at = arith.addi(address, _shift_left(starts[row], 2))
            for element in range(vec):
                picked = mask[row][element]
                if element:
                    before = mask[row][element - 1]
                    at = _asm(
                        i32, "{ mov.b32 $0, $1; @$2 add.u32 $0, $1, 4; }", "=&r,r,b", at, before
                    )
                for n, array in enumerate(arrays):
                    value = array[row][element]
                    value = value if value.type == i32 else arith.bitcast(i32, value)
                    _store_shared(at, value, picked, offset=n * pitch)
            scf.yield_([])
    return end


def _tally(places, picked, address) -> None:
    """Emits `Warpgroup.tally` for one thread."""
    for place, bit in zip(places, picked, strict=True):
        _asm(
            ir.Type.parse("!llvm.void"),
            "@$1 red.shared.add.u32 [$0], 1;",
            "r,b",
            arith.addi(address, _shift_left(place, 2)),
            bit,
        )


def _reduce(kind, values, scratch, turn, team):
    """Emits `Warpgroup.sum` or `max` for one thread: of its values and those of all others."""
    combine = {"add": arith.addi, "max": arith.maxsi}[kind]
    mine = functools.reduce(combine, values)
    mine = _asm(_i32(), f"redux.sync.{kind}.s32 $0, $1, -1;", "=r,r", mine)
    _, (theirs,) = _exchange([mine], scratch, turn, team)
    return functools.reduce(combine, theirs)


def _upper_bin(counts, want, scratch, turn, team):
    """Emits `Warpgroup.upper_bin` for one thread, whose bins follow on those of the one before."""
    mine = _sum(counts)
    upto = _warp_scan(mine)
    warp, (theirs,) = _exchange([upto], scratch, turn, team)
    below = _sum([arith.subi(upto, mine), *_before(warp, theirs)])
    # Downwards from the highest bin: what is in it and above.
    upwards = arith.subi(_sum(theirs), below)
    first = arith.muli(_thread(team), _constant(len(counts)))
    # Behind the words of `_exchange` in this turn's part.
    result = arith.addi(_turn_address(scratch, turn, team), _constant(64 * team))
    for n, count in enumerate(counts):
        above = arith.subi(upwards, count)
        here = arith.andi(
            arith.cmpi(arith.CmpIPredicate.sge, upwards, want),
            arith.cmpi(arith.CmpIPredicate.slt, above, want),
        )
        for m, word in enumerate((arith.addi(first, _constant(n)), upwards, above)):
            _store_shared(arith.addi(result, _constant(4 * m)), word, here)
        upwards = above
    _barrier(team)
    return _load_four(result)[:3]


def _load_four(address):
    four = _asm(
        ir.Type.parse("!llvm.struct<(i32, i32, i32, i32)>"),
        "ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];",
        "=r,=r,=r,=r,r",
        address,
    )
    return [llvm.extractvalue(_i32(), four, [n]) for n in range(4)]


def _before(warp, words):
    """Of one word of every warp those of the warps before this one, and zeros."""
    return [
        arith.select(arith.cmpi(arith.CmpIPredicate.ugt, warp, _constant(n)), word, _constant(0))
        for n, word in enumerate(words[:-1])
    ]


def _exchange(words, scratch, turn, team):
    """Every warp tells every other what its last lane has.

    Args:
        words: of this thread, eight at most.
        scratch: address of the scratch memory, in bytes.
        turn: 0 or 1.
        team: number of warpgroups.

    Returns:
        The number of this warp, and per word those of all warps.
    """
    assert len(words) <= 8, "SCRATCH_WORDS is too small"
    address = _turn_address(scratch, turn, team)
    pitch = 4 * _WARPS * team
    thread = _thread(team)
    lane = arith.andi(thread, _constant(_LANES - 1))
    warp = arith.shrui(thread, _constant(5))
    is_last = arith.cmpi(arith.CmpIPredicate.eq, lane, _constant(_LANES - 1))
    mine = arith.addi(address, _shift_left(warp, 2))
    for n, word in enumerate(words):
        _store_shared(mine, word, is_last, offset=n * pitch)
    _barrier(team)
    all_warps = [
        [
            word
            for group in range(team)
            for word in _load_four(arith.addi(address, _constant(n * pitch + 16 * group)))
        ]
        for n in range(len(words))
    ]
    return warp, all_warps


def _turn_address(scratch, turn, team):
    return arith.addi(scratch, arith.muli(turn, _constant(2 * SCRATCH_WORDS * team)))


def _thread(team):
    """The number of this thread in its team."""
    thread = _asm(_i32(), "mov.u32 $0, %tid.x;", "=r")
    return arith.andi(thread, _constant(THREADS - 1)) if team == 1 else thread


def _barrier(team) -> None:
    if team == 1:
        mgpu_utils.warpgroup_barrier()
    else:
        # The compiler's own barriers have the lower numbers.
        _asm(ir.Type.parse("!llvm.void"), f"bar.sync 15, {THREADS * team};", "")


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


def _pairs(words, bits: int):
    """Sums of words field by field, the fields moved to 16 bits each: two a word."""
    if bits == 16:
        return [_sum(words)]
    mask = _constant(0x00FF00FF)
    return [
        _sum([arith.andi(arith.shrui(word, _constant(8 * half)), mask) for word in words])
        for half in range(2)
    ]


def _pick(index, options):
    """One of several, by its number."""
    chosen = options[0]
    for n, option in enumerate(options[1:]):
        later = arith.cmpi(arith.CmpIPredicate.ugt, index, _constant(n))
        chosen = arith.select(later, option, chosen)
    return chosen


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


def _store_shared(address, value, predicate, offset: int = 0) -> None:
    _asm(
        ir.Type.parse("!llvm.void"),
        f"@$2 st.shared.b32 [$0+{offset}], $1;",
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
