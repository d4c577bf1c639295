"""What the kernels need of jax that is private, or has moved between its releases."""

from __future__ import annotations

from jax.experimental.pallas import mosaic_gpu as plgpu

# Assembly and warp-level operations inside `plgpu.inline_mgpu` are written in these two;
# jax.extend.mlir shows other dialects (arith, memref, scf, vector), but neither of them.
from jaxlib.mlir.dialects import llvm as llvm
from jaxlib.mlir.dialects import nvvm as nvvm

if hasattr(plgpu, "InterpretGPUParams"):
    InterpretGPUParams = plgpu.InterpretGPUParams
else:  # jax 0.10
    from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

__all__ = ["InterpretGPUParams", "llvm", "nvvm"]
