"""The probabilities of selected rows, summed over heads, on TPUs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import tpu
from pallas_kernels.sparse_attention import mosaic_tpu_rows as rows
from pallas_kernels.sparse_attention import reference
from pallas_kernels.sparse_attention.mosaic_tpu_rows import Plan


def _body(plan: Plan, fetch: rows.Fetch, inputs, outputs, memory):
    (q_ref, lse_ref), (mass_ref,) = inputs, outputs
    del memory
    mass_ref[...] = jnp.zeros(mass_ref.shape, jnp.float32)

    def one_query(j, each_tile):
        lse = rows.as_column(lse_ref[j])

        def one_tile(tile, keys, valid):
            logits = rows.dot(q_ref[j], keys, (1, 1)) * plan.scale
            mass = jnp.sum(jnp.exp(logits - lse), axis=0, keepdims=True)
            mass_ref[j, pl.ds(tile, 1)] = jnp.where(valid, mass, 0.0)

        each_tile(one_tile)

    fetch.each_query(one_query)


def forward(q, main_rows, indices, lse_with_sink, *, scale, interpret=None):
    """Runs the kernel; see `selected_mass`, whose arguments these are."""
    plan = rows.plan_of(q, 0, main_rows, indices, scale, interpret)
    nothing = jnp.zeros(q.shape[:2], jnp.int32)
    # -inf means that there is no key; heads that fill up a tile get no share.
    lse = jnp.where(lse_with_sink > -jnp.inf, lse_with_sink, 0.0)
    more = [(0, 0), (0, 0), (0, plan.heads - q.shape[2])]
    lse = rows.padded(plan, jnp.pad(lse, more, constant_values=jnp.inf))
    count = plan.batch * plan.queries
    (mass,) = rows.run(
        plan,
        "selected_mass",
        _body,
        rows.call_of(plan, None, nothing, nothing, main_rows, indices),
        [
            (rows.padded(plan, q), rows.block_of(plan, plan.heads, plan.dim)),
            (lse[:, None], rows.block_of(plan, 1, plan.heads)),
        ],
        [
            (
                jax.ShapeDtypeStruct((count, plan.tiles, plan.tile), jnp.float32),
                rows.block_of(plan, plan.tiles, plan.tile),
            )
        ],
        [],
        products=1,
    )
    return rows.unpadded(plan, mass.reshape(count, -1), indices.shape)


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
    interpret=None,
):
    """See `pallas_kernels.sparse_attention.selected_mass`; `chunk` has no effect.

    Args:
        interpret: parameters of Pallas's TPU interpret mode, in which it runs on any device.

    Raises:
        NotImplementedError: no TPU; main rows without indices; none of either; more heads or keys
            than vector memory holds.
    """
    del main_lo, main_hi, chunk
    tpu.require("selected_mass", interpret)
    if indices is None or main_rows.shape[1] == 0 or indices.shape[-1] == 0:
        raise NotImplementedError("needs main rows and indices")
    q, main_rows, lse_with_sink = jax.lax.stop_gradient((q, main_rows, lse_with_sink))
    main_rows = reference.values(main_rows, reference.MAIN_FORMAT, q.dtype)
    scale = float(q.shape[-1] ** -0.5 if scale is None else scale)
    return forward(q, main_rows, indices, lse_with_sink, scale=scale, interpret=interpret)
