"""Grouped matmul and its gradients against a float64 loop over experts."""

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import fp4
from pallas_kernels.grouped_matmul import grouped_matmul
from pallas_kernels.grouped_matmul.cases import CASES, Case, arguments
from pallas_kernels.grouped_matmul.reference import block_rows

BF16_TOLERANCE = 2.0**-7


def loop(x, w, sizes, grad):
    """(y, grad of x, grad of w) in float64, one expert at a time."""
    x, w, grad = (np.asarray(a, np.float64) for a in (x, w, grad))
    y = np.zeros((len(x), w.shape[2]))
    grad_x, grad_w = np.zeros_like(x), np.zeros_like(w)
    start = 0
    for expert, size in enumerate(sizes):
        rows = slice(start, start + size)
        y[rows] = x[rows] @ w[expert]
        grad_x[rows] = grad[rows] @ w[expert].T
        grad_w[expert] = x[rows].T @ grad[rows]
        start += size
    return y, grad_x, grad_w


@jax.jit
def with_gradients(x, w, sizes, grad):
    y, vjp = jax.vjp(lambda x, w: grouped_matmul(x, w, sizes), x, w)
    return y, *vjp(grad)


def check(x, w, sizes, grad, tolerance):
    results = with_gradients(x, w, sizes, grad)
    for actual, expected, like in zip(results, loop(x, w, sizes, grad), (x, x, w), strict=True):
        assert actual.dtype == like.dtype
        bound = tolerance * max(np.abs(expected).max(), 1.0)
        np.testing.assert_allclose(np.asarray(actual, np.float64), expected, rtol=0, atol=bound)


@pytest.mark.parametrize("name", CASES)
def test_equals_loop(name):
    x, w, sizes = arguments(CASES[name])
    grad = np.random.default_rng(1).normal(size=(len(x), w.shape[2])).astype(np.float32)
    check(x, w, sizes, grad, 2e-6)


def test_bfloat16_accumulates_in_fp32():
    x, w, sizes = arguments(Case((5, 0, 700, 11), rows=720, inner=33), jnp.bfloat16)
    grad = np.ones((len(x), w.shape[2]), np.float32).astype(jnp.bfloat16)
    # A bf16 accumulator would stop growing at 256.
    x[5:705] = 1
    check(x, w, sizes, grad, BF16_TOLERANCE)


def test_a_float32_weight_of_bfloat16_rows_gets_a_float32_gradient():
    x, w, sizes = arguments(Case((5, 0, 700, 11), rows=720, inner=33))
    x = x.astype(jnp.bfloat16)
    grad = np.random.default_rng(2).normal(size=(len(x), w.shape[2])).astype(jnp.bfloat16)
    check(x, w, sizes, grad, BF16_TOLERANCE)
    _, _, grad_w = with_gradients(x, w, sizes, grad)
    np.testing.assert_allclose(grad_w, loop(x, w, sizes, grad)[2], atol=1e-4)


@hypothesis.settings(max_examples=40, deadline=None)
@hypothesis.given(cuts=st.lists(st.integers(0, 41), min_size=5, max_size=5))
def test_any_sizes(cuts):
    edges = np.sort(cuts)
    sizes = np.diff(np.concatenate([[0], edges])).astype(np.int32)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(41, 3)).astype(np.float32)
    w = rng.normal(size=(5, 3, 4)).astype(np.float32)
    grad = rng.normal(size=(41, 4)).astype(np.float32)
    check(x, w, sizes, grad, 2e-6)


def test_rows_beyond_the_groups_are_zero_even_if_not_finite():
    x, w, sizes = arguments(CASES["rows_left_over"])
    used = sizes.sum()
    x[used:] = np.nan
    grad = np.ones((len(x), w.shape[2]), np.float32)
    y, grad_x, grad_w = with_gradients(x, w, sizes, grad)
    assert not np.asarray(y)[used:].any() and not np.asarray(grad_x)[used:].any()
    assert np.isfinite(y).all() and np.isfinite(grad_w).all()


def test_vmap_over_sizes():
    x, w, _ = arguments(CASES["unequal"])
    sizes = np.asarray([[5, 1, 20, 11], [0, 0, 37, 0]], np.int32)
    mapped = jax.jit(jax.vmap(grouped_matmul, in_axes=(None, None, 0)))(x, w, sizes)
    for actual, row in zip(mapped, sizes, strict=True):
        np.testing.assert_allclose(actual, loop(x, w, row, np.zeros((37, 10)))[0], atol=2e-5)


def test_no_rows_at_all():
    y = grouped_matmul(
        np.zeros((0, 3), np.float32), np.ones((2, 3, 5), np.float32), np.zeros(2, np.int32)
    )
    assert y.shape == (0, 5)


def test_padding_is_bounded():
    for rows in (1, 7, 64, 4096, 24576, 1 << 20):
        for groups in (1, 8, 32, 384):
            block = block_rows(rows, groups)
            assert 8 <= block <= 512 and block & (block - 1) == 0
            if rows >= 16 * groups:
                assert block * groups <= rows / 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"w": np.ones((4, 5, 10), np.float32)}, r"must be \[M,K\] and \[E,K,N\]"),
        ({"group_sizes": np.zeros(3, np.int32)}, r"must be int32\[4\]"),
        ({"group_sizes": np.zeros(4, np.float32)}, r"must be int32\[4\]"),
        ({"w": np.ones((4, 6, 10), jnp.bfloat16)}, "x is float32, w is bfloat16"),
    ],
)
def test_arguments_that_do_not_fit(change, message):
    x, w, sizes = arguments(CASES["unequal"])
    with pytest.raises(ValueError, match=message):
        grouped_matmul(**({"x": x, "w": w, "group_sizes": sizes} | change))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("count, used", [(35, [3, 0, 20, 7, 1]), (6, [1, 0, 0, 2, 0, 1, 0])])
def test_packed_weights_are_those_that_they_stand_for(dtype, count, used):
    """Many rows; fewer than there are experts."""
    rng = np.random.default_rng(0)
    experts, out, inner, sizes = len(used), 24, 64, np.array(used, np.int32)
    rows = fp4.pack(jnp.asarray(rng.normal(size=(experts, out, inner)), jnp.float32), "mxfp4")
    x = jnp.asarray(rng.normal(size=(count, inner)), dtype)
    elements, scales = rows[..., : inner // 2], rows[..., inner // 2 :]
    ours = jax.jit(grouped_matmul)(x, elements, sizes, scales)
    dense = fp4.unpack(rows, "mxfp4", dtype).swapaxes(1, 2)
    expected = jax.jit(grouped_matmul)(x, dense, sizes).astype(jnp.float32)
    tolerance = 1e-5 if dtype == jnp.float32 else BF16_TOLERANCE
    np.testing.assert_allclose(ours.astype(jnp.float32), expected, tolerance, 10 * tolerance)
    assert not np.asarray(ours[sum(used) :]).any() and np.asarray(ours[: sum(used)]).any(1).all()
    assert grouped_matmul(x[:0], elements, 0 * sizes, scales).shape == (0, out)


def test_packed_weights_that_do_not_fit():
    x, sizes = jnp.ones((4, 64)), jnp.array([4], jnp.int32)
    w, scales = jnp.zeros((1, 8, 32), jnp.uint8), jnp.zeros((1, 8, 2), jnp.uint8)
    for wrong in ((x[:, :32], w, scales), (x, w, scales[..., :1]), (x, w[:, :4], scales)):
        with pytest.raises(ValueError, match="packed w"):
            grouped_matmul(wrong[0], wrong[1], sizes, wrong[2])
