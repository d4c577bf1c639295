"""Which parameters a compiled program gathers, and along which mesh axes it may."""

from __future__ import annotations

from typing import Any

import jax

from train import hlo

# Parameters are split over these as in ZeRO-3: the rules ask for whole ones where they are used.
SHARED_OUT = {"fsdp", "context"}


def _shapes(leaf: jax.ShapeDtypeStruct) -> set[tuple[int, ...]]:
    """Shapes that parts of a parameter have, from what a device holds to the whole; of one layer
    too where several may be stacked: stacks are split over nothing."""
    local = leaf.sharding.shard_shape(leaf.shape)
    shapes = {()}
    for whole, part in zip(leaf.shape, local, strict=True):
        sizes = {size for size in range(part, whole + 1, part) if whole % size == 0}
        shapes = {(*shape, size) for shape in shapes for size in sizes}
    shapes.discard(local)
    stacks = [depth for depth in (0, 1, 2) if local[:depth] == leaf.shape[:depth]]
    return {shape[depth:] for shape in shapes for depth in stacks}


def unasked(text: str, params: Any, mesh: jax.sharding.Mesh) -> list[str]:
    """All-gathers of matrices or tables that the rules do not ask for.

    Args:
        text: of a compiled program.
        params: abstract parameters with shardings.
        mesh: of them.

    Returns:
        A line for each all-gather that has the shape of a parameter (or of a larger part of one
        than a device holds) and goes along other axes than `SHARED_OUT`.
    """
    named: dict[tuple[int, ...], str] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        for shape in _shapes(leaf):
            if len(shape) > 1:
                named.setdefault(shape, jax.tree_util.keystr(path))
    found = []
    for one in hlo.collectives(text):
        if one.kind != "all-gather":
            continue
        along = hlo.axes_of(mesh, one.groups)
        for _, shape in one.shapes:
            squeezed = tuple(size for size in shape if size > 1)
            name = named.get(shape) or named.get(squeezed)
            if name and not along <= SHARED_OUT:
                found.append(f"{name} {list(shape)} along {sorted(along)}: {one.op_name}")
    return found
