"""Optimizer work on a device mesh."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec


def with_auto_axes(function: Callable[..., Any], *likes: int) -> Callable[..., Any]:
    """Lets `function` run on arrays of a mesh with Explicit axes.

    There it is traced with Auto axes (reshapes and products of sharded matrices have no result
    sharding of their own), and result i is laid out leaf by leaf as argument `likes[i]` is. Without
    Explicit axes it is `function` itself.
    """

    def wrapped(*arguments):
        shardings = [jax.typeof(leaf).sharding for leaf in jax.tree.leaves(arguments)]
        meshes = [sharding.mesh for sharding in shardings if not sharding.mesh.empty]
        explicit = [mesh for mesh in meshes if AxisType.Explicit in mesh.axis_types]
        if not explicit:
            return function(*arguments)
        mesh = explicit[0]
        out = tuple(
            jax.tree.map(lambda leaf: jax.typeof(leaf).sharding.spec, arguments[like])
            for like in likes
        )
        automatic = jax.sharding.auto_axes(
            function,
            axes=_names(mesh, AxisType.Explicit),
            out_sharding=out if len(out) > 1 else out[0],
        )
        with jax.sharding.use_abstract_mesh(mesh):
            return automatic(*arguments)

    return wrapped


def devices(mesh: Mesh | None) -> int:
    """Devices that `spread` lays a batch over."""
    ambient = jax.sharding.get_abstract_mesh()
    inside = mesh if ambient.empty else ambient
    if inside is None:
        return 1
    return math.prod(inside.shape[axis] for axis in _names(inside, AxisType.Auto))


def spread(batch: jax.Array, mesh: Mesh | None) -> jax.Array:
    """Lays a batch [N, ...] over all devices, filled up with zeros to a multiple of their number.

    The mesh in force (`jax.set_mesh`) comes before the `mesh` given; without either, or inside
    `shard_map` over all of its axes, nothing happens.
    """
    parts = devices(mesh)
    if parts == 1:
        return batch
    ambient = jax.sharding.get_abstract_mesh()
    if ambient.empty:
        sharding: Any = NamedSharding(mesh, PartitionSpec(_names(mesh, AxisType.Auto)))
    else:
        sharding = PartitionSpec(_names(ambient, AxisType.Auto))
    missing = -batch.shape[0] % parts
    if missing:
        batch = jnp.pad(batch, ((0, missing),) + ((0, 0),) * (batch.ndim - 1))
    return jax.lax.with_sharding_constraint(batch, sharding)


def _names(mesh: Any, kind: AxisType) -> tuple[str, ...]:
    pairs = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return tuple(name for name, axis_type in pairs if axis_type == kind)
