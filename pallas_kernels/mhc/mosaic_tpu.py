"""Hyper-connections on a TPU: one pass over the streams, whichever parts of it are asked for.

A tile of tokens passes through vector memory once. The write, the square sums, the read and the
projection are taken from it there, so that `write_read` moves (2n + 2) d values a token: n streams
and the output in, n streams and the next input out.

Layout: a token is one row of n*d lanes, so that a stream is an aligned run of lanes and the tokens
fill the sublanes; as [n, d] four streams would fill half of every register. XLA copies streams
where the model's [.., n, d] meets this, and not between two kernels. Coefficients travel as one row
a token in the order of the projection, [pre n | post n | comb n*n]; a kernel turns a tile of
projections so that the tokens lie along the lanes, and runs Sinkhorn there
(`tpu_coefficients`).

The projection is at float32's precision in any case: float32 streams at the highest matmul
precision; bfloat16 streams exactly, by one bfloat16 product with the three bfloat16 parts of fn
beside each other, which the 128 columns of the matrix unit hold anyway.

Vector memory at n 4, d 5120, bfloat16, 64 tokens: streams in and out twice each (pipelined) 10 MiB,
output and next input 2.5 MiB, fn 5 MiB, the unnormalised input in float32 1.3 MiB.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import types
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import tpu
from pallas_kernels.mhc import mosaic_tpu_backward, reference, tpu_coefficients
from pallas_kernels.mhc.tpu_plan import Operands, Plan, call, columns_of
from pallas_kernels.split_products import bfloat16_parts

Coefficients = reference.Coefficients


def coefficients(streams, fn, base, scale, *, interpret: Any = None, **keywords) -> Coefficients:
    """See `pallas_kernels.mhc.coefficients`.

    Raises:
        NotImplementedError: not on a TPU, channels that are no multiple of 128, or a dtype other
            than float32 and bfloat16.
    """
    arguments = dict(fn=fn, base=base, scale=scale)
    return _run("coefficients", streams, arguments, interpret, keywords)["made"]


def mix(streams, pre, norm_weight, *, interpret: Any = None, **keywords) -> jax.Array:
    """See `pallas_kernels.mhc.mix`, and `coefficients` for what it declines."""
    results = _run("mix", streams, dict(pre=pre, norm_weight=norm_weight), interpret, keywords)
    return results["x"]


def read(
    streams, pre, fn, base, scale, norm_weight, *, interpret: Any = None, **keywords
) -> tuple[jax.Array, Coefficients]:
    """See `pallas_kernels.mhc.read`, and `coefficients` for what it declines."""
    arguments = dict(pre=pre, fn=fn, base=base, scale=scale, norm_weight=norm_weight)
    results = _run("read", streams, arguments, interpret, keywords)
    return results["x"], results["made"]


def write(streams, out, post, comb, *, interpret: Any = None) -> jax.Array:
    """See `pallas_kernels.mhc.write`, and `coefficients` for what it declines."""
    results = _run("write", streams, dict(out=out, post=post, comb=comb), interpret, {})
    return results["streams"]


def write_read(
    streams,
    out,
    post,
    comb,
    pre,
    fn,
    base,
    scale,
    norm_weight,
    *,
    interpret: Any = None,
    **keywords,
) -> tuple[jax.Array, jax.Array, Coefficients]:
    """See `pallas_kernels.mhc.write_read`, and `coefficients` for what it declines."""
    arguments = dict(out=out, post=post, comb=comb, pre=pre)
    arguments |= dict(fn=fn, base=base, scale=scale, norm_weight=norm_weight)
    results = _run("write_read", streams, arguments, interpret, keywords)
    return results["streams"], results["x"], results["made"]


def _run(
    op: str,
    streams: jax.Array,
    arguments: dict[str, jax.Array],
    interpret: Any,
    keywords: dict[str, Any],
) -> dict[str, Any]:
    """Flattens the tokens, runs the parts of `op`, and gives the results their shapes back."""
    tpu.require(f"mhc.{op}", interpret)
    *lead, n, d = streams.shape
    if d % tpu.LANES:
        raise NotImplementedError(f"mhc.{op}: {d} channels are no multiple of {tpu.LANES}")
    if streams.dtype not in (jnp.float32, jnp.bfloat16):
        raise NotImplementedError(f"mhc.{op}: streams of {streams.dtype}")
    if "fn" in arguments:
        reference.check_streams(streams, *(arguments[name] for name in ("fn", "base", "scale")))
    plan = Plan.make(op, n, d, math.prod(lead), streams.dtype, interpret=interpret, **keywords)
    if plan.sweeps < 1:
        raise ValueError(f"mhc: sinkhorn_iters is {plan.sweeps}; must be at least 1")

    def rows(array: jax.Array, width: int) -> jax.Array:
        array = array.reshape(-1, width)
        return jnp.pad(array, ((0, plan.tokens - array.shape[0]), (0, 0)))

    operands = {"streams": rows(streams, n * d)}
    if plan.write:
        operands["out"] = rows(arguments["out"].astype(streams.dtype), d)
    if plan.write or plan.mix:
        # One row a token, in the order of the projection; parts that are not asked for are zeros.
        count = math.prod(lead)
        parts = [
            arguments[name].astype(jnp.float32).reshape(count, width)
            if name in arguments
            else jnp.zeros((count, width), jnp.float32)
            for name, width in (("pre", n), ("post", n), ("comb", n * n))
        ]
        operands["mixing"] = rows(jnp.concatenate(parts, axis=-1), plan.rows)
    if plan.project:
        operands["fn"] = arguments["fn"].astype(jnp.float32)
        operands["base"] = arguments["base"].astype(jnp.float32)[:, None]
        operands["scale"] = arguments["scale"].astype(jnp.float32)[_scale_of_row(n)][:, None]
    if plan.mix:
        operands["norm_weight"] = arguments["norm_weight"].astype(jnp.float32)[None]

    results = _differentiable(plan, operands)
    shaped = {}
    for name, array in results.items():
        array = array[: math.prod(lead)]
        if name == "made":
            shaped[name] = Coefficients(
                pre=array[:, :n].reshape(*lead, n),
                post=array[:, n : 2 * n].reshape(*lead, n),
                comb=array[:, 2 * n :].reshape(*lead, n, n),
            )
        else:
            shaped[name] = array.reshape(*lead, *((n, d) if name == "streams" else (d,)))
    return shaped


def _scale_of_row(n: int) -> jax.Array:
    """Which of the three scales each row of the projection has."""
    return jnp.repeat(jnp.arange(3), jnp.array([n, n, n * n]), total_repeat_length=(2 + n) * n)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _differentiable(plan: Plan, operands: Operands) -> Operands:
    return _forward_call(plan, operands)


def _forward(plan: Plan, operands: Operands) -> tuple[Operands, tuple]:
    results = _forward_call(dataclasses.replace(plan, save=plan.project), operands)
    return results, (operands, results.pop("saved", None))


def _backward(plan: Plan, residuals: tuple, grads: Operands) -> tuple[Operands]:
    operands, saved = residuals
    return (mosaic_tpu_backward.gradients(plan, operands, saved, grads),)


_differentiable.defvjp(_forward, _backward)


def _forward_call(plan: Plan, operands: Operands) -> Operands:
    """The kernel on padded tokens; `saved` [tokens, K + 8] is mixes and the inverse norm."""
    n, d, tile = plan.streams, plan.channels, plan.tile
    operands = dict(operands)
    blocks = {name: plan.per_token(array) for name, array in operands.items() if name in _TOKENWISE}
    if plan.project:
        operands["fn"] = _projection(plan, operands["fn"])
    blocks |= {name: plan.whole(operands[name]) for name in operands if name not in blocks}
    results, scratch = {}, {}
    if plan.write:
        results["streams"] = jax.ShapeDtypeStruct((plan.tokens, n * d), plan.dtype)
    if plan.mix:
        results["x"] = jax.ShapeDtypeStruct((plan.tokens, d), plan.dtype)
        scratch["mixed"] = pltpu.VMEM((tile, d), jnp.float32)
    if plan.project:
        results["made"] = jax.ShapeDtypeStruct((plan.tokens, plan.rows), jnp.float32)
        scratch["squares"] = pltpu.VMEM((tile, tpu.LANES), jnp.float32)
    if plan.save:
        saved = (plan.tokens, plan.rows + tpu.SUBLANES)
        results["saved"] = jax.ShapeDtypeStruct(saved, jnp.float32)
    return call(
        plan,
        "forward",
        functools.partial(_kernel, plan),
        operands,
        blocks,
        results,
        {name: plan.per_token(shape) for name, shape in results.items()},
        scratch,
        flops=2 * plan.tokens * n * d * plan.projection_columns * plan.projection_passes
        if plan.project
        else 0,
    )


_TOKENWISE = ("streams", "out", "mixing")


def _projection(plan: Plan, fn: jax.Array) -> jax.Array:
    """fn as the kernel multiplies by it: [n*d, columns], padded to whole lanes."""
    if plan.dtype == jnp.bfloat16:
        fn = jnp.concatenate(bfloat16_parts(fn, 3), axis=0)
    return jnp.pad(fn, ((0, plan.projection_columns - fn.shape[0]), (0, 0))).T


def _kernel(plan: Plan, refs: types.SimpleNamespace) -> None:
    n, d, group, chunk = plan.streams, plan.channels, plan.group, plan.chunk
    source = refs.out_streams if plan.write else refs.streams

    def token_group(g, _):
        rows = pl.ds(pl.multiple_of(g * group, group), group)
        if plan.write or plan.mix:
            pre, post, comb = columns_of(plan, refs.mixing, rows)

        def pass_one(c, sums):
            at = functools.partial(plan.lanes, c)
            squares, mixed_squares = sums
            new = [refs.streams[rows, at(k)].astype(jnp.float32) for k in range(n)]
            if plan.write:
                old, out = new, refs.out[rows, at(0)].astype(jnp.float32)
                new = []
                for k in range(n):
                    total = post[k] * out
                    for j in range(n):
                        total += comb[j][k] * old[j]
                    stored = total.astype(plan.dtype)
                    refs.out_streams[rows, at(k)] = stored
                    new.append(stored.astype(jnp.float32))
            if plan.project:
                for stream in new:
                    squares += plan.fold(stream * stream)
            if plan.mix:
                mixed = pre[0] * new[0]
                for k in range(1, n):
                    mixed += pre[k] * new[k]
                refs.mixed[rows, at(0)] = mixed
                mixed_squares += plan.fold(mixed * mixed)
            return squares, mixed_squares

        zeros = jnp.zeros((group, tpu.LANES), jnp.float32)
        squares, mixed_squares = lax.fori_loop(0, d // chunk, pass_one, (zeros, zeros))
        if plan.project:
            total = jnp.sum(squares, axis=1, keepdims=True)
            refs.squares[rows, :] = jnp.broadcast_to(total, (group, tpu.LANES))
        if plan.mix:
            total = jnp.sum(mixed_squares, axis=1, keepdims=True)
            inverse = lax.rsqrt(total * (1 / d) + plan.norm_eps)

            def normalise(c, _):
                at = plan.lanes(c, 0)
                x = refs.mixed[rows, at] * inverse * refs.norm_weight[:, at]
                refs.out_x[rows, at] = x.astype(plan.dtype)

            lax.fori_loop(0, d // chunk, normalise, None)

    lax.fori_loop(0, plan.tile // group, token_group, None)
    if plan.project:
        _project(plan, refs, source)


def _project(plan: Plan, refs: types.SimpleNamespace, source: Any) -> None:
    """Coefficients of a tile whose streams are in `source`."""
    n, width = plan.streams, plan.streams * plan.channels
    step = plan.chunk

    def multiply(c, total):
        at = pl.ds(pl.multiple_of(c * step, step), step)
        return total + jnp.dot(
            source[:, at],
            refs.fn[at, :],
            precision=plan.precision,
            preferred_element_type=jnp.float32,
        )

    zeros = jnp.zeros((plan.tile, plan.projection_columns), jnp.float32)
    product = lax.fori_loop(0, width // step, multiply, zeros).T
    mixes = product[: plan.rows]
    if plan.dtype == jnp.bfloat16:
        for part in (1, 2):
            mixes = mixes + product[part * plan.rows : (part + 1) * plan.rows]
    inverse = lax.rsqrt(refs.squares[...].T[: tpu.SUBLANES] * (1 / width) + plan.norm_eps)
    mixes = mixes * inverse[:1]
    logits = mixes * refs.scale[...] + refs.base[...]
    refs.out_made[...] = tpu_coefficients.forward(logits, n, plan.sweeps, plan.eps).T
    if plan.save:
        refs.out_saved[...] = jnp.concatenate([mixes, inverse], axis=0).T
