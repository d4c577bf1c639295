"""Rows of keys on a TPU: tables that single rows can be copied from, and gathers that run ahead.

The memory of a TPU is tiled, and a copy of one row at any offset exists only where elements have 32
bits and rows are whole lanes. Tables are therefore

* "words": bfloat16 rows as i32 `[R, D/2]`, channel c in the low and channel c + D/2 in the high
  half of word c (D a multiple of 256);
* "float32": f32 `[R, D]`, for float32 and for bfloat16 rows of other widths;
* the two arrays of an `Fp4Table`, of which an entry takes a row each.

A kernel takes a block of consecutive queries of one batch row a grid step. Their windows lie within
one run of rows, which starts at a multiple of 8 and arrives in one copy a step ahead; selected rows
arrive one copy a row, all of a query's while the query before is computed.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import tpu
from pallas_kernels.sparse_attention import mosaic_tpu_packed as packed
from pallas_kernels.sparse_attention.tables import Fp4Table
from pallas_kernels.tpu import LANES, SUBLANES

BLOCK_QUERIES = 8
LARGEST_TILE = 256
# Room for what the compiler itself keeps in vector memory: logits, weights, rows as values.
_VALUES_BYTES = 24 * 2**20
# Row copies that one iteration of a loop starts.
_TOGETHER = 8


def rounded(size: int, multiple: int) -> int:
    """The least multiple that is at least `size`."""
    return -(-size // multiple) * multiple


def words_of(rows: jax.Array) -> jax.Array:
    """bfloat16 `[.., D]` as i32 `[.., D/2]`: halves of the channels share words."""
    # Halves first: XLA then makes one pass of it, with nothing in between.
    low, high = (
        lax.bitcast_convert_type(half, jnp.uint16).astype(jnp.uint32)
        for half in jnp.split(rows, 2, axis=-1)
    )
    return lax.bitcast_convert_type(low | (high << 16), jnp.int32)


def table_of(rows: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """The table of rows that are computed with in `dtype`: one pass over them."""
    rows = rows.astype(dtype)
    if dtype == jnp.bfloat16 and rows.shape[-1] % (2 * LANES) == 0:
        return words_of(rows)
    return rows.astype(jnp.float32)


def values_of(block: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """Rows `[N, D]` of `dtype` from rows of a table."""
    if block.dtype == jnp.float32:
        return block.astype(dtype)
    low = lax.bitcast_convert_type(block << 16, jnp.float32)
    high = lax.bitcast_convert_type(block & jnp.int32(-(2**16)), jnp.float32)
    return jnp.concatenate([low, high], axis=-1).astype(dtype)


def as_table(values: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """Rows of a table, whose dtype that is, from float32 `[N, D]`; words are rounded."""
    if dtype == jnp.float32:
        return values
    bits = lax.bitcast_convert_type(values, jnp.int32)
    # To nearest, ties to even, by integers: compilers may take a cast there and back for nothing.
    bits = bits + 0x7FFF + (lax.shift_right_logical(bits, 16) & 1)
    half = values.shape[-1] // 2
    return lax.shift_right_logical(bits[:, :half], 16) | (bits[:, half:] & jnp.int32(-(2**16)))


def dot(a: jax.Array, b: jax.Array, contract: tuple[int, int]) -> jax.Array:
    """f32 product of matrices over one axis of each; exact products where they are float32."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    axes = ((contract[0],), (contract[1],)), ((), ())
    return lax.dot_general(a, b, axes, precision=precision, preferred_element_type=jnp.float32)


def as_row(column: jax.Array) -> jax.Array:
    """`[N, 1]` as `[1, N]`."""
    return jnp.sum(_diagonal(column), axis=0, keepdims=True)


def as_column(row: jax.Array) -> jax.Array:
    """`[1, N]` as `[N, 1]`."""
    return jnp.sum(_diagonal(row), axis=1, keepdims=True)


def _diagonal(vector):
    size = max(vector.shape)
    square = (size, size)
    here = lax.broadcasted_iota(jnp.int32, square, 0) == lax.broadcasted_iota(jnp.int32, square, 1)
    return jnp.where(here, jnp.broadcast_to(vector, square), jnp.zeros((), vector.dtype))


@dataclasses.dataclass(frozen=True)
class Plan:
    """One call of a kernel over blocks of queries: everything static.

    Attributes:
        batch: B.
        queries: T, a multiple of `block`.
        block: queries of a grid step.
        heads: H, a multiple of 16.
        dim: D, a multiple of 128.
        length: rows of a window's run; 0 for none.
        tile: selected rows of a tile.
        tiles: tiles of a query, at most; 0 for none.
        packed: whether main rows are an `Fp4Table`.
        dtype: of products.
        scale: of the logits.
        interpret: parameters of interpret mode, or None.
    """

    batch: int
    queries: int
    block: int
    heads: int
    dim: int
    length: int
    tile: int
    tiles: int
    packed: bool
    dtype: Any
    scale: float
    interpret: Any

    @property
    def blocks(self) -> int:
        """Blocks of queries of all batch rows."""
        return self.batch * self.queries // self.block

    @property
    def grid(self) -> tuple[int, int]:
        """Two halves, for chips whose two cores are one device, and the blocks of a half."""
        halves = 1 if self.blocks % 2 else 2
        return halves, self.blocks // halves


class Call(NamedTuple):
    """Arguments of a kernel as it takes them, N queries with padding.

    Attributes:
        ahead: i32 `[blocks, block, 3]`: tiles of each query up to the last with a key, those of the
            query after it, and where the run of the next block starts in the table of window rows.
        start: i32 `[blocks, 1, 1]`, where that of the block starts.
        visible: i32 `[N, 1, 2]`, rows of the run that a query sees: first, and one past the last.
        indices: i32 `[N, tiles, tile]` rows of the main table, -1 for none; or None.
        main: tables that main rows are in: none, one, or the two of an `Fp4Table`.
        window: table of window rows of all batch rows; or None.
    """

    ahead: jax.Array
    start: jax.Array
    visible: jax.Array
    indices: jax.Array | None
    main: tuple[jax.Array, ...]
    window: jax.Array | None


def plan_of(q, window: int, main_rows, indices, scale: float, interpret: Any) -> Plan:
    """The plan of a call of `mosaic_tpu.forward`, or one that fetches the same rows."""
    slots = 0 if indices is None else indices.shape[-1]
    batch, queries, heads, dim = q.shape
    block = min(queries, BLOCK_QUERIES)
    tile = rounded(min(slots, LARGEST_TILE), LANES if slots >= LANES else 16)
    return Plan(
        batch=batch,
        queries=rounded(queries, block),
        block=block,
        heads=rounded(heads, 16),
        dim=rounded(dim, LANES),
        length=rounded(window + block - 1 + SUBLANES - 1, SUBLANES) if window else 0,
        tile=tile,
        tiles=-(-slots // tile) if slots else 0,
        packed=isinstance(main_rows, Fp4Table),
        dtype=q.dtype,
        scale=scale,
        interpret=interpret,
    )


def padded(plan: Plan, x: jax.Array) -> jax.Array:
    """`[B, T, H, D]` or `[B, T, H]` as `[B * T, ..]` of the plan's sizes."""
    sizes = (plan.batch, plan.queries, plan.heads, plan.dim)[: x.ndim]
    x = jnp.pad(x, [(0, size - old) for size, old in zip(sizes, x.shape, strict=True)])
    return x.reshape(-1, *sizes[2:])


def padded_heads(plan: Plan, x: jax.Array) -> jax.Array:
    """`[H]` as a column of the plan's heads."""
    return jnp.pad(x, (0, plan.heads - x.size))[:, None]


def unpadded(plan: Plan, x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """The inverse of `padded`."""
    x = x.reshape(plan.batch, plan.queries, *x.shape[1:])
    return x[tuple(slice(size) for size in shape)]


def padded_rows(plan: Plan, rows: jax.Array) -> jax.Array:
    """Rows `[.., D]` with as many channels as the plan has."""
    return jnp.pad(rows, [(0, 0)] * (rows.ndim - 1) + [(0, plan.dim - rows.shape[-1])])


def call_of(plan: Plan, window_rows, window_lo, window_hi, main_rows, indices) -> Call:
    """What a kernel fetches.

    Args:
        plan: of the call.
        window_rows: `[B, S, D]`, not looked at where the plan has no window.
        window_lo: i32 `[B, T]`.
        window_hi: i32 `[B, T]`.
        main_rows: `[B, G, D]` or an `Fp4Table`, not looked at where the plan has no tiles.
        indices: i32 `[B, T, K]`, likewise.
    """
    batch, queries = window_lo.shape
    more = [(0, 0), (0, plan.queries - queries)]
    cut = (batch, plan.queries // plan.block, plan.block)
    lo = jnp.pad(window_lo, more).reshape(cut)
    hi = jnp.pad(window_hi, more).reshape(cut)
    window, start = None, jnp.zeros((*cut[:2], 1), jnp.int32)
    if plan.length:
        size = window_rows.shape[1]
        space = rounded(max(size, plan.length), SUBLANES)
        rows = jnp.pad(window_rows, [(0, 0), (0, space - size), (0, 0)])
        window = table_of(padded_rows(plan, rows), plan.dtype).reshape(batch * space, -1)
        lo, hi = jnp.maximum(lo, 0), jnp.minimum(hi, size)
        start = jnp.where(lo < hi, lo, space).min(axis=-1, keepdims=True)
        start = jnp.clip(start // SUBLANES * SUBLANES, 0, space - plan.length)
        lo, hi = lo - start, hi - start
        start = start + (jnp.arange(batch, dtype=jnp.int32) * space)[:, None, None]
    count = jnp.zeros(cut, jnp.int32)
    if plan.tiles:
        main, size = _main_tables(plan, main_rows)
        slots = plan.tiles * plan.tile
        indices = jnp.where((indices >= 0) & (indices < size), indices, -1)
        space = [*more, (0, slots - indices.shape[-1])]
        indices = jnp.pad(indices, space, constant_values=-1)
        slot = jnp.arange(1, slots + 1, dtype=jnp.int32)
        count = jnp.max(jnp.where(indices >= 0, slot, 0), axis=-1)
        count = -(-count // plan.tile)
        if main[0].shape[0] > 1:
            offset = (jnp.arange(batch, dtype=jnp.int32) * size)[:, None, None]
            indices = jnp.where(indices >= 0, indices + offset, -1)
        main = tuple(table.reshape(-1, table.shape[-1]) for table in main)
        indices = indices.reshape(-1, plan.tiles, plan.tile)
    else:
        main, indices = (), None
    count, start = count.reshape(-1), start.reshape(-1)
    cut = plan.blocks, plan.block
    after = jnp.broadcast_to(_shifted(start)[:, None], cut)
    ahead = jnp.stack([count.reshape(cut), _shifted(count).reshape(cut), after], axis=-1)
    visible = jnp.stack([lo, hi], axis=-1).reshape(-1, 1, 2)
    return Call(ahead, start[:, None, None], visible, indices, main, window)


def _main_tables(plan, main_rows):
    """Tables `[B or 1, rows, words]`, and G."""
    if plan.packed:
        return tuple(main_rows), main_rows.entries
    rows = padded_rows(plan, main_rows)
    return (table_of(rows, plan.dtype),), rows.shape[1]


def _shifted(x):
    """Each element's successor."""
    return jnp.concatenate([x[1:], x[-1:]])


def block_of(plan: Plan, *tail: int, each: int = 0, memory_space: Any = None):
    """Block spec of an array that has `each` (or `plan.block`) leading elements a grid step."""
    keywords = {} if memory_space is None else {"memory_space": memory_space}
    return pl.BlockSpec(
        (each or plan.block, *tail),
        lambda half, step: (half * plan.grid[1] + step, *[0] * len(tail)),
        **keywords,
    )


def shared(*shape: int):
    """Block spec of a small array that every grid step sees whole."""
    return pl.BlockSpec(shape, lambda half, step: (0,) * len(shape))


def _fetched(plan: Plan, call: Call) -> tuple[list, list, list]:
    """Arguments of `Fetch`, their block specs, and its memory."""
    scalars, anywhere = pltpu.SMEM, pl.BlockSpec(memory_space=pl.ANY)
    given = [call.ahead]
    specs = [block_of(plan, plan.block, 3, each=1, memory_space=scalars)]
    memory = []
    if plan.tiles:
        sizes = plan.tiles, plan.tile
        given += [call.indices, _shifted(call.indices), call.indices, *call.main]
        specs += [
            pl.BlockSpec(
                (1, *sizes),
                lambda half, step: (half * plan.grid[1] * plan.block, 0, 0),
                memory_space=scalars,
            ),
            block_of(plan, *sizes, memory_space=scalars),
            block_of(plan, *sizes),
            *[anywhere] * len(call.main),
        ]
        memory += [
            *(pltpu.VMEM((2, *sizes, table.shape[-1]), table.dtype) for table in call.main),
            pltpu.SemaphoreType.DMA((2, plan.tiles)),
        ]
    if plan.length:
        given += [call.start, call.visible, call.window]
        specs += [
            block_of(plan, 1, 1, each=1, memory_space=scalars),
            block_of(plan, 1, 2),
            anywhere,
        ]
        memory += [
            pltpu.VMEM((2, plan.length, call.window.shape[-1]), call.window.dtype),
            pltpu.SemaphoreType.DMA((2,)),
        ]
    return given, specs, memory


def run(
    plan: Plan,
    name: str,
    body: Callable[..., None],
    call: Call,
    inputs: Sequence[tuple[jax.Array, pl.BlockSpec]],
    outputs: Sequence[tuple[jax.ShapeDtypeStruct, pl.BlockSpec]],
    memory: Sequence[Any],
    *,
    products: int,
    written: int = 0,
) -> list[jax.Array]:
    """Runs a kernel over the blocks of a call.

    Args:
        plan: of the call.
        name: of the kernel.
        body: takes the plan, a `Fetch`, and the references of inputs, of outputs and of memory.
        call: what to fetch.
        inputs: arrays and their block specs.
        outputs: likewise.
        memory: scratch of the body.
        products: of a head, a key and the D channels, that the kernel multiplies and adds.
        written: bytes that the body's own copies write.

    Returns:
        The outputs.

    Raises:
        NotImplementedError: it would take more vector memory than there is.
    """
    given, given_specs, fetch_memory = _fetched(plan, call)
    arrays, specs = [x for x, _ in inputs] + given, [spec for _, spec in inputs] + given_specs
    shapes, out_specs = [x for x, _ in outputs], [spec for _, spec in outputs]
    scratch = [*memory, *fetch_memory]
    cuts = len(inputs), len(arrays), len(arrays) + len(outputs)

    def kernel(*refs):
        fetch = Fetch(plan, refs[cuts[0] : cuts[1]], refs[cuts[2] + len(memory) :])
        own = refs[cuts[2] : cuts[2] + len(memory)]
        body(plan, fetch, refs[: cuts[0]], refs[cuts[1] : cuts[2]], own)

    keys = plan.tiles * plan.tile
    blocks = list(zip(arrays + shapes, specs + out_specs, strict=True))
    blocked = [x for x, spec in blocks if spec.memory_space is not pl.ANY]
    copied = plan.block * keys * sum(map(row_bytes, call.main))
    copied += plan.length * (row_bytes(call.window) if plan.length else 0)
    pairs = plan.blocks * plan.block * plan.heads * (plan.length + keys)
    account = tpu.Account(
        vmem_bytes=sum(
            2 * _vmem_bytes(spec.block_shape, x.dtype)
            for x, spec in blocks
            if spec.memory_space not in (pl.ANY, pltpu.SMEM)
        )
        + sum(_vmem_bytes(x.shape, x.dtype) for x in scratch if x.memory_space is pltpu.VMEM),
        hbm_bytes=sum(x.size * x.dtype.itemsize for x in blocked) + plan.blocks * copied + written,
        flops=2 * products * pairs * plan.dim * (6 if plan.dtype == jnp.float32 else 1),
        transcendentals=pairs,
        copies=plan.blocks * (plan.block * keys * len(call.main) + (plan.length > 0)),
    )
    limit = account.vmem_bytes + _VALUES_BYTES
    if limit > tpu.LEAST_VMEM_BYTES:
        raise NotImplementedError(
            f"{name}: {plan.heads} heads, {keys} keys and head_dim {plan.dim} would take"
            f" {limit / 2**20:.0f} MiB of {tpu.LEAST_VMEM_BYTES / 2**20:.0f} MiB of VMEM"
        )
    return pl.pallas_call(
        kernel,
        grid=plan.grid,
        in_specs=specs,
        out_specs=out_specs,
        out_shape=shapes,
        scratch_shapes=scratch,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=limit
        ),
        cost_estimate=tpu.stated(name, account),
        interpret=plan.interpret or False,
        name=name,
    )(*arrays)


def row_bytes(table: jax.Array) -> int:
    """Bytes of one row of a table."""
    return table.shape[-1] * table.dtype.itemsize


def _vmem_bytes(shape, dtype) -> int:
    *outer, rows, lanes = shape
    itemsize = jnp.dtype(dtype).itemsize
    tile = rounded(rows, SUBLANES * 4 // itemsize) * rounded(lanes, LANES) * itemsize
    return math.prod(outer) * tile


class Fetch:
    """The copies of a kernel: windows one grid step ahead, selected rows one query ahead."""

    def __init__(self, plan: Plan, given, scratch):
        given, scratch = iter(given), iter(scratch)
        self.plan = plan
        self._step = pl.program_id(1)
        self._more = self._step < plan.grid[1] - 1
        self._ahead = next(given)
        if plan.tiles:
            self._first, self._next, self._indices = (next(given) for _ in range(3))
            self._shifts = packed.SHIFTS if plan.packed else (0,)
            self._main = [next(given) for _ in self._shifts]
            self._rows = [next(scratch) for _ in self._shifts]
            self._arrived = next(scratch)
        if plan.length:
            self._start_of_run, self._visible, self._window = (next(given) for _ in range(3))
            self._run, self._run_arrived = next(scratch), next(scratch)

    def window(self) -> tuple[jax.Array, jax.Array]:
        """The block's run of window rows `[length, D]` and who sees them `[block, 1, length]`.

        Starts the copy of the next block's.
        """
        slot = lax.rem(self._step, 2)

        def copy(start, slot):
            return pltpu.make_async_copy(
                self._window.at[pl.ds(pl.multiple_of(start, SUBLANES), self.plan.length)],
                self._run.at[slot],
                self._run_arrived.at[slot],
            )

        here = copy(self._start_of_run[0, 0, 0], slot)
        pl.when(self._step == 0)(here.start)
        pl.when(self._more)(lambda: copy(self._ahead[0, 0, 2], 1 - slot).start())
        here.wait()
        place = (self.plan.block, 1, self.plan.length)
        place = lax.broadcasted_iota(jnp.int32, place, 2)
        bounds = self._visible[...]
        seen = jnp.logical_and(place >= bounds[:, :, 0:1], place < bounds[:, :, 1:2])
        return values_of(self._run[slot], self.plan.dtype), seen

    def each_query(self, one: Callable[[jax.Array, Callable[..., None]], None]) -> None:
        """Calls `one(query, each_tile)` for the queries of the block.

        `each_tile(body)` calls `body(tile, rows, valid)` for the tiles of the query: rows
        `[tile, D]`, whether there is a key, `[1, tile]`.
        """
        block, step = self.plan.block, self._step
        if self.plan.tiles:
            first = lax.rem(step * block, 2)
            count = self._ahead[0, 0, 0]
            pl.when(step == 0)(lambda: self._start(self._first, 0, count, first))

        @pl.loop(0, block)
        def _query(j):
            slot = lax.rem(step * block + j, 2)
            if self.plan.tiles:
                count = self._ahead[0, j, 1]
                pl.when(jnp.logical_or(j + 1 < block, self._more))(
                    lambda: self._start(self._next, j, count, 1 - slot)
                )

            def each_tile(body):
                if not self.plan.tiles:
                    return

                @pl.loop(0, self._ahead[0, j, 0])
                def _tile(tile):
                    here = [rows.at[slot, tile] for rows in self._rows]
                    for rows in here:
                        pltpu.make_async_copy(rows, rows, self._arrived.at[slot, tile]).wait()
                    indices = self._indices[j, pl.ds(tile, 1)]
                    body(tile, self._values(here, indices), indices >= 0)

            one(j, each_tile)

    def _values(self, copied, indices) -> jax.Array:
        blocks = [rows[...] for rows in copied]
        if not self.plan.packed:
            return values_of(*blocks, self.plan.dtype)
        # Only the last bits of an entry say where in its rows it lies: exact in float32.
        entry = as_column((indices & (packed.SCALE_ENTRIES - 1)).astype(jnp.float32))
        return packed.values(*blocks, entry.astype(jnp.int32), self.plan.dtype)

    def _start(self, indices, j, count, slot) -> None:
        """Starts copying all rows of one query; a slot without a key gets the first row."""
        together = 1 if self.plan.interpret else _TOGETHER

        @pl.loop(0, count)
        def _tile(tile):
            @pl.loop(0, self.plan.tile // together)
            def _some(i):
                for more in range(together):
                    place = i * together + more
                    entry = jnp.maximum(indices[j, tile, place], 0)
                    for table, rows, shift in zip(
                        self._main, self._rows, self._shifts, strict=True
                    ):
                        pltpu.make_async_copy(
                            table.at[pl.ds(entry >> shift, 1)],
                            rows.at[slot, tile, pl.ds(place, 1)],
                            self._arrived.at[slot, tile],
                        ).start()
