"""CSA2 attention on Hopper: gathered rows, wgmma, warp specialisation.

A work item is one query, 64 of its heads, and a share of its keys (all of them, unless there are
too few queries to fill the GPU). A block of four warpgroups takes items in turn, and each warpgroup
has its own part of the pipeline over tiles of 64 keys:

* rows: gathers a tile into shared memory, dequantising packed rows on the way;
* scores: S = Q K^T, the online softmax, P to shared memory;
* values, twice: each adds P V for one half of the channels to 64 x D/2 accumulators in registers.

So the scores of a tile are computed while the values of the one before are summed. The running
maximum is raised only when a tile exceeds it by more than 2^8: probabilities stay representable,
and the accumulators hardly ever need rescaling.

Rows are keys and values at once, hence a tile is read once. Fewer than 64 heads run as 64, of which
the rest is neither loaded nor stored.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import dispatch, hopper
from pallas_kernels.sparse_attention import hopper_rows, mosaic_gpu_backward, reference
from pallas_kernels.sparse_attention.hopper_rows import ORDER, PARTS, SWIZZLED, TILE, Tile
from pallas_kernels.sparse_attention.tables import Fp4Table
from pallas_kernels.tuning import Table

_HEADS = 64  # rows of one wgmma
_STAGES = 2
LOG2E = math.log2(math.e)
_SLACK = 8.0
COMPILER_PARAMS = plgpu.CompilerParams(
    approx_math=True,
    unsafe_no_auto_barriers=True,
    lowering_semantics=plgpu.LoweringSemantics.Lane,
)
_ROWS = plgpu.Layout.WGMMA.reduce(1)
_COLUMNS = plgpu.Layout.WGMMA.reduce(0)


@dataclasses.dataclass(frozen=True)
class TuningConfig:
    """How the forward kernel is laid out.

    Attributes:
        score_registers: per thread of the warpgroup that computes scores.
        value_registers: of the two that sum values.
        row_registers: of the one that gathers. With the others at most 512.
        blocks: of the grid, at most; one fits on a multiprocessor.
        shares: blocks that share the keys of a query, at most: as many as divide its tiles.
    """

    score_registers: int
    value_registers: int
    row_registers: int
    blocks: int = 132
    shares: int = 1


TABLE = Table(pathlib.Path(__file__).parent / "tuned.json", TuningConfig)
_PLAIN_CONFIG = TuningConfig(128, 160, 64)
_PACKED_CONFIG = TuningConfig(104, 160, 88)


def kind_of(main_rows: jax.Array | None) -> str:
    """Of main rows, as `shape_class` names it."""
    if main_rows is None:
        return "window alone"
    return "fp4 rows" if main_rows.dtype == jnp.uint8 else "bfloat16 rows"


def shape_class(kind: str, items: int) -> str:
    """What calls share a configuration.

    Args:
        kind: see `kind_of`.
        items: queries of the batch times groups of 64 heads.
    """
    few = f"up to {1 << max(0, items - 1).bit_length()}"
    return f"{kind}, {'many' if items >= TuningConfig.blocks else few} items"


@dataclasses.dataclass(frozen=True)
class _Plan:
    """One call of the forward kernel: everything static.

    Attributes:
        batch: B.
        queries: T.
        heads: of an item, at most 64.
        groups: of heads, items of one query and share of keys.
        dim: D.
        window_rows: S.
        window_tiles: tiles of window rows, first of all.
        main_rows: G.
        main_tiles: tiles of selected rows.
        packed: whether main rows are FP4.
        shares: that the tiles of a query are cut into.
        factor: of the logits, for powers of two.
        config: layout of the kernel.
        interpret: parameters of interpret mode, or None.
    """

    batch: int
    queries: int
    heads: int
    groups: int
    dim: int
    window_rows: int
    window_tiles: int
    main_rows: int
    main_tiles: int
    packed: bool
    shares: int
    factor: float
    config: TuningConfig
    interpret: Any

    @property
    def part(self) -> int:
        """Channels of a unit; 128 (as 256 columns of an accumulator find no registers) or less."""
        return self.dim // PARTS

    @property
    def items(self) -> int:
        return self.batch * self.queries * self.shares * self.groups

    @property
    def blocks(self) -> int:
        return min(self.config.blocks, self.items)

    @property
    def tiles(self) -> int:
        """Tiles of an item."""
        return (self.window_tiles + self.main_tiles) // self.shares


class _Refs:
    """Arguments, results and shared memory of the kernel, by name."""

    def __init__(self, plan: _Plan, refs):
        refs = iter(refs)
        self.q, self.window, self.lo, self.hi = (next(refs) for _ in range(4))
        self.main, self.indices = (next(refs), next(refs)) if plan.main_tiles else (None, None)
        self.sink, self.out, self.lse = (next(refs) for _ in range(3))
        # Queries and rows in parts of the channels; probabilities; per head the factor that the
        # accumulators take before the next tile (after the last: at the end); per key 0 or -inf.
        self.q_shared, self.rows, self.p, self.grow, self.bias, self.lse_shared = (
            next(refs) for _ in range(6)
        )
        self.q_full, self.rows_full, self.rows_free, self.p_full, self.p_free = refs


def _scratch(plan: _Plan) -> list:
    return [
        plgpu.SMEM((PARTS, _HEADS, plan.part), jnp.bfloat16, transforms=SWIZZLED),
        plgpu.SMEM((_STAGES, PARTS, TILE, plan.part), jnp.bfloat16, transforms=SWIZZLED),
        plgpu.SMEM((2, _HEADS, TILE), jnp.bfloat16, transforms=SWIZZLED),
        plgpu.SMEM((2, _HEADS), jnp.float32),
        plgpu.SMEM((_STAGES, TILE), jnp.float32),
        plgpu.SMEM((_HEADS,), jnp.float32),
        plgpu.Barrier(num_arrivals=PARTS),
        plgpu.Barrier(num_barriers=_STAGES * PARTS),
        plgpu.Barrier(num_barriers=_STAGES * PARTS),
        plgpu.Barrier(num_barriers=2),
        plgpu.Barrier(num_barriers=2, num_arrivals=2),
    ]


class _Item:
    """Where the n-th item of this block lies."""

    def __init__(self, plan: _Plan, n):
        item = lax.axis_index("block") + n * plan.blocks
        item, self.group = item // plan.groups, item % plan.groups
        # Shares of one query lie side by side along the queries of the results.
        self.share, self.row = item % plan.shares, item % (plan.queries * plan.shares)
        item = item // plan.shares
        self.batch, self.query = item // plan.queries, item % plan.queries
        self.heads = pl.ds(self.group * plan.heads, plan.heads)
        self.first = self.share * plan.tiles


def _tile_slots(plan: _Plan, n, tile):
    """Stage of a tile of the n-th item, and slot of its probabilities (one more an item)."""
    return (n * plan.tiles + tile) % _STAGES, (n * (plan.tiles + 1) + tile) % 2


def _channels(plan: _Plan, part):
    return pl.ds(part * plan.part, plan.part)


def finite(x: jax.Array) -> jax.Array:
    """`x` with 0 for -inf, a logarithm of nothing."""
    return jnp.where(x == -jnp.inf, 0.0, x)


def _accumulated(plan: _Plan, products, sums):
    """Sums after `products` has added to accumulators that hold them."""
    if not plan.interpret:
        return pl.run_state(lambda refs: products(*refs))(tuple(plgpu.ACC.init(x) for x in sums))

    # Interpret mode has no accumulators that hold something.
    def from_nothing(*accumulators):
        products(*accumulators)
        return [accumulator[...] for accumulator in accumulators]

    more = pl.run_scoped(from_nothing, *(plgpu.ACC(x.shape) for x in sums))
    return tuple(a + b for a, b in zip(sums, more, strict=True))


def _score_role(plan: _Plan, refs: _Refs, mine) -> None:
    def load_queries(n):
        item = _Item(plan, n)
        for part in range(PARTS):
            plgpu.copy_gmem_to_smem(
                refs.q.at[item.batch, item.query, item.heads, _channels(plan, part)],
                refs.q_shared.at[part, pl.ds(0, plan.heads)],
                refs.q_full,
            )

    load_queries(0)

    @pl.loop(0, mine)
    def _each_item(n):
        item = _Item(plan, n)
        plgpu.barrier_wait(refs.q_full)

        def one_tile(tile, carry):
            highest, total = carry
            stage, slot = _tile_slots(plan, n, tile)

            def products(accumulator):
                for part in ORDER:
                    plgpu.barrier_wait(refs.rows_full.at[stage * PARTS + part])
                    rows = refs.rows.at[stage, part].transpose((1, 0))
                    plgpu.wgmma(accumulator, refs.q_shared.at[part], rows)
                bias = plgpu.load(refs.bias.at[stage], layout=_COLUMNS)
                return accumulator[...], bias

            s, bias = pl.run_scoped(products, plgpu.ACC((_HEADS, TILE), jnp.float32))

            @pl.when(jnp.logical_and(tile == plan.tiles - 1, n + 1 < mine))
            def _next_queries():
                load_queries(n + 1)

            s = s + lax.broadcast_in_dim(bias, s.shape, [1])
            top = s.max(axis=1) * plan.factor
            raised = jnp.where(top > highest + _SLACK, top, highest)
            base = finite(raised)
            p = jnp.exp2(s * plan.factor - lax.broadcast_in_dim(base, s.shape, [0]))
            grow = jnp.exp2(highest - base)
            plgpu.barrier_wait(refs.p_free.at[slot])
            refs.p[slot] = p.astype(jnp.bfloat16)
            refs.grow[slot] = grow
            plgpu.commit_smem()
            plgpu.barrier_arrive(refs.p_full.at[slot])
            return raised, total * grow + p.sum(axis=1)

        def per_head(value):
            return plgpu.layout_cast(jnp.full((_HEADS,), value, jnp.float32), _ROWS)

        carry = per_head(-jnp.inf), per_head(0.0)
        highest, total = lax.fori_loop(0, plan.tiles, one_tile, carry)
        _, slot = _tile_slots(plan, n, plan.tiles)
        base = finite(highest)
        sink = refs.sink.at[pl.ds(item.group * _HEADS, _HEADS)]
        sink = plgpu.load(sink, layout=_ROWS, optimized=False) * LOG2E
        inverse = jnp.where(total > 0.0, 1.0 / (total + jnp.exp2(sink - base)), 0.0)
        plgpu.barrier_wait(refs.p_free.at[slot])
        refs.grow[slot] = inverse
        plgpu.wait_smem_to_gmem(0)  # of the item before
        refs.lse_shared[...] = base / LOG2E + jnp.log(total)
        plgpu.commit_smem()
        plgpu.barrier_arrive(refs.p_full.at[slot])
        plgpu.copy_smem_to_gmem(
            refs.lse_shared.at[pl.ds(0, plan.heads)],
            refs.lse.at[item.batch, item.row, item.heads],
        )

    plgpu.wait_smem_to_gmem(0)
    for slot in range(2):
        plgpu.barrier_wait(refs.p_free.at[slot])


def _value_role(plan: _Plan, refs: _Refs, mine, side) -> None:
    parts = (2 * side, 2 * side + 1)
    for i in range(2):
        plgpu.barrier_arrive(refs.p_free.at[i])
    for stage in range(_STAGES):
        for part in parts:
            plgpu.barrier_arrive(refs.rows_free.at[stage * PARTS + part])

    def scaled(sums, by):
        by = lax.broadcast_in_dim(by, sums[0].shape, [0])
        return tuple(x * by for x in sums)

    @pl.loop(0, mine)
    def _each_item(n):
        item = _Item(plan, n)

        def one_tile(tile, sums):
            stage, slot = _tile_slots(plan, n, tile)
            for part in parts:
                plgpu.barrier_wait(refs.rows_full.at[stage * PARTS + part])
            plgpu.barrier_wait(refs.p_full.at[slot])
            grow = plgpu.load(refs.grow.at[slot], layout=_ROWS)
            if plan.interpret:
                sums = scaled(sums, grow)
            else:
                rescale = hopper_rows.differs_from_one(grow) != 0
                sums = lax.cond(rescale, lambda x: scaled(x, grow), lambda x: x, sums)
            last = tile == plan.tiles - 1

            def release(part):
                pl.when(jnp.logical_not(last))(
                    lambda: plgpu.barrier_arrive(refs.rows_free.at[stage * PARTS + part])
                )

            def products(*accumulators):
                for part, accumulator in zip(parts, accumulators, strict=True):
                    plgpu.wgmma(accumulator, refs.p.at[slot], refs.rows.at[stage, part])
                if not plan.interpret:  # where products are complete at once
                    plgpu.wgmma_wait(1)
                    release(parts[0])

            sums = _accumulated(plan, products, sums)
            if plan.interpret:
                release(parts[0])
            plgpu.barrier_arrive(refs.p_free.at[slot])
            release(parts[1])
            return sums

        zeros = jnp.full((_HEADS, plan.part), 0.0, jnp.float32)
        zeros = tuple(plgpu.layout_cast(zeros, plgpu.Layout.WGMMA) for _ in parts)
        sums = lax.fori_loop(0, plan.tiles, one_tile, zeros)
        stage, _ = _tile_slots(plan, n, plan.tiles - 1)
        _, slot = _tile_slots(plan, n, plan.tiles)
        plgpu.barrier_wait(refs.p_full.at[slot])
        inverse = plgpu.load(refs.grow.at[slot], layout=_ROWS)
        plgpu.barrier_arrive(refs.p_free.at[slot])
        # The last tile's rows make room for the result on its way out.
        for part, x in zip(parts, scaled(sums, inverse), strict=True):
            refs.rows[stage, part] = x.astype(jnp.bfloat16)
        plgpu.commit_smem()
        for part in parts:
            plgpu.copy_smem_to_gmem(
                refs.rows.at[stage, part, pl.ds(0, plan.heads)],
                refs.out.at[item.batch, item.row, item.heads, _channels(plan, part)],
            )
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        for part in parts:
            plgpu.barrier_arrive(refs.rows_free.at[stage * PARTS + part])

    plgpu.wait_smem_to_gmem(0)


def _row_role(plan: _Plan, refs: _Refs, mine) -> None:
    def barrier(barriers, stage, part):
        return barriers.at[stage * PARTS + part]

    def tile_at(stage):
        return Tile(
            refs.rows.at[stage],
            refs.bias.at[stage],
            lambda part: plgpu.barrier_wait(barrier(refs.rows_free, stage, part)),
            lambda part: plgpu.barrier_arrive(barrier(refs.rows_full, stage, part)),
        )

    @pl.loop(0, mine)
    def _each_item(n):
        item = _Item(plan, n)
        last = item.first + plan.tiles
        main_from = jnp.maximum(item.first, plan.window_tiles)

        def stage_of(tile):
            return _tile_slots(plan, n, tile - item.first)[0]

        def indices_of(tile):
            tile = jnp.clip(tile - plan.window_tiles, 0, plan.main_tiles - 1)
            here = refs.indices.at[item.batch, item.query, pl.ds(tile * TILE, TILE)]
            return here[...] if plan.interpret else hopper_rows.indices_of(here)

        def load(indices):
            if not plan.packed or plan.interpret:
                return ()
            rows = refs.main.at[item.batch]
            return hopper_rows.load_fp4(rows, indices, plan.dim, plan.main_rows)

        def window_tile(tile):
            rows, count = refs.window.at[item.batch], plan.window_rows
            first, into = lo + tile * TILE, tile_at(stage_of(tile))
            if plan.interpret:
                indices = first + jnp.arange(TILE)
                indices = jnp.where(indices < hi, indices, -1)
                into.interpret(rows, reference.WINDOW_FORMAT, indices, plan.dim, count)
            else:
                into.copy(rows, hopper_rows.indices_from(first, hi), plan.dim, count)

        def main_tile(tile, ahead):
            indices, data = ahead
            rows, count = refs.main.at[item.batch], plan.main_rows
            into = tile_at(stage_of(tile))
            following = indices_of(tile + 1)
            if plan.interpret:
                into.interpret(rows, reference.MAIN_FORMAT, indices, plan.dim, count)
            elif plan.packed:
                into.dequantise(data, indices, plan.dim, count)
            else:
                into.copy(rows, indices, plan.dim, count)
            return following, load(following)

        # The first selected rows are on their way while window rows are copied.
        if plan.main_tiles:
            indices = indices_of(main_from)
            ahead = indices, load(indices)
        if plan.window_tiles:
            lo = jnp.maximum(refs.lo[item.batch, item.query], 0)
            hi = jnp.minimum(refs.hi[item.batch, item.query], plan.window_rows)
            pl.loop(item.first, jnp.minimum(last, plan.window_tiles))(window_tile)
        if plan.main_tiles:
            lax.fori_loop(main_from, last, main_tile, ahead)

    # Every phase of a barrier is waited for.
    for stage in range(_STAGES):
        for part in ORDER:
            plgpu.barrier_wait(barrier(refs.rows_free, stage, part))


def _body(plan: _Plan, *refs) -> None:
    refs = _Refs(plan, refs)
    config = plan.config
    role = lax.axis_index("role")
    mine = (plan.items - lax.axis_index("block") + plan.blocks - 1) // plan.blocks

    @pl.when(role == 0)
    def _scores():
        plgpu.set_max_registers(config.score_registers, action="decrease")
        _score_role(plan, refs, mine)

    @pl.when(jnp.logical_or(role == 1, role == 2))
    def _values():
        plgpu.set_max_registers(config.value_registers, action="increase")
        _value_role(plan, refs, mine, role - 1)

    @pl.when(role == 3)
    def _rows():
        plgpu.set_max_registers(config.row_registers, action="decrease")
        _row_role(plan, refs, mine)


# Kept, so that the layers of a model trace and compile one kernel.
@functools.cache
def _kernel(plan: _Plan):
    rows = plan.batch, plan.queries * plan.shares, plan.heads * plan.groups
    kernel = plgpu.kernel(
        functools.partial(_body, plan),
        out_type=(
            jax.ShapeDtypeStruct((*rows, plan.dim), jnp.bfloat16),
            jax.ShapeDtypeStruct(rows, jnp.float32),
        ),
        scratch_types=_scratch(plan),
        grid=(plan.blocks,),
        grid_names=("block",),
        num_threads=4,
        thread_name="role",
        kernel_name="sparse_attention",
        interpret=plan.interpret,
        compiler_params=COMPILER_PARAMS,
    )
    return jax.jit(kernel)


def _merge(out: jax.Array, lse: jax.Array, sink: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Results of shares `[B, T, shares, H, ..]`, each a softmax of its own, as one softmax."""
    highest = jnp.max(lse, axis=2)
    base = finite(highest)
    weights = jnp.exp(lse - base[:, :, None])
    total = weights.sum(axis=2)
    inverse = jnp.where(total > 0, 1 / (total + jnp.exp(sink - base)), 0)
    weights = (weights * inverse[:, :, None])[..., None]
    merged = jnp.sum(weights * out.astype(jnp.float32), axis=2).astype(out.dtype)
    return merged, base + jnp.log(total)


def forward(
    q: jax.Array,
    window_rows: jax.Array,
    window_lo: jax.Array,
    window_hi: jax.Array,
    main_rows: jax.Array | None,
    indices: jax.Array | None,
    sink: jax.Array,
    *,
    window: int,
    scale: float,
    config: TuningConfig | None = None,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """Runs the forward kernel; see `sparse_attention`.

    Args:
        q: bfloat16 `[B, T, H, D]`.
        window_rows: bfloat16 `[B, S, D]`.
        window_lo: i32 `[B, T]`.
        window_hi: i32 `[B, T]`.
        main_rows: bfloat16 `[B, G, D]`, packed, or None.
        indices: i32 `[B, T, K]`, or None.
        sink: f32 `[H]`.
        window: bound of `window_hi - window_lo`.
        scale: of the logits.
        config: layout of the kernel; looked up in the table when None.
        interpret: parameters of Pallas's interpret mode, in which it runs on any device.

    Returns:
        out and lse.
    """
    batch, queries, heads, dim = q.shape
    packed = main_rows is not None and main_rows.dtype == jnp.uint8
    slots = 0 if indices is None else indices.shape[-1]
    main_tiles, window_tiles = -(-slots // TILE), -(-window // TILE)
    group = min(heads, _HEADS)
    groups = heads // group
    if config is None:
        items = batch * queries * groups
        default = _PACKED_CONFIG if packed else _PLAIN_CONFIG
        # Queries that leave most multiprocessors without work share out their keys.
        default = dataclasses.replace(default, shares=max(1, default.blocks // items))
        config = TABLE.lookup(shape_class(kind_of(main_rows), items), default)
    tiles = main_tiles + window_tiles
    shares = max(n for n in range(1, config.shares + 1) if tiles % n == 0)
    plan = _Plan(
        batch=batch,
        queries=queries,
        heads=group,
        groups=groups,
        dim=dim,
        window_rows=window_rows.shape[1],
        window_tiles=window_tiles,
        main_rows=main_rows.shape[1] if main_tiles else 0,
        main_tiles=main_tiles,
        packed=packed,
        shares=shares,
        factor=scale * LOG2E,
        config=config,
        interpret=interpret,
    )
    main = ()
    if main_tiles:
        padding = [(0, 0), (0, 0), (0, main_tiles * TILE - slots)]
        main = main_rows, jnp.pad(indices, padding, constant_values=-1)
    own = jnp.pad(sink, (0, groups * _HEADS - heads))
    if shares > 1:
        own = jnp.full_like(own, -jnp.inf)
    out, lse = _kernel(plan)(q, window_rows, window_lo, window_hi, *main, own)
    if shares == 1:
        return out, lse
    cut = batch, queries, shares, heads
    return _merge(out.reshape(*cut, dim), lse.reshape(cut), sink)


def check_queries(q: jax.Array, scale: float) -> None:
    """Declines queries that the kernels do not take."""
    _, _, heads, dim = q.shape
    if q.dtype != jnp.bfloat16:
        raise NotImplementedError(f"q must be bfloat16, got {q.dtype}")
    if dim not in (256, 512):
        raise NotImplementedError(f"head_dim must be 256 or 512, got {dim}")
    if heads % (_HEADS if heads > _HEADS else 8):
        raise NotImplementedError(f"heads must be a multiple of 8 up to 64, or of 64, got {heads}")
    if scale <= 0:
        raise NotImplementedError(f"scale must be positive, got {scale}")


@functools.partial(jax.custom_vjp, nondiff_argnums=(7, 8))
def _attention(q, window_rows, window_lo, window_hi, main_rows, indices, sink, window, scale):
    arguments = q, window_rows, window_lo, window_hi, main_rows, indices, sink
    return forward(*arguments, window=window, scale=scale)


def _attention_forward(*arguments):
    result = checkpoint_name(_attention(*arguments), reference.RESULT)
    return result, (arguments[:7], result)


def _attention_backward(window, scale, residuals, cotangents):
    arguments, result = residuals
    keywords = {"window": window, "scale": scale}
    try:
        dq, dwindow, dmain, dsink = mosaic_gpu_backward.backward(
            *arguments, *result, *cotangents, **keywords
        )
        dispatch.note("sparse_attention.backward", "mosaic_gpu")
    except NotImplementedError as reason:  # packed main rows, which have no gradient, or D = 256
        dq, dwindow, dmain, dsink = reference.backward(arguments, cotangents, **keywords)
        dispatch.note("sparse_attention.backward", "xla", [reason])
    return dq, dwindow, None, None, dmain, None, dsink


_attention.defvjp(_attention_forward, _attention_backward)


def sparse_attention(
    q,
    window_rows,
    window_lo,
    window_hi,
    main_rows,
    indices,
    sink,
    *,
    window,
    main_lo=None,
    main_hi=None,
    scale=None,
    chunk=None,
):
    """See `pallas_kernels.sparse_attention.sparse_attention`; `chunk` has no effect.

    Raises:
        NotImplementedError: not a Hopper GPU; queries not bfloat16 `[.., 8 n or 64 n, 256 or 512]`;
            main rows without indices; no key at all.
    """
    del main_lo, main_hi, chunk
    hopper.require("sparse_attention", jax_release=(0, 11))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    check_queries(q, scale)
    if isinstance(main_rows, Fp4Table):
        raise NotImplementedError("an Fp4Table is for TPUs")
    if main_rows is not None and indices is None:
        raise NotImplementedError("needs indices; main_lo and main_hi alone are not enough")
    if main_rows is not None and (main_rows.shape[1] == 0 or indices.shape[-1] == 0):
        main_rows = indices = None
    window = min(window, window_rows.shape[1])
    if window == 0 and main_rows is None:
        raise NotImplementedError("there is no row that could be a key")
    window_rows = reference.values(window_rows, reference.WINDOW_FORMAT, jnp.bfloat16)
    if main_rows is not None and main_rows.dtype != jnp.uint8:
        main_rows = main_rows.astype(jnp.bfloat16)
    sink = sink.astype(jnp.float32)
    return _attention(
        q, window_rows, window_lo, window_hi, main_rows, indices, sink, window, float(scale)
    )
