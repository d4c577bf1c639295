"""Sinkhorn-balanced updates of tables of which a batch touches few rows.

The full form reads and writes every row at every step. Here a row's momentum stays as it was when
the row last had a gradient, together with its norm and that step's number: what it has decayed to
since is a power of beta. Masking needs the norms alone, and the rows that are read are those that
are touched and those whose momentum is still above the mask.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from pallas_kernels.dispatch import Implementation
from pallas_kernels.sinkhorn import sinkhorn, sinkhorn_update
from pallas_kernels.sinkhorn.reference import norms, row_mask
from v41flash.optim import checks
from v41flash.optim.axes import TABLE, Matrices, Specs, TableSpec, leaf_names
from v41flash.optim.meshes import with_auto_axes


class TableRows(NamedTuple):
    """Momentum of one table [m, n], decayed lazily.

    Attributes:
        momentum: [m, n], each row as of the step in `last`.
        norm: float32 [m, 1], 2-norms of the rows of `momentum` (float64 with it).
        last: int32 [m, 1], number of the step that last touched the row; 0 before any.
    """

    momentum: jax.Array
    norm: jax.Array
    last: jax.Array

    @classmethod
    def zeros(cls, table: jax.Array, dtype: jax.typing.DTypeLike | None = None) -> TableRows:
        """State before the first step; `dtype` of the momentum, at least float32 where None."""
        wide = jnp.promote_types(table.dtype, jnp.float32)
        momentum = jnp.zeros_like(table, dtype=dtype or wide)
        column = momentum[:, :1]
        norm = jnp.zeros_like(column, dtype=jnp.promote_types(column.dtype, jnp.float32))
        return cls(momentum, norm, jnp.zeros_like(column, dtype=jnp.int32))


class SinkhornRowsState(NamedTuple):
    """State of `scale_by_sinkhorn_rows`: the fields of `TableRows`, and the steps done so far."""

    count: jax.Array
    momentum: optax.Updates
    norm: optax.Updates
    last: optax.Updates


class _Static(NamedTuple):
    """What does not depend on the table, and is known when the step is traced."""

    capacity: int
    iterations: int
    compute_dtype: Any
    implementation: Implementation


class _Numbers(NamedTuple):
    """Hyperparameters that may be arrays."""

    beta: jax.typing.ArrayLike
    tau: jax.typing.ArrayLike
    gamma: jax.typing.ArrayLike
    eps: jax.typing.ArrayLike


def _step(
    static: _Static,
    numbers: _Numbers,
    rows: TableRows,
    count: jax.Array,
    touched: jax.Array,
    compact_gradient: Callable[[jax.Array], jax.Array],
    full_gradient: Callable[[], jax.Array],
    base: jax.Array,
    write: Callable[[jax.Array, jax.Array | None, jax.Array], jax.Array],
) -> tuple[jax.Array, TableRows]:
    """One step of one table.

    Args:
        static: hyperparameters.
        numbers: likewise.
        rows: state.
        count: number of this step, from 1.
        touched: bool [m].
        compact_gradient: i32[C] row numbers (m: none) -> their gradients [C, n], 0 for none.
        full_gradient: -> [m, n]; called where the rows do not fit.
        base: [m, n], what is written to.
        write: (base, row numbers or None for all, balanced updates [C, n] or [m, n]) -> [m, n].

    Returns:
        (what was written, new state).
    """
    size = touched.shape[0]
    wide = rows.norm.dtype
    beta = jnp.asarray(numbers.beta, wide)

    def gather(array, indices):
        return array.at[indices].get(mode="fill", fill_value=0)

    def decay(last, extra=0):
        return beta ** (count - last + extra).astype(wide)

    # New momentum of the touched rows.
    chosen = jnp.nonzero(touched, size=static.capacity, fill_value=size)[0]
    fresh = (1 - beta) * compact_gradient(chosen).astype(wide)
    old = gather(rows.momentum, chosen).astype(wide) * decay(gather(rows.last, chosen))
    new = (old + fresh).astype(rows.momentum.dtype)
    averaged = beta * new.astype(wide) + fresh

    # The mask, from norms alone.
    rho = rows.norm * decay(rows.last, 1)
    rho = rho.at[chosen].set(norms(averaged, -1), mode="drop")
    keep = row_mask(rho, numbers.tau)[:, 0]
    active = jnp.nonzero(keep, size=static.capacity, fill_value=size)[0]
    fits = (jnp.sum(touched) <= static.capacity) & (jnp.sum(keep) <= static.capacity)

    # In a step that does not fit nothing is written here, and the loop below runs once.
    written = jnp.where(fits, chosen, size)
    new_rows = TableRows(
        rows.momentum.at[written].set(new, mode="drop"),
        rows.norm.at[written].set(norms(new.astype(wide), -1), mode="drop"),
        rows.last.at[written].set(count, mode="drop"),
    )

    # The rows to balance: the touched ones from above, the others from what they have decayed to.
    # Read after the writes, or XLA would copy the table to keep both.
    place = jnp.full(size, static.capacity, jnp.int32)
    place = place.at[chosen].set(jnp.arange(static.capacity, dtype=jnp.int32), mode="drop")
    slots = place.at[active].get(mode="fill", fill_value=static.capacity)
    idle = gather(new_rows.momentum, active).astype(wide) * decay(gather(new_rows.last, active), 1)
    balanced = sinkhorn(
        jnp.where((slots < static.capacity)[:, None], gather(averaged, slots), idle),
        iterations=static.iterations,
        eps=numbers.eps,
        keep=active < size,
        dtype=static.compute_dtype,
    )
    result = write(base, jnp.where(fits, active, size), balanced)

    def all_rows(carry):
        _, result, rows = carry
        decayed = rows.momentum.astype(wide) * decay(rows.last, -1)
        balanced, momentum = sinkhorn_update(
            full_gradient(),
            decayed.astype(rows.momentum.dtype),
            beta=numbers.beta,
            tau=numbers.tau,
            iterations=static.iterations,
            eps=numbers.eps,
            dtype=static.compute_dtype,
            implementation=static.implementation,
        )
        last = jnp.full_like(rows.last, 0) + count
        rows = TableRows(momentum, norms(momentum.astype(wide), -1), last)
        return jnp.zeros((), bool), write(result, None, balanced), rows

    # A loop of no or one turn: unlike the operands of a conditional, its state is updated in place.
    _, result, new_rows = jax.lax.while_loop(
        lambda carry: carry[0], all_rows, (~fits, result, new_rows)
    )
    return result, new_rows


def scale_by_sinkhorn_rows(
    specs: Specs = TABLE,
    *,
    capacity: int,
    beta: float = 0.95,
    tau: float = 1e-3,
    iterations: int = 11,
    gamma: float = 0.18,
    eps: float = 1e-20,
    momentum_dtype: jax.typing.DTypeLike | None = None,
    compute_dtype: jax.typing.DTypeLike | None = None,
    implementation: Implementation = None,
) -> optax.GradientTransformationExtraArgs:
    r"""`scale_by_sinkhorn` for tables [rows, columns] whose gradients are 0 in most rows.

    The same results, up to the rounding of :math:`\beta^k M` against k multiplications by beta. The
    balancing costs as much as the rows that are touched or above the mask; beside it stand one read
    of the gradient (to find its rows) and one write of the update, which this interface asks for:
    see `sinkhorn_rows_update` for a step without either.

    Where more than `capacity` rows are touched, or above the mask, a step is done in the full form,
    with the same result.

    Memory: one buffer like the parameters, and 8 bytes a row.

    Args:
        specs: must come to `TableSpec(rows=0, columns=1)`, the axes of a 2-D table.
        capacity: rows that fit. With R rows touched a step and tables that are mostly new to a
            batch, some 135 R at the defaults, as each keeps moving for about so long.
        beta: as in `scale_by_sinkhorn`, like the rest.
        tau: see there.
        iterations: see there.
        gamma: see there.
        eps: see there.
        momentum_dtype: see there.
        compute_dtype: see there.
        implementation: of sinkhorn_update in the full form.

    Returns:
        A transform whose update has the gradient's dtypes. With `optax.inject_hyperparams`,
        capacity and iterations are static.

    Raises:
        ValueError: as `scale_by_sinkhorn`; a capacity that is not positive; from `init`, another
            layout than [rows, columns].
        TypeError: a hyperparameter that is no number.

    Example:
        >>> import jax.numpy as jnp
        >>> tx = scale_by_sinkhorn_rows(capacity=4)
        >>> table = jnp.zeros((100, 2))
        >>> gradient = table.at[7].set(3.0)
        >>> updates, state = tx.update(gradient, tx.init(table))
        >>> [round(float(x), 4) for x in updates[7]], float(jnp.sum(jnp.abs(updates))) < 0.37
        ([0.18, 0.18], True)
    """
    numbers = _Numbers(beta, tau, gamma, eps)
    static = _Static(capacity, iterations, compute_dtype, implementation)
    _check(static, numbers)
    checks.floating("momentum_dtype", momentum_dtype)

    def init(params):
        checks.parameters(params)
        planned = Matrices.of_tree(specs, params, TableSpec)
        for plan, name in zip(planned, leaf_names(params), strict=True):
            if plan.order != (0, 1):
                raise ValueError(
                    f"parameter {name!r} of shape {plan.shape}: touched rows need a 2-D table, and "
                    "TableSpec(rows=0, columns=1)"
                )

        def field(name):
            return jax.tree.map(lambda x: getattr(TableRows.zeros(x, momentum_dtype), name), params)

        return SinkhornRowsState(jnp.zeros((), jnp.int32), *map(field, TableRows._fields))

    def one(grad, rows, count, numbers):
        if not grad.size:
            return grad, rows

        def write(base, indices, balanced):
            scaled = (balanced * numbers.gamma).astype(grad.dtype)
            return scaled if indices is None else base.at[indices].set(scaled, mode="drop")

        return _step(
            static,
            numbers,
            rows,
            count,
            jnp.any(grad != 0, axis=1),
            lambda indices: grad.at[indices].get(mode="fill", fill_value=0),
            lambda: grad,
            jnp.zeros_like(grad),
            write,
        )

    def update(updates, state, params=None, **extra_args):
        del params, extra_args
        checks.gradients(updates, state.momentum)
        grads, treedef = jax.tree.flatten(jax.tree.map(jnp.asarray, updates))
        tables = [
            TableRows(*fields) for fields in zip(*map(jax.tree.leaves, state[1:]), strict=True)
        ]
        count = optax.safe_increment(state.count)

        # Numbers are arguments: on a mesh with Explicit axes injected ones may not be closed over.
        def run(grads, tables, count, numbers):
            done = [one(*table, count, numbers) for table in zip(grads, tables, strict=True)]
            return [scaled for scaled, _ in done], [rows for _, rows in done]

        scaled, tables = with_auto_axes(run, 0, 1)(grads, tables, count, numbers)
        fields = [treedef.unflatten(leaves) for leaves in zip(*tables, strict=True)]
        if not tables:
            fields = list(state[1:])
        return treedef.unflatten(scaled), SinkhornRowsState(count, *fields)

    return optax.GradientTransformationExtraArgs(init, update)


def sinkhorn_rows_update(
    table: jax.Array,
    state: TableRows,
    count: jax.Array,
    rows: jax.Array,
    values: jax.Array,
    learning_rate: jax.typing.ArrayLike,
    *,
    capacity: int,
    beta: float = 0.95,
    tau: float = 1e-3,
    iterations: int = 11,
    gamma: float = 0.18,
    eps: float = 1e-20,
    compute_dtype: jax.typing.DTypeLike | None = None,
    implementation: Implementation = None,
) -> tuple[jax.Array, TableRows]:
    r"""One Sinkhorn-balanced step from a row-sparse gradient, in place where `table` is donated.

    Nothing of the table's full size is read or written, except for vectors with one number a row,
    and in a step that does not fit (see `scale_by_sinkhorn_rows`). XLA sets memory aside for such a
    step, about three times the table.

    Args:
        table: float[m, n].
        state: of the table; `TableRows.zeros(table)` at first.
        count: int32, steps done before.
        rows: int32[N], rows that have a gradient. Repetitions add up; -1 or m means none.
        values: float[N, n], the gradients.
        learning_rate: eta; the table loses eta * gamma * the balanced update.
        capacity: as in `scale_by_sinkhorn_rows`; at least N never overflows by touched rows alone.
        beta: as in `scale_by_sinkhorn`, like the rest.
        tau: see there.
        iterations: see there.
        gamma: see there.
        eps: see there.
        compute_dtype: see there.
        implementation: of sinkhorn_update in the full form.

    Returns:
        (new table, new state).

    Raises:
        ValueError: shapes that do not fit, rows that are no integers, a hyperparameter out of its
            range.
        TypeError: a hyperparameter that is no number.

    Example:
        >>> import jax.numpy as jnp
        >>> table = jnp.zeros((100, 2))
        >>> rows, values = jnp.array([7, -1, 7]), jnp.ones((3, 2))
        >>> table, state = sinkhorn_rows_update(
        ...     table, TableRows.zeros(table), 0, rows, values, 1.0, capacity=4
        ... )
        >>> [round(float(x), 4) for x in table[7]], int(state.last[7, 0])
        ([-0.18, -0.18], 1)
    """
    numbers = _Numbers(beta, tau, gamma, eps)
    static = _Static(capacity, iterations, compute_dtype, implementation)
    _check(static, numbers)
    checks.learning_rate(learning_rate)
    rows, values = jnp.asarray(rows), jnp.asarray(values)
    if table.ndim != 2 or rows.ndim != 1 or values.shape != (rows.shape[0], table.shape[1]):
        raise ValueError(
            f"table [m, n], rows [N] and values [N, n] have shapes {table.shape}, {rows.shape} and "
            f"{values.shape}"
        )
    if not jnp.issubdtype(rows.dtype, jnp.integer):
        raise ValueError(f"rows are {rows.dtype}: must be integers")
    if state.momentum.shape != table.shape:
        raise ValueError(f"state is of a table {state.momentum.shape}, not {table.shape}")
    if not table.size:
        return table, state

    def run(table, state, count, rows, values, learning_rate, numbers):
        return _sparse_step(static, numbers, table, state, count, rows, values, learning_rate)

    count = jnp.asarray(count, jnp.int32) + 1
    return with_auto_axes(run, 0, 1)(table, state, count, rows, values, learning_rate, numbers)


def _sparse_step(
    static: _Static,
    numbers: _Numbers,
    table: jax.Array,
    state: TableRows,
    count: jax.Array,
    rows: jax.Array,
    values: jax.Array,
    learning_rate: jax.typing.ArrayLike,
) -> tuple[jax.Array, TableRows]:
    """`sinkhorn_rows_update`; `count` is the number of this step."""
    size, capacity = table.shape[0], static.capacity
    rows = jnp.where(rows < 0, size, rows)
    wide = state.norm.dtype
    touched = jnp.zeros(size, bool).at[rows].set(True, mode="drop")

    def compact_gradient(indices):
        place = jnp.full(size, capacity, jnp.int32)
        place = place.at[indices].set(jnp.arange(capacity, dtype=jnp.int32), mode="drop")
        slots = place.at[rows].get(mode="fill", fill_value=capacity)
        zeros = jnp.zeros((capacity, table.shape[1]), wide)
        return zeros.at[slots].add(values.astype(wide), mode="drop")

    def full_gradient():
        return jnp.zeros(table.shape, wide).at[rows].add(values.astype(wide), mode="drop")

    def write(base, indices, balanced):
        change = (-learning_rate * numbers.gamma * balanced).astype(base.dtype)
        return base + change if indices is None else base.at[indices].add(change, mode="drop")

    return _step(
        static, numbers, state, count, touched, compact_gradient, full_gradient, table, write
    )


def _check(static: _Static, numbers: _Numbers) -> None:
    capacity = static.capacity
    if isinstance(capacity, bool) or not isinstance(capacity, int) or capacity < 1:
        raise ValueError(f"capacity must be a positive number of rows, got {capacity!r}")
    checks.sinkhorn(**numbers._asdict(), iterations=static.iterations)
    checks.floating("compute_dtype", static.compute_dtype)
