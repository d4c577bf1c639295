"""Compiles kernels to machine code for TPUs on a machine that has none.

It takes libtpu (the extra `tpu` of setup.py). Tests ask for the fixture `tpu` of conftest.py, which
runs them once a generation, or skips them with the reason where libtpu is missing:

    def test_compiles(tpu):
        tpu.compile(kernel, jax.ShapeDtypeStruct((4096, 512), jnp.bfloat16))

What Mosaic or XLA would refuse on the TPU's own machine they refuse here: vector memory that does
not fit, copies that are not aligned, operations that do not exist. Numbers and races come from
interpret mode, for which there is the fixture `interpreted`; a copy that nobody waits for only it
can find.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pallas_kernels.tpu import GENERATIONS
from tests.pallas_kernels.cuda_aot import nothing_cached

# The smallest that every libtpu describes; kernels are compiled for the first device of it.
TOPOLOGIES = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1"}
assert TOPOLOGIES.keys() == GENERATIONS.keys()

# libtpu would ask a metadata server that is not there, and let no two processes in at once.
_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


def missing() -> str | None:
    """What this machine lacks for compiling, in one line; None where nothing is missing."""
    if jax.default_backend() != "cpu":
        return "run on JAX_PLATFORMS=cpu: this compiles for a TPU that is not there"
    try:
        importlib.metadata.version("libtpu")
    except importlib.metadata.PackageNotFoundError:
        return "no libtpu (pip install -e '.[tpu]')"
    return None


@dataclasses.dataclass(frozen=True)
class Tpu:
    """A TPU to compile for.

    Attributes:
        generation: one of `pallas_kernels.tpu.GENERATIONS`.
        mesh: of its one device.
    """

    generation: str
    mesh: Mesh

    @classmethod
    def describe(cls, generation: str) -> Tpu:
        """One device of the generation's topology."""
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        topology = topologies.get_topology_desc(
            platform="tpu", topology_name=TOPOLOGIES[generation]
        )
        return cls(generation, Mesh(np.array(topology.devices[:1]), ("device",)))

    def compile(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Compiles `function` for the device, which it sees as the present one.

        Args:
            function: of arrays; jitted here, so anything static is bound already.
            *arguments: pytrees of `jax.ShapeDtypeStruct` or arrays, of which shape and dtype count.
            **options: of `jax.jit`.

        Returns:
            The compiled executable (`as_text`, `memory_analysis`); it cannot be called here.

        Raises:
            Exception: what lowering, Mosaic or XLA says against the program.
        """
        sharding = NamedSharding(self.mesh, PartitionSpec())
        shapes = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), arguments
        )
        with jax.set_mesh(self.mesh):
            lowered = jax.jit(function, **options).trace(*shapes).lower()
            with nothing_cached():
                return lowered.compile()
