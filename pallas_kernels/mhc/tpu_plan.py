"""How the TPU kernels of hyper-connections cut their work, forward and backward."""

from __future__ import annotations

import dataclasses
import math
import types
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import tpu

Operands = dict[str, jax.Array]

_PARTS = {
    "coefficients": (False, False, True),
    "mix": (False, True, False),
    "read": (False, True, True),
    "write": (True, False, False),
    "write_read": (True, True, True),
}
# Vector memory that tiles are chosen for, of the 64 MiB that the least generation has: what the
# kernels hold beside the streams comes to about as much again.
_TILE_BYTES = 12 * 2**20
_VMEM_LIMIT_BYTES = 56 * 2**20


@dataclasses.dataclass(frozen=True)
class Plan:
    """One call, apart from its arrays.

    Attributes:
        op: of `pallas_kernels.mhc`.
        write: whether the sublayer's output is written.
        mix: whether the next input is read.
        project: whether coefficients are made.
        streams: n.
        channels: d, a multiple of 128.
        tokens: padded to whole tiles.
        tile: tokens at a time.
        chunk: lanes at a time, a divisor of d.
        dtype: of the streams.
        sweeps: of Sinkhorn.
        eps: of the coefficients.
        norm_eps: of both norms.
        interpret: parameters of interpret mode, or None.
        save: whether the forward pass keeps what the backward pass needs.
    """

    op: str
    write: bool
    mix: bool
    project: bool
    streams: int
    channels: int
    tokens: int
    tile: int
    chunk: int
    dtype: Any
    sweeps: int
    eps: float
    norm_eps: float
    interpret: Any
    save: bool = False

    @classmethod
    def make(
        cls,
        op: str,
        streams: int,
        channels: int,
        tokens: int,
        dtype: Any,
        *,
        sinkhorn_iters: int = 20,
        eps: float = 1e-6,
        norm_eps: float = 1e-20,
        interpret: Any = None,
    ) -> Plan:
        """Chooses the tile: at most 128 tokens, fewer where their streams are large."""
        dtype = jnp.dtype(dtype)
        group = _group(dtype)
        # Streams in and out, and the gradient of those out, twice each.
        per_token = 6 * streams * channels * dtype.itemsize
        tile = 128
        while tile > group and tile * per_token > _TILE_BYTES:
            tile //= 2
        tile = min(tile, -(-tokens // group) * group)
        write, mix, project = _PARTS[op]
        return cls(
            op=op,
            write=write,
            mix=mix,
            project=project,
            streams=streams,
            channels=channels,
            tokens=-(-tokens // tile) * tile,
            tile=tile,
            chunk=next(size for size in (512, 384, 256, 128) if channels % size == 0),
            dtype=dtype,
            sweeps=sinkhorn_iters,
            eps=eps,
            norm_eps=norm_eps,
            interpret=interpret,
        )

    @property
    def rows(self) -> int:
        """K, rows of the projection."""
        return (2 + self.streams) * self.streams

    @property
    def group(self) -> int:
        """Tokens whose chunk fits the registers: the sublanes of a packed tile."""
        return _group(self.dtype)

    @property
    def precision(self) -> Any:
        """Of products whose operands are not bfloat16 already."""
        return None if self.dtype == jnp.bfloat16 else lax.Precision.HIGHEST

    @property
    def projection_passes(self) -> int:
        """Bfloat16 passes of such a product."""
        return 1 if self.dtype == jnp.bfloat16 else 6

    @property
    def projection_columns(self) -> int:
        """Columns of fn as the forward kernel multiplies by it, whole lanes."""
        parts = 3 if self.dtype == jnp.bfloat16 else 1
        return -(-parts * self.rows // tpu.LANES) * tpu.LANES

    def lanes(self, c: jax.Array, stream: int) -> Any:
        """Lanes of chunk c of a stream."""
        start = stream * self.channels + c * self.chunk
        return pl.ds(pl.multiple_of(start, self.chunk), self.chunk)

    def fold(self, values: jax.Array) -> jax.Array:
        """[group, chunk] added up to [group, 128]."""
        total = values[:, : tpu.LANES]
        for start in range(tpu.LANES, self.chunk, tpu.LANES):
            total += values[:, start : start + tpu.LANES]
        return total

    def per_token(self, array: Any) -> pl.BlockSpec:
        """A tile of rows of [tokens, width]."""
        return pl.BlockSpec((self.tile, array.shape[1]), lambda *at: (self._tile_of(at), 0))

    def whole(self, array: Any) -> pl.BlockSpec:
        """All of an array, fetched once and kept in one buffer."""
        rank = len(array.shape)
        return pl.BlockSpec(
            array.shape, lambda *_: (0,) * rank, pipeline_mode=pl.Buffered(buffer_count=1)
        )

    def _tile_of(self, at: tuple) -> Any:
        """The tile of a grid position; the backward pass has two grid axes."""
        return at[0] if len(at) == 1 else at[0] * pl.num_programs(1) + at[1]


def _group(dtype: Any) -> int:
    return tpu.SUBLANES * 4 // jnp.dtype(dtype).itemsize


def columns_of(
    plan: Plan, mixing: Any, rows: Any
) -> tuple[list[jax.Array], list[jax.Array], list[list[jax.Array]]]:
    """(pre, post, comb[j][k]) of a group of tokens, each [group, 1]."""
    n = plan.streams
    values = mixing[rows, :]
    columns = [values[:, i : i + 1] for i in range(plan.rows)]
    comb = [columns[(2 + j) * n : (3 + j) * n] for j in range(n)]
    return columns[:n], columns[n : 2 * n], comb


def call(
    plan: Plan,
    name: str,
    kernel: Callable[[types.SimpleNamespace], None],
    operands: Operands,
    blocks: Mapping[str, pl.BlockSpec],
    results: Mapping[str, jax.ShapeDtypeStruct],
    result_blocks: Mapping[str, pl.BlockSpec],
    scratch: Mapping[str, Any],
    *,
    flops: int,
    grid: tuple[int, ...] | None = None,
    semantics: tuple[str, ...] = ("parallel",),
) -> Operands:
    """Calls a kernel whose references have names; those of results begin with "out_"."""
    grid = grid or (plan.tokens // plan.tile,)
    names = [*operands, *(f"out_{name}" for name in results), *scratch]
    account = account_of(plan, operands, blocks, results, result_blocks, scratch, flops)
    outputs = pl.pallas_call(
        lambda *refs: kernel(types.SimpleNamespace(**dict(zip(names, refs, strict=True)))),
        grid=grid,
        in_specs=[blocks[name] for name in operands],
        out_specs=[result_blocks[name] for name in results],
        out_shape=list(results.values()),
        scratch_shapes=list(scratch.values()),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=semantics, vmem_limit_bytes=_VMEM_LIMIT_BYTES
        ),
        cost_estimate=tpu.stated(f"{name} {plan.op}", account),
        interpret=False if plan.interpret is None else plan.interpret,
    )(*operands.values())
    return dict(zip(results, outputs, strict=True))


def account_of(plan, operands, blocks, results, result_blocks, scratch, flops) -> tpu.Account:
    """The account of a `call`: blocks are held twice unless they are the whole array."""

    def held(array, block):
        copies = 2 if block.pipeline_mode is None else 1
        return copies * math.prod(size or 1 for size in block.block_shape) * array.dtype.itemsize

    pairs = [(operands[name], blocks[name]) for name in operands]
    pairs += [(results[name], result_blocks[name]) for name in results]
    extra = sum(math.prod(s.shape) * jnp.dtype(s.dtype).itemsize for s in scratch.values())
    transcendentals = plan.tokens * (plan.rows * (2 + 2 * plan.sweeps) if plan.project else 1)
    return tpu.Account(
        vmem_bytes=sum(held(*pair) for pair in pairs) + extra,
        hbm_bytes=sum(math.prod(a.shape) * a.dtype.itemsize for a, _ in pairs),
        flops=flops,
        transcendentals=transcendentals,
    )
