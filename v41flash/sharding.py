"""Logical axis names of parameters and activations, and the mesh axes they are laid out on.

This is the one place to read or change how the model is sharded: modules name their axes
(`"experts"`, `"heads"`, ...), `RULES` maps each name to mesh axes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
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
    # Slots of images, of all rows together: [batch * slots].
    ("images", ("data", "fsdp", "expert", "context")),
    # Parameters.
    ("embed", "fsdp"),
    ("vocab", "tensor"),
    ("heads", "tensor"),
    ("index_heads", "tensor"),
    ("o_groups", "tensor"),
    ("experts", "expert"),
    ("expert_hidden", "tensor"),
    ("table_rows", ("fsdp", "expert")),
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


def constrain(x: jax.Array, *names: str | None) -> jax.Array:
    """Asks the compiler to lay `x` out by the logical `names` of its axes; no-op without a mesh."""
    return nn.with_logical_constraint(x, names, rules=RULES)


def partitioned(init: nn.initializers.Initializer, names: Sequence[str | None]) -> Any:
    """An initializer whose parameter carries the logical `names` of its axes."""
    return nn.with_logical_partitioning(init, tuple(names))


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Sharding of batch arrays [B, T, ...]: rows over data axes, positions over context."""
    rules = dict(RULES)
    return NamedSharding(mesh, PartitionSpec(rules["batch"], rules["length"]))


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
            ) from error

    jax.tree_util.tree_map_with_path(check, abstract, shardings)
    return shardings
