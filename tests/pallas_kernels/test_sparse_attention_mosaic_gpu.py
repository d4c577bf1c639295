"""The attention kernels: interpreted against the reference, and compiled for a GPU."""

import functools
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import fp4
from pallas_kernels._compat import InterpretGPUParams
from pallas_kernels.sparse_attention import (
    forward_cases,
    mosaic_gpu,
    mosaic_gpu_mass,
    reference,
    selected_mass,
    sparse_attention,
)
from pallas_kernels.sparse_attention.mosaic_gpu import TuningConfig

needs_new_jax = pytest.mark.skipif(
    jax.__version_info__ < (0, 11), reason="the kernels are for jax 0.11 and later"
)


def small_arguments(*, heads=8, dim=256, packed=False):
    """Three queries over 50 window rows and 45 main rows, the last of them without any key."""
    rng = np.random.default_rng(0)

    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape), jnp.bfloat16)

    lo = np.int32([[8, 13, 49]])
    hi = np.int32([[48, 49, 49]])
    indices = rng.integers(-3, 48, (1, 3, 70)).astype(np.int32)
    indices[:, -1] = -1
    main_rows = normal(1, 45, dim)
    if packed:
        main_rows = fp4.pack(main_rows, "fp4")
    sink = np.float32([0.5, np.inf, -np.inf, *rng.normal(size=heads - 3)])
    return (
        normal(1, 3, heads, dim),
        normal(1, 50, dim),
        lo,
        hi,
        main_rows,
        indices,
        jnp.asarray(sink),
    )


def check_forward(packed, blocks, shares):
    arguments = small_arguments(packed=packed)
    out, lse = mosaic_gpu.forward(
        *arguments,
        window=40,
        scale=1 / 16,
        config=TuningConfig(128, 160, 64, blocks, shares),
        interpret=InterpretGPUParams(),
    )
    expected_out, expected_lse = reference.sparse_attention(*arguments, window=40)
    keys = np.asarray(expected_lse) > -np.inf
    assert not keys[0, -1].any() and not np.any(out[0, -1])
    np.testing.assert_array_equal(lse > -np.inf, keys)
    np.testing.assert_allclose(lse[:, :-1], expected_lse[:, :-1], atol=1e-4)
    expected = np.asarray(expected_out, np.float32)
    error = np.linalg.norm(np.asarray(out, np.float32) - expected)
    assert error < 0.01 * np.linalg.norm(expected)
    assert not np.any(out[:, :, 1]), "an infinite sink"


def check_mass():
    q, _, _, _, main_rows, indices, _ = small_arguments()
    lse = jnp.full(q.shape[:3], 3.0).at[0, 1].set(jnp.inf)
    mass = mosaic_gpu_mass.forward(
        q, main_rows, indices, lse, scale=1 / 16, interpret=InterpretGPUParams()
    )
    expected = reference.selected_mass(q, main_rows, indices, lse)
    assert mass.shape == indices.shape
    np.testing.assert_allclose(mass, expected, rtol=1e-3)
    np.testing.assert_array_equal(mass == 0, np.asarray(expected) == 0)


@needs_new_jax
@pytest.mark.parametrize(
    "check", ["check_forward(False, 2, 1)", "check_forward(True, 9, 3)", "check_mass()"]
)
def test_interpreted(check):
    # Interpreted roles wait for each other on threads of the CPU client, which has as many as there
    # are cores unless it is told otherwise as it starts.
    code = f"from {__name__} import *; {check}"
    environment = os.environ | {"PJRT_NPROC": "64", "JAX_PLATFORMS": "cpu"}
    run = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=600
    )
    assert run.returncode == 0, run.stderr[-2000:]


def shape(*sizes, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(sizes, dtype)


def full_size(heads=64, main="bfloat16", slots=512, queries=264):
    """Shapes of a call at the published widths."""
    bound = shape(1, queries, dtype=jnp.int32)
    main_rows = indices = None
    if main is not None:
        main_rows = shape(1, 8192, 512) if main == "bfloat16" else shape(1, 8192, 288, dtype=main)
        indices = shape(1, queries, slots, dtype=jnp.int32)
    rows = shape(1, queries, 512)
    return (
        shape(1, queries, heads, 512),
        rows,
        bound,
        bound,
        main_rows,
        indices,
        shape(heads, dtype=jnp.float32),
    )


@pytest.mark.parametrize(
    "keywords",
    [
        {},
        {"main": jnp.uint8, "heads": 16, "slots": 100},
        {"main": None, "heads": 128},
        {"main": jnp.uint8, "queries": 1, "shares": 5},
    ],
)
def test_compiles_for_hopper(recent_hopper, keywords):
    shares = keywords.pop("shares", 1)
    config = TuningConfig(104, 160, 88, shares=shares) if shares > 1 else None
    call = functools.partial(mosaic_gpu.forward, window=128, scale=512**-0.5, config=config)
    recent_hopper.compile(call, *full_size(**keywords))


@pytest.mark.parametrize("heads, main", [(16, "bfloat16"), (64, jnp.uint8)])
def test_mass_compiles_for_hopper(recent_hopper, heads, main):
    q, _, _, _, main_rows, indices, _ = full_size(heads, main)
    call = functools.partial(mosaic_gpu_mass.forward, scale=512**-0.5)
    recent_hopper.compile(call, q, main_rows, indices, shape(*q.shape[:3], dtype=jnp.float32))


def test_compiler_refuses_fewer_registers_than_an_instruction_takes(recent_hopper):
    config = TuningConfig(128, 160, 16)
    call = functools.partial(mosaic_gpu.forward, window=128, scale=1.0, config=config)
    with pytest.raises(jax.errors.JaxRuntimeError, match="[Pp]ass pipeline failed"):
        recent_hopper.compile(call, *full_size(main=jnp.uint8))


@needs_new_jax
@pytest.mark.parametrize(
    "queries, slots, parts", [(1, 512, 10), (16, 512, 5), (66, 512, 2), (67, 512, 1), (1, 8, 3)]
)
def test_few_queries_share_out_their_keys(queries, slots, parts, monkeypatch):
    given = full_size(main=jnp.uint8, slots=slots, queries=queries)
    plans = []

    def no_kernel(plan):
        plans.append(plan)
        rows = 1, queries * plan.shares, 64
        return lambda *_: (jnp.zeros((*rows, 512), jnp.bfloat16), jnp.zeros(rows))

    monkeypatch.setattr(mosaic_gpu, "_kernel", no_kernel)
    call = functools.partial(mosaic_gpu.forward, window=128, scale=1.0)
    out, lse = jax.eval_shape(call, *given)
    assert (out.shape, lse.shape) == ((1, queries, 64, 512), (1, queries, 64))
    assert plans[0].shares == parts


@needs_new_jax
def test_tuning(monkeypatch):
    work = forward_cases.Work(2, 300, batch=2, heads=8, dim=256, selected=64, packed=True)
    monkeypatch.setitem(forward_cases.BENCHMARKS, "A9", work)
    tuned = forward_cases.tuning("A9")
    assert tuned.shape_class == "fp4 rows, up to 4 items"
    assert {config.shares for config in tuned.candidates} == {1, 2, 5, 10}
    out, lse = jax.eval_shape(tuned.function(tuned.candidates[-1]), *tuned.arguments)
    assert (out.shape, lse.shape) == ((2, 2, 8, 256), (2, 2, 8))


def test_declines_without_a_gpu():
    q, *rest = small_arguments()
    with pytest.raises(NotImplementedError, match="needs a GPU"):
        sparse_attention(q, *rest, window=40, implementation="mosaic_gpu")
    with pytest.raises(NotImplementedError, match="needs a GPU"):
        selected_mass(q, rest[3], rest[4], q[..., 0], implementation="mosaic_gpu")


@pytest.mark.parametrize(
    "change, message",
    [
        ({"q": shape(1, 1, 8, 512, dtype=jnp.float32)}, "must be bfloat16, got float32"),
        ({"q": shape(1, 1, 8, 128)}, "head_dim must be 256 or 512, got 128"),
        ({"q": shape(1, 1, 96, 512)}, "or of 64, got 96"),
        ({"scale": -1.0}, "scale must be positive"),
    ],
)
def test_queries_that_the_kernels_do_not_take(change, message):
    arguments = {"q": shape(1, 1, 64, 512), "scale": 1.0} | change
    with pytest.raises(NotImplementedError, match=message):
        mosaic_gpu.check_queries(**arguments)
