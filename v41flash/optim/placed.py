"""Work on whole matrices of parameters that lie split over a mesh, without ever gathering one.

A parameter [layers, experts, in, out] may be split along its batch axes (experts) and inside its
matrices (in). The devices that hold parts of the same matrices exchange them: each gets whole ones,
a share of their number, by all-to-all, and gives them back the same way. Devices that hold equal
parts take a share each. So every matrix is worked on once, and a device holds as many bytes as it
had before.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from v41flash.optim.axes import Matrices


class _Kind(NamedTuple):
    """What parameters share whose matrices can be worked on together.

    Attributes:
        inner: local sizes of the axes of a matrix, in the order of its rows and columns.
        split: for each of them the mesh axes that it is split over.
        free: mesh axes along which devices hold the same.
        shape: of a matrix.
        dtype: of the arrays.
    """

    inner: tuple[int, ...]
    split: tuple[tuple[str, ...], ...]
    free: tuple[str, ...]
    shape: tuple[int, int]
    dtype: Any


def apply(
    function: Callable[[jax.Array], jax.Array],
    plans: Sequence[Matrices],
    arrays: Sequence[jax.Array],
    specs: Sequence[PartitionSpec],
    mesh: Mesh | None = None,
) -> list[jax.Array]:
    """A function of matrices one by one, of every parameter.

    Args:
        function: [N, rows, columns] -> the same shape and dtype, for any N; zeros come too.
        plans: how each parameter becomes matrices, none of them side by side.
        arrays: the parameters.
        specs: how each lies on the mesh.
        mesh: where none is in force (`jax.set_mesh`).

    Returns:
        The results, laid out like the parameters.
    """
    if not arrays:
        return []
    ambient = jax.sharding.get_abstract_mesh()
    sizes = dict(mesh.shape if ambient.empty else ambient.shape)
    wanted = [axis for axis, size in sizes.items() if size > 1]

    def local(*parts: jax.Array) -> tuple[jax.Array, ...]:
        groups: dict[_Kind, list[tuple[int, jax.Array]]] = defaultdict(list)
        for number, (plan, part, spec) in enumerate(zip(plans, parts, specs, strict=True)):
            flat = _flat(plan, part)
            groups[_kind(plan, flat, spec, wanted)].append((number, flat))
        results: list[Any] = [None] * len(parts)
        for kind, members in groups.items():
            joined = [flat for _, flat in members]
            done = _exchanged(function, kind, sizes, jnp.concatenate(joined))
            start = 0
            for number, flat in members:
                end = start + flat.shape[0]
                results[number] = plans[number].restore(done[start:end], parts[number].shape)
                start = end
        return tuple(results)

    run = jax.shard_map(
        local,
        mesh=mesh if ambient.empty else None,
        in_specs=tuple(specs),
        out_specs=tuple(specs),
        check_vma=False,
    )
    return list(run(*arrays))


def _flat(plan: Matrices, part: jax.Array) -> jax.Array:
    """[N, *inner]: the batch axes as one, then those of a matrix."""
    ordered = part.transpose(plan.order)
    return ordered.reshape(-1, *ordered.shape[plan.batch_axes :])


def _kind(plan: Matrices, flat: jax.Array, spec: PartitionSpec, wanted: list[str]) -> _Kind:
    padded = (*spec, *(None,) * (len(plan.order) - len(spec)))
    axes = [(entry,) if isinstance(entry, str) else entry or () for entry in padded]
    axes = [tuple(axis for axis in entry if axis in wanted) for entry in axes]
    taken = {axis for entry in axes for axis in entry}
    split = tuple(axes[axis] for axis in plan.order[plan.batch_axes :])
    free = tuple(axis for axis in wanted if axis not in taken)
    return _Kind(flat.shape[1:], split, free, (plan.rows, plan.columns[0]), flat.dtype)


def _exchanged(
    function: Callable[[jax.Array], jax.Array], kind: _Kind, sizes: dict[str, int], x: jax.Array
) -> jax.Array:
    """The results for x [N, *inner], of which this device has a part of each, or all."""
    count = x.shape[0]
    sharing = [*kind.free, *(axis for axes in kind.split for axis in axes)]
    missing = -count % math.prod(sizes[axis] for axis in sharing)
    x = jnp.pad(x, ((0, missing), *((0, 0),) * (x.ndim - 1)))
    if kind.free:
        own = x.shape[0] // math.prod(sizes[axis] for axis in kind.free)
        x = jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(kind.free) * own, own)
    split = [(place + 1, axes) for place, axes in enumerate(kind.split) if axes]
    for place, axes in split:
        x = jax.lax.all_to_all(x, axes, 0, place, tiled=True)
    x = function(x.reshape(x.shape[0], *kind.shape)).reshape(x.shape)
    for place, axes in reversed(split):
        x = jax.lax.all_to_all(x, axes, place, 0, tiled=True)
    if kind.free:
        x = jax.lax.all_gather(x, kind.free, axis=0, tiled=True)
    return x[:count]
