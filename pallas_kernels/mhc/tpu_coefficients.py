"""The coefficients of hyper-connections inside a TPU kernel, tokens along the lanes.

A tile's projection is [K, tokens] with K = (2+n)n rows [pre n | post n | comb n*n]. The n x n
matrix of a token is n arrays [n, tokens], one for each old stream j, the new stream k along the
sublanes: dividing by column sums (over j) adds arrays, dividing by row sums (over k) adds sublanes.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def matrix_of(values_KxT: jax.Array, n: int) -> list[jax.Array]:
    """The comb part of [K, tokens] as n arrays [n, tokens]."""
    return [values_KxT[2 * n + j * n : 2 * n + (j + 1) * n] for j in range(n)]


def _sum(arrays: list[jax.Array]) -> jax.Array:
    total = arrays[0]
    for array in arrays[1:]:
        total = total + array
    return total


def _over_k(array: jax.Array) -> jax.Array:
    return jnp.sum(array, axis=0, keepdims=True)


def _divide(comb: list[jax.Array], sums: list[jax.Array]) -> list[jax.Array]:
    return [row / total for row, total in zip(comb, sums, strict=True)]


def _column_sums(comb: list[jax.Array], eps: float) -> list[jax.Array]:
    return [_sum(comb) + eps] * len(comb)


def _row_sums(comb: list[jax.Array], eps: float) -> list[jax.Array]:
    return [_over_k(row) + eps for row in comb]


def _softmax(logits: list[jax.Array]) -> list[jax.Array]:
    powers = [jnp.exp(row - jnp.max(row, axis=0, keepdims=True)) for row in logits]
    return [row / _over_k(row) for row in powers]


def _sinkhorn(logits: list[jax.Array], sweeps: int, eps: float, sums: Any) -> list[jax.Array]:
    """`reference.sinkhorn`; what is divided by is kept in `sums` where that is given.

    Args:
        logits: n arrays [n, tokens].
        sweeps: column normalisations.
        eps: added to every sum.
        sums: None, or a reference [2 * sweeps, n, tokens]: at 2s + 1 the column sums of sweep s, at
            2s the row sums before them.
    """
    n = len(logits)

    def columns(comb, s):
        totals = _column_sums(comb, eps)
        if sums is not None:
            sums[2 * s + 1] = totals[0]
        return _divide(comb, totals)

    def sweep(s, comb):
        totals = _row_sums(list(comb), eps)
        if sums is not None:
            for j in range(n):
                sums[2 * s, _row(j)] = totals[j]
        return tuple(columns(_divide(list(comb), totals), s))

    comb = columns([row + eps for row in _softmax(logits)], 0)
    return list(lax.fori_loop(1, sweeps, sweep, tuple(comb)))


def _row(j: int) -> slice:
    """Sublane j alone, kept as an axis."""
    return slice(j, j + 1)


def _sinkhorn_backward(
    comb: list[jax.Array], grads: list[jax.Array], logits: list[jax.Array], sweeps: int, sums: Any
) -> list[jax.Array]:
    """Gradient of the logits; `sums` as `_sinkhorn` left them.

    With y = x / s, s the sum of x: dx = (dy - sum(dy y)) / s. The x of one step is the y of the one
    before, so going backwards multiplies by s and nothing but s is stored.
    """
    n = len(comb)

    def undo(comb, grads, totals, dots):
        grads = [(g - dot) / s for g, dot, s in zip(grads, dots, totals, strict=True)]
        return [y * s for y, s in zip(comb, totals, strict=True)], grads

    def columns(comb, grads, s):
        dots = [_sum([g * y for g, y in zip(grads, comb, strict=True)])] * n
        return undo(comb, grads, [sums[2 * s + 1]] * n, dots)

    def rows(comb, grads, s):
        dots = [_over_k(g * y) for g, y in zip(grads, comb, strict=True)]
        return undo(comb, grads, [sums[2 * s, _row(j)] for j in range(n)], dots)

    def sweep(i, state):
        s = sweeps - 1 - i
        state = columns(*(list(part) for part in state), s)
        return tuple(tuple(part) for part in rows(*state, s))

    state = lax.fori_loop(0, sweeps - 1, sweep, (tuple(comb), tuple(grads)))
    _, grads = columns(*(list(part) for part in state), 0)
    shares = _softmax(logits)
    return [p * (g - _over_k(g * p)) for p, g in zip(shares, grads, strict=True)]


def forward(logits_KxT: jax.Array, n: int, sweeps: int, eps: float) -> jax.Array:
    """Coefficients [K, tokens] of logits [K, tokens], as `reference.coefficients_from_projection`.

    Args:
        logits_KxT: mixes * scale + base.
        n: streams.
        sweeps: of Sinkhorn.
        eps: added to pre, to the softmax and to every sum.
    """
    pre = jax.nn.sigmoid(logits_KxT[:n]) + eps
    post = 2 * jax.nn.sigmoid(logits_KxT[n : 2 * n])
    comb = _sinkhorn(matrix_of(logits_KxT, n), sweeps, eps, None)
    return jnp.concatenate([pre, post, *comb], axis=0)


def backward(
    logits_KxT: jax.Array, grads_KxT: jax.Array, n: int, sweeps: int, eps: float, sums: Any
) -> jax.Array:
    """Gradient [K, tokens] of the logits from that of the coefficients.

    Args:
        logits_KxT: as for `forward`.
        grads_KxT: of its result.
        n: streams.
        sweeps: of Sinkhorn.
        eps: as for `forward`.
        sums: reference float32[2 * sweeps, n, tokens] to work in.
    """
    logistic = jax.nn.sigmoid(logits_KxT[: 2 * n])
    slope = logistic * (1 - logistic) * grads_KxT[: 2 * n]
    logits = matrix_of(logits_KxT, n)
    comb = _sinkhorn(logits, sweeps, eps, sums)
    comb = _sinkhorn_backward(comb, matrix_of(grads_KxT, n), logits, sweeps, sums)
    return jnp.concatenate([slope[:n], 2 * slope[n:], *comb], axis=0)
