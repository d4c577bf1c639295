"""Which axes of a parameter form a matrix: declared, never guessed from its rank."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from types import EllipsisType
from typing import Any

import jax
import jax.numpy as jnp

Axes = int | tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class MatrixSpec:
    """A linear weight x W = y as matrices [reduction, output], for Newton-Schulz.

    Axes are numbers as in NumPy; counted from the end (negative) they hold for stacked weights too.

    Attributes:
        reduction: axes that the product sums over (fan-in), flattened in this order.
        output: axes of y (fan-out), flattened in this order.
        batch: axes of independent matrices: heads, experts, stacked layers, fused weights of equal
            size. `...` declares every axis that is not in the other two. An axis that is in none of
            the three is an error.
        split: for weights fused side by side in the flattened output: the sizes of the parts, or
            how many equal ones. Each part is a matrix of its own.

    Example:
        Queries [stacked layers, in, heads, head_dim], one matrix per layer and head, and a fused
        q, k, v [in, 3 * width]:

        >>> per_head = MatrixSpec(reduction=-3, output=-1, batch=...)
        >>> fused = MatrixSpec(reduction=0, output=1, split=3)
    """

    reduction: Axes = -2
    output: Axes = -1
    batch: Axes | EllipsisType = ()
    split: int | tuple[int, ...] = 1


@dataclasses.dataclass(frozen=True)
class TableSpec:
    """A look-up table as a matrix [rows, columns], for Sinkhorn balancing.

    Attributes:
        rows: axes of the entries (vocabulary, table rows).
        columns: axes of an entry's features.
        batch: axes of independent tables, `...` for all others, as in `MatrixSpec`.
    """

    rows: Axes = -2
    columns: Axes = -1
    batch: Axes | EllipsisType = ()


# Plain [in, out] and [rows, columns].
MATRIX = MatrixSpec()
TABLE = TableSpec()

Spec = MatrixSpec | TableSpec
# One spec for everything, a tree of them (prefixes will do), or a function of the parameter tree.
Specs = Any | Callable[[Any], Any]


def leaf_names(tree: Any) -> list[str]:
    """Paths of the leaves in order, as "group_0/first/attn/wq_b"."""
    return [
        jax.tree_util.keystr(path, simple=True, separator="/")
        for path, _ in jax.tree_util.tree_leaves_with_path(tree)
    ]


def leaf_specs(specs: Specs, tree: Any, kind: type) -> list[Any]:
    """One spec per leaf of `tree`, in order.

    Raises:
        ValueError: a leaf without a spec of that kind, named by its path.
    """
    names = leaf_names(tree)
    if not names:
        return []
    if callable(specs):
        specs = specs(tree)

    def is_spec(node):
        return node is None or isinstance(node, MatrixSpec | TableSpec)

    try:
        found = jax.tree.broadcast(specs, tree, is_leaf=is_spec)
    except ValueError as error:
        raise ValueError(
            f"specs must be a {kind.__name__} or a tree of them that is a prefix of the "
            f"parameters: {str(error).splitlines()[0]}"
        ) from error
    found = jax.tree.leaves(found, is_leaf=is_spec)
    for name, spec in zip(names, found, strict=True):
        if not isinstance(spec, kind):
            raise ValueError(f"parameter {name!r} needs a {kind.__name__}, got {spec!r}")
    return found


def momenta(params: Any, dtype: jax.typing.DTypeLike | None) -> Any:
    """A buffer of zeros per parameter: of `dtype`, or the parameter's own, at least float32."""
    return jax.tree.map(
        lambda leaf: jnp.zeros_like(
            leaf, dtype=dtype or jnp.promote_types(leaf.dtype, jnp.float32)
        ),
        params,
    )


@dataclasses.dataclass(frozen=True)
class Matrices:
    """How one parameter becomes matrices [batch, rows, columns], and back.

    Attributes:
        shape: of the parameter.
        order: its axes in the order batch, rows, columns.
        batch: number of matrices (before a split).
        batch_axes: number of the axes that they lie along.
        rows: fan-in, or table rows.
        columns: sizes of the parts side by side; one where nothing is split.
    """

    shape: tuple[int, ...]
    order: tuple[int, ...]
    batch: int
    batch_axes: int
    rows: int
    columns: tuple[int, ...]

    @classmethod
    def of(cls, spec: Spec, shape: tuple[int, ...], name: str) -> Matrices:
        """Checks `spec` against a parameter's shape.

        Raises:
            ValueError: an axis is out of range, declared twice or not at all, or a split does not
                add up; the parameter is named.
        """
        if isinstance(spec, MatrixSpec):
            sides, split = (spec.reduction, spec.output), spec.split
        else:
            sides, split = (spec.rows, spec.columns), 1
        where = f"parameter {name!r} of shape {tuple(shape)}, {spec}"
        rows, columns = (_axes(side, len(shape), where) for side in sides)
        if spec.batch is ...:
            batch = tuple(i for i in range(len(shape)) if i not in rows + columns)
        else:
            batch = _axes(spec.batch, len(shape), where)
        # One axis of a batch may be split over devices, and the batch stays split only where it
        # comes first: it is the largest (experts, not layers).
        batch = tuple(sorted(batch, key=lambda axis: -shape[axis]))
        order = batch + rows + columns
        if len(set(order)) != len(order):
            raise ValueError(f"{where}: an axis is declared twice")
        missing = sorted(set(range(len(shape))) - set(order))
        if missing or not rows or not columns:
            raise ValueError(
                f"{where}: every axis must be declared, undeclared: {missing}; batch=... makes "
                "the others batch axes"
            )
        width = math.prod(shape[axis] for axis in columns)
        sizes = split if isinstance(split, tuple) else (split,)
        if not all(isinstance(size, int) for size in sizes):
            raise ValueError(f"{where}: split is a number of parts or a tuple of their sizes")
        if isinstance(split, int):
            if split < 1 or width % split:
                raise ValueError(f"{where}: {width} outputs do not split into {split} equal parts")
            split = (width // split,) * split
        if sum(split) != width:
            raise ValueError(f"{where}: the split must add up to {width} outputs")
        count = math.prod(shape[axis] for axis in batch)
        height = math.prod(shape[axis] for axis in rows)
        return cls(tuple(shape), order, count, len(batch), height, tuple(split))

    @classmethod
    def of_tree(cls, specs: Specs, tree: Any, kind: type) -> list[Matrices]:
        """How every parameter of a tree becomes matrices, in order.

        Raises:
            ValueError: as `of` and `leaf_specs`.
        """
        declared, leaves = leaf_specs(specs, tree, kind), jax.tree.leaves(tree)
        parts = zip(declared, leaves, leaf_names(tree), strict=True)
        return [cls.of(spec, jnp.shape(leaf), name) for spec, leaf, name in parts]

    def take(self, x: jax.Array) -> list[jax.Array]:
        """The parts of a parameter, each [batch, rows, columns]."""
        flat = x.transpose(self.order).reshape(self.batch, self.rows, sum(self.columns))
        if len(self.columns) == 1:
            return [flat]
        edges = [sum(self.columns[:i]) for i in range(1, len(self.columns))]
        return jnp.split(flat, edges, axis=-1)

    def put(self, parts: list[jax.Array]) -> jax.Array:
        """Inverse of `take`."""
        flat = parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=-1)
        return self.restore(flat, self.shape)

    def restore(self, flat: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """A parameter of any `shape`, such as a device's part, from its axes in `order`."""
        inverse = sorted(range(len(self.order)), key=self.order.__getitem__)
        return flat.reshape([shape[axis] for axis in self.order]).transpose(inverse)


def _axes(axes: Axes, ndim: int, where: str) -> tuple[int, ...]:
    axes = tuple(axes) if isinstance(axes, Sequence) else (axes,)
    for axis in axes:
        if isinstance(axis, bool) or not isinstance(axis, int):
            raise ValueError(f"{where}: an axis is a number, got {axis!r}")
        if not -ndim <= axis < ndim:
            raise ValueError(f"{where}: there is no axis {axis}")
    return tuple(axis % ndim for axis in axes)
