"""What is refused, and how it is said: one line that names the argument or the parameter."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from v41flash.optim import (
    MatrixSpec,
    Rule,
    TableRows,
    TableSpec,
    head_muon,
    partition,
    scale_by_head_muon,
    scale_by_sinkhorn,
    scale_by_sinkhorn_rows,
    sinkhorn_balanced,
    sinkhorn_rows_update,
    warmup_constant_cosine,
)

PARAMS = {"first": jnp.ones((4, 3)), "second": {"weight": jnp.ones((2, 4, 3))}}


@pytest.mark.parametrize(
    ("make", "error", "named"),
    [
        (lambda: head_muon(-1e-3), ValueError, "learning_rate = -0.001"),
        (lambda: head_muon(float("nan")), ValueError, "learning_rate = nan"),
        (lambda: head_muon("1e-3"), TypeError, "learning_rate = '1e-3'"),
        (lambda: head_muon(1e-3, weight_decay=-0.1), ValueError, "weight_decay = -0.1"),
        (lambda: scale_by_head_muon(momentum=1.0), ValueError, r"momentum = 1.0: .* \[0, 1"),
        (lambda: scale_by_head_muon(rms=float("inf")), ValueError, "rms = inf"),
        (lambda: scale_by_head_muon(eps=None), TypeError, "eps = None"),
        (lambda: scale_by_head_muon(coefficients=()), ValueError, "coefficients"),
        (lambda: scale_by_head_muon(coefficients=(1, 2, 3)), ValueError, "coefficients"),
        (lambda: scale_by_head_muon(form="grams"), ValueError, "form"),
        (lambda: scale_by_head_muon(momentum_dtype="int8"), ValueError, "momentum_dtype = int8"),
        (lambda: scale_by_head_muon(compute_dtype="int32"), ValueError, "compute_dtype = int32"),
        (lambda: scale_by_sinkhorn(beta=1.5), ValueError, "beta = 1.5"),
        (lambda: scale_by_sinkhorn(tau=-1), ValueError, "tau = -1"),
        (lambda: scale_by_sinkhorn(iterations=10), ValueError, "odd.*10"),
        (lambda: scale_by_sinkhorn(iterations=11.0), ValueError, "odd.*11.0"),
        (lambda: scale_by_sinkhorn(momentum_dtype="int8"), ValueError, "momentum_dtype = int8"),
        (lambda: sinkhorn_balanced(float("inf")), ValueError, "learning_rate = inf"),
        (lambda: scale_by_sinkhorn_rows(capacity=0), ValueError, "capacity.*0"),
        (lambda: scale_by_sinkhorn_rows(capacity=2.5), ValueError, "capacity.*2.5"),
        (lambda: scale_by_sinkhorn_rows(capacity=4, gamma=-1), ValueError, "gamma = -1"),
        (lambda: warmup_constant_cosine(float("nan")), ValueError, "learning_rate = nan"),
        (lambda: partition({"a": head_muon(0.1)}, [Rule("(", "a")]), ValueError, r"pattern='\('"),
    ],
)
def test_arguments(make, error, named):
    with pytest.raises(error, match=named):
        make()


@pytest.mark.parametrize(
    ("specs", "named"),
    [
        (MatrixSpec(), "second/weight.*undeclared"),
        ({"first": MatrixSpec()}, "prefix of the parameters"),
        (TableSpec(), "first.*needs a MatrixSpec"),
        (MatrixSpec("0", 1), "first.*an axis is a number, got '0'"),
        (MatrixSpec(0, 1.0), "first.*an axis is a number, got 1.0"),
        (MatrixSpec(0, 1, split=(1.5, 1.5)), "first.*split"),
        (MatrixSpec(0, 5), "first.*no axis 5"),
    ],
)
def test_specs(specs, named):
    with pytest.raises(ValueError, match=named):
        scale_by_head_muon(specs).init(PARAMS)


@pytest.mark.parametrize(
    "tx", [scale_by_head_muon(), scale_by_sinkhorn(), scale_by_sinkhorn_rows(capacity=2)]
)
def test_parameters_and_gradients(tx):
    with pytest.raises(ValueError, match="parameter 'b'.*int32"):
        tx.init({"a": jnp.ones((2, 2)), "b": jnp.ones((2, 2), jnp.int32)})
    state = tx.init({"a": jnp.ones((2, 2)), "b": jnp.ones((3, 2))})
    with pytest.raises(ValueError, match="gradient 'b' has shape.*2, 2.*3, 2"):
        tx.update({"a": jnp.ones((2, 2)), "b": jnp.ones((2, 2))}, state)
    with pytest.raises(ValueError, match="other leaves.*'b'"):
        tx.update({"a": jnp.ones((2, 2))}, state)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        (dict(rows=jnp.zeros(2, jnp.int32)), "shapes"),
        (dict(rows=jnp.zeros(3)), "float32: must be integers"),
        (dict(values=jnp.ones((3, 5))), "shapes"),
        (dict(state=TableRows.zeros(jnp.ones((6, 2)))), r"state is of a table \(6, 2\)"),
        (dict(learning_rate=-1.0), "learning_rate = -1.0"),
        (dict(capacity=0), "capacity"),
        (dict(iterations=4), "odd"),
    ],
)
def test_sparse_step(changed, named):
    table = jnp.ones((5, 2))
    arguments = dict(
        table=table,
        state=TableRows.zeros(table),
        count=0,
        rows=jnp.zeros(3, jnp.int32),
        values=jnp.ones((3, 2)),
        learning_rate=0.1,
        capacity=4,
    )
    with pytest.raises(ValueError, match=named):
        sinkhorn_rows_update(**(arguments | changed))


def test_where_a_parameter_lies_is_a_partition_spec():
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    assert mesh.size == 1  # nothing is asked on one device
    tx = scale_by_head_muon(placed_at=lambda name: None, mesh=mesh)
    updates, _ = tx.update(jnp.eye(2), tx.init(jnp.eye(2)))
    np.testing.assert_allclose(updates, 0.18 * 2**0.5 * np.eye(2), rtol=0.02)


def test_muon_takes_empty_parameters_and_shows_nan():
    params = {"empty": jnp.ones((0, 3)), "none": jnp.ones((3, 0)), "full": jnp.ones((2, 2))}
    tx = scale_by_head_muon()
    updates, _ = tx.update(params, tx.init(params))
    assert updates["empty"].shape == (0, 3) and updates["none"].shape == (3, 0)
    for bad in (jnp.nan, jnp.inf):
        params["full"] = params["full"].at[0, 0].set(bad)
        updates, _ = tx.update(params, tx.init(params))
        assert np.isnan(updates["full"]).all()
