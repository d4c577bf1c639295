"""Whether kernels for TPUs can run here, and what they cost on each generation.

A program meant for TPUs that are not there is traced under `jax.set_mesh` of a mesh of their
topology; `require` then accepts as it does on a TPU itself. Tests on a CPU pass the parameters of
Pallas's TPU interpret mode to a kernel, which then asks for nothing.

Every kernel states its `Account` where it is called (`cost_estimate=stated(name, account)`); from
it come the cost that XLA's scheduler is told and the table of `python -m pallas_kernels.account`.
"""

from __future__ import annotations

import contextvars
import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.chunking import devices, platform

LANES = 128
SUBLANES = 8

# What kernels are compiled for, with the cores that make one device: v5p joins two ("megacore"),
# a chip of 7x shows as two devices.
GENERATIONS = {
    "v5e": pltpu.get_tpu_info_for_chip(pltpu.ChipVersion.TPU_V5E, 1),
    "v5p": pltpu.get_tpu_info_for_chip(pltpu.ChipVersion.TPU_V5P, 2),
    "v6e": pltpu.get_tpu_info_for_chip(pltpu.ChipVersion.TPU_V6E, 1),
    "tpu7x": pltpu.get_tpu_info_for_chip(pltpu.ChipVersion.TPU_7X, 1),
}

# What a kernel may use of a core's vector memory unless it asks for more (`vmem_limit_bytes`), the
# least of all generations; and what there is of it, again the least.
DEFAULT_VMEM_BYTES = 16 * 2**20
LEAST_VMEM_BYTES = min(info.vmem_capacity_bytes for info in GENERATIONS.values())


def require(op: str, interpret: Any = None) -> None:
    """Declines unless the present computation runs on one TPU, or is interpreted.

    Args:
        op: named in the reason.
        interpret: parameters of interpret mode, in which a kernel runs on any device; or None.

    Raises:
        NotImplementedError: the devices of the present mesh, or the default one without a mesh, are
            no TPUs; or the mesh spreads arrays over several, over which XLA does not partition
            kernels (call the op inside `jax.shard_map`).
    """
    if interpret is not None:
        return
    if platform() != "tpu":
        raise NotImplementedError(f"{op}: needs a TPU, the platform is {platform()}")
    if devices() > 1:
        raise NotImplementedError(f"{op}: under a mesh of {devices()} devices needs jax.shard_map")


@dataclasses.dataclass(frozen=True)
class Account:
    """What one call of a kernel uses, by count.

    Attributes:
        vmem_bytes: vector memory of one core that buffers and scratch take, pipelining included.
        hbm_bytes: that cross to and from main memory.
        flops: of the matrix unit, in bfloat16 passes: a float32 product at the highest precision
            counts six times.
        transcendentals: exponentials, logarithms, roots and divisions.
        copies: asynchronous copies that the kernel starts itself, beside those of its pipeline.
    """

    vmem_bytes: int
    hbm_bytes: int
    flops: int = 0
    transcendentals: int = 0
    copies: int = 0

    def cost(self) -> pl.CostEstimate:
        """What XLA's scheduler is told."""
        return pl.CostEstimate(
            flops=self.flops,
            bytes_accessed=self.hbm_bytes,
            transcendentals=self.transcendentals,
        )

    def seconds(self, generation: str) -> float:
        """Roofline time on one device: main memory or the matrix unit, whichever takes longer.

        Args:
            generation: one of `GENERATIONS`, whose published rates are taken.
        """
        info = GENERATIONS[generation]
        memory = self.hbm_bytes / (info.mem_bw_bytes_per_second * info.num_cores)
        return max(memory, self.flops / (info.bf16_ops_per_second * info.num_cores))


_listeners: contextvars.ContextVar[list[tuple[str, Account]] | None] = contextvars.ContextVar(
    "listeners", default=None
)


def stated(name: str, account: Account) -> pl.CostEstimate:
    """States what a kernel's call takes, while it is traced.

    Args:
        name: of the kernel, for `accounts_of`.
        account: of this call.

    Returns:
        The argument `cost_estimate` of `pallas_call`.
    """
    heard = _listeners.get()
    if heard is not None:
        heard.append((name, account))
    return account.cost()


def accounts_of(function: Callable[..., Any], *arguments: Any) -> list[tuple[str, Account]]:
    """(name, account) of every kernel that a function calls on a TPU; it is traced, and not run.

    Args:
        function: of arrays, with kernels in it. A kernel inside a jitted function that was traced
            before for the same shapes states nothing again.
        *arguments: pytrees of `jax.ShapeDtypeStruct` or arrays.
    """
    device = jax.sharding.AbstractDevice(device_kind="TPU v5p", num_cores=2, platform="tpu")
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.sharding.AbstractMesh((1,), ("device",), auto, abstract_device=device)
    token = _listeners.set([])
    try:
        with jax.sharding.use_abstract_mesh(mesh):
            jax.eval_shape(function, *arguments)
        return _listeners.get()
    finally:
        _listeners.reset(token)
