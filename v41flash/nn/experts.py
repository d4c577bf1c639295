"""Routed experts on the tokens of a device, and on a mesh: each token travels to its experts.

A device holds some of the experts. Its tokens' assignments are sorted by expert and exchanged with
the devices of the `expert` axis in turns (`v41flash.exchange`): hidden states, router weights and
expert numbers go, results come back. No assignment is dropped, however uneven they are.

Memory of a turn, beside the tokens themselves: with N tokens of k assignments a device sends and
receives about 1.5 N k rows, each of them d values in, 3 x hidden inside the experts, d out; the
backward pass makes a turn's values again and keeps one turn of gradients, and the gradient of the
device's expert weights in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from v41flash import exchange
from v41flash.sharding import parts

# (rows [M, d] sorted by expert, router weights [M], expert weights, sizes int32 [E]) -> [M, d]
Products = Callable[[jax.Array, jax.Array, tuple, jax.Array], jax.Array]


class _Static(NamedTuple):
    """What is known when the program is traced.

    Attributes:
        products: the experts themselves.
        axes: mesh axes that the experts are split over, () for none.
        devices: their number.
        experts: experts of a device.
        room: see `exchange.capacity`.
    """

    products: Products
    axes: tuple[str, ...]
    devices: int
    experts: int
    room: int


class _Plan(NamedTuple):
    """Assignments of the tokens of a device, in the order of their experts.

    Attributes:
        chosen: int32 [N, k], experts.
        order: int32 [N * k], assignment numbers sorted by expert.
        rank: int32 [N, k], place of each assignment in that order.
        queue: for each device its assignments.
    """

    chosen: jax.Array
    order: jax.Array
    rank: jax.Array
    queue: exchange.Lines


class _Places(NamedTuple):
    """Which token each slot of a turn takes, and where each token's assignments went.

    Attributes:
        token: int32 [S], N for an empty slot.
        slot: int32 [N, k], S where an assignment goes in another turn.
    """

    token: jax.Array
    slot: jax.Array


def routed(
    products: Products,
    axes: tuple[str, ...],
    x: jax.Array,
    chosen: jax.Array,
    weights: jax.Array,
    held: tuple,
) -> jax.Array:
    """Sum of every token's experts.

    Args:
        products: of the experts of this device.
        axes: mesh axes that the experts are split over.
        x: [N, d].
        chosen: int32 [N, k], of all experts.
        weights: float32 [N, k].
        held: weights of this device's experts, float arrays [E, ...] (or of any dtype that has no
            gradient).

    Returns:
        float32 [N, d].
    """
    count, k = chosen.shape
    devices = parts(axes)
    experts = jax.tree.leaves(held)[0].shape[0]
    room = exchange.capacity(count * k, devices)
    static = _Static(products, axes, devices, experts, room)
    order = jnp.argsort(chosen.reshape(-1), stable=True).astype(jnp.int32)
    places = jnp.arange(order.size, dtype=jnp.int32)
    rank = jnp.zeros_like(order).at[order].set(places).reshape(count, k)
    if devices == 1:
        everything = jnp.full(1, count * k, jnp.int32)
        queue = exchange.Lines(jnp.zeros_like(everything), everything, jnp.ones((), jnp.int32))
        return _turn(static, _Plan(chosen, order, rank, queue), 0, x, weights, held)
    counts = jnp.bincount(chosen.reshape(-1) // experts, length=devices).astype(jnp.int32)
    plan = _Plan(chosen, order, rank, exchange.lines(counts, room))
    return _turns(static, plan, x, weights, held)


def _turn(
    static: _Static,
    plan: _Plan,
    turn: jax.Array | int,
    x: jax.Array,
    weights: jax.Array,
    held: tuple,
) -> jax.Array:
    """What the assignments of one turn add to the result, float32 [N, d]."""
    count, k = plan.chosen.shape
    slot, used = exchange.slots(plan.queue, turn, static.room)
    assignment = plan.order.at[slot].get(mode="fill", fill_value=0)
    owner = plan.chosen // static.experts
    place = plan.rank - plan.queue.first[owner] - turn * static.room
    here = (place >= 0) & (place < static.room)
    places = _Places(
        token=jnp.where(used, assignment // k, count).reshape(-1),
        slot=jnp.where(here, owner * static.room + place, used.size),
    )
    rows = _spread(x, places).reshape(*used.shape, -1)
    weight = weights.reshape(-1)[assignment]
    expert = plan.chosen.reshape(-1)[assignment]
    if static.devices > 1:
        expert = jnp.where(used, expert % static.experts, static.experts)
        rows, weight, expert = (exchange.swap(part, static.axes) for part in (rows, weight, expert))
    rows, weight, expert = rows.reshape(-1, rows.shape[-1]), weight.reshape(-1), expert.reshape(-1)
    sizes = jnp.bincount(expert, length=static.experts).astype(jnp.int32)
    if static.devices == 1:
        done = static.products(rows, weight, held, sizes)
    else:
        # Sorted within each sender already; empty slots come last.
        order = jnp.argsort(expert, stable=True).astype(jnp.int32)
        inverse = jnp.zeros_like(order).at[order].set(jnp.arange(order.size, dtype=order.dtype))
        rows = _spread(rows, _Places(order, inverse[:, None]))
        done = static.products(rows, weight[order], held, sizes)
        done = _spread(done, _Places(inverse, order[:, None]))
        done = exchange.swap(done.reshape(static.devices, static.room, -1), static.axes)
        done = done.reshape(-1, done.shape[-1])
    return _collect(done, places)


# The two are each other's transposes. Left to autodiff those would be sums over scattered rows,
# which a GPU makes by atomic additions: ten times slower, and in an order of their own every time.
@jax.custom_vjp
def _spread(x: jax.Array, places: _Places) -> jax.Array:
    """[S, d]: each slot's token of x [N, d], 0 in empty slots."""
    return x.at[places.token].get(mode="fill", fill_value=0)


@jax.custom_vjp
def _collect(rows: jax.Array, places: _Places) -> jax.Array:
    """float32 [N, d]: the sum of each token's rows of [S, d]."""
    found = rows.at[places.slot].get(mode="fill", fill_value=0)
    return jnp.sum(found.astype(jnp.float32), axis=1)


def _spread_backward(residuals: tuple, grad: jax.Array) -> tuple[jax.Array, None]:
    (places,) = residuals
    return _collect(grad, places).astype(grad.dtype), None


def _collect_backward(residuals: tuple, grad: jax.Array) -> tuple[jax.Array, None]:
    places, like = residuals
    return _spread(grad, places).astype(like.dtype), None


_spread.defvjp(lambda x, places: (_spread(x, places), (places,)), _spread_backward)
_collect.defvjp(
    lambda rows, places: (_collect(rows, places), (places, rows[:0])), _collect_backward
)


def _turns(
    static: _Static, plan: _Plan, x: jax.Array, weights: jax.Array, held: tuple
) -> jax.Array:
    """The sum of all turns. A loop whose end is computed has no gradient of its own: the backward
    pass goes through the turns once more, each made again."""

    def loop(plan, start, body):
        turns = plan.queue.turns
        _, done = jax.lax.while_loop(
            lambda carry: carry[0] < turns,
            lambda carry: (carry[0] + 1, body(carry[0], carry[1])),
            (jnp.zeros((), jnp.int32), start),
        )
        return done

    @jax.custom_vjp
    def run(plan, x, weights, held):
        return loop(
            plan,
            jnp.zeros(x.shape, jnp.float32),
            lambda turn, total: total + _turn(static, plan, turn, x, weights, held),
        )

    def forward(plan, x, weights, held):
        return run(plan, x, weights, held), (plan, x, weights, held)

    def backward(residuals, gradient):
        plan, *inputs = residuals

        def body(turn, total):
            _, pull = jax.vjp(lambda *inputs: _turn(static, plan, turn, *inputs), *inputs)
            return jax.tree.map(jnp.add, total, pull(gradient))

        return None, *loop(plan, jax.tree.map(jnp.zeros_like, tuple(inputs)), body)

    run.defvjp(forward, backward)
    return run(plan, x, weights, held)
