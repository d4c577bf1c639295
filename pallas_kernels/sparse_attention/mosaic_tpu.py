"""CSA2 attention on TPUs.

A grid step takes 8 queries of a batch row (fewer where there are fewer). Their windows lie in one
run of rows, so that all heads of all of them are one product with it; then each query's selected
rows, tile by tile, with an online softmax in float32. See `mosaic_tpu_rows` for how rows arrive.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import tpu
from pallas_kernels.sparse_attention import mosaic_tpu_backward, reference
from pallas_kernels.sparse_attention import mosaic_tpu_packed as packed
from pallas_kernels.sparse_attention import mosaic_tpu_rows as rows
from pallas_kernels.sparse_attention.mosaic_tpu_rows import Plan
from pallas_kernels.sparse_attention.tables import Fp4Table


def _softmax(logits, highest):
    """Weights of logits `[.., N]` given the highest so far `[.., 1]`.

    Returns:
        weights, the factor of earlier ones, the highest now.
    """
    raised = jnp.maximum(highest, jnp.max(logits, axis=-1, keepdims=True))
    base = jnp.where(raised == -jnp.inf, 0.0, raised)
    return jnp.exp(logits - base), jnp.exp(highest - base), raised


def _forward_body(plan: Plan, fetch: rows.Fetch, inputs, outputs, memory):
    q_ref, sink_ref = inputs
    out_ref, lse_ref = outputs
    highest_ref, total_ref, sum_ref = memory
    heads, dtype = plan.heads, plan.dtype

    if plan.length:
        run, visible = fetch.window()
        q = q_ref[...].reshape(plan.block * heads, plan.dim)
        logits = rows.dot(q, run, (1, 1)) * plan.scale
        logits = logits.reshape(plan.block, heads, plan.length)
        nothing = jnp.full((plan.block, heads, 1), -jnp.inf)
        weights, _, highest_ref[...] = _softmax(jnp.where(visible, logits, -jnp.inf), nothing)
        total_ref[...] = jnp.sum(weights, axis=-1, keepdims=True)
        weights = weights.astype(dtype).reshape(plan.block * heads, plan.length)
        sum_ref[...] = rows.dot(weights, run, (1, 0)).reshape(plan.block, heads, plan.dim)
    else:
        highest_ref[...] = jnp.full(highest_ref.shape, -jnp.inf)
        total_ref[...] = jnp.zeros(total_ref.shape, jnp.float32)
        sum_ref[...] = jnp.zeros(sum_ref.shape, jnp.float32)

    def one_query(j, each_tile):
        def one_tile(tile, keys, valid):
            logits = rows.dot(q_ref[j], keys, (1, 1)) * plan.scale
            logits = jnp.where(valid, logits, -jnp.inf)
            weights, grow, highest_ref[j] = _softmax(logits, highest_ref[j])
            total_ref[j] = total_ref[j] * grow + jnp.sum(weights, axis=-1, keepdims=True)
            sum_ref[j] = sum_ref[j] * grow + rows.dot(weights.astype(dtype), keys, (1, 0))

        each_tile(one_tile)
        highest, total = highest_ref[j], total_ref[j]
        any_key = total > 0.0
        total = jnp.where(any_key, total, 1.0)
        lse = jnp.where(any_key, highest + jnp.log(total), -jnp.inf)
        # exp(lse) / (exp(lse) + exp(sink)), for infinite sinks too.
        factor = jnp.where(any_key, 1.0 / ((1.0 + jnp.exp(sink_ref[...] - lse)) * total), 0.0)
        out_ref[j] = (sum_ref[j] * factor).astype(dtype)
        lse_ref[j] = rows.as_row(lse)

    fetch.each_query(one_query)


def forward(
    q, window_rows, window_lo, window_hi, main_rows, indices, sink, *, window, scale, interpret=None
):
    """Runs the forward kernel.

    Args:
        q: `[B, T, H, D]`, bfloat16 or float32.
        window_rows: `[B, S, D]`.
        window_lo: i32 `[B, T]`.
        window_hi: i32 `[B, T]`.
        main_rows: `[B, G, D]`, an `Fp4Table`, or None.
        indices: i32 `[B, T, K]`, or None.
        sink: f32 `[H]`.
        window: bound of `window_hi - window_lo`.
        scale: of the logits.
        interpret: parameters of Pallas's interpret mode, in which it runs on any device.

    Returns:
        out and lse.
    """
    plan = rows.plan_of(q, window, main_rows, indices, scale, interpret)
    if plan.packed:
        q, window_rows = packed.ordered(q), packed.ordered(window_rows)
    per_head = pltpu.VMEM((plan.block, plan.heads, 1), jnp.float32)
    count = plan.batch * plan.queries
    out, lse = rows.run(
        plan,
        "sparse_attention",
        _forward_body,
        rows.call_of(plan, window_rows, window_lo, window_hi, main_rows, indices),
        [
            (rows.padded(plan, q), rows.block_of(plan, plan.heads, plan.dim)),
            (rows.padded_heads(plan, sink), rows.shared(plan.heads, 1)),
        ],
        [
            (
                jax.ShapeDtypeStruct((count, plan.heads, plan.dim), plan.dtype),
                rows.block_of(plan, plan.heads, plan.dim),
            ),
            (
                jax.ShapeDtypeStruct((count, 1, plan.heads), jnp.float32),
                rows.block_of(plan, 1, plan.heads),
            ),
        ],
        [per_head, per_head, pltpu.VMEM((plan.block, plan.heads, plan.dim), jnp.float32)],
        products=2,
    )
    out = packed.restored(out) if plan.packed else out
    return rows.unpadded(plan, out, q.shape), rows.unpadded(plan, lse[:, 0], q.shape[:3])


@functools.partial(jax.custom_vjp, nondiff_argnums=(7, 8, 9))
def _attention(
    q, window_rows, window_lo, window_hi, main_rows, indices, sink, window, scale, interpret
):
    arguments = q, window_rows, window_lo, window_hi, main_rows, indices, sink
    return forward(*arguments, window=window, scale=scale, interpret=interpret)


def _attention_forward(*arguments):
    result = checkpoint_name(_attention(*arguments), reference.RESULT)
    return result, (arguments[:7], result)


def _attention_backward(window, scale, interpret, residuals, cotangents):
    arguments, result = residuals
    dq, dwindow, dmain, dsink = mosaic_tpu_backward.backward(
        *arguments, *result, *cotangents, window=window, scale=scale, interpret=interpret
    )
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
    interpret=None,
):
    """See `pallas_kernels.sparse_attention.sparse_attention`; `chunk` has no effect.

    Args:
        interpret: parameters of Pallas's TPU interpret mode, in which it runs on any device.

    Raises:
        NotImplementedError: no TPU; main rows without indices; no key at all; more heads or keys
            than vector memory holds.
    """
    del main_lo, main_hi, chunk
    tpu.require("sparse_attention", interpret)
    if main_rows is not None and indices is None:
        raise NotImplementedError("needs indices; main_lo and main_hi alone are not enough")
    table = isinstance(main_rows, Fp4Table)
    if main_rows is not None:
        entries = main_rows.entries if table else main_rows.shape[1]
        if entries == 0 or indices.shape[-1] == 0:
            main_rows = indices = None
    window = min(window, window_rows.shape[1])
    if window == 0 and main_rows is None:
        raise NotImplementedError("there is no row that could be a key")
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    window_rows = reference.values(window_rows, reference.WINDOW_FORMAT, q.dtype)
    if main_rows is not None and not table:
        main_rows = reference.values(main_rows, reference.MAIN_FORMAT, q.dtype)
    arguments = q, window_rows, window_lo, window_hi, main_rows, indices, sink.astype(jnp.float32)
    if table:
        return forward(*arguments, window=window, scale=float(scale), interpret=interpret)
    return _attention(*arguments, window, float(scale), interpret)
