"""Executes what `pallas_kernels.warpgroup` emits for one thread, on all threads of a block at once.

Interpret mode does not know that code. Here the dialects and the assembly that it is written in are
replaced by NumPy, one number a thread, and shared memory by an array that complains where two warps
touch a word without a barrier between them, or threads of one warp store different values to it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import types

import numpy as np

from pallas_kernels import warpgroup

I32, F32 = "i32", "f32"


@dataclasses.dataclass(frozen=True)
class Value:
    """A register of every thread."""

    data: np.ndarray
    type: str = I32


def bits(data) -> Value:
    return Value(np.asarray(data).astype(np.int64) & 0xFFFFFFFF)


def signed(value: Value) -> np.ndarray:
    return value.data.astype(np.uint32).astype(np.int32)


class Block:
    """The threads of a block and their shared memory.

    Attributes:
        threads: their number.
        memory: 32-bit words.
    """

    def __init__(self, team: int, words: int):
        self.threads = 128 * team
        self.warp = np.arange(self.threads) // 32
        self.memory = np.full(words, 0xDEADBEEF, np.int64)
        self._active = [np.ones(self.threads, bool)]
        self.barrier()

    def barrier(self) -> None:
        """Orders everything before and after."""
        self._writer = np.full(self.memory.size, -1)
        self._readers = [set() for _ in range(self.memory.size)]

    @contextlib.contextmanager
    def where(self, condition: Value):
        """Runs a branch."""
        self._active.append(self._active[-1] & condition.data)
        yield
        self._active.pop()

    def constant(self, number: int) -> Value:
        return bits(np.full(self.threads, number))

    def load(self, address: Value, offset: int) -> Value:
        words = address.data // 4 + offset
        for word, warp in set(zip(words.tolist(), self.warp.tolist(), strict=True)):
            assert self._writer[word] in (-1, warp), f"word {word} is read while it is written"
            self._readers[word].add(warp)
        return bits(self.memory[words])

    def store(self, address: Value, value: Value, picked: Value) -> None:
        assert (address.data % 4 == 0).all()
        written = {}
        for thread in np.flatnonzero(picked.data & self._active[-1]):
            word, warp = address.data[thread] // 4, self.warp[thread]
            assert self._writer[word] in (-1, warp), f"two warps write word {word}"
            assert self._readers[word] <= {warp}, f"word {word} is written while it is read"
            number = value.data[thread]
            assert written.setdefault(word, number) == number, f"threads differ about word {word}"
            self.memory[word], self._writer[word] = number, warp

    def assembly(self, result, text: str, constraints: str, *operands: Value):
        """What `warpgroup._asm` emits."""
        lanes = np.arange(self.threads) % 32
        if "%tid.x" in text:
            return bits(np.arange(self.threads))
        if shuffle := re.search(r"shfl\.sync\.up\.b32 t\|p, \$1, (\d+), 0, -1;.*@p add", text):
            distance = int(shuffle.group(1))
            shifted = np.where(lanes >= distance, np.roll(operands[0].data, distance), 0)
            return bits(operands[0].data + shifted)
        if reduction := re.match(r"redux\.sync\.(add|max)\.s32 \$0, \$1, -1;", text):
            combine = {"add": np.add, "max": np.maximum}[reduction.group(1)]
            warps = signed(operands[0]).reshape(-1, 32)
            return bits(np.repeat(combine.reduce(warps, axis=1), 32))
        if text.startswith("ld.shared.v4.b32"):
            assert (operands[0].data % 16 == 0).all()
            return [self.load(operands[0], n) for n in range(4)]
        if stored := re.match(r"@\$2 st\.shared\.b32 \[\$0\+(\d+)\], \$1;", text):
            address, value, picked = operands
            return self.store(bits(address.data + int(stored.group(1))), value, picked)
        if text == "@$1 red.shared.add.u32 [$0], 1;":
            address, picked = operands
            np.add.at(self.memory, address.data[picked.data & self._active[-1]] // 4, 1)
            return None
        if text == "{ mov.b32 $0, $1; @$2 add.u32 $0, $1, 4; }":
            return bits(operands[0].data + 4 * operands[1].data)
        if barrier := re.match(r"bar\.sync 15, (\d+);", text):
            assert int(barrier.group(1)) == self.threads
            return self.barrier()
        raise AssertionError(f"no meaning for: {text}")

    def install(self, monkeypatch) -> None:
        """Replaces what the emitting code calls."""

        def arithmetic(function):
            return lambda x, y: bits(function(x.data, y.data))

        compare = {
            "eq": lambda x, y: x.data == y.data,
            "ne": lambda x, y: x.data != y.data,
            "ugt": lambda x, y: x.data > y.data,
            "sge": lambda x, y: signed(x) >= signed(y),
            "slt": lambda x, y: signed(x) < signed(y),
        }
        arith = types.SimpleNamespace(
            CmpIPredicate=types.SimpleNamespace(**{name: name for name in compare}),
            cmpi=lambda name, x, y: Value(compare[name](x, y), "i1"),
            constant=lambda _, number: self.constant(number),
            extui=lambda _, bit: bits(bit.data),
            select=lambda bit, x, y: bits(np.where(bit.data, x.data, y.data)),
            bitcast=lambda _, x: bits(x.data.astype(np.float32).view(np.uint32)),
            maxsi=lambda x, y: bits(np.maximum(signed(x), signed(y))),
            addi=arithmetic(np.add),
            subi=arithmetic(np.subtract),
            muli=arithmetic(np.multiply),
            shli=arithmetic(np.left_shift),
            shrui=arithmetic(np.right_shift),
            andi=lambda x, y: Value(x.data & y.data, x.type),
        )
        ir = types.SimpleNamespace(
            InsertionPoint=self.where,
            IntegerType=types.SimpleNamespace(get_signless=lambda _: I32),
            Type=types.SimpleNamespace(parse=lambda text: text),
        )
        scf = types.SimpleNamespace(
            IfOp=lambda condition: types.SimpleNamespace(then_block=condition),
            yield_=lambda _: None,
        )
        llvm = types.SimpleNamespace(extractvalue=lambda _, four, at: four[at[0]])
        barriers = types.SimpleNamespace(warpgroup_barrier=self.barrier)
        for name, fake in {
            "arith": arith,
            "ir": ir,
            "scf": scf,
            "llvm": llvm,
            "mgpu_utils": barriers,
            "_asm": self.assembly,
        }.items():
            monkeypatch.setattr(warpgroup, name, fake)
