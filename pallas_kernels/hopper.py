"""Whether kernels for Hopper GPUs can run here."""

from __future__ import annotations

import jax

from pallas_kernels.chunking import devices, platform


def require(op: str, *, jax_release: tuple[int, int] = (0, 10)) -> None:
    """Declines unless the default device is a Hopper GPU, and the computation its alone.

    Args:
        op: named in the reason.
        jax_release: the oldest release whose Mosaic GPU has what the kernel needs.

    Raises:
        NotImplementedError: an older jax; another device; or the present mesh spreads arrays over
            several, over which XLA does not partition kernels (call the op inside
            `jax.shard_map`).
    """
    if platform() != "gpu":
        raise NotImplementedError(f"{op}: needs a GPU, the platform is {platform()}")
    capability = jax.devices()[0].compute_capability
    if capability != "9.0":
        raise NotImplementedError(f"{op}: needs compute capability 9.0, not {capability}")
    if jax.__version_info__ < jax_release:
        wanted = ".".join(map(str, jax_release))
        raise NotImplementedError(f"{op}: needs jax {wanted} or later, this is {jax.__version__}")
    if devices() > 1:
        raise NotImplementedError(f"{op}: under a mesh of {devices()} devices needs jax.shard_map")
