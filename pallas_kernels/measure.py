"""Timing of kernels, and the ceilings that they are held against."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class Variant:
    """One thing to time.

    Attributes:
        function: implementation (see `pallas_kernels.dispatch`; None for a rival) -> function of
            `arguments`, which is jitted.
        arguments: arrays on the device.
        flops: of the work, 0 where it is bound by memory.
        bytes: that have to cross to and from main memory, 0 where it is bound by arithmetic.
        tolerance: largest `error` against the reference that is allowed.
        repeats: times that the function does the work, where once takes no longer than to start it;
            flops and bytes are those of one.
        fp8: whether e4m3 represents the factors of its products exactly: the ceiling of its FLOPs
            is that of FP8.
    """

    function: Callable[[Any], Callable[..., Any]]
    arguments: tuple[Any, ...]
    flops: float
    bytes: float
    tolerance: float
    repeats: int = 1
    fp8: bool = False


@dataclasses.dataclass(frozen=True)
class Foreign:
    """A rival that is not a JAX function.

    Attributes:
        start: starts one call, and returns its result.
        wait: waits until a result is there.
        convert: result -> arrays as the reference has them.
        flops, bytes, tolerance, fp8: as for `Variant`.
    """

    start: Callable[[], Any]
    wait: Callable[[Any], Any]
    convert: Callable[[Any], Any]
    flops: float
    bytes: float
    tolerance: float
    fp8: bool = False


@dataclasses.dataclass(frozen=True)
class Benchmark:
    """What `benchmark(name)` of an op's cases returns.

    Attributes:
        reference: function of the same arguments that results are checked against.
        variants: name -> the op, in the dtypes and forms that it has.
        rivals: name -> other code for the same work.
    """

    reference: Callable[..., Any]
    variants: Mapping[str, Variant]
    rivals: Mapping[str, Variant | Foreign] = dataclasses.field(default_factory=dict)


class Ceilings(NamedTuple):
    """Measured on this device.

    Attributes:
        matmul: bfloat16 matrix product, FLOP/s.
        fp8: e4m3 matrix product, FLOP/s; without such units it is what XLA makes of it there.
        copy: read and write, bytes/s.
    """

    matmul: float
    fp8: float
    copy: float

    def floor(self, work: Variant | Foreign) -> float:
        """Seconds that the FLOPs or the bytes of `work` take, whichever are more."""
        # What e4m3 holds is exact in bfloat16 too.
        rate = max(self.fp8, self.matmul) if work.fp8 else self.matmul
        return max(work.flops / rate, work.bytes / self.copy)


def seconds(
    function: Callable[..., Any],
    *arguments: Any,
    budget: float = 2.0,
    wait: Callable[[Any], Any] = jax.block_until_ready,
) -> float:
    """Median time of a call of a compiled function.

    Calls are timed in groups long enough (20 ms) that starting and waiting for them does not count.

    Args:
        function: compiled, on any arguments.
        *arguments: of it.
        budget: seconds to spend, beyond the two calls that it takes to warm up.
        wait: waits for a result.
    """
    wait(function(*arguments))
    start = time.perf_counter()
    wait(function(*arguments))
    once = time.perf_counter() - start
    group = max(1, min(100, round(20e-3 / max(once, 1e-6))))
    samples = []
    spent = 0.0
    while len(samples) < 3 or (spent < budget and len(samples) < 30):
        start = time.perf_counter()
        for _ in range(group):
            result = function(*arguments)
        wait(result)
        elapsed = time.perf_counter() - start
        samples.append(elapsed / group)
        spent += elapsed
    return statistics.median(samples)


@contextlib.contextmanager
def side_by_side(lock: str | None, *, alone: bool) -> Iterator[None]:
    """For processes that compile side by side and are timed one at a time.

    Args:
        lock: file that all of them name (`fcntl.flock`); None: there are no others.
        alone: wait until nobody compiles, and keep the others waiting: for timing. False: for
            compiling.
    """
    if lock is None:
        yield
        return
    with open(lock, "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        yield


def repeated(function: Callable[..., Any], repeats: int) -> Callable[..., Any]:
    """A function that calls another several times, one after the other, and returns the last."""
    if repeats == 1:
        return function

    def call(*arguments):
        def again(_, result):
            return function(*jax.lax.optimization_barrier((arguments, result))[0])

        return jax.lax.fori_loop(1, repeats, again, function(*arguments))

    return call


def ceilings(budget: float = 2.0) -> Ceilings:
    """Measures each in about `budget` seconds; smaller sizes on CPU, to try things out."""
    cpu = jax.default_backend() == "cpu"
    n = 512 if cpu else 8192
    a, b = (jax.random.normal(key, (n, n), jnp.bfloat16) for key in jax.random.split(_key()))
    product = jax.jit(lambda a, b: a @ b)
    small_a, small_b = (x.astype(jnp.float8_e4m3fn) for x in (a, b))
    x = jax.random.normal(_key(), (2**22 if cpu else 2**28,), jnp.float32)
    copy = jax.jit(lambda x: x + 1)
    return Ceilings(
        2 * n**3 / seconds(product, a, b, budget=budget),
        2 * n**3 / seconds(jax.jit(rows_by_rows), small_a, small_b, budget=budget),
        8 * x.size / seconds(copy, x, budget=budget),
    )


def rows_by_rows(a: jax.Array, b: jax.Array) -> jax.Array:
    """a b^T in bfloat16: what tensor cores take in e4m3 without a transposition before."""
    dimensions = (((1,), (1,)), ((), ()))
    return jax.lax.dot_general(a, b, dimensions, preferred_element_type=jnp.bfloat16)


def error(result: Any, expected: Any) -> float:
    """Norm of the difference over that of what is expected; the largest over all leaves."""

    @jax.jit
    def one(x, y):
        x, y = x.astype(jnp.float32), y.astype(jnp.float32)
        return jnp.sqrt(jnp.sum(jnp.square(x - y)) / (jnp.sum(jnp.square(y)) + 1e-30))

    return float(np.max([float(e) for e in jax.tree.leaves(jax.tree.map(one, result, expected))]))


def _key() -> jax.Array:
    return jax.random.key(1)
