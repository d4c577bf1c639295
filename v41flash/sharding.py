"""Logical axis names of parameters and activations, and the mesh axes they are laid out on.

This is the one place to read or change how the model is sharded: modules name their axes
(`"experts"`, `"heads"`, ...), `RULES` maps each name to mesh axes. Matrix products are left to the
compiler, which lays them out by these names; whatever it must not lay out itself (kernels, the
exchange of tokens, of table rows, of window rows) runs on each device's own part: `on_shards`.
"""

from __future__ import annotations

import contextlib
import contextvars
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from v41flash.errors import InputError

MESH_AXES = ("data", "fsdp", "expert", "context", "tensor")

RULES: tuple[tuple[str, Any], ...] = (
    # Activations.
    ("batch", ("data", "fsdp", "expert")),
    ("length", "context"),
    # Tokens where every head is needed at once: what is not split by heads is split by tokens.
    ("queries", ("context", "tensor")),
    # Slots of images, of all rows together: [batch * slots].
    ("images", ("data", "fsdp", "expert", "context")),
    # Parameters. What shares the tokens of a row shares the parameters, too.
    ("embed", ("fsdp", "context")),
    # Inner sizes of weights that have no axis of `embed`.
    ("rank", ("fsdp", "context")),
    ("vocab", "tensor"),
    ("heads", "tensor"),
    ("index_heads", "tensor"),
    ("o_groups", "tensor"),
    ("experts", "expert"),
    ("expert_hidden", "tensor"),
    ("table_rows", ("fsdp", "expert", "context", "tensor")),
    ("layers", None),
    ("units", None),
)


def make_mesh(sizes: Mapping[str, int], devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Builds the device mesh.

    Args:
        sizes: size of each axis of `MESH_AXES`; absent axes are 1; one axis may be -1 and takes the
            devices that the others leave.
        devices: the devices to use, all by default.

    Returns:
        A mesh with all five axes, in `MESH_AXES` order, with Auto axis types.

    Raises:
        InputError: an unknown axis, or sizes that do not multiply to the number of devices.
    """
    devices = list(jax.devices() if devices is None else devices)
    unknown = sorted(set(sizes) - set(MESH_AXES))
    if unknown:
        raise InputError(f"mesh: unknown axis {unknown[0]!r}; there is {', '.join(MESH_AXES)}")
    shape = [sizes.get(axis, 1) for axis in MESH_AXES]
    if shape.count(-1) > 1 or any(size < 1 and size != -1 for size in shape):
        raise InputError(f"mesh: sizes {dict(sizes)} must be positive, at most one of them -1")
    if -1 in shape:
        known = math.prod(size for size in shape if size != -1)
        shape[shape.index(-1)] = max(len(devices) // known, 1)
    if math.prod(shape) != len(devices):
        raise InputError(
            f"mesh: sizes {dict(zip(MESH_AXES, shape, strict=True))} need {math.prod(shape)} "
            f"devices, there are {len(devices)}"
        )
    axis_types = (jax.sharding.AxisType.Auto,) * len(shape)
    return Mesh(np.asarray(devices).reshape(shape), MESH_AXES, axis_types=axis_types)


# Inside a `shard_map` of the caller: logical names that are split already, and over what.
_inside: contextvars.ContextVar[Mapping[str, tuple[str, ...]] | None] = contextvars.ContextVar(
    "inside", default=None
)


@contextlib.contextmanager
def inside(axes: Mapping[str, tuple[str, ...]]) -> Iterator[None]:
    """For a caller's own `jax.shard_map` around the model: says which dimensions it has split.

    Args:
        axes: logical name -> mesh axes; names that are absent are whole, or not to be exchanged.
    """
    token = _inside.set(axes)
    try:
        yield
    finally:
        _inside.reset(token)


def local_shape(shape: Sequence[int], names: Sequence[str | None]) -> tuple[int, ...]:
    """The shape that a parameter has here: `shape`, or that of a device's part under `inside`."""
    split = _inside.get() or {}
    return tuple(
        size // parts(split.get(name, ())) for size, name in zip(shape, names, strict=True)
    )


def _in_force() -> Any:
    """The mesh in force, where the compiler spreads arrays over several devices of it; or None."""
    mesh = jax.sharding.get_abstract_mesh()
    automatic = all(kind == jax.sharding.AxisType.Auto for kind in mesh.axis_types)
    return mesh if not mesh.empty and mesh.size > 1 and automatic else None


def split_axes(mesh: Any, name: str | None, *sizes: int) -> tuple[str, ...]:
    """Mesh axes that dimensions of a logical name are split over.

    Args:
        mesh: the mesh.
        name: of `RULES`; None for none.
        *sizes: of all dimensions that are to be split alike.

    Returns:
        The axes of the rule, without those of size 1; of them as many, from the first on, as every
        size divides by.
    """
    rule = None if name is None else dict(RULES)[name]
    axes = () if rule is None else (rule,) if isinstance(rule, str) else rule
    taken: list[str] = []
    parts = 1
    for axis in axes:
        if mesh.shape[axis] == 1:
            continue
        parts *= mesh.shape[axis]
        if any(size % parts for size in sizes):
            break
        taken.append(axis)
    return tuple(taken)


def constrain(x: jax.Array, *names: str | None) -> jax.Array:
    """Asks the compiler to lay `x` out by the logical `names` of its axes; no-op without a mesh."""
    mesh = _in_force()
    if mesh is None:
        return x
    spec = [split_axes(mesh, name, size) for name, size in zip(names, x.shape, strict=True)]
    return jax.lax.with_sharding_constraint(x, PartitionSpec(*spec))


def on_shards(
    function: Callable[..., Any],
    arguments: Sequence[tuple[str | None, ...] | None],
    results: Any,
) -> Callable[..., Any]:
    """Lets a function run on every device's own part of its arguments.

    Under a mesh of several devices this is `jax.shard_map` over all of its axes: kernels, which the
    compiler cannot partition, see local arrays, and the function may exchange data itself. Without
    one (or inside another `shard_map`, see `inside`) the function gets its arguments as they are.
    Differentiable:
    the gradient of an argument is summed over the devices that share it.

    Args:
        function: (axes, *arguments) -> results. `axes` maps each logical name to the mesh axes that
            its dimensions have been split over, () for none.
        arguments: for each argument the logical names of its dimensions, which hold for every array
            in it; None where the argument is None.
        results: for each result likewise, as a tuple; or the names of the only one as a list.

    Returns:
        A function of the arguments. Dimensions of one name are split alike: where one of them does
        not divide by the mesh axes of its rule, none is split over the axes from there on.
    """
    single = isinstance(results, list)

    def call(*values: Any) -> Any:
        sizes: dict[str, list[int]] = {}
        for value, names in zip(values, arguments, strict=True):
            for leaf in jax.tree.leaves(value):
                for name, size in zip(names, leaf.shape, strict=True):
                    if name is not None:
                        sizes.setdefault(name, []).append(size)
        mesh = _in_force()
        if mesh is None:
            split = _inside.get() or {}
            return function({name: split.get(name, ()) for name in sizes}, *values)
        axes = {name: split_axes(mesh, name, *each) for name, each in sizes.items()}

        def spec(names: Sequence[str | None] | None) -> PartitionSpec:
            return PartitionSpec(*(axes[name] if name else None for name in names or ()))

        flat, structure = jax.tree.flatten(values)
        specs = [
            spec(names)
            for value, names in zip(values, arguments, strict=True)
            for _ in jax.tree.leaves(value)
        ]

        def local(*leaves: jax.Array) -> Any:
            return function(axes, *jax.tree.unflatten(structure, leaves))

        out = spec(results) if single else tuple(spec(names) for names in results)
        run = jax.shard_map(local, mesh=mesh, in_specs=tuple(specs), out_specs=out, check_vma=False)
        return run(*flat)

    return call


def parts(axes: Sequence[str]) -> int:
    """Inside `on_shards`: the number of parts along mesh axes."""
    return math.prod(jax.lax.axis_size(axis) for axis in axes)


def part(axes: Sequence[str]) -> jax.Array | int:
    """Inside `on_shards`: which of the parts along mesh axes is this device's."""
    return jax.lax.axis_index(tuple(axes)) if axes else 0


def partitioned(init: nn.initializers.Initializer, names: Sequence[str | None]) -> Any:
    """An initializer whose parameter carries the logical `names` of its axes."""
    return nn.with_logical_partitioning(init, tuple(names))


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Sharding of batch arrays [B, T, ...]: rows over data axes, positions over context."""
    rules = dict(RULES)
    return NamedSharding(mesh, PartitionSpec(rules["batch"], rules["length"]))


def _remedy(path: Any, sharding: NamedSharding) -> str:
    if jax.tree_util.keystr(path).endswith("['table']"):
        parts = math.prod(sharding.mesh.shape[axis] for axis in sharding.spec[0])
        return f"; model.engram_row_multiple={parts} fills the table up"
    return ""


def param_shardings(boxed: Any, mesh: Mesh) -> Any:
    """NamedShardings of a tree of (abstract) parameters that still carries its logical axis names.

    Args:
        boxed: what `jax.eval_shape(model.init, ...)["params"]` returns.
        mesh: the device mesh.

    Returns:
        A tree of NamedSharding with the structure of the unboxed parameters.

    Raises:
        InputError: an axis does not divide by the mesh axes that it is laid out on.
    """
    shardings = nn.logical_to_mesh_sharding(nn.get_partition_spec(boxed), mesh, RULES)
    abstract = nn.unbox(boxed)

    def check(path: Any, leaf: Any, sharding: NamedSharding) -> None:
        try:
            sharding.shard_shape(leaf.shape)
        except ValueError as error:
            raise InputError(
                f"parameter {jax.tree_util.keystr(path)} of shape {leaf.shape} does not divide "
                f"over mesh axes {sharding.spec} of sizes {dict(mesh.shape)}"
                f"{_remedy(path, sharding)}"
            ) from error

    jax.tree_util.tree_map_with_path(check, abstract, shardings)
    return shardings
