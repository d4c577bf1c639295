"""The probabilities of selected rows, summed over heads, on Hopper.

A block of four warpgroups takes queries in turn. Two of them gather tiles of 64 rows, one the even
and one the odd tiles; each feeds another that computes S^T = K Q^T, so that the sum over heads runs
along a row of the product, and any multiple of 8 heads fills it.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import hopper
from pallas_kernels.sparse_attention import hopper_rows, mosaic_gpu, reference
from pallas_kernels.sparse_attention.hopper_rows import ORDER, PARTS, SWIZZLED, TILE, Tile
from pallas_kernels.sparse_attention.mosaic_gpu import LOG2E, finite

_LANES = 2  # of the pipeline: one warpgroup that gathers, one that multiplies, one stage
_BLOCKS = 132
_ROWS = plgpu.Layout.WGMMA.reduce(1)
_COLUMNS = plgpu.Layout.WGMMA.reduce(0)
_HEADS = 64  # at a time: queries and two tiles fill the shared memory


@dataclasses.dataclass(frozen=True)
class _Plan:
    """One call: everything static. `tiles` of 64 slots are a multiple of the lanes."""

    batch: int
    queries: int
    heads: int
    dim: int
    rows: int
    tiles: int
    packed: bool
    factor: float
    interpret: Any

    @property
    def items(self) -> int:
        return self.batch * self.queries

    @property
    def blocks(self) -> int:
        return min(_BLOCKS, self.items)


class _Refs:
    """Arguments, result and shared memory of the kernel, by name."""

    def __init__(self, refs):
        self.q, self.main, self.indices, self.lse, self.out, *refs = refs
        self.q_shared, self.rows, self.bias, self.mass, *refs = refs
        self.q_full, self.q_free, self.rows_full, self.rows_free = refs


def _scratch(plan: _Plan) -> list:
    part = plan.dim // PARTS
    return [
        plgpu.SMEM((PARTS, plan.heads, part), jnp.bfloat16, transforms=SWIZZLED),
        plgpu.SMEM((_LANES, PARTS, TILE, part), jnp.bfloat16, transforms=SWIZZLED),
        plgpu.SMEM((_LANES, TILE), jnp.float32),
        plgpu.SMEM((_LANES, TILE), jnp.float32),
        plgpu.Barrier(num_arrivals=PARTS),
        plgpu.Barrier(num_arrivals=_LANES),
        plgpu.Barrier(num_barriers=_LANES * PARTS),
        plgpu.Barrier(num_barriers=_LANES * PARTS),
    ]


def _query(plan: _Plan, n):
    """Batch row and query of the n-th item of this block."""
    item = lax.axis_index("block") + n * plan.blocks
    return item // plan.queries, item % plan.queries


def _mass_role(plan: _Plan, refs: _Refs, mine, lane) -> None:
    plgpu.barrier_arrive(refs.q_free)
    for part in ORDER:
        plgpu.barrier_arrive(refs.rows_free.at[lane * PARTS + part])

    @pl.loop(0, mine)
    def _each_item(n):
        batch, query = _query(plan, n)
        plgpu.barrier_wait(refs.q_full)
        lse = plgpu.load(refs.lse.at[batch, query], layout=_COLUMNS, optimized=False)
        # -inf means that there is no key: the bias of every slot is -inf too.
        base = lax.broadcast_in_dim(finite(lse) * LOG2E, (TILE, plan.heads), [1])

        @pl.loop(0, plan.tiles // _LANES)
        def _each_tile(tile):
            def products(accumulator):
                for part in ORDER:
                    plgpu.barrier_wait(refs.rows_full.at[lane * PARTS + part])
                    q = refs.q_shared.at[part].transpose((1, 0))
                    plgpu.wgmma(accumulator, refs.rows.at[lane, part], q)
                return accumulator[...]

            s = pl.run_scoped(products, plgpu.ACC((TILE, plan.heads), jnp.float32))
            bias = plgpu.load(refs.bias.at[lane], layout=_ROWS)
            for part in ORDER:
                plgpu.barrier_arrive(refs.rows_free.at[lane * PARTS + part])
            mass = jnp.exp2(s * plan.factor - base).sum(axis=1)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # of the tile before
            refs.mass[lane] = jnp.where(bias == 0.0, mass, 0.0)
            plgpu.commit_smem()
            slots = pl.ds((tile * _LANES + lane) * TILE, TILE)
            plgpu.copy_smem_to_gmem(refs.mass.at[lane], refs.out.at[batch, query, slots])

        plgpu.barrier_arrive(refs.q_free)

    plgpu.wait_smem_to_gmem(0)


def _row_role(plan: _Plan, refs: _Refs, mine, lane) -> None:
    into = Tile(
        refs.rows.at[lane],
        refs.bias.at[lane],
        lambda part: plgpu.barrier_wait(refs.rows_free.at[lane * PARTS + part]),
        lambda part: plgpu.barrier_arrive(refs.rows_full.at[lane * PARTS + part]),
    )

    @pl.loop(0, mine)
    def _each_item(n):
        batch, query = _query(plan, n)
        rows = refs.main.at[batch]

        def indices_of(tile):
            tile = jnp.minimum(tile, plan.tiles // _LANES - 1)
            slots = pl.ds((tile * _LANES + lane) * TILE, TILE)
            here = refs.indices.at[batch, query, slots]
            return here[...] if plan.interpret else hopper_rows.indices_of(here)

        def load(indices):
            if not plan.packed or plan.interpret:
                return ()
            return hopper_rows.load_fp4(rows, indices, plan.dim, plan.rows)

        def one_tile(tile, ahead):
            indices, data = ahead
            following = indices_of(tile + 1)
            if plan.interpret:
                into.interpret(rows, reference.MAIN_FORMAT, indices, plan.dim, plan.rows)
            elif plan.packed:
                into.dequantise(data, indices, plan.dim, plan.rows)
            else:
                into.copy(rows, indices, plan.dim, plan.rows)
            return following, load(following)

        indices = indices_of(0)
        ahead = indices, load(indices)
        plgpu.barrier_wait(refs.q_free)

        @pl.when(lane == 0)
        def _load_queries():
            for part in range(PARTS):
                plgpu.copy_gmem_to_smem(
                    refs.q.at[batch, query, :, pl.ds(part * plan.dim // PARTS, plan.dim // PARTS)],
                    refs.q_shared.at[part],
                    refs.q_full,
                )

        lax.fori_loop(0, plan.tiles // _LANES, one_tile, ahead)

    # Every phase of a barrier is waited for.
    plgpu.barrier_wait(refs.q_free)
    for part in ORDER:
        into.wait_free(part)


def _body(plan: _Plan, *refs) -> None:
    refs = _Refs(refs)
    role = lax.axis_index("role")
    mine = (plan.items - lax.axis_index("block") + plan.blocks - 1) // plan.blocks
    pl.when(role < _LANES)(lambda: _mass_role(plan, refs, mine, role))
    pl.when(role >= _LANES)(lambda: _row_role(plan, refs, mine, role - _LANES))


def forward(
    q: jax.Array,
    main_rows: jax.Array,
    indices: jax.Array,
    lse: jax.Array,
    *,
    scale: float,
    interpret: Any = None,
) -> jax.Array:
    """Runs the kernel; see `pallas_kernels.sparse_attention.selected_mass`.

    Args:
        q: bfloat16 `[B, T, H, D]`.
        main_rows: bfloat16 `[B, G, D]`, or packed.
        indices: i32 `[B, T, K]`.
        lse: f32 `[B, T, H]`, with the sink.
        scale: of the logits.
        interpret: parameters of Pallas's interpret mode, in which it runs on any device.

    Returns:
        f32 `[B, T, K]`.
    """
    batch, queries, heads, dim = q.shape
    if heads > _HEADS:
        several = heads // _HEADS, _HEADS
        q = jnp.moveaxis(q.reshape(batch, queries, *several, dim), 2, 0)
        lse = jnp.moveaxis(lse.reshape(batch, queries, *several), 2, 0)
        one = functools.partial(forward, scale=scale, interpret=interpret)
        return sum(one(q, main_rows, indices, its) for q, its in zip(q, lse, strict=True))
    slots = indices.shape[-1]
    tiles = -(-slots // (_LANES * TILE)) * _LANES
    plan = _Plan(
        batch=batch,
        queries=queries,
        heads=heads,
        dim=dim,
        rows=main_rows.shape[1],
        tiles=tiles,
        packed=main_rows.dtype == jnp.uint8,
        factor=scale * LOG2E,
        interpret=interpret,
    )
    kernel = plgpu.kernel(
        functools.partial(_body, plan),
        out_type=jax.ShapeDtypeStruct((batch, queries, tiles * TILE), jnp.float32),
        scratch_types=_scratch(plan),
        grid=(plan.blocks,),
        grid_names=("block",),
        num_threads=2 * _LANES,
        thread_name="role",
        kernel_name="selected_mass",
        interpret=plan.interpret,
        compiler_params=mosaic_gpu.COMPILER_PARAMS,
    )
    padding = [(0, 0), (0, 0), (0, tiles * TILE - slots)]
    indices = jnp.pad(indices, padding, constant_values=-1)
    return kernel(q, main_rows, indices, lse)[..., :slots]


def selected_mass(
    q,
    main_rows,
    indices,
    lse_with_sink,
    *,
    main_lo=None,
    main_hi=None,
    scale=None,
    chunk=None,
):
    """See `pallas_kernels.sparse_attention.selected_mass`; `chunk` has no effect.

    Raises:
        NotImplementedError: as `mosaic_gpu.sparse_attention`.
    """
    del main_lo, main_hi, chunk
    hopper.require("selected_mass", jax_release=(0, 11))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    mosaic_gpu.check_queries(q, scale)
    if indices is None:
        raise NotImplementedError("needs indices; main_lo and main_hi alone are not enough")
    if main_rows.shape[1] == 0 or indices.shape[-1] == 0:
        raise NotImplementedError("there is no row")
    q, main_rows, lse = jax.lax.stop_gradient((q, main_rows, lse_with_sink))
    if main_rows.dtype != jnp.uint8:
        main_rows = main_rows.astype(jnp.bfloat16)
    return _mass(q, main_rows, indices, lse.astype(jnp.float32), float(scale))


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _mass(q, main_rows, indices, lse, scale):
    return forward(q, main_rows, indices, lse, scale=scale)


_mass.defvjp(
    lambda *arguments: (_mass(*arguments), None),
    lambda scale, residuals, cotangent: (None,) * 4,
)
