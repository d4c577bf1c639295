"""Compiles kernels to machine code for a Hopper GPU on a machine that has no GPU.

It takes JAX's CUDA plugin (the extra `cuda13-local` of setup.py) and ptxas. Tests ask for the
fixture `hopper` of conftest.py, which skips them with the reason where either is missing:

    def test_compiles_for_hopper(hopper):
        hopper.compile(kernel, jax.ShapeDtypeStruct((4096, 512), jnp.bfloat16))

Whatever the compiler would refuse on the GPU's own machine it refuses here: shared memory that does
not fit, shapes that no instruction takes, wrong assembly. Numbers come from interpret mode, races
and deadlocks from the GPU alone. By hand, `MOSAIC_GPU_DUMP_PTXAS=1` prints the registers and spills
of every Mosaic GPU kernel that is compiled, `MOSAIC_GPU_DUMP_PTX=1` its assembly.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import shutil
import subprocess
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from pallas_kernels import tuning

# What XLA asks of a device when it compiles for it: an H200 of 132 multiprocessors (sm_90a).
_H200 = """
gpu_device_info {
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  shared_memory_per_block_optin: 232448
  threads_per_core_limit: 2048
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000
  l2_cache_size: 62914560
  clock_rate_ghz: 1.98
  device_memory_size: 150000000000
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  cuda_compute_capability { major: 9 minor: 0 }
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 12 }
runtime_version { major: 13 minor: 0 patch: 0 }
device_description_str: "NVIDIA H200"
"""


def missing() -> str | None:
    """What this machine lacks for compiling, in one line; None where nothing is missing."""
    if jax.default_backend() != "cpu":
        return "run on JAX_PLATFORMS=cpu: this compiles for a GPU that is not there"
    try:
        plugin = importlib.metadata.version("jax-cuda13-plugin")
    except importlib.metadata.PackageNotFoundError:
        return "no CUDA plugin of JAX (pip install -e '.[cuda13-local]')"
    if plugin != jax.__version__:
        return f"the CUDA plugin is for jax {plugin}, this is jax {jax.__version__}"
    if shutil.which("ptxas") is None:
        return "no ptxas on PATH (CUDA 13 tools)"
    version = subprocess.run(["ptxas", "--version"], capture_output=True, text=True)
    if version.returncode:
        return f"ptxas does not run: {version.stderr.strip()}"
    return None


@dataclasses.dataclass(frozen=True)
class Hopper:
    """An H200 to compile for.

    Attributes:
        device: as programs see it while they are compiled.
    """

    device: Any

    @classmethod
    def describe(cls) -> Hopper:
        """The one device of a topology made from its description."""
        topology = topologies.get_topology_desc(
            platform="cuda", target_config=_H200, topology="1x1x1"
        )
        return cls(topology.devices[0])

    def compile(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Compiles `function` for the device.

        Args:
            function: of arrays; jitted here, so anything static is bound already.
            *arguments: pytrees of `jax.ShapeDtypeStruct` or arrays, of which shape and dtype count.
            **options: of `jax.jit`.

        Returns:
            The compiled executable (`as_text`, `memory_analysis`); it cannot be called here.

        Raises:
            Exception: what lowering or the compiler says against the program.
        """
        sharding = SingleDeviceSharding(self.device)
        shapes = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), arguments
        )
        # The configurations that are used there, not those of this machine.
        with mock.patch.object(tuning, "device_kind", lambda: "NVIDIA H200"):
            lowered = jax.jit(function, **options).trace(*shapes).lower()
        with nothing_cached():
            return lowered.compile()


@contextlib.contextmanager
def nothing_cached():
    """Writes nothing to the persistent cache, which cannot read programs for absent devices."""
    name = "jax_persistent_cache_min_compile_time_secs"
    before = jax.config.jax_persistent_cache_min_compile_time_secs
    jax.config.update(name, float("inf"))
    try:
        yield
    finally:
        jax.config.update(name, before)
