"""Hyper-connections' GPU kernels: interpreted against XLA's form, and compiled for a GPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import hopper as hopper_device
from pallas_kernels import mhc
from pallas_kernels._compat import InterpretGPUParams
from pallas_kernels.mhc import mosaic_gpu, mosaic_gpu_pass, mosaic_gpu_tiles, reference
from pallas_kernels.mhc.cases import CASES, Case
from tests.pallas_kernels.test_mhc_mosaic_tpu import arrays, cotangents_of, with_gradients

ON_GPU = jax.default_backend() == "gpu"
pytestmark = pytest.mark.usefixtures("no_races")
EPS = 1e-6
slow = pytest.mark.slow
recent = pytest.mark.skipif(
    jax.__version_info__ < (0, 11), reason="the kernels are for jax 0.11 and later"
)


def kernel(sweeps):
    interpret = None if ON_GPU else InterpretGPUParams(detect_races=True)
    return functools.partial(mosaic_gpu.sinkhorn, sweeps=sweeps, eps=EPS, interpret=interpret)


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def agree(actual, expected):
    assert actual.shape == expected.shape and actual.dtype == expected.dtype
    np.testing.assert_allclose(actual, expected, rtol=0, atol=3e-6 * np.abs(expected).max())


@pytest.mark.parametrize(
    "n, tokens, sweeps",
    [(4, 130, 20), (2, 1, 2), (2, 5, 1), pytest.param(8, 3, 2, marks=pytest.mark.slow)],
)
def test_forward_and_gradient(n, tokens, sweeps):
    logits, grads = 3 * normal(n, n, tokens), normal(n, n, tokens, seed=1)
    both = jax.jit(with_gradients(kernel(sweeps)))
    ours = both(grads, logits)
    expected = functools.partial(reference.sinkhorn, sweeps=sweeps, eps=EPS)
    jax.tree.map(agree, ours, jax.jit(with_gradients(expected))(grads, logits))
    np.testing.assert_allclose(ours[0].sum(axis=0), 1, atol=1e-4)
    again = both(grads, logits)
    jax.tree.map(np.testing.assert_array_equal, again, ours)


def test_under_vmap():
    logits, grads = normal(3, 2, 2, 5), normal(3, 2, 2, 5, seed=1)
    one = jax.jit(with_gradients(kernel(2)))
    ours = jax.jit(jax.vmap(with_gradients(kernel(2))))(grads, logits)
    one_by_one = [one(g, x) for g, x in zip(grads, logits, strict=True)]
    jax.tree.map(lambda a, *b: np.testing.assert_array_equal(a, np.stack(b)), ours, *one_by_one)
    # One of both arguments alone.
    ours = jax.jit(jax.vmap(with_gradients(kernel(2)), in_axes=(0, None)))(grads, logits[0])[1][0]
    expected = [one(g, logits[0])[1][0] for g in grads]
    np.testing.assert_array_equal(ours, np.stack(expected))


@pytest.mark.parametrize(
    "op",
    [*(pytest.param(op, marks=pytest.mark.slow) for op in ("coefficients", "read")), "write_read"],
)
def test_whole_ops(op, monkeypatch):
    monkeypatch.setattr(hopper_device, "require", lambda *_, **__: None)
    args, keywords = arrays(op, CASES["two_sweeps"], np.float32)
    expected = functools.partial(getattr(reference, op), **keywords)
    ours = functools.partial(getattr(mhc, op), implementation="mosaic_gpu", **keywords)
    if not ON_GPU:
        ours = functools.partial(
            getattr(mosaic_gpu, op), interpret=InterpretGPUParams(), **keywords
        )
    grads = cotangents_of(expected, args)
    jax.tree.map(
        agree,
        jax.jit(with_gradients(ours))(grads, *args),
        jax.jit(with_gradients(expected))(grads, *args),
    )


@pytest.mark.parametrize("n, sweeps", [(4, 20), (4, 56), (2, 1)])
def test_compiles_for_hopper(hopper, n, sweeps):
    shape = jax.ShapeDtypeStruct((n, n, 300), jnp.float32)
    run = with_gradients(functools.partial(mosaic_gpu.sinkhorn, sweeps=sweeps, eps=EPS))
    text = hopper.compile(run, shape, shape).as_text()
    assert text.count("mosaic_gpu") >= 2


def passed(sweeps):
    """`write_read` in kernels, whatever the number of tokens."""
    if ON_GPU:
        interpret, balance = None, mosaic_gpu.sinkhorn
    else:
        interpret, balance = InterpretGPUParams(detect_races=True), reference.sinkhorn
    return functools.partial(
        mosaic_gpu_pass.write_read, sinkhorn_iters=sweeps, balance=balance, interpret=interpret
    )


def bfloat16_case(streams, channels, tokens):
    """(arguments of `write_read`, gradients of its results, sweeps), streams in bfloat16."""
    case = Case((tokens,), streams, channels, 2)
    args, keywords = arrays("write_read", case, jnp.bfloat16)
    expected = functools.partial(reference.write_read, **keywords)
    return args, cotangents_of(expected, args), keywords["sinkhorn_iters"]


def whole(x):
    return jax.tree.map(lambda a: a.astype(jnp.float32), x)


@recent
@pytest.mark.parametrize(
    "streams, channels, tokens, one_block",
    [
        (2, 64, 69, False),
        pytest.param(4, 64, 200, False, marks=slow),
        pytest.param(2, 128, 130, False, marks=slow),
        # Every place of the rings is filled several times, and the last round is not full.
        pytest.param(2, 64, 7 * 64 - 5, True, marks=slow),
        pytest.param(4, 192, 5 * 64, True, marks=slow),
    ],
)
def test_pass_is_as_exact_as_the_reference(streams, channels, tokens, one_block, monkeypatch):
    """Errors of both in bfloat16, against the reference in float32."""
    if one_block:
        monkeypatch.setattr(mosaic_gpu_tiles, "_MULTIPROCESSORS", 1)
    args, grads, sweeps = bfloat16_case(streams, channels, tokens)
    definition = with_gradients(functools.partial(reference.write_read, sinkhorn_iters=sweeps))
    ours = jax.jit(with_gradients(passed(sweeps)))(grads, *args)
    # Or a GPU's compiler would mix, project and square new streams before they are rounded.
    rounding = {"xla_allow_excess_precision": False}
    theirs = jax.jit(definition, compiler_options=rounding)(grads, *args)
    exact = jax.jit(definition)(whole(grads), *whole(args))
    for actual, other, truth in zip(*map(jax.tree.leaves, (ours, theirs, exact)), strict=True):
        assert actual.dtype == other.dtype and actual.shape == other.shape
        truth = np.asarray(truth, np.float64)
        error, allowed = (np.abs(np.asarray(x, np.float64) - truth) for x in (actual, other))
        slack = 1e-6 * np.abs(truth).max()
        assert error.max() <= 1.5 * allowed.max() + slack
        assert (error**2).mean() ** 0.5 <= 1.5 * (allowed**2).mean() ** 0.5 + slack


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
@pytest.mark.parametrize("streams, channels, tokens", [(4, 1024, 4096), (2, 320, 5001)])
def test_pass_on_the_gpu_is_deterministic(streams, channels, tokens):
    args, grads, sweeps = bfloat16_case(streams, channels, tokens)
    both = jax.jit(with_gradients(passed(sweeps)))
    jax.tree.map(np.testing.assert_array_equal, both(grads, *args), both(grads, *args))


@recent
@pytest.mark.skipif(ON_GPU, reason="kernels are called otherwise")
def test_which_streams_are_passed_over_in_kernels():
    def kernels(streams, channels, tokens, dtype=jnp.bfloat16, mapped=False):
        shape = (tokens,)
        args, keywords = arrays("write_read", Case(shape, streams, channels, 1), dtype)
        op = functools.partial(mosaic_gpu.write_read, interpret=InterpretGPUParams(), **keywords)
        if mapped:
            op, args = jax.vmap(op), jax.tree.map(lambda x: jnp.stack([x, x]), args)
        return "mhc_write" in str(jax.make_jaxpr(op)(*args))

    assert kernels(4, 64, 256) and kernels(2, 192, 300) and kernels(2, 64, 256, mapped=True)
    assert not kernels(4, 64, 256, jnp.float32)
    assert not any(kernels(*case) for case in [(3, 64, 256), (8, 64, 256), (4, 96, 256)])
    assert not kernels(4, 64, 255)


@slow
@pytest.mark.parametrize("streams, channels, tokens", [(4, 1024, 2048), (2, 64, 300)])
def test_pass_compiles_for_hopper(recent_hopper, streams, channels, tokens, monkeypatch, capfd):
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    args, grads, sweeps = bfloat16_case(streams, channels, tokens)
    run = functools.partial(
        mosaic_gpu_pass.write_read, sinkhorn_iters=sweeps, balance=mosaic_gpu.sinkhorn
    )
    text = recent_hopper.compile(with_gradients(run), grads, *args).as_text()
    assert text.count('custom_call_target="mosaic_gpu') == 4
    said = "".join(capfd.readouterr())
    assert said.count("0 bytes spill stores, 0 bytes spill loads") == said.count("spill stores") > 0


@pytest.mark.parametrize("n, sweeps", [(9, 2), (4, 57)])
def test_declines_what_does_not_fit(n, sweeps):
    with pytest.raises(NotImplementedError, match="mhc"):
        mosaic_gpu.sinkhorn(jnp.zeros((n, n, 3)), sweeps, EPS)


@pytest.mark.skipif(ON_GPU, reason="there is one")
def test_declines_without_a_gpu():
    args, keywords = arrays("read", CASES["two_sweeps"], np.float32)
    with pytest.raises(NotImplementedError, match="needs a GPU"):
        mhc.read(*args, implementation="mosaic_gpu", **keywords)
