"""Grouped matmul in XLA: a scan over blocks of rows, each wholly inside one group; few rows, as in
decoding, each by a product with its own expert's weight.

Groups are unequal and known only at run time, so each is padded up to whole blocks. There are at
most M // block + E of them whatever the sizes are, hence at most M + E * block rows are multiplied.

Measured forward + backward on two busy CPU cores, ms: M=4096, K=64, N=128: E=8 `lax.ragged_dot` 32,
this scan 2.6, one batched matmul over gathered weights 2.6; E=32: 186, 3.6, 4.6. M=8192, K=256,
N=512, E=16: scan 86-114, batched 150. Besides, the batched form holds a copy of an expert's weight,
and an fp32 weight gradient, for every block.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import fp4

_PACKED_FORMAT = "mxfp4"
# Rows that are not worth a scan. XLA may copy the weights of that many experts for them.
_FEW_ROWS = 16


class _Blocks(NamedTuple):
    expert_P: jax.Array
    """Expert of each block, P = M // block + E; an arbitrary one for surplus blocks."""
    row_PxR: jax.Array
    """Row of x in each slot of each block; M (out of range) where there is none."""
    slot_M: jax.Array
    """Flat slot of each row; out of range for rows beyond the last group."""


def block_rows(rows: int, groups: int) -> int:
    """Rows of a block: about half of a mean group, a power of two within 8..512.

    Padding then costs a quarter more rows on average, and half as many again at worst.
    """
    half = max(rows // (2 * groups), 1)
    return min(max(1 << (half.bit_length() - 1), 8), 512)


def few(rows: int, groups: int) -> bool:
    """Whether each row gets its expert's weight: fewer are read than there are, in one step."""
    return rows <= min(_FEW_ROWS, groups)


def _owners(group_sizes: jax.Array, rows: int) -> tuple[jax.Array, jax.Array]:
    """(expert of each row, an arbitrary one beyond the last group; whether the row has one)."""
    groups = group_sizes.shape[0]
    owner_M = jnp.searchsorted(
        jnp.cumsum(group_sizes), jnp.arange(rows), side="right", method="compare_all"
    )
    return jnp.minimum(owner_M, groups - 1), owner_M < groups


def _row_by_row(x: jax.Array, w_MxKxN: jax.Array, owned_M: jax.Array) -> jax.Array:
    y = lax.dot_general(
        x,
        w_MxKxN,
        (((1,), (1,)), ((0,), (0,))),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
    return jnp.where(owned_M[:, None], y, 0).astype(x.dtype)


def _take(array: jax.Array, index: jax.Array) -> jax.Array:
    return array.at[index].get(mode="fill", fill_value=0)


def _plan(group_sizes: jax.Array, rows: int, block: int) -> _Blocks:
    groups = group_sizes.shape[0]
    count = rows // block + groups
    end_E = jnp.cumsum(group_sizes)
    start_E = end_E - group_sizes
    blocks_E = (group_sizes + block - 1) // block
    block_end_E = jnp.cumsum(blocks_E)
    block_start_E = block_end_E - blocks_E

    block_P = jnp.arange(count)
    owner_P = jnp.searchsorted(block_end_E, block_P, side="right", method="compare_all")
    expert_P = jnp.minimum(owner_P, groups - 1)
    first_P = start_E[expert_P] + (block_P - block_start_E[expert_P]) * block
    row_PxR = first_P[:, None] + jnp.arange(block)
    used_PxR = (row_PxR < end_E[expert_P][:, None]) & (owner_P < groups)[:, None]

    expert_M, owned_M = _owners(group_sizes, rows)
    slot_M = block_start_E[expert_M] * block + jnp.arange(rows) - start_E[expert_M]
    return _Blocks(
        expert_P=expert_P,
        row_PxR=jnp.where(used_PxR, row_PxR, rows),
        slot_M=jnp.where(owned_M, slot_M, count * block),
    )


def _dot(a: jax.Array, b: jax.Array, axes: tuple[int, int]) -> jax.Array:
    # HIGHEST changes nothing for bf16; fp32 would otherwise be rounded to bf16 or tf32.
    return lax.dot_general(
        a,
        b,
        (((axes[0],), (axes[1],)), ((), ())),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )


@jax.custom_vjp
def _grouped_matmul(x: jax.Array, w: jax.Array, group_sizes: jax.Array) -> jax.Array:
    rows, w = x.shape[0], w.astype(x.dtype)
    if few(rows, w.shape[0]):
        expert_M, owned_M = _owners(group_sizes, rows)
        return _row_by_row(x, w[expert_M], owned_M)
    plan = _plan(group_sizes, rows, block_rows(rows, w.shape[0]))

    def multiply(_: None, block: tuple[jax.Array, jax.Array]) -> tuple[None, jax.Array]:
        expert, x_RxK = block
        return None, _dot(x_RxK, w[expert], (1, 0)).astype(x.dtype)

    _, y_PxRxN = lax.scan(multiply, None, (plan.expert_P, _take(x, plan.row_PxR)))
    return _take(y_PxRxN.reshape(-1, w.shape[2]), plan.slot_M)


def _forward(x: jax.Array, w: jax.Array, group_sizes: jax.Array) -> tuple[jax.Array, tuple]:
    return _grouped_matmul(x, w, group_sizes), (x, w, group_sizes)


def _backward(residuals: tuple, grad: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    x, weight, group_sizes = residuals
    rows, w = x.shape[0], weight.astype(x.dtype)
    plan = _plan(group_sizes, rows, block_rows(rows, w.shape[0]))

    def multiply(
        grad_w: jax.Array, block: tuple[jax.Array, jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        expert, x_RxK, grad_RxN = block
        # A surplus block holds zeros only, so it may be added to any expert.
        grad_w = grad_w.at[expert].add(_dot(x_RxK, grad_RxN, (0, 0)))
        return grad_w, _dot(grad_RxN, w[expert], (1, 1)).astype(x.dtype)

    blocks = (plan.expert_P, _take(x, plan.row_PxR), _take(grad, plan.row_PxR))
    grad_w, grad_x_PxRxK = lax.scan(multiply, jnp.zeros(w.shape, jnp.float32), blocks)
    grad_x = _take(grad_x_PxRxK.reshape(-1, w.shape[1]), plan.slot_M)
    return grad_x, grad_w.astype(weight.dtype), None


_grouped_matmul.defvjp(_forward, _backward)


def _packed(x: jax.Array, w: jax.Array, group_sizes: jax.Array, scales: jax.Array) -> jax.Array:
    if few(x.shape[0], w.shape[0]):
        expert_M, owned_M = _owners(group_sizes, x.shape[0])
        w_MxNxK = fp4.decode(w[expert_M], scales[expert_M], _PACKED_FORMAT, x.dtype)
        return _row_by_row(x, jnp.swapaxes(w_MxNxK, 1, 2), owned_M)
    plan = _plan(group_sizes, x.shape[0], block_rows(x.shape[0], w.shape[0]))

    def multiply(_: None, block: tuple[jax.Array, jax.Array]) -> tuple[None, jax.Array]:
        expert, x_RxK = block
        w_NxK = fp4.decode(w[expert], scales[expert], _PACKED_FORMAT, x.dtype)
        return None, _dot(x_RxK, w_NxK, (1, 1)).astype(x.dtype)

    _, y_PxRxN = lax.scan(multiply, None, (plan.expert_P, _take(x, plan.row_PxR)))
    return _take(y_PxRxN.reshape(-1, w.shape[1]), plan.slot_M)


def check(
    x: jax.Array, w: jax.Array, group_sizes: jax.Array, scales: jax.Array | None = None
) -> None:
    """ValueError unless shapes and dtypes fit each other."""
    if scales is not None:
        wanted = (*w.shape[:2], x.shape[-1] // 32)
        if x.ndim != 2 or w.ndim != 3 or x.shape[1] != 2 * w.shape[2] or scales.shape != wanted:
            raise ValueError(
                f"grouped_matmul: x {x.shape}, packed w {w.shape}, scales {scales.shape}; must be"
                " [M,K], [E,N,K/2] and [E,N,K/32]"
            )
    elif x.ndim != 2 or w.ndim != 3 or x.shape[1] != w.shape[1]:
        raise ValueError(f"grouped_matmul: x {x.shape} and w {w.shape}; must be [M,K] and [E,K,N]")
    if group_sizes.shape != w.shape[:1] or not jnp.issubdtype(group_sizes.dtype, jnp.integer):
        raise ValueError(
            f"grouped_matmul: group_sizes is {group_sizes.dtype}{list(group_sizes.shape)}; "
            f"must be int32[{w.shape[0]}], one a weight"
        )
    if scales is None and w.dtype not in (x.dtype, jnp.float32):
        raise ValueError(
            f"grouped_matmul: x is {x.dtype}, w is {w.dtype}; must be the same, or w float32"
        )


def grouped_matmul(
    x: jax.Array, w: jax.Array, group_sizes: jax.Array, scales: jax.Array | None = None
) -> jax.Array:
    """XLA definition of `grouped_matmul.grouped_matmul`."""
    x, w, group_sizes = jnp.asarray(x), jnp.asarray(w), jnp.asarray(group_sizes)
    check(x, w, group_sizes, scales)
    if not x.shape[0]:
        return jnp.zeros((0, w.shape[2 if scales is None else 1]), x.dtype)
    if scales is not None:
        return _packed(x, w, group_sizes, jnp.asarray(scales))
    return _grouped_matmul(x, w, group_sizes)
