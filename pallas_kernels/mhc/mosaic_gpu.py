"""Sinkhorn of hyper-connections on Hopper GPUs: a thread a token, its n x n matrix in registers.

XLA makes every one of the 2 * sinkhorn_iters - 1 normalisations (and every one of their gradients)
a kernel or two of its own, which take longer to start than to run; here they are one. Products and
sums over channels stay with XLA.

With y = x / s, s the sum of x: dx = (dy - sum(dy y)) / s. The x of one normalisation is the y of
the one before, so going backwards multiplies by s, and nothing but s is kept.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import hopper
from pallas_kernels.mhc import mosaic_gpu_pass, reference
from pallas_kernels.mhc.reference import Coefficients
from pallas_kernels.warpgroup import COMPILER_PARAMS, THREADS

_MAX_STREAMS = 8
_SHARED_MEMORY = 224 * 1024
_OLD, _NEW = 0, 1  # axes of a matrix

# [j][k], old stream first: each an array of one value for every token of a block.
_Matrix = list[list[jax.Array]]
# What normalisation number i divided by.
_Keep = Callable[[Any, list[jax.Array]], None]


def coefficients(*arguments: jax.Array, interpret: Any = None, **keywords: float) -> Coefficients:
    """See `pallas_kernels.mhc.coefficients`.

    Args:
        *arguments, **keywords: as there.
        interpret: parameters of Pallas's interpret mode, in which it runs on any device.

    Raises:
        NotImplementedError: not on a Hopper GPU; more than 8 streams; more sweeps than shared
            memory has room for (55 of 4 streams).
    """
    return reference.coefficients(
        *arguments, balance=_accepted("coefficients", interpret), **keywords
    )


def read(
    *arguments: jax.Array, interpret: Any = None, **keywords: float
) -> tuple[jax.Array, Coefficients]:
    """See `pallas_kernels.mhc.read`; arguments and errors are as for `coefficients`."""
    return reference.read(*arguments, balance=_accepted("read", interpret), **keywords)


def write_read(
    streams: jax.Array,
    out: jax.Array,
    *arguments: jax.Array,
    interpret: Any = None,
    **keywords: float,
) -> tuple[jax.Array, jax.Array, Coefficients]:
    """See `pallas_kernels.mhc.write_read`; arguments and errors are as for `coefficients`.

    Where `mosaic_gpu_pass` takes the streams they are passed over in kernels, too.
    """
    balance = _accepted("write_read", interpret)
    if mosaic_gpu_pass.takes(streams, out):
        return mosaic_gpu_pass.write_read(
            streams, out, *arguments, balance=balance, interpret=interpret, **keywords
        )
    return reference.write_read(streams, out, *arguments, balance=balance, **keywords)


def _accepted(op: str, interpret: Any) -> Callable[..., jax.Array]:
    if interpret is None:
        hopper.require(f"mhc.{op}")
    return functools.partial(sinkhorn, interpret=interpret)


def sinkhorn(
    logits_NxNxT: jax.Array, sweeps: int, eps: float, *, interpret: Any = None
) -> jax.Array:
    """`reference.sinkhorn` by kernels, forward and backward; under `jax.vmap` too.

    Args:
        logits_NxNxT: float32 [n, n, T].
        sweeps: column normalisations, at least 1.
        eps: added to the softmax and to every sum.
        interpret: as for `coefficients`.

    Returns:
        float32 [n, n, T].

    Raises:
        NotImplementedError: too many streams or sweeps.
    """
    n = logits_NxNxT.shape[0]
    if n > _MAX_STREAMS:
        raise NotImplementedError(f"mhc: the kernel takes {_MAX_STREAMS} streams at most, not {n}")
    if 4 * THREADS * n * (2 * sweeps - 1) > _SHARED_MEMORY:
        raise NotImplementedError(f"mhc: {sweeps} sweeps of {n} streams exceed shared memory")
    numbers = dict(sweeps=sweeps, eps=eps, interpret=interpret)

    @jax.custom_vjp
    def balance(logits):
        return _of_tokens(functools.partial(_call, _forward, **numbers), logits)

    def backward(logits, grads):
        return (_of_tokens(functools.partial(_call, _backward, **numbers), logits, grads),)

    balance.defvjp(lambda logits: (balance(logits), logits), backward)
    return balance(logits_NxNxT)


def _of_tokens(run: Callable[..., jax.Array], *arrays: jax.Array) -> jax.Array:
    """`run` of arrays [n, n, T]; under `jax.vmap` there are more tokens."""

    @jax.custom_batching.custom_vmap
    def flat(*arrays):
        return run(*arrays)

    @flat.def_vmap
    def batch(axis_size, is_batched, *arrays):
        n, _, tokens = arrays[0].shape[-3:]

        def joined(x, one):
            x = jnp.moveaxis(x, 0, 2) if one else jnp.repeat(x[:, :, None], axis_size, axis=2)
            return x.reshape(n, n, axis_size * tokens)

        result = _of_tokens(run, *map(joined, arrays, is_batched))
        return jnp.moveaxis(result.reshape(n, n, axis_size, tokens), 2, 0), True

    return flat(*arrays)


def _call(
    work: Callable[..., _Matrix], *arrays: jax.Array, sweeps: int, eps: float, interpret: Any
) -> jax.Array:
    """One kernel: `work` of as many matrices as there are arrays [n, n, T], a block of tokens."""
    n, _, tokens = arrays[0].shape
    blocks = pl.cdiv(tokens, THREADS)
    padding = (0, 0), (0, 0), (0, blocks * THREADS - tokens)
    keeps = len(arrays) > 1
    normalisations = 2 * sweeps - 1

    def body(*refs):
        *given, out_ref = refs[: len(arrays) + 1]
        columns = pl.ds(lax.axis_index("block") * THREADS, THREADS)
        matrices = [[[ref[j, k, columns] for k in range(n)] for j in range(n)] for ref in given]
        result = work(*matrices, sweeps, eps, *refs[len(arrays) + 1 :])
        for j in range(n):
            for k in range(n):
                out_ref[j, k, columns] = result[j][k]

    padded = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((n, n, blocks * THREADS), jnp.float32),
        grid=(blocks,),
        grid_names=("block",),
        scratch_types=[plgpu.SMEM((normalisations, n, THREADS), jnp.float32)] * keeps,
        compiler_params=COMPILER_PARAMS,
        interpret=interpret,
        kernel_name="mhc_sinkhorn",
    )(*(jnp.pad(x.astype(jnp.float32), padding) for x in arrays))
    return padded[:, :, :tokens]


def _added(values: Sequence[jax.Array]) -> jax.Array:
    return functools.reduce(jnp.add, values)


def _sums(matrix: _Matrix, axis: int) -> list[jax.Array]:
    return [_added(line) for line in (zip(*matrix, strict=True) if axis == _OLD else matrix)]


def _dots(one: _Matrix, other: _Matrix, axis: int) -> list[jax.Array]:
    """Sums of products of entries."""
    products = [list(map(jnp.multiply, *rows)) for rows in zip(one, other, strict=True)]
    return _sums(products, axis)


def _map(function: Callable[..., jax.Array], axis: int, lines: Any, *matrices: _Matrix) -> _Matrix:
    """`function(value of lines, entries...)` of every entry; `lines` are along the other axis."""
    n = len(matrices[0])
    return [
        [function(lines[k if axis == _OLD else j], *(m[j][k] for m in matrices)) for k in range(n)]
        for j in range(n)
    ]


def _softmax(logits: _Matrix) -> _Matrix:
    """Over new streams."""
    largest = [functools.reduce(jnp.maximum, row) for row in logits]
    powers = _map(lambda top, x: jnp.exp(x - top), _NEW, largest, logits)
    return _map(lambda total, x: x / total, _NEW, _sums(powers, _NEW), powers)


def _balanced(logits: _Matrix, sweeps: int, eps: float, keep: _Keep) -> _Matrix:
    def normalised(comb, axis, i):
        totals = [total + eps for total in _sums(comb, axis)]
        keep(i, totals)
        inverses = [1.0 / total for total in totals]
        return _map(jnp.multiply, axis, inverses, comb)

    def sweep(s, comb):
        return normalised(normalised(comb, _NEW, 2 * s - 1), _OLD, 2 * s)

    comb = [[x + eps for x in row] for row in _softmax(logits)]
    return lax.fori_loop(1, sweeps, sweep, normalised(comb, _OLD, 0))


def _forward(logits: _Matrix, sweeps: int, eps: float) -> _Matrix:
    return _balanced(logits, sweeps, eps, lambda i, totals: None)


def _backward(logits: _Matrix, grads: _Matrix, sweeps: int, eps: float, kept: Any) -> _Matrix:
    n = len(logits)

    def keep(i, totals):
        for line, total in enumerate(totals):
            kept[i, line] = total

    def undone(comb, grads, axis, i):
        totals = [kept[i, line] for line in range(n)]
        inverses = [1.0 / total for total in totals]
        both = list(zip(_dots(grads, comb, axis), inverses, strict=True))
        grads = _map(lambda line, g: (g - line[0]) * line[1], axis, both, grads)
        return _map(jnp.multiply, axis, totals, comb), grads

    def sweep(turn, state):
        s = sweeps - 1 - turn
        return undone(*undone(*state, _OLD, 2 * s), _NEW, 2 * s - 1)

    comb = _balanced(logits, sweeps, eps, keep)
    comb, grads = lax.fori_loop(0, sweeps - 1, sweep, (comb, grads))
    _, grads = undone(comb, grads, _OLD, 0)
    shares = _softmax(logits)
    dots = _dots(grads, shares, _NEW)
    return _map(lambda dot, p, g: p * (g - dot), _NEW, dots, shares, grads)
