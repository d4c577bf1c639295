"""What a compiled program says of itself: collectives, counted with the loops that they are in.

XLA's own cost analysis counts the body of a loop once. Here every instruction counts as often as
the loops around it turn, as far as their conditions name a number (loops of `jax.lax.scan` and
`map` do; one whose end is computed counts once, and is listed).
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator
from typing import NamedTuple

import jax
from jax.extend import core as jax_core

COLLECTIVES = (
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-permute",
    "ragged-all-to-all",
    "reduce-scatter",
)
_BYTES = {"pred": 1, "s4": 0.5, "u4": 0.5, "token": 0, "opaque": 0}
_HEADER = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)$")
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\]")
_CALLED = re.compile(r"(?:calls|to_apply|body|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_CONDITION = re.compile(r"condition=%?([\w.\-]+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_MESH_GROUPS = re.compile(
    r"replica_groups=mesh\[([^\]]*)\]"
    r"(?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))?\s*\{([^}]*)\}"
)
_OP_NAME = re.compile(r'op_name="([^"]*)"')


class Origin(NamedTuple):
    """Where an instruction comes from.

    Attributes:
        opcode: what it is, "fusion", "custom-call", ...
        op_name: path in the traced function, "" where the compiler made it up.
    """

    opcode: str
    op_name: str


def origins(text: str) -> dict[str, Origin]:
    """{name of an instruction: where it comes from}, of a program's text."""
    found = {}
    for line in text.splitlines():
        match = _INSTRUCTION.match(line)
        if match:
            name = _OP_NAME.search(line)
            found[match[1]] = Origin(match[3], name[1] if name else "")
    return found


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective instruction.

    Attributes:
        kind: of `COLLECTIVES`.
        shapes: (dtype, dimensions) of its results on one device.
        groups: device numbers that exchange with each other, one tuple a group; for a permutation
            its (source, target) pairs.
        times: turns of the loops around it.
        op_name: where in the traced function it comes from.
    """

    kind: str
    shapes: tuple[tuple[str, tuple[int, ...]], ...]
    groups: tuple[tuple[int, ...], ...]
    times: int
    op_name: str

    @property
    def elements(self) -> int:
        """Of the largest result."""
        return max(math.prod(shape) for _, shape in self.shapes)

    @property
    def bytes(self) -> float:
        """Of its results on one device, once."""
        return sum(item_bytes(dtype) * math.prod(shape) for dtype, shape in self.shapes)


def item_bytes(dtype: str) -> float:
    """Bytes of an element of HLO's `dtype`, as "bf16" or "f8e4m3fn"."""
    if dtype in _BYTES:
        return _BYTES[dtype]
    return int(re.match(r"[a-z]+(\d+)", dtype)[1]) / 8


def collectives(text: str) -> list[Collective]:
    """All collectives of a compiled module, from `compiled.as_text()`."""
    computations, entry = _computations(text)
    return list(_walk(computations, entry, 1, ()))


def largest_copy(text: str) -> tuple[int, str]:
    """Bytes and type of the largest array that a compiled module copies as it is; (0, "") of none.

    A change of layout is a copy, also as the work of a fusion.
    """
    largest = 0, ""
    for line in text.splitlines():
        match = _INSTRUCTION.match(line)
        if match and match[3] in ("copy", "copy-start"):
            dtype, sizes = _ARRAY.search(match[2]).groups()
            size = item_bytes(dtype) * math.prod(int(n) for n in sizes.split(",") if n)
            largest = max(largest, (int(size), f"{dtype}[{sizes}]"))
    return largest


def _computations(text: str) -> tuple[dict[str, list[str]], str]:
    computations: dict[str, list[str]] = {}
    entry, current = "", None
    for line in text.splitlines():
        header = _HEADER.match(line)
        if header:
            current = computations.setdefault(header[1], [])
            entry = header[1] if line.startswith("ENTRY") else entry
        elif line.startswith("}"):
            current = None
        elif current is not None:
            current.append(line)
    return computations, entry


def _walk(
    computations: dict[str, list[str]], name: str, times: int, above: tuple[str, ...]
) -> Iterator[Collective]:
    if name not in computations or name in above:
        return
    for line in computations[name]:
        match = _INSTRUCTION.match(line)
        if not match:
            continue
        _, result, op, rest = match.groups()
        kind = op.removesuffix("-start")
        if kind in COLLECTIVES:
            yield _collective(kind, op, result, rest, times)
            continue
        turns = times * _trips(computations, line) if op == "while" else times
        called = _CALLED.findall(rest)
        for branches in _BRANCHES.findall(rest):
            called += [branch.strip().lstrip("%") for branch in branches.split(",")]
        for other in called:
            yield from _walk(computations, other, turns, (*above, name))


def _trips(computations: dict[str, list[str]], line: str) -> int:
    """Turns of a while loop; 1 where its end is computed."""
    known = _TRIPS.search(line)
    if known:
        return int(known[1])
    condition = computations.get(_CONDITION.search(line)[1], [])
    root = next((text for text in condition if text.lstrip().startswith("ROOT")), "")
    bounds = [re.search(r"s32\[\]\S* constant\((\d+)\)", text) for text in condition]
    bounds = [int(bound[1]) for bound in bounds if bound]
    return bounds[0] if len(bounds) == 1 and "direction=LT" in root else 1


def _collective(kind: str, op: str, result: str, rest: str, times: int) -> Collective:
    shapes = [
        (dtype, tuple(int(size) for size in sizes.split(",") if size))
        for dtype, sizes in _ARRAY.findall(result)
    ]
    if op.endswith("-start") and len(shapes) > 1:
        # (operands, results, bookkeeping): the second half of what is no scalar of bookkeeping.
        arrays = [shape for shape in shapes if shape[1]]
        shapes = arrays[len(arrays) // 2 :] or shapes[:1]
    name = _OP_NAME.search(rest)
    return Collective(kind, tuple(shapes), _groups(rest), times, name[1] if name else "")


def _groups(text: str) -> tuple[tuple[int, ...], ...]:
    """Device groups in any of HLO's notations; () stands for all devices."""
    pairs = re.search(r"(?:replica_groups|source_target_pairs)=\{(\{[\d,{} ]*\})\}", text)
    if pairs:
        inner = re.findall(r"\{([\d, ]*)\}", pairs[1])
        return tuple(tuple(int(n) for n in part.split(",") if n.strip()) for part in inner)
    listed = re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text)
    if listed:
        shape, dims, order = ([int(n) for n in (g or "").split(",") if n] for g in listed.groups())
        return _grid(dims, order or list(range(len(dims))), shape[-1])
    named = _MESH_GROUPS.search(text)
    if named:
        axes = re.findall(r"'?(\w+)'?=(\d+)", named[1])
        names, dims = [axis for axis, _ in axes], [int(size) for _, size in axes]
        last = [names.index(axis) for axis in re.findall(r"'(\w+)'", named[4])]
        order = [i for i in range(len(dims)) if i not in last] + last
        groups = _grid(dims, order, math.prod(dims[i] for i in last))
        if named[2] is None:
            return groups
        # The devices stand in the mesh in another order than their numbers.
        given = named.groups()[1:3]
        shape, order = ([int(n) for n in (part or "").split(",") if n] for part in given)
        devices = _grid(shape, order or list(range(len(shape))), math.prod(shape))[0]
        return tuple(tuple(devices[place] for place in group) for group in groups)
    if "replica_groups=" in text and "replica_groups={}" not in text:
        raise ValueError(f"device groups in an unknown notation: {text[:200]}")
    return ()


def _grid(dims: list[int], order: list[int], size: int) -> tuple[tuple[int, ...], ...]:
    strides = [math.prod(dims[i + 1 :]) for i in range(len(dims))]
    numbers = [0]
    for axis in order:
        numbers = [n + step * strides[axis] for n in numbers for step in range(dims[axis])]
    return tuple(tuple(numbers[i : i + size]) for i in range(0, len(numbers), size))


def dot_flops(jaxpr: jax_core.Jaxpr, devices: int = 1) -> float:
    """Operations of all matrix products of a traced function, over all devices together.

    Loops count as often as they turn (`while` with a computed end once), recomputation counts,
    kernels count what their cost estimate says.

    Args:
        jaxpr: of the function.
        devices: of the mesh; what stands inside `shard_map` runs on each.
    """
    total = 0.0
    for equation in jaxpr.eqns:
        name, params = equation.primitive.name, equation.params
        if name == "dot_general":
            contracted = params["dimension_numbers"][0][0]
            shape = equation.invars[0].aval.shape
            out = math.prod(equation.outvars[0].aval.shape)
            total += 2.0 * out * math.prod(shape[axis] for axis in contracted)
            continue
        if name == "pallas_call":
            estimate = params.get("cost_estimate")
            total += float(estimate.flops) if estimate is not None else 0.0
            continue
        inner = [dot_flops(body, devices) for body in _bodies(params)]
        if name == "scan":
            total += params["length"] * sum(inner)
        elif name == "cond":
            total += max(inner, default=0.0)
        elif name == "shard_map":
            total += devices * sum(inner)
        else:
            total += sum(inner)
    return total


def _bodies(params: dict) -> Iterator[jax_core.Jaxpr]:
    for key, value in params.items():
        # A custom rule's own functions are traced where they are used.
        if key in ("jvp_jaxpr_fun", "fwd_jaxpr_thunk", "bwd"):
            continue
        for item in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(item, jax_core.ClosedJaxpr):
                yield item.jaxpr
            elif isinstance(item, jax_core.Jaxpr):
                yield item


def axes_of(mesh: jax.sharding.Mesh, groups: tuple[tuple[int, ...], ...]) -> set[str]:
    """Names of the mesh axes along which the devices of a group differ; all of them for ()."""
    sizes = [mesh.shape[axis] for axis in mesh.axis_names]
    if not groups:
        return {axis for axis, size in zip(mesh.axis_names, sizes, strict=True) if size > 1}
    found = set()
    for group in groups:
        places = [_place(number, sizes) for number in group]
        for axis, values in zip(mesh.axis_names, zip(*places, strict=True), strict=True):
            if len(set(values)) > 1:
                found.add(axis)
    return found


def _place(number: int, sizes: list[int]) -> list[int]:
    place = []
    for size in reversed(sizes):
        number, index = divmod(number, size)
        place.append(index)
    return place[::-1]
