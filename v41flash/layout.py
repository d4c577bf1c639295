"""How a parameter of the model lies in published tensors, and back.

A published linear weight is [out, in]; ours keep head and group axes and lie [in, ..., out], and
what is multiplied at once (the experts of a layer, gate and input of one expert) is one parameter.
A `Layout` says so once, for the modules that may hold a weight as published, and for checkpoints.
Standard library only: it works on anything that has `reshape` and `transpose`.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any


@dataclasses.dataclass(frozen=True)
class Layout:
    """ours = published tensors, stacked, with their axes split, in another order.

    Attributes:
        split: axes of one published tensor; the first `rows` of them are merged in it into one, and
            the others into another (if there are any).
        order: ours[i] is axis order[i] of (*stack, *split).
        stack: how the published tensors of one parameter are stacked; () for a single one.
        rows: see `split`.
    """

    split: tuple[int, ...]
    order: tuple[int, ...]
    stack: tuple[int, ...] = ()
    rows: int = 1

    @property
    def axes(self) -> tuple[int, ...]:
        """Sizes of (*stack, *split)."""
        return (*self.stack, *self.split)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the parameter."""
        return tuple(self.axes[i] for i in self.order)

    @property
    def published(self) -> tuple[int, ...]:
        """Shape of one published tensor: [out, in], or [n]."""
        parts = (self.split[: self.rows], self.split[self.rows :])
        return tuple(math.prod(part) for part in parts if part)

    @property
    def tensors(self) -> int:
        """How many published tensors make the parameter."""
        return math.prod(self.stack)

    def ours(self, x: Any) -> Any:
        """The parameter(s) [*lead, *shape] of tensors [*lead, *stack, *published]."""
        lead = x.ndim - len(self.stack) - len(self.published)
        x = x.reshape(*x.shape[:lead], *self.axes)
        return x.transpose(*range(lead), *(lead + i for i in self.order))

    def theirs(self, x: Any) -> Any:
        """Inverse of `ours`."""
        lead = x.ndim - len(self.order)
        inverse = (lead + self.order.index(i) for i in range(len(self.order)))
        x = x.transpose(*range(lead), *inverse)
        return x.reshape(*x.shape[:lead], *self.stack, *self.published)


def plain(*shape: int) -> Layout:
    """As published: vectors, tables, what is never multiplied from the right."""
    return Layout(shape, tuple(range(len(shape))))


def linear(out: int, inner: int) -> Layout:
    """[out, in] -> [in, out]."""
    return Layout((out, inner), (1, 0))


def heads(count: int, dim: int, inner: int) -> Layout:
    """[heads*dim, in] -> [in, heads, dim]."""
    return Layout((count, dim, inner), (2, 0, 1), rows=2)


def groups_in(groups: int, out: int, inner: int) -> Layout:
    """[groups*out, in] -> [groups, in, out]: every group reads inputs of its own."""
    return Layout((groups, out, inner), (0, 2, 1), rows=2)


def groups_out(groups: int, inner: int, out: int) -> Layout:
    """[out, groups*in] -> [groups, in, out]: the groups add up."""
    return Layout((out, groups, inner), (1, 2, 0))


def pair(hidden: int, inner: int) -> Layout:
    """w1 and w3 of one expert, each [hidden, in] -> [in, 2, hidden]."""
    return Layout((hidden, inner), (2, 0, 1), stack=(2,))


def expert_pairs(experts: int, hidden: int, inner: int) -> Layout:
    """w1 and w3 of every expert -> [experts, in, 2, hidden]."""
    return Layout((hidden, inner), (0, 3, 1, 2), stack=(experts, 2))


def experts(count: int, out: int, inner: int) -> Layout:
    """One [out, in] of every expert -> [experts, in, out]."""
    return Layout((out, inner), (0, 2, 1), stack=(count,))
