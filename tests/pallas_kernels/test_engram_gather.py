"""Engram gather and its table gradient against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import fp4
from pallas_kernels.engram_gather import engram_gather
from pallas_kernels.engram_gather.cases import CASES, arguments


def numpy_gather(table, rows):
    taken = np.where((rows >= 0)[..., None], np.asarray(table)[np.maximum(rows, 0)], 0)
    return taken.reshape(*rows.shape[:-1], -1)


@jax.jit
def with_gradient(table, rows, grad):
    out, vjp = jax.vjp(lambda t: engram_gather(t, rows), table)
    return out, vjp(grad)[0]


@pytest.mark.parametrize("name", CASES)
def test_equals_numpy(name):
    table, rows = arguments(CASES[name])
    expected = numpy_gather(table, rows)
    grad = np.random.default_rng(1).normal(size=expected.shape).astype(np.float32)
    out, grad_table = with_gradient(table, rows, grad)
    np.testing.assert_array_equal(out, expected)
    expected_grad = np.zeros(table.shape)
    present = rows >= 0
    pieces = grad.reshape(*rows.shape, -1)
    np.add.at(expected_grad, rows[present], pieces[present].astype(np.float64))
    np.testing.assert_allclose(grad_table, expected_grad, atol=1e-5)
    untouched = np.setdiff1d(np.arange(len(table)), rows)
    assert not np.asarray(grad_table)[untouched].any()


@pytest.mark.parametrize("row", [-1, -2, -7, 7, 1 << 30])
def test_out_of_range_reads_zero_and_gives_no_gradient(row):
    table = np.ones((7, 2), np.float32)
    rows = np.asarray([[3, row]], np.int32)
    out, grad = with_gradient(table, rows, np.ones((1, 4), np.float32))
    np.testing.assert_array_equal(out, [[1, 1, 0, 0]])
    np.testing.assert_array_equal(np.flatnonzero(np.asarray(grad).any(-1)), [3])


def test_dtype():
    table, rows = arguments(CASES["repeated"], jnp.bfloat16)
    assert engram_gather(table, rows).dtype == jnp.bfloat16
    out = engram_gather(table, rows, jnp.float32)
    assert out.dtype == jnp.float32
    np.testing.assert_array_equal(out, numpy_gather(table.astype(np.float32), rows))


def test_vmap_over_batch():
    table, rows = arguments(CASES["repeated"])
    mapped = jax.vmap(engram_gather, in_axes=(None, 0))(table, rows)
    np.testing.assert_array_equal(mapped, numpy_gather(table, rows))


@pytest.mark.parametrize(
    ("table", "rows", "message"),
    [
        (np.ones(3, np.float32), np.zeros((2, 2), np.int32), r"table is float32\[3\]"),
        (np.ones((3, 2), np.int32), np.zeros((2, 2), np.int32), r"table is int32\[3, 2\]"),
        (np.ones((3, 2), np.float32), np.zeros((2, 2), np.float32), r"rows is float32\[2, 2\]"),
        (np.ones((3, 2), np.float32), np.int32(1), r"rows is int32\[\]"),
    ],
)
def test_arguments_that_do_not_fit(table, rows, message):
    with pytest.raises(ValueError, match=message):
        engram_gather(table, rows)


@pytest.mark.parametrize("dtype", [None, jnp.bfloat16])
def test_packed_rows_are_those_that_they_stand_for(dtype):
    rng = np.random.default_rng(0)
    packed = fp4.pack(jnp.asarray(rng.normal(size=(11, 64)), jnp.float32), "fp8")
    rows = jnp.array([[[3, -1], [10, 3], [0, 11]]], jnp.int32)
    ours = jax.jit(engram_gather, static_argnums=2)(packed, rows, dtype)
    expected = engram_gather(fp4.unpack(packed, "fp8"), rows, dtype)
    assert ours.dtype == (dtype or jnp.float32)
    np.testing.assert_array_equal(ours, expected)
