"""Gradients of hyper-connections on a TPU, in one pass over the streams.

Streams, output, and the gradients of new streams and next input come in, the gradients of streams
and output go out: (3n + 3) d values a token. The new streams are computed again from the old; of
the forward pass only its mixes are kept, K + 1 numbers a token.

A tile goes through four stages. (1) By groups of tokens: new streams, and the sums that the
gradient of RMSNorm needs. (2) Coefficients, tokens along the lanes: from their gradients to those
of the projection's result. (3) By chunks of lanes: the projection's share of the new streams'
gradient, a matrix product, and the gradient of fn, another, which stays in vector memory from tile
to tile. (4) For that chunk, by groups: the whole gradient of the new streams, and from it those of
streams and output, and what each token contributes to the gradients of pre, post and comb:
n (n + 2) sums over the channels, kept 128 lanes wide until the end.

The gradients of fn and of the norm's weight are sums over tokens, so tiles follow each other; two
such sums are made, each over half of the tiles, so that a device of two cores uses both.
"""

from __future__ import annotations

import functools
import types

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import tpu
from pallas_kernels.mhc import tpu_coefficients
from pallas_kernels.mhc.tpu_plan import Operands, Plan, call, columns_of
from pallas_kernels.split_products import bfloat16_parts

_TOKENWISE = ("streams", "out", "mixing", "saved", "grad_streams", "grad_x", "grad_made")


def gradients(
    plan: Plan, operands: Operands, saved: jax.Array | None, grads: Operands
) -> Operands:
    """Gradients of the operands of `mosaic_tpu._differentiable`.

    Args:
        plan: of the forward pass.
        operands: of it.
        saved: mixes and inverse norms [tokens, K + 8]; None where nothing is projected.
        grads: of its results.
    """
    n, d, tile, width = plan.streams, plan.channels, plan.tile, plan.streams * plan.channels
    halves = 2 if plan.tokens // tile % 2 == 0 else 1
    inputs = {"streams": operands["streams"]}
    results = {"streams": _like(operands["streams"])}
    scratch = {}
    if plan.write:
        inputs["out"] = operands["out"]
        inputs["grad_streams"] = grads["streams"]
        results["out"] = _like(operands["out"])
        if plan.mix or plan.project:
            scratch["new"] = pltpu.VMEM((tile, width), plan.dtype)
    if plan.mix:
        inputs["grad_x"] = grads["x"]
        inputs["norm_weight"] = operands["norm_weight"]
        results["norm_weight"] = _sum_of(halves, tpu.SUBLANES, d)
        # On all lanes of a token: its inverse norm, and what its gradient loses to the norm.
        scratch["norms"] = pltpu.VMEM((2, tile, tpu.LANES), jnp.float32)
    if plan.write or plan.mix:
        inputs["mixing"] = operands["mixing"]
        results["mixing"] = _like(operands["mixing"])
        scratch["sums"] = pltpu.VMEM((plan.rows, tile, tpu.LANES), jnp.float32)
    if plan.project:
        inputs |= {"grad_made": grads["made"], "saved": saved}
        inputs |= {name: operands[name] for name in ("base", "scale")}
        inputs["fn"] = _stacked(plan, operands["fn"])
        results["logits"] = jax.ShapeDtypeStruct((plan.tokens, plan.rows), jnp.float32)
        results["fn"] = _sum_of(halves, plan.rows, width)
        dtype = plan.dtype
        scratch["left"] = pltpu.VMEM((tile, inputs["fn"].shape[0]), dtype)
        scratch["turned"] = pltpu.VMEM((_parts(plan) * plan.rows, tile), dtype)
        scratch["shrink"] = pltpu.VMEM((tile, tpu.LANES), jnp.float32)
        scratch["share"] = pltpu.VMEM((n, tile, plan.chunk), jnp.float32)
        scratch["divisors"] = pltpu.VMEM((2 * plan.sweeps, n, tile), jnp.float32)

    blocks = {
        name: plan.per_token(array) if name in _TOKENWISE else plan.whole(array)
        for name, array in inputs.items()
    }
    result_blocks = {
        name: _half(array) if len(array.shape) == 3 else plan.per_token(array)
        for name, array in results.items()
    }
    depth = inputs["fn"].shape[0] + _parts(plan) * plan.rows if plan.project else 0
    made = call(
        plan,
        "backward",
        functools.partial(_kernel, plan),
        inputs,
        blocks,
        results,
        result_blocks,
        scratch,
        flops=2 * plan.tokens * width * depth * plan.projection_passes,
        grid=(halves, plan.tokens // tile // halves),
        semantics=("parallel", "arbitrary"),
    )
    if plan.mix:
        made["norm_weight"] = made["norm_weight"].sum(axis=(0, 1))[None]
    if plan.project:
        logits = made.pop("logits")
        made["fn"] = made["fn"].sum(axis=0)
        made["base"] = logits.sum(axis=0)[:, None]
        made["scale"] = (logits * saved[:, : plan.rows]).sum(axis=0)[:, None]
    return {name: made[name] for name in operands}


def _like(array: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype)


def _sum_of(halves: int, rows: int, columns: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((halves, rows, columns), jnp.float32)


def _half(array: jax.ShapeDtypeStruct) -> pl.BlockSpec:
    return pl.BlockSpec((None, *array.shape[1:]), lambda half, _: (half, 0, 0))


def _parts(plan: Plan) -> int:
    """Bfloat16 parts of the projection's gradient for the gradient of fn."""
    return 3 if plan.dtype == jnp.bfloat16 else 1


def _stacked(plan: Plan, fn: jax.Array) -> jax.Array:
    """fn below itself, so that one product multiplies parts of both factors.

    With g = g1 + g2 and f = f1 + f2 in bfloat16 parts, [g1 g1 g2] times [f1; f2; f1] is g f up to
    2^-16, which the streams' gradient in bfloat16 does not show.
    """
    if plan.dtype != jnp.bfloat16:
        return fn
    first, second = bfloat16_parts(fn, 2)
    return jnp.concatenate([first, second, first], axis=0)


def _kernel(plan: Plan, refs: types.SimpleNamespace) -> None:
    d, group, chunk, tile = plan.channels, plan.group, plan.chunk, plan.tile

    @pl.when(pl.program_id(1) == 0)
    def _():
        if plan.mix:
            refs.out_norm_weight[...] = jnp.zeros_like(refs.out_norm_weight)
        if plan.project:
            refs.out_fn[...] = jnp.zeros_like(refs.out_fn)

    if plan.write and not (plan.mix or plan.project):
        new = None
    else:
        new = refs.new if plan.write else refs.streams

    def groups(body, *arguments):
        def step(g, _):
            body(pl.ds(pl.multiple_of(g * group, group), group), *arguments)

        lax.fori_loop(0, tile // group, step, None)

    if plan.mix or (plan.write and plan.project):
        groups(functools.partial(_first_pass, plan, refs))
    if plan.project:
        _coefficients(plan, refs)
    if plan.write or plan.mix:
        refs.sums[...] = jnp.zeros_like(refs.sums)

    def chunk_of_lanes(c, _):
        if plan.project:
            _products(plan, refs, new, c)
        groups(functools.partial(_second_pass, plan, refs, new), c)

    lax.fori_loop(0, d // chunk, chunk_of_lanes, None)
    if plan.write or plan.mix:
        lane = lax.broadcasted_iota(jnp.int32, (tile, plan.rows), 1)
        total = jnp.zeros((tile, plan.rows), jnp.float32)
        for i in range(plan.rows):
            total += jnp.where(lane == i, jnp.sum(refs.sums[i], axis=1, keepdims=True), 0.0)
        refs.out_mixing[...] = total


def _first_pass(plan: Plan, refs: types.SimpleNamespace, rows) -> None:
    """New streams; the inverse norm of the next input, and mean(weight grad unit) times it."""
    n, d, group = plan.streams, plan.channels, plan.group
    pre, post, comb = columns_of(plan, refs.mixing, rows)

    def step(c, sums):
        at = functools.partial(plan.lanes, c)
        new = [refs.streams[rows, at(k)].astype(jnp.float32) for k in range(n)]
        if plan.write:
            old, out = new, refs.out[rows, at(0)].astype(jnp.float32)
            new = []
            for k in range(n):
                total = post[k] * out
                for j in range(n):
                    total += comb[j][k] * old[j]
                stored = total.astype(plan.dtype)
                refs.new[rows, at(k)] = stored
                new.append(stored.astype(jnp.float32))
        if not plan.mix:
            return sums
        mixed = _mixed(pre, new)
        weighted = refs.grad_x[rows, at(0)].astype(jnp.float32) * refs.norm_weight[:, at(0)]
        squares, products = sums
        return squares + plan.fold(mixed * mixed), products + plan.fold(mixed * weighted)

    zeros = jnp.zeros((group, tpu.LANES), jnp.float32)
    squares, products = lax.fori_loop(0, d // plan.chunk, step, (zeros, zeros))
    if plan.mix:
        total = jnp.sum(squares, axis=1, keepdims=True)
        inverse = lax.rsqrt(total * (1 / d) + plan.norm_eps)
        mean = jnp.sum(products, axis=1, keepdims=True) * inverse * (1 / d)
        refs.norms[0, rows, :] = jnp.broadcast_to(inverse, (group, tpu.LANES))
        refs.norms[1, rows, :] = jnp.broadcast_to(mean, (group, tpu.LANES))


def _mixed(pre: list[jax.Array], new: list[jax.Array]) -> jax.Array:
    total = pre[0] * new[0]
    for weight, stream in zip(pre[1:], new[1:], strict=True):
        total += weight * stream
    return total


def _coefficients(plan: Plan, refs: types.SimpleNamespace) -> None:
    """From the gradient of a tile's coefficients to that of its projection."""
    rows, width = plan.rows, plan.streams * plan.channels
    saved = refs.saved[...].T
    mixes, inverse = saved[:rows], saved[rows : rows + 1]
    logits = tpu_coefficients.backward(
        mixes * refs.scale[...] + refs.base[...],
        refs.grad_made[...].T,
        plan.streams,
        plan.sweeps,
        plan.eps,
        refs.divisors,
    )
    refs.out_logits[...] = logits.T
    scaled = logits * refs.scale[...]
    # The norm's share: with mixes = inverse * product, d(inverse) = sum(scaled mixes) / inverse.
    loss = jnp.sum(scaled * mixes, axis=0, keepdims=True) * inverse * inverse * (-1 / width)
    turned = jnp.broadcast_to(loss, (tpu.LANES, plan.tile)).T
    refs.shrink[...] = turned
    product = scaled * inverse
    if plan.dtype != jnp.bfloat16:
        refs.turned[...] = product
        refs.left[...] = product.T
        return
    parts = []
    for _ in range(_parts(plan)):
        parts.append(product.astype(jnp.bfloat16).astype(jnp.float32))
        product = product - parts[-1]
    refs.turned[...] = jnp.concatenate(parts, axis=0).astype(jnp.bfloat16)
    left = jnp.concatenate([parts[0], parts[0], parts[1]], axis=0)
    refs.left[...] = left.T.astype(jnp.bfloat16)


def _products(plan: Plan, refs: types.SimpleNamespace, new, c) -> None:
    """The projection's share of a chunk's gradient, and the chunk's gradient of fn."""
    for k in range(plan.streams):
        at = plan.lanes(c, k)
        refs.share[k] = jnp.dot(
            refs.left[...],
            refs.fn[:, at],
            precision=plan.precision,
            preferred_element_type=jnp.float32,
        )
        parts = jnp.dot(
            refs.turned[...],
            new[:, at],
            precision=plan.precision,
            preferred_element_type=jnp.float32,
        )
        total = parts[: plan.rows]
        for part in range(1, _parts(plan)):
            total = total + parts[part * plan.rows : (part + 1) * plan.rows]
        refs.out_fn[:, at] += total


def _second_pass(plan: Plan, refs: types.SimpleNamespace, new, rows, c) -> None:
    """The gradients of a chunk of a group of tokens."""
    n, chunk = plan.streams, plan.chunk
    at = functools.partial(plan.lanes, c)
    grads = [jnp.zeros((plan.group, chunk), jnp.float32)] * n
    if plan.write:
        grads = [refs.grad_streams[rows, at(k)].astype(jnp.float32) for k in range(n)]
    if plan.write or plan.mix:
        pre, post, comb = columns_of(plan, refs.mixing, rows)
    if new is not None:
        values = [new[rows, at(k)].astype(jnp.float32) for k in range(n)]
    if plan.mix:
        inverse, mean = refs.norms[0, rows, :][:, :1], refs.norms[1, rows, :][:, :1]
        grad = refs.grad_x[rows, at(0)].astype(jnp.float32)
        unit = _mixed(pre, values) * inverse
        by_group = (grad * unit).reshape(-1, tpu.SUBLANES, chunk)
        refs.out_norm_weight[:, at(0)] += jnp.sum(by_group, axis=0)
        mixed = inverse * (grad * refs.norm_weight[:, at(0)] - unit * mean)
        for k in range(n):
            grads[k] = grads[k] + pre[k] * mixed
            refs.sums[k, rows, :] += plan.fold(mixed * values[k])
    if plan.project:
        shrink = refs.shrink[rows, :][:, :1]
        for k in range(n):
            grads[k] = grads[k] + refs.share[k, rows, :] + shrink * values[k]
    if not plan.write:
        for k in range(n):
            refs.out_streams[rows, at(k)] = grads[k].astype(plan.dtype)
        return
    old = [refs.streams[rows, at(j)].astype(jnp.float32) for j in range(n)]
    out = refs.out[rows, at(0)].astype(jnp.float32)
    refs.out_out[rows, at(0)] = _mixed(post, grads).astype(plan.dtype)
    for k in range(n):
        refs.sums[n + k, rows, :] += plan.fold(out * grads[k])
    for j in range(n):
        refs.out_streams[rows, at(j)] = _mixed(comb[j], grads).astype(plan.dtype)
        for k in range(n):
            refs.sums[(2 + j) * n + k, rows, :] += plan.fold(old[j] * grads[k])
