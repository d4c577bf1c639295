"""Sinkhorn-balanced updates: the full form, and the touched-rows form against it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.v41flash.optim import numpy_optimizers
from v41flash.optim import (
    TableRows,
    TableSpec,
    scale_by_sinkhorn,
    scale_by_sinkhorn_rows,
    sinkhorn_rows_update,
)

ROWS, COLUMNS, CAPACITY = 40, 4, 16


def sparse_gradients(seed, steps, touched=3):
    """Gradients [steps, ROWS, COLUMNS] with a few rows each, some steps without any."""
    rng = np.random.default_rng(seed)
    result = np.zeros((steps, ROWS, COLUMNS))
    for step in range(steps):
        count = 0 if step % 7 == 3 else touched
        chosen = rng.choice(ROWS, count, replace=False)
        result[step, chosen] = rng.normal(size=(count, COLUMNS)) * np.exp(rng.normal())
    return result


@jax.jit
def both_forms(grads, tau, beta):
    """Updates [steps, ROWS, COLUMNS] of either form, and how many rows each step moved."""
    full = scale_by_sinkhorn(tau=tau, beta=beta)
    rows = scale_by_sinkhorn_rows(tau=tau, beta=beta, capacity=CAPACITY)

    def step(states, grad):
        a, left = full.update(grad, states[0])
        b, right = rows.update(grad, states[1])
        return (left, right), (a, b)

    states, updates = jax.lax.scan(step, (full.init(grads[0]), rows.init(grads[0])), grads)
    return updates, states


def test_full_form_equals_numpy():
    """Also for a table that lies on its side, like an output head [d, V]."""
    grads = sparse_gradients(0, 6)
    momentum = np.zeros((ROWS, COLUMNS))
    with jax.enable_x64(True):
        tx = scale_by_sinkhorn({"table": TableSpec(), "head": TableSpec(rows=1, columns=0)})
        state = tx.init({"table": jnp.zeros((ROWS, COLUMNS)), "head": jnp.zeros((COLUMNS, ROWS))})
        for grad in grads:
            wanted, momentum = numpy_optimizers.sinkhorn_update(grad, momentum)
            got, state = jax.jit(tx.update)(
                {"table": jnp.asarray(grad), "head": jnp.asarray(grad.T)}, state
            )
            np.testing.assert_allclose(got["table"], 0.18 * wanted, atol=1e-12)
            np.testing.assert_allclose(got["head"], 0.18 * wanted.T, atol=1e-12)
            np.testing.assert_allclose(state.momentum["table"], momentum, atol=1e-12)


@settings(deadline=None, max_examples=8)
@given(seed=st.integers(0, 2**31), tau=st.sampled_from([1e-3, 0.1, 0.5]), beta=st.floats(0.3, 0.95))
def test_touched_rows_equal_the_full_form_in_float64(seed, tau, beta):
    """High tau: rows drop under the mask and come back. Low tau: more rows than fit (16)."""
    with jax.enable_x64(True):
        grads = jnp.asarray(sparse_gradients(seed, 24))
        (full, rows), (left, right) = both_forms(grads, tau, beta)
        np.testing.assert_allclose(rows, full, atol=1e-9)
        late = right.count - right.last
        decayed = right.momentum * beta ** late.astype(float)
        np.testing.assert_allclose(decayed, left.momentum, atol=1e-12)


def test_both_branches_are_tested():
    """The settings above are such that steps fit, and that they do not."""
    for tau in (1e-3, 0.5):
        (full, _), _ = both_forms(jnp.asarray(sparse_gradients(1, 24), jnp.float32), tau, 0.95)
        moved = np.asarray((full != 0).any(-1).sum(-1))
        assert moved.min() < CAPACITY < moved.max()
        assert tau == 1e-3 or (np.diff(moved) < 0).any()


def test_float32_and_long_pauses():
    """A row that is not seen for 400 steps, in single precision."""
    grads = np.zeros((420, ROWS, COLUMNS), np.float32)
    grads[0, 5] = [3.0, -1.0, 2.0, 0.5]
    grads[::20, 7] = 1.0
    grads[410, 5] = 1.0
    (full, rows), _ = both_forms(jnp.asarray(grads), 1e-3, 0.95)
    moving = np.asarray((full[:, 5] != 0).any(-1))
    assert 100 < moving[:400].sum() < 250
    # One of the two may count a row in one step longer, where it is at the mask up to rounding.
    same = np.isclose(full, rows, atol=2e-4).all((1, 2))
    assert (~same).sum() <= 1


def test_more_rows_touched_than_fit():
    grads = jnp.asarray(sparse_gradients(2, 6, touched=CAPACITY + 5), jnp.float32)
    (full, rows), _ = both_forms(grads, 1e-3, 0.95)
    np.testing.assert_allclose(rows, full, atol=1e-5)


def test_row_sparse_gradients_equal_dense_ones():
    rng = np.random.default_rng(3)
    with jax.enable_x64(True):
        tx = scale_by_sinkhorn_rows(capacity=CAPACITY)
        table = dense_table = jnp.asarray(rng.normal(size=(ROWS, COLUMNS)))
        state, dense = TableRows.zeros(table), tx.init(table)
        update = jax.jit(functools.partial(sinkhorn_rows_update, capacity=CAPACITY))
        for step in range(10):
            # Repetitions, -1 and numbers beyond the end; later more rows than fit.
            rows = rng.integers(-1, ROWS + 2, size=30 if step > 7 else 6)
            values = rng.normal(size=(len(rows), COLUMNS))
            grad = np.zeros((ROWS, COLUMNS))
            inside = (rows >= 0) & (rows < ROWS)
            np.add.at(grad, rows[inside], values[inside])
            updates, dense = jax.jit(tx.update)(jnp.asarray(grad), dense)
            dense_table = dense_table - 0.1 * updates
            table, state = update(table, state, step, jnp.asarray(rows), jnp.asarray(values), 0.1)
            np.testing.assert_allclose(table, dense_table, atol=1e-12)
            np.testing.assert_allclose(state.norm, dense.norm, atol=1e-12)
            np.testing.assert_array_equal(state.last, dense.last)


def equations(jaxpr):
    """The equations of a program, loops left out: those are for steps that do not fit."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "while":
            continue
        inner = [value for value in eqn.params.values() if hasattr(value, "jaxpr")]
        if not inner or eqn.primitive.name.startswith("scatter"):
            yield eqn
            continue
        for value in inner:
            yield from equations(value.jaxpr)


def test_cost_follows_the_rows():
    """Where the rows fit, the table and its momentum are gathered from and scattered to, nothing
    else, and never copied."""
    size, columns = 1000, 64
    table = jax.ShapeDtypeStruct((size, columns), jnp.float32)
    arguments = (
        table,
        jax.eval_shape(TableRows.zeros, table),
        jnp.zeros((), jnp.int32),
        jnp.zeros(8, jnp.int32),
        jnp.zeros((8, columns)),
        jnp.zeros(()),
    )
    update = functools.partial(sinkhorn_rows_update, capacity=32)
    whole = {
        eqn.primitive.name
        for eqn in equations(jax.make_jaxpr(update)(*arguments).jaxpr)
        for var in (*eqn.invars, *eqn.outvars)
        if var.aval.shape == table.shape
    }
    assert whole == {"gather", "scatter", "scatter-add"}
    compiled = jax.jit(update, donate_argnums=(0, 1)).lower(*arguments).compile().as_text()
    assert f"f32[{size},{columns}]" in compiled
    copies = [line for line in compiled.splitlines() if f"= f32[{size},{columns}]" in line]
    copies = [line for line in copies if " copy(" in line or " copy-start(" in line]
    assert not copies


@pytest.mark.parametrize("spec", [TableSpec(rows=1, columns=0), TableSpec(1, 2, batch=0)])
def test_rows_form_needs_rows_first(spec):
    shape = (3,) * (2 if spec.batch == () else 3)
    with pytest.raises(ValueError, match="table.*rows=0, columns=1"):
        scale_by_sinkhorn_rows(spec, capacity=4).init({"table": jnp.ones(shape)})


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e30])
@pytest.mark.parametrize("capacity", [None, 4, 64], ids=["full", "overflowing", "rows"])
def test_bad_gradients_are_not_hidden(bad, capacity):
    """One entry that is no number, or whose square is none, shows in every row."""
    tx = scale_by_sinkhorn() if capacity is None else scale_by_sinkhorn_rows(capacity=capacity)
    grad = jnp.ones((ROWS, COLUMNS)).at[3, 1].set(bad)
    updates, _ = jax.jit(tx.update)(grad, tx.init(grad))
    assert np.isnan(updates).any(1).all()


def test_numpy_gradients_and_empty_tables():
    for tx in (scale_by_sinkhorn(), scale_by_sinkhorn_rows(capacity=4)):
        grads = {"table": np.ones((3, 2), np.float32), "empty": np.ones((0, 2), np.float32)}
        updates, _ = tx.update(grads, tx.init(grads))
        np.testing.assert_allclose(updates["table"], 0.18, rtol=1e-6)
        assert updates["empty"].shape == (0, 2)
    empty = jnp.ones((0, 2))
    state = TableRows.zeros(empty)
    new, _ = sinkhorn_rows_update(
        empty, state, 0, jnp.zeros(0, jnp.int32), jnp.ones((0, 2)), 0.1, capacity=1
    )
    assert new.shape == (0, 2)


def test_dtypes():
    grad = jnp.ones((ROWS, COLUMNS), jnp.bfloat16)
    for tx in (scale_by_sinkhorn(), scale_by_sinkhorn_rows(capacity=64)):
        update, state = jax.eval_shape(lambda g, tx=tx: tx.update(g, tx.init(g)), grad)
        assert update.dtype == jnp.bfloat16 and state.momentum.dtype == jnp.float32
    for tx in (
        scale_by_sinkhorn(momentum_dtype="bfloat16"),
        scale_by_sinkhorn_rows(capacity=64, momentum_dtype="bfloat16"),
    ):
        _, state = jax.eval_shape(lambda g, tx=tx: tx.update(g, tx.init(g)), grad)
        assert state.momentum.dtype == jnp.bfloat16
