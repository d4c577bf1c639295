"""Items sorted by where they have to go, and sent there a bounded number at a time.

An all-to-all moves equally much between all pairs of devices. What a pair really has to exchange
(tokens of an expert, rows of a table) is known only at run time, and at worst one device is sent
everything. So items travel in turns: a turn takes at most `capacity` items of each pair, and there
are as many turns as the fullest pair needs. Nothing is dropped and no buffer depends on the data.
All of it runs inside `v41flash.sharding.on_shards`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

# Above the mean of a pair: room for uneven pairs in the first turn. A second one costs as much
# again, room that stays empty costs buffers and bandwidth.
SLACK = 1.5
_MULTIPLE = 8


class Lines(NamedTuple):
    """Items [N], sorted by destination.

    Attributes:
        first: int32 [P], the first item for each destination.
        last: int32 [P], one past its last.
        turns: int32 scalar, the same on all devices of the mesh.
    """

    first: jax.Array
    last: jax.Array
    turns: jax.Array


def capacity(items: int, destinations: int) -> int:
    """Items of each pair in one turn, `items` being all that a device may have to send."""
    if destinations == 1:
        return items
    mean = int(SLACK * items / destinations)
    return min(items, -(-max(mean, 1) // _MULTIPLE) * _MULTIPLE)


def lines(counts: jax.Array, room: int) -> Lines:
    """Lines of `counts` int32 [P] items each, `room` of which go at a time."""
    last = jnp.cumsum(counts)
    turns = -(-jnp.max(counts) // room)
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.empty and mesh.size > 1:
        turns = jax.lax.pmax(turns, mesh.axis_names)
    return Lines(last - counts, last, turns)


def slots(queue: Lines, turn: jax.Array | int, room: int) -> tuple[jax.Array, jax.Array]:
    """What goes in a turn: (item numbers int32 [P, room], bool [P, room] where there is one)."""
    place = jnp.arange(room, dtype=jnp.int32)
    slot = queue.first[:, None] + turn * room + place
    return slot, slot < queue.last[:, None]


def swap(x: jax.Array, axes: Sequence[str]) -> jax.Array:
    """[P, ...] -> [P, ...]: part p of device q goes to part q of device p; its own inverse."""
    return jax.lax.all_to_all(x, tuple(axes), 0, 0, tiled=True) if axes else x


def gathered(
    weight: jax.Array, axes: Sequence[str], dimension: int, dtype: jax.typing.DTypeLike
) -> jax.Array:
    """A weight whose `dimension` is split over `axes`, whole.

    It travels in `dtype` and comes in its own; its gradient is added up in its own, where each
    device keeps its part.

    Args:
        weight: this device's part.
        axes: mesh axes; () where it is whole already.
        dimension: number of the split dimension.
        dtype: that a float weight is rounded to (for a product with activations of that dtype).
    """
    own = weight.dtype
    if not axes:
        return weight
    if not jnp.issubdtype(own, jnp.floating):
        return jax.lax.all_gather(weight, tuple(axes), axis=dimension, tiled=True)

    @jax.custom_vjp
    def gather(weight):
        rounded = weight.astype(dtype)
        return jax.lax.all_gather(rounded, tuple(axes), axis=dimension, tiled=True).astype(own)

    def forward(weight):
        return gather(weight), None

    def backward(_, gradient):
        summed = jax.lax.psum_scatter(
            gradient, tuple(axes), scatter_dimension=dimension, tiled=True
        )
        return (summed,)

    gather.defvjp(forward, backward)
    return gather(weight)
