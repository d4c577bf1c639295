"""Hyper-connections against recorded numbers and a float64 loop; gradients by differences."""

import functools
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import mhc
from pallas_kernels.mhc.cases import CASES, arguments

GOLDEN = Path(__file__).parents[1] / "golden" / "unit" / "hc_sinkhorn.npz"
COEFFICIENT_NAMES = ("streams", "fn", "base", "scale")
WRITE_NAMES = ("streams", "out", "post", "comb")

jitted = jax.jit(mhc.write_read, static_argnames="sinkhorn_iters")


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def loop_coefficients(streams, fn, base, scale, iters):
    """pre, post, comb of one token, from [n, d] streams, in float64."""
    n, d = streams.shape
    z = streams.reshape(n * d)
    m = fn @ z / np.sqrt(np.mean(z**2) + 1e-20)
    pre = sigmoid(m[:n] * scale[0] + base[:n]) + 1e-6
    post = 2 * sigmoid(m[n : 2 * n] * scale[1] + base[n : 2 * n])
    comb = np.exp(m[2 * n :] * scale[2] + base[2 * n :]).reshape(n, n)
    comb = comb / comb.sum(1)[:, None] + 1e-6
    for sweep in range(iters):
        if sweep:
            comb = comb / (comb.sum(1)[:, None] + 1e-6)
        comb = comb / (comb.sum(0)[None] + 1e-6)
    return pre, post, comb


def loop_write_read(args):
    """The five results of `write_read` (coefficients spread out) in float64, token by token."""
    args = {k: np.asarray(v, np.float64) for k, v in args.items() if k != "sinkhorn_iters"} | {
        "iters": args["sinkhorn_iters"]
    }
    *lead, n, d = args["streams"].shape
    streams = np.zeros((*lead, n, d))
    x, pre, post, comb = (np.zeros((*lead, *s)) for s in ((d,), (n,), (n,), (n, n)))
    for at in np.ndindex(*lead):
        for k in range(n):
            streams[at][k] = args["post"][at][k] * args["out"][at]
            for j in range(n):
                streams[at][k] += args["comb"][at][j, k] * args["streams"][at][j]
        mixed = args["pre"][at] @ streams[at]
        x[at] = mixed / np.sqrt(np.mean(mixed**2) + 1e-20) * args["norm_weight"]
        pre[at], post[at], comb[at] = loop_coefficients(
            streams[at], args["fn"], args["base"], args["scale"], args["iters"]
        )
    return streams, x, pre, post, comb


def spread(results):
    streams, x, coefficients = results
    return streams, x, *coefficients


@pytest.mark.parametrize("iters", [1, 2, 20])
def test_recorded_coefficients(iters):
    numbers = np.load(GOLDEN)
    # One projection a token: the streams are ones, of unit mean square, and only the first counts.
    fn = np.zeros((len(numbers["mixes"]), 24, 24), np.float32)
    fn[:, :, 0] = numbers["mixes"]
    streams = np.ones((4, 6), np.float32)
    for case in ("set0", "set1", "set2"):
        coefficients = functools.partial(mhc.coefficients, sinkhorn_iters=iters)
        pre, post, comb = jax.vmap(coefficients, in_axes=(None, 0, None, None))(
            streams, fn, numbers[f"{case}.base"], numbers[f"{case}.scale"]
        )
        np.testing.assert_allclose(comb, numbers[f"{case}.iters{iters}.comb"], atol=5e-7)
        np.testing.assert_allclose(pre, numbers[f"{case}.iters20.pre"], atol=2e-7)
        np.testing.assert_allclose(post, numbers[f"{case}.iters20.post"], atol=2e-7)


@pytest.mark.parametrize("name", CASES)
def test_write_read_equals_loop(name):
    args = arguments(CASES[name])
    results = spread(jitted(**args))
    for actual, expected in zip(results, loop_write_read(args), strict=True):
        assert actual.dtype == jnp.float32
        np.testing.assert_allclose(actual, expected, atol=5e-6)


def test_bfloat16_streams():
    args = arguments(CASES["published_sweeps"], jnp.bfloat16)
    streams, x, coefficients = jitted(**args)
    assert streams.dtype == x.dtype == jnp.bfloat16
    assert {c.dtype for c in coefficients} == {jnp.dtype(jnp.float32)}
    expected, _, *_ = loop_write_read(args)
    np.testing.assert_allclose(np.asarray(streams, np.float64), expected, rtol=2**-7, atol=1e-6)
    # What is read are the streams as stored, hence rounded.
    args |= {"streams": streams, "post": args["post"] * 0, "comb": np.eye(4) + 0 * args["comb"]}
    _, read_x, *read_coefficients = loop_write_read(args)
    np.testing.assert_allclose(np.asarray(x, np.float64), read_x, rtol=2**-7, atol=1e-6)
    for actual, rounded in zip(coefficients, read_coefficients, strict=True):
        np.testing.assert_allclose(actual, rounded, atol=5e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_write_read_is_write_then_read(dtype):
    args = arguments(CASES["published_sweeps"], dtype)
    streams = mhc.write(*(args[k] for k in WRITE_NAMES))
    x, coefficients = mhc.read(
        streams, *(args[k] for k in ("pre", "fn", "base", "scale", "norm_weight"))
    )
    chex.assert_trees_all_equal(mhc.write_read(**args), (streams, x, coefficients))
    chex.assert_trees_all_equal(mhc.mix(streams, args["pre"], args["norm_weight"]), x)
    chex.assert_trees_all_equal(
        mhc.coefficients(streams, args["fn"], args["base"], args["scale"]), coefficients
    )


@pytest.mark.parametrize("name", ["two_sweeps", "published_sweeps", "two_streams"])
def test_gradients_are_finite_differences_of_the_loop(name):
    args = arguments(CASES[name])
    iters = args.pop("sinkhorn_iters")
    rng = np.random.default_rng(1)
    weights = [rng.normal(size=r.shape) for r in loop_write_read(args | {"sinkhorn_iters": iters})]

    def loss(args):
        results = spread(mhc.write_read(**args, sinkhorn_iters=iters))
        return sum(jnp.vdot(r, w) for r, w in zip(results, weights, strict=True))

    def loop_loss(args):
        results = loop_write_read(args | {"sinkhorn_iters": iters})
        return sum(np.vdot(r, w) for r, w in zip(results, weights, strict=True))

    grads = jax.jit(jax.grad(loss))(args)
    for key, grad in grads.items():
        direction = rng.normal(size=grad.shape)
        step = 1e-5
        ahead, behind = (
            loop_loss(args | {key: args[key].astype(np.float64) + sign * step * direction})
            for sign in (1, -1)
        )
        slope = (ahead - behind) / (2 * step)
        found = np.vdot(np.asarray(grad, np.float64), direction)
        scale = np.linalg.norm(grad) * np.linalg.norm(direction)
        assert abs(found - slope) < 1e-4 * scale, (key, found, slope)


def test_columns_sum_to_one_and_rows_nearly():
    args = arguments(CASES["published_sweeps"])
    comb = np.asarray(mhc.coefficients(*(args[k] for k in COEFFICIENT_NAMES)).comb)
    np.testing.assert_allclose(comb.sum(-2), 1, atol=3e-6)
    np.testing.assert_allclose(comb.sum(-1), 1, atol=1e-2)


def test_a_token_does_not_depend_on_its_batch():
    args = arguments(CASES["published_sweeps"])
    whole = mhc.coefficients(*(args[k] for k in COEFFICIENT_NAMES))
    rest = [args[k] for k in COEFFICIENT_NAMES[1:]]
    one = mhc.coefficients(args["streams"][1, 3], *rest)
    chex.assert_trees_all_close(jax.tree.map(lambda a: a[1, 3], whole), one, atol=1e-6)


def test_zero_streams_are_finite():
    args = arguments(CASES["published_sweeps"])
    args["streams"] = np.zeros_like(args["streams"])
    args["out"] = np.zeros_like(args["out"])
    chex.assert_tree_all_finite(jitted(**args))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("fn", np.ones((24, 95), np.float32), r"fn has shape \(24, 95\); .* need \(24, 96\)"),
        ("base", np.ones(23, np.float32), r"base has shape \(23,\); .* need \(24,\)"),
        ("scale", np.ones(4, np.float32), r"scale has shape \(4,\); .* need \(3,\)"),
        ("sinkhorn_iters", 0, "sinkhorn_iters is 0; must be at least 1"),
    ],
)
def test_arguments_that_do_not_fit(key, value, message):
    with pytest.raises(ValueError, match=message):
        mhc.write_read(**(arguments(CASES["published_sweeps"]) | {key: value}))
