"""Looking up rows of tables: of the embedding, and of Engram tables that are split by rows.

No device ever has a whole Engram table, nor a gradient of one. A device names each row that its
tokens need once (n-grams repeat), asks the device that holds it, and gets it back; in the backward
pass gradients of those rows go the same way, and each holder adds them to its own part. Both travel
in bounded turns (`v41flash.exchange`), so nothing is lost where many rows lie on one device.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import Implementation
from pallas_kernels.engram_gather import engram_gather
from v41flash import exchange
from v41flash.sharding import on_shards, part, parts


def embed(table: jax.Array, tokens: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """Token embeddings.

    Args:
        table: float[V, d]; on a mesh split by vocabulary, and by columns as all parameters are.
        tokens: int32 [B, T] in 0..V-1.
        dtype: of the result.

    Returns:
        dtype[B, T, d].
    """

    def local(axes, table, tokens):
        vocab = axes["vocab"]
        whole = exchange.gathered(table, axes["embed"], 1, dtype)
        if not vocab:
            return jnp.take(whole, tokens, axis=0).astype(dtype)
        places = tokens - part(vocab) * table.shape[0]
        taken = whole.at[places].get(mode="fill", fill_value=0, wrap_negative_indices=False)
        return jax.lax.psum(taken, vocab).astype(dtype)

    token = ("batch", "length")
    return on_shards(local, (("vocab", "embed"), token), [*token, None])(table, tokens)


class _Wanted(NamedTuple):
    """Rows that the tokens of a device need.

    Attributes:
        numbers: int32 [M], each row once, ascending, counted on the whole table.
        place: int32 [M], where in `numbers` each of the M rows asked for is; M where there is none.
        queue: for each device the rows that it holds.
    """

    numbers: jax.Array
    place: jax.Array
    queue: exchange.Lines


def look_up(
    table: jax.Array,
    rows: jax.Array,
    dtype: jax.typing.DTypeLike,
    implementation: Implementation = None,
) -> jax.Array:
    """`pallas_kernels.engram_gather` for tokens and a table that may be split over devices.

    Args:
        table: float[N, c] or packed rows, as there.
        rows: int32 [B, T, R], as there.
        dtype: of the result.
        implementation: of `engram_gather`.

    Returns:
        dtype[B, T, R*c]. The gradient of the table adds up in its dtype, as there.
    """

    def local(axes, table, rows):
        axes = axes["table_rows"]
        if not axes:
            return engram_gather(table, rows, dtype, implementation=implementation)
        taken = _exchanged(table, rows.reshape(-1), axes, dtype, implementation)
        return taken.reshape(*rows.shape[:-1], -1)

    token = ("batch", "queries", None)
    return on_shards(local, (("table_rows", None), token), list(token))(table, rows)


def _wanted(rows: jax.Array, holders: int, rows_each: int, room: int) -> _Wanted:
    """Sorts out the rows int32 [M] that tokens ask for."""
    count = rows.shape[0]
    none = holders * rows_each
    known = jnp.where((rows >= 0) & (rows < none), rows, none)
    order = jnp.argsort(known).astype(jnp.int32)
    ascending = known[order]
    fresh = jnp.concatenate([jnp.ones(1, bool), ascending[1:] != ascending[:-1]])
    unique = jnp.cumsum(fresh, dtype=jnp.int32) - 1
    numbers = jnp.full(count, none, jnp.int32).at[unique].set(ascending)
    place = jnp.zeros(count, jnp.int32).at[order].set(unique)
    place = jnp.where(known < none, place, count)
    ends = (jnp.arange(holders, dtype=jnp.int32) + 1) * rows_each
    last = jnp.searchsorted(numbers, ends, side="left").astype(jnp.int32)
    counts = last - jnp.concatenate([jnp.zeros(1, jnp.int32), last[:-1]])
    return _Wanted(numbers, place, exchange.lines(counts, room))


def _exchanged(
    table: jax.Array,
    rows: jax.Array,
    axes: tuple[str, ...],
    dtype: jax.typing.DTypeLike,
    implementation: Implementation,
) -> jax.Array:
    """dtype[M, c] of rows int32 [M], `table` being this device's part."""
    holders, rows_each = parts(axes), table.shape[0]
    room = exchange.capacity(rows.shape[0], holders)

    def asked(wanted: _Wanted, turn: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """(slots [P, C]; those in use; the rows of this device that others ask for, -1 for none)"""
        slot, used = exchange.slots(wanted.queue, turn, room)
        number = wanted.numbers.at[slot].get(mode="fill", fill_value=0)
        number = exchange.swap(jnp.where(used, number, -1), axes)
        return slot, used, jnp.where(number >= 0, number - part(axes) * rows_each, -1)

    def loop(wanted: _Wanted, start: jax.Array, body) -> jax.Array:
        _, done = jax.lax.while_loop(
            lambda carry: carry[0] < wanted.queue.turns,
            lambda carry: (carry[0] + 1, body(carry[0], carry[1])),
            (jnp.zeros((), jnp.int32), start),
        )
        return done

    def take(table: jax.Array, wanted: _Wanted) -> jax.Array:
        width = jax.eval_shape(lambda t: engram_gather(t, rows[:1, None], dtype), table).shape[-1]

        def body(turn: jax.Array, held: jax.Array) -> jax.Array:
            slot, used, mine = asked(wanted, turn)
            found = engram_gather(table, mine[..., None], dtype, implementation=implementation)
            slot = jnp.where(used, slot, rows.shape[0])
            return held.at[slot].set(exchange.swap(found, axes), mode="drop")

        held = loop(wanted, jnp.zeros((rows.shape[0], width), dtype), body)
        return held.at[wanted.place].get(mode="fill", fill_value=0)

    if table.dtype == jnp.uint8:  # packed: no gradient
        return take(table, _wanted(rows, holders, rows_each, room))

    @jax.custom_vjp
    def run(table, wanted):
        return take(table, wanted)

    def forward(table, wanted):
        return take(table, wanted), (jnp.zeros((0, *table.shape[1:]), table.dtype), wanted)

    def backward(residuals, gradient):
        like, wanted = residuals
        summed = jnp.zeros((rows.shape[0], like.shape[1]), like.dtype)
        summed = summed.at[wanted.place].add(gradient.astype(like.dtype), mode="drop")

        def body(turn: jax.Array, total: jax.Array) -> jax.Array:
            slot, used, mine = asked(wanted, turn)
            own = summed.at[slot].get(mode="fill", fill_value=0)
            given = exchange.swap(jnp.where(used[..., None], own, 0), axes)
            mine = jnp.where(mine >= 0, mine, rows_each)
            return total.at[mine].add(given, mode="drop")

        zeros = jnp.zeros((rows_each, like.shape[1]), like.dtype)
        return loop(wanted, zeros, body), None

    run.defvjp(forward, backward)
    return run(table, _wanted(rows, holders, rows_each, room))
