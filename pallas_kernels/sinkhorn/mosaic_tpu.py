"""Sinkhorn balancing on a TPU: every pass takes a row step and the next column step in one read.

The matrix U = diag(r) G diag(c) is never written; passes over G change r and c alone. The first
pass takes the momentum step, writes what lies between the passes ("kept") and its row norms; from
these and the row mask comes the first r. A further pass reads kept once: given c it makes the new r
of a row as soon as the row has been read, and with that r adds the row to the column sums. The last
one writes the update. For K = 11 that is one write and six reads of kept.

Layout: blocks of whole rows, 128 or a multiple of them, taken sixteen rows and 512 lanes at a time,
so that nothing leaves the registers but sums. Row vectors lie in main memory along the lanes, 32
bytes a row at most, where [m, 1] would be padded to 512; a kernel turns 128 of them at a time.
Column sums stay in vector memory from block to block, eight sublanes of them, in two halves so that
a device of two cores uses both.

Vector memory at 5120 columns, float32, 128 rows: 20 MiB in the momentum pass, 10 MiB in the last.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import tpu
from pallas_kernels.sinkhorn import reference

_LIFT = reference.LIFT
# Of all blocks of the momentum pass, pipelined; a block has at least 128 rows.
_BLOCK_BYTES = 24 * 2**20
_VMEM_LIMIT_BYTES = 56 * 2**20
_MOST_COLUMNS = 10240
# Rows whose chunk fits the registers: the sublanes of a tile of bfloat16.
_GROUP = 16


@dataclasses.dataclass(frozen=True)
class _Plan:
    """One matrix [rows, columns].

    Attributes:
        rows: m.
        columns: n, a multiple of 128.
        block: rows at a time, a multiple of 128.
        chunk: lanes at a time, a divisor of n.
        eps: added to every norm.
        interpret: parameters of interpret mode, or None.
    """

    rows: int
    columns: int
    block: int
    chunk: int
    eps: float
    interpret: Any

    @classmethod
    def make(cls, rows: int, columns: int, eps: float, interpret: Any) -> _Plan:
        most = max(1, _BLOCK_BYTES // (8 * 4 * columns * tpu.LANES))
        needed = -(-rows // tpu.LANES)
        return cls(
            rows=rows,
            columns=columns,
            block=tpu.LANES * min(8, most, needed),
            chunk=next(size for size in (512, 384, 256, 128) if columns % size == 0),
            eps=eps,
            interpret=interpret,
        )

    @property
    def blocks(self) -> int:
        """Blocks of rows, the last of which may not be full."""
        return -(-self.rows // self.block)

    @property
    def halves(self) -> int:
        """Column sums that are made apart."""
        return 2 if self.blocks % 2 == 0 else 1

    def matrix(self) -> pl.BlockSpec:
        """A block of rows."""
        return pl.BlockSpec((self.block, self.columns), lambda *at: (self._block_of(at), 0))

    def vector(self) -> pl.BlockSpec:
        """A block's part of a row vector [blocks, block / 128, 128]."""
        shape = (None, self.block // tpu.LANES, tpu.LANES)
        return pl.BlockSpec(shape, lambda *at: (self._block_of(at), 0, 0))

    def vector_shape(self) -> jax.ShapeDtypeStruct:
        """A row vector."""
        shape = (self.blocks, self.block // tpu.LANES, tpu.LANES)
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    def _block_of(self, at: tuple) -> Any:
        return at[0] * (self.blocks // self.halves) + at[1]

    def lanes(self, c: jax.Array) -> Any:
        """Lanes of chunk c."""
        return pl.ds(pl.multiple_of(c * self.chunk, self.chunk), self.chunk)


def sinkhorn(matrix, *, tau, iterations, eps, keep, dtype, interpret: Any = None) -> jax.Array:
    """See `pallas_kernels.sinkhorn.sinkhorn`.

    Raises:
        NotImplementedError: not on a TPU, a number of columns that is no multiple of 128 or above
            10240, or a dtype other than float32 and bfloat16.
    """
    _accept("sinkhorn", (matrix,), dtype, interpret)
    if matrix.ndim > 2:
        one = functools.partial(
            sinkhorn, tau=tau, iterations=iterations, eps=eps, dtype=dtype, interpret=interpret
        )
        return lax.map(lambda both: one(both[0], keep=both[1]), (matrix, keep))
    plan = _Plan.make(*matrix.shape, eps, interpret)
    kept_dtype = jnp.dtype(jnp.float32 if dtype is None else dtype)
    first = _first_pass(plan, {"matrix": matrix}, None, kept_dtype)
    kept = first.get("kept", matrix)
    mask = _as_vector(plan, keep) if keep is not None else _mask(plan, first["rho"], tau)
    return _balance(plan, kept, mask, first.get("rho_kept", first["rho"]), iterations)


def sinkhorn_update(
    gradient, momentum, *, beta, tau, iterations, eps, dtype, interpret: Any = None
) -> tuple[jax.Array, jax.Array]:
    """See `pallas_kernels.sinkhorn.sinkhorn_update`, and `sinkhorn` for what it declines."""
    _accept("sinkhorn_update", (gradient, momentum), dtype, interpret)
    if gradient.ndim > 2:
        one = functools.partial(
            sinkhorn_update,
            beta=beta,
            tau=tau,
            iterations=iterations,
            eps=eps,
            dtype=dtype,
            interpret=interpret,
        )
        return lax.map(lambda both: one(*both), (gradient, momentum))
    plan = _Plan.make(*gradient.shape, eps, interpret)
    kept_dtype = jnp.dtype(jnp.float32 if dtype is None else dtype)
    operands = {"gradient": gradient, "momentum": momentum}
    first = _first_pass(plan, operands, beta, kept_dtype)
    mask = _mask(plan, first["rho"], tau)
    rho = first.get("rho_kept", first["rho"])
    return _balance(plan, first["kept"], mask, rho, iterations), first["momentum"]


def _accept(op: str, arrays: tuple[jax.Array, ...], dtype: Any, interpret: Any) -> None:
    tpu.require(op, interpret)
    columns = arrays[0].shape[-1]
    if columns % tpu.LANES or columns > _MOST_COLUMNS:
        raise NotImplementedError(
            f"{op}: {columns} columns; takes multiples of {tpu.LANES} up to {_MOST_COLUMNS}"
        )
    dtypes = {x.dtype for x in arrays} | ({jnp.dtype(dtype)} if dtype is not None else set())
    if other := dtypes - {jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16)}:
        raise NotImplementedError(f"{op}: {', '.join(sorted(map(str, other)))}")


def _as_vector(plan: _Plan, values: jax.Array) -> jax.Array:
    """[m] as kernels take row vectors; 0 beyond the last row."""
    padded = jnp.pad(values.astype(jnp.float32), (0, plan.blocks * plan.block - plan.rows))
    return padded.reshape(plan.vector_shape().shape)


def _mask(plan: _Plan, rho: jax.Array, tau: float) -> jax.Array:
    """`reference.row_mask` of a row vector."""
    mask = reference.row_mask(rho.reshape(-1)[: plan.rows, None], tau)
    return _as_vector(plan, mask[:, 0])


def _balance(plan: _Plan, kept, mask, rho, iterations: int) -> jax.Array:
    """The update from row mask and row norms, row vectors both."""
    r = reference.rescaled(mask, rho, plan.eps)
    c = jnp.ones((1, plan.columns), jnp.float32)

    def columns(c, squares):
        norm = jnp.sqrt(jnp.sum(squares, axis=(0, 1)))[None] / _LIFT
        return reference.rescaled(c, c * norm, plan.eps)

    steps = iterations // 2
    if steps:
        c = columns(c, _pass(plan, kept, r, c, rows=False, columns=True, update=False)["columns"])

    def both(_, scales):
        r, c = scales
        made = _pass(plan, kept, r, c, rows=True, columns=True, update=False)
        return made["r"], columns(c, made["columns"])

    r, c = lax.fori_loop(0, steps - 1, both, (r, c))
    return _pass(plan, kept, r, c, rows=steps > 0, columns=False, update=True)["update"]


def _first_pass(plan: _Plan, operands, beta: float | None, kept_dtype) -> dict[str, jax.Array]:
    """Momentum (where beta is given), kept (where it is not the matrix itself), and row norms.

    Returns:
        "momentum" and "kept" matrices; row vectors "rho", the norms before rounding to
        `kept_dtype`, and "rho_kept", those after, where that is a difference.
    """
    shape = (plan.rows, plan.columns)
    results = {}
    if beta is not None:
        results["momentum"] = jax.ShapeDtypeStruct(shape, operands["momentum"].dtype)
    if beta is not None or operands["matrix"].dtype != kept_dtype:
        results["kept"] = jax.ShapeDtypeStruct(shape, kept_dtype)
    results["rho"] = plan.vector_shape()
    if kept_dtype != jnp.float32:
        results["rho_kept"] = plan.vector_shape()

    def kernel(refs):
        def chunk(rows, lanes):
            if beta is None:
                averaged = refs.matrix[rows, lanes].astype(jnp.float32)
            else:
                fresh = (1 - beta) * refs.gradient[rows, lanes].astype(jnp.float32)
                new = beta * refs.momentum[rows, lanes].astype(jnp.float32) + fresh
                new = new.astype(refs.out_momentum.dtype)
                refs.out_momentum[rows, lanes] = new
                averaged = beta * new.astype(jnp.float32) + fresh
            rounded = averaged.astype(kept_dtype)
            if "kept" in results:
                refs.out_kept[rows, lanes] = rounded
            return averaged, rounded.astype(jnp.float32)

        def group(rows, turned):
            def step(c, sums):
                values = chunk(rows, plan.lanes(c))
                return tuple(
                    s + _fold(jnp.square(v * _LIFT)) for s, v in zip(sums, values, strict=True)
                )

            zeros = jnp.zeros((_GROUP, tpu.LANES), jnp.float32)
            sums = lax.fori_loop(0, plan.columns // plan.chunk, step, (zeros, zeros))
            for index, total in enumerate(sums):
                refs.turned[index, turned, :] = _norm(total)

        def finish(part):
            refs.out_rho[part : part + 1] = refs.turned[0].T[:1]
            if "rho_kept" in results:
                refs.out_rho_kept[part : part + 1] = refs.turned[1].T[:1]

        _over_groups(plan, group, finish)

    scratch = {"turned": pltpu.VMEM((2, tpu.LANES, tpu.LANES), jnp.float32)}
    return _call(plan, "first pass", kernel, operands, results, scratch)


def _pass(plan: _Plan, kept, r, c, *, rows: bool, columns: bool, update: bool):
    """One read of kept.

    Args:
        plan: of the matrix.
        kept: [m, n].
        r: row vector.
        c: [1, n].
        rows: whether to take a row step first: "r" among the results.
        columns: whether to add up squares of columns times r: "columns" [halves, 8, n].
        update: whether to write "update", the balanced matrix.
    """
    results = {}
    if rows and not update:
        results["r"] = plan.vector_shape()
    if columns:
        results["columns"] = jax.ShapeDtypeStruct(
            (plan.halves, tpu.SUBLANES, plan.columns), jnp.float32
        )
    if update:
        results["update"] = jax.ShapeDtypeStruct((plan.rows, plan.columns), jnp.float32)
    chunks = plan.columns // plan.chunk
    root = math.sqrt(plan.columns)

    def kernel(refs):
        if columns:

            @pl.when(pl.program_id(1) == 0)
            def _():
                refs.out_columns[...] = jnp.zeros_like(refs.out_columns)

        def start(part):
            spread = jnp.broadcast_to(refs.r[part : part + 1], (tpu.LANES, tpu.LANES))
            refs.turned[...] = spread.T

        first = (pl.program_id(0) * (plan.blocks // plan.halves) + pl.program_id(1)) * plan.block

        def group(at, turned):
            scale = refs.turned[turned, :][:, :1]

            if rows:

                def square(i, total):
                    lanes = plan.lanes(i)
                    values = refs.kept[at, lanes].astype(jnp.float32)
                    return total + _fold(jnp.square(values * (refs.c[:, lanes] * _LIFT)))

                zeros = jnp.zeros((_GROUP, tpu.LANES), jnp.float32)
                norm = _norm(lax.fori_loop(0, chunks, square, zeros))[:, :1]
                scale = reference.rescaled(scale, scale * norm, plan.eps)
                refs.turned[turned, :] = jnp.broadcast_to(scale, (_GROUP, tpu.LANES))
            if columns:
                # Beyond the last row there is anything.
                row = first + at.start + lax.broadcasted_iota(jnp.int32, (_GROUP, plan.chunk), 0)
                inside = row < plan.rows

                def add(i, _):
                    lanes = plan.lanes(i)
                    values = refs.kept[at, lanes].astype(jnp.float32) * (scale * _LIFT)
                    squares = jnp.where(inside, jnp.square(values), 0.0)
                    total = squares[: tpu.SUBLANES]
                    for start in range(tpu.SUBLANES, _GROUP, tpu.SUBLANES):
                        total += squares[start : start + tpu.SUBLANES]
                    refs.out_columns[:, lanes] += total

                lax.fori_loop(0, chunks, add, None)
            if update:

                def write(i, _):
                    lanes = plan.lanes(i)
                    values = refs.kept[at, lanes].astype(jnp.float32)
                    refs.out_update[at, lanes] = values * scale * (refs.c[:, lanes] * root)

                lax.fori_loop(0, chunks, write, None)

        def finish(part):
            if "r" in results:
                refs.out_r[part : part + 1] = refs.turned[...].T[:1]

        _over_groups(plan, group, finish, start)

    scratch = {"turned": pltpu.VMEM((tpu.LANES, tpu.LANES), jnp.float32)}
    what = " and ".join(
        part for part, asked in (("rows", rows), ("columns", columns), ("update", update)) if asked
    )
    return _call(plan, what, kernel, {"kept": kept, "r": r, "c": c}, results, scratch)


def _fold(values: jax.Array) -> jax.Array:
    """Lanes added up to 128."""
    total = values[:, : tpu.LANES]
    for start in range(tpu.LANES, values.shape[1], tpu.LANES):
        total += values[:, start : start + tpu.LANES]
    return total


def _norm(squares: jax.Array) -> jax.Array:
    """Norm of lifted values from the sum of squares over lanes, on all lanes."""
    total = jnp.sum(squares, axis=1, keepdims=True)
    return jnp.broadcast_to(jnp.sqrt(total) * (1 / _LIFT), squares.shape)


def _over_groups(
    plan: _Plan,
    group: Callable[[Any, Any], None],
    finish: Callable[[int], None],
    start: Callable[[int], None] | None = None,
) -> None:
    """Runs `group` on a few rows at a time; `start` and `finish` around each 128 of them.

    `group` gets its rows of the block, and among the 128; `start` and `finish` which 128 it is.
    """
    for part in range(plan.block // tpu.LANES):
        if start is not None:
            start(part)

        def step(g, _, part=part):
            first = pl.multiple_of(g * _GROUP, _GROUP)
            group(pl.ds(part * tpu.LANES + first, _GROUP), pl.ds(first, _GROUP))

        lax.fori_loop(0, tpu.LANES // _GROUP, step, None)
        finish(part)


def _call(plan: _Plan, what: str, kernel, operands, results, scratch) -> dict[str, jax.Array]:
    """Calls a kernel whose references have names; those of results begin with "out_"."""
    names = [*operands, *(f"out_{result}" for result in results), *scratch]

    def block_of(name, array):
        if name == "columns":
            return pl.BlockSpec((None, *array.shape[1:]), lambda half, _: (half, 0, 0))
        if name == "c":
            return pl.BlockSpec(array.shape, lambda *_: (0, 0))
        return plan.matrix() if len(array.shape) == 2 else plan.vector()

    # The momentum is an operand and a result: pairs, not one mapping.
    arrays = [*operands.items(), *results.items()]
    blocks = {name: block_of(name, array) for name, array in arrays}
    account = tpu.Account(
        vmem_bytes=sum(
            2 * math.prod(size or 1 for size in blocks[name].block_shape) * array.dtype.itemsize
            for name, array in arrays
        )
        + sum(4 * math.prod(s.shape) for s in scratch.values()),
        hbm_bytes=sum(math.prod(array.shape) * array.dtype.itemsize for _, array in arrays),
        transcendentals=2 * plan.rows,
    )
    outputs = pl.pallas_call(
        lambda *refs: kernel(types.SimpleNamespace(**dict(zip(names, refs, strict=True)))),
        grid=(plan.halves, plan.blocks // plan.halves),
        in_specs=[blocks[name] for name in operands],
        out_specs=[blocks[name] for name in results],
        out_shape=list(results.values()),
        scratch_shapes=list(scratch.values()),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=_VMEM_LIMIT_BYTES
        ),
        cost_estimate=tpu.stated(what, account),
        interpret=False if plan.interpret is None else plan.interpret,
    )(*operands.values())
    return dict(zip(results, outputs, strict=True))
