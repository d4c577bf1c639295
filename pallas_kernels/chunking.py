"""Running a function of queries a chunk at a time, so that no temporary grows with queries x keys.

Attention-like ops differ in what a chunk computes, not in how their queries are cut.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

# The largest temporary of one chunk. Measured on CPU (T 512 to 2048, head_dim 64 and 128, forward
# and backward): 2 to 4 MiB is fastest; 32 MiB, beyond the caches, takes 1.4 to 2.3 times as long.
# An accelerator wants enough work per chunk to fill it.
CPU_BUDGET_BYTES = 4 * 2**20
ACCELERATOR_BUDGET_BYTES = 512 * 2**20
# Adding one chunk's gradient of the keys costs as much as gathering the keys of this many queries.
SMALLEST_CHUNK = 64


def devices() -> int:
    """Devices that the compiler spreads the present computation over."""
    mesh = jax.sharding.get_abstract_mesh()
    kinds = zip(mesh.axis_sizes, mesh.axis_types, strict=True)
    return math.prod(size for size, kind in kinds if kind != jax.sharding.AxisType.Manual)


def platform() -> str:
    """Kind of device ("cpu", "gpu", "tpu") that the present computation is compiled for.

    Under a mesh (`jax.set_mesh`) it is that of the mesh, whose devices may be those of a topology
    that is not there; otherwise the default one.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform


def chunk_size(queries: int, batch: int, bytes_per_query: int, multiple: int = 1) -> int:
    """Queries per chunk whose largest temporary stays near the budget of the present platform.

    Under a mesh (`jax.set_mesh`) the budget is that of all its devices, over which the temporary is
    taken to be spread evenly; inside `jax.shard_map` shapes are local already, and so is the
    budget. Without a mesh in force the computation counts as one device's.

    Args:
        queries: T, the number of queries of one batch row.
        batch: B, the rows that are processed together.
        bytes_per_query: size of the largest temporary of one query of one batch row.
        multiple: the result is a multiple of it.

    Returns:
        A chunk size that cuts `queries` into nearly equal chunks.
    """
    on_cpu = platform() == "cpu"
    budget = CPU_BUDGET_BYTES if on_cpu else ACCELERATOR_BUDGET_BYTES
    limit = max(SMALLEST_CHUNK, budget * devices() // max(1, batch * bytes_per_query))
    chunks = -(-queries // limit)
    return max(1, -(-queries // (chunks * multiple))) * multiple


def map_queries(body: Callable[..., Any], queries: tuple[jax.Array, ...], chunk: int) -> Any:
    """Applies `body` to chunks of queries, keeping for the backward pass only what it is given.

    Args:
        body: takes arrays `[B, chunk, ...]`, one for each of `queries`, and returns arrays
            `[B, chunk, ...]` in any pytree. Its result for a query must not depend on the other
            queries of the chunk; it sees zeros beyond the last query.
        queries: arrays `[B, T, ...]`.
        chunk: queries at a time; T need not be a multiple of it.

    Returns:
        The results of `body`, `[B, T, ...]` each.
    """
    total = queries[0].shape[1]
    chunks = -(-total // chunk)
    padded = [
        jnp.pad(x, [(0, 0), (0, chunks * chunk - total)] + [(0, 0)] * (x.ndim - 2)) for x in queries
    ]
    if chunks == 1:
        return jax.tree.map(lambda y: y[:, :total], body(*padded))

    cut = [jnp.moveaxis(x.reshape(x.shape[0], chunks, chunk, *x.shape[2:]), 1, 0) for x in padded]
    # A loop's recomputation cannot be merged with its first pass: no barrier is needed for that.
    step = jax.checkpoint(lambda xs: body(*xs), prevent_cse=False)
    results = jax.lax.map(step, cut)

    def join(y: jax.Array) -> jax.Array:
        y = jnp.moveaxis(y, 0, 1)
        return y.reshape(y.shape[0], chunks * chunk, *y.shape[3:])[:, :total]

    return jax.tree.map(join, results)
