"""Kernels that are right compile for a GPU that is not there, and wrong ones do not."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels._compat import llvm
from tests.pallas_kernels import cuda_aot


def add_one(x_gmem, o_gmem, x_smem, barrier):
    plgpu.copy_gmem_to_smem(x_gmem, x_smem, barrier)
    plgpu.barrier_wait(barrier)
    x_smem[...] = x_smem[...] + 1.0
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(x_smem, o_gmem)
    plgpu.wait_smem_to_gmem(0)


def adder(size):
    return plgpu.kernel(
        add_one,
        out_type=jax.ShapeDtypeStruct((size // 128, 128), jnp.float32),
        scratch_types=[plgpu.SMEM((size // 128, 128), jnp.float32), plgpu.Barrier()],
    )


def multiply(a_gmem, b_gmem, o_gmem, a_smem, b_smem, o_smem, barrier):
    for gmem, smem in ((a_gmem, a_smem), (b_gmem, b_smem)):
        plgpu.copy_gmem_to_smem(gmem, smem, barrier)
        plgpu.barrier_wait(barrier)

    def accumulate(acc):
        plgpu.wgmma(acc, a_smem, b_smem)
        return acc[...]

    shape = (a_gmem.shape[0], b_gmem.shape[1])
    o_smem[...] = pl.run_scoped(accumulate, plgpu.ACC(shape, jnp.float32))
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(o_smem, o_gmem)
    plgpu.wait_smem_to_gmem(0)


def multiplier(m, n, k):
    tiled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    return plgpu.kernel(
        multiply,
        out_type=jax.ShapeDtypeStruct((m, n), jnp.float32),
        scratch_types=[
            plgpu.SMEM((m, k), jnp.bfloat16, transforms=tiled),
            plgpu.SMEM((k, n), jnp.bfloat16, transforms=tiled),
            plgpu.SMEM((m, n), jnp.float32),
            plgpu.Barrier(),
        ],
    )


def assembly(instruction, x_gmem, o_gmem):
    """Puts one instruction of PTX between reading and writing."""
    @plgpu.inline_mgpu()
    def emit(_):
        llvm.inline_asm(None, [], instruction, "", has_side_effects=True)

    emit()
    o_gmem[...] = x_gmem[...]


def compile_assembly(hopper, instruction):
    kernel = plgpu.kernel(
        functools.partial(assembly, instruction),
        out_type=jax.ShapeDtypeStruct((128,), jnp.float32),
    )
    return hopper.compile(kernel, jax.ShapeDtypeStruct((128,), jnp.float32))


def compile_multiplier(hopper, m, n, k):
    shapes = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((m, k), (k, n)))
    return hopper.compile(multiplier(m, n, k), *shapes)


def compile_adder(hopper, size):
    return hopper.compile(adder(size), jax.ShapeDtypeStruct((size // 128, 128), jnp.float32))


def test_right_kernels_compile(hopper):
    compiled = compile_adder(hopper, 1024)
    assert compiled.memory_analysis().argument_size_in_bytes == 4096
    assert "custom-call" in compiled.as_text()
    compile_multiplier(hopper, 64, 64, 64)


def test_shared_memory_overflow_fails(hopper):
    with pytest.raises(ValueError, match="exceeds available shared memory"):
        compile_adder(hopper, 60 * 1024)


def test_wgmma_shape_fails(hopper):
    with pytest.raises(Exception, match="multiple.? of 64"):
        compile_multiplier(hopper, 48, 64, 64)


def test_assembly_fails(hopper):
    compile_assembly(hopper, "membar.cta;")
    with pytest.raises(jax.errors.JaxRuntimeError, match="[Pp]ass pipeline failed"):
        compile_assembly(hopper, "membar.nowhere;")


def test_missing_plugin_is_named(monkeypatch):
    def absent(_):
        raise cuda_aot.importlib.metadata.PackageNotFoundError

    monkeypatch.setattr(cuda_aot.importlib.metadata, "version", absent)
    assert "cuda13-local" in cuda_aot.missing()


def test_missing_ptxas_is_named(monkeypatch):
    monkeypatch.setattr(cuda_aot.importlib.metadata, "version", lambda _: jax.__version__)
    monkeypatch.setattr(cuda_aot.shutil, "which", lambda _: None)
    assert "ptxas" in cuda_aot.missing()
