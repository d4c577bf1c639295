"""Right kernels compile for TPUs that are not there, wrong ones do not; races are seen."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.tpu import GENERATIONS
from tests.pallas_kernels import tpu_aot


def add_one(x_hbm, o_ref, x_vmem, arrived, *, wait=True):
    copy = pltpu.make_async_copy(x_hbm, x_vmem.at[pl.ds(0, 8)], arrived)
    copy.start()
    if wait:
        copy.wait()
    o_ref[...] = x_vmem[0:8] + 1.0
    if not wait:
        copy.wait()


def shape(*sizes, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(sizes, dtype)


def adder(kernel=add_one, room=8, interpret=False):
    return pl.pallas_call(
        kernel,
        out_shape=shape(8, 128),
        in_specs=[pl.BlockSpec(memory_space=pl.ANY)],
        scratch_shapes=[pltpu.VMEM((room, 128), jnp.float32), pltpu.SemaphoreType.DMA],
        interpret=interpret,
    )


def test_right_kernel_compiles(tpu):
    compiled = tpu.compile(adder(), shape(8, 128))
    assert "tpu_custom_call" in compiled.as_text()
    assert compiled.memory_analysis().temp_size_in_bytes == 0


def test_vector_memory_overflow_fails(tpu):
    room = 2 * GENERATIONS[tpu.generation].vmem_capacity_bytes // 512
    with pytest.raises(jax.errors.JaxRuntimeError, match="(?i)vmem"):
        tpu.compile(adder(room=room), shape(8, 128))


def test_unsupported_operation_fails(tpu):
    def kernel(x_ref, o_ref):
        o_ref[...] = jnp.sort(x_ref[...], axis=1)

    call = pl.pallas_call(kernel, out_shape=shape(8, 128))
    with pytest.raises(NotImplementedError, match="sort"):
        tpu.compile(call, shape(8, 128))


def test_misaligned_copy_fails(tpu):
    """Only Mosaic itself finds this one: a row that is half of a tile's word."""

    def kernel(x_hbm, o_ref, arrived):
        copy = pltpu.make_async_copy(x_hbm.at[pl.ds(3, 1)], o_ref.at[pl.ds(0, 1)], arrived)
        copy.start()
        copy.wait()

    call = pl.pallas_call(
        kernel,
        out_shape=shape(16, 128, dtype=jnp.bfloat16),
        in_specs=[pl.BlockSpec(memory_space=pl.ANY)],
        scratch_shapes=[pltpu.SemaphoreType.DMA],
    )
    with pytest.raises(Exception, match="(?s)Mosaic.*aligned"):
        tpu.compile(call, shape(64, 128, dtype=jnp.bfloat16))


def test_interpreted_kernel(interpreted):
    x = np.arange(8 * 128, dtype=np.float32).reshape(8, 128)
    np.testing.assert_array_equal(adder(interpret=interpreted)(x), x + 1)


def test_a_race_is_found(interpreted, capsys):
    kernel = functools.partial(add_one, wait=False)
    x = np.ones((8, 128), np.float32)
    try:
        jax.block_until_ready(adder(kernel, interpret=interpreted)(x))
    except Exception as error:  # jax 0.11 and later
        report = str(error)
        pltpu.reset_tpu_interpret_mode_state()
    else:
        report = capsys.readouterr().out
    assert re.search("RACE DETECTED", report)


def test_missing_libtpu_is_named(monkeypatch):
    def absent(_):
        raise tpu_aot.importlib.metadata.PackageNotFoundError

    monkeypatch.setattr(tpu_aot.importlib.metadata, "version", absent)
    assert "'.[tpu]'" in tpu_aot.missing()
