"""Named argument sets of topk, for tests and benchmarks."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.measure import Benchmark, Variant, repeated
from pallas_kernels.topk import mosaic_gpu, mosaic_tpu, topk, topk_blocks
from pallas_kernels.topk.mosaic_gpu import TABLE, TuningConfig
from pallas_kernels.tpu import Account
from pallas_kernels.tuning import Tuning

# Of a call that takes less time than it takes to start one.
_REPEATS = 50


@dataclasses.dataclass(frozen=True)
class Case:
    """Shapes of one call.

    Attributes:
        shape: of the scores.
        k: how many are selected.
        lengths: whether rows have lengths of their own.
        block: scores of a block, where blocks are selected.
    """

    shape: tuple[int, ...]
    k: int
    lengths: bool = False
    block: int = 1


CASES = {
    "plain": Case((3, 5, 37), k=6),
    "lengths": Case((4, 37), k=6, lengths=True),
    "one_row": Case((37,), k=37),
    "more_than_all": Case((4, 5), k=9, lengths=True),
}

# Sets of indices, as the indexer asks for them. C5 selects blocks of 8.
BENCHMARKS = {
    "small": Case((256, 2048), k=32),
    "C1": Case((2048, 131072), k=512),
    "C3": Case((4096, 16384), k=512),
    "C4": Case((1, 2**20), k=512),
    "C5": Case((256, 2**20), k=2048, block=8),
    "C6_8": Case((8, 65536), k=512),
    "C6_64": Case((64, 65536), k=512),
}


def arguments(case: Case, seed: int = 0, ties: bool = False):
    """Scores, k and lengths of one case; with `ties`, few values, -inf and -0.0 among them."""
    rng = np.random.default_rng(seed)
    scores = rng.normal(size=case.shape).astype(np.float32)
    if ties:
        scores = rng.choice(np.float32([-np.inf, -1, -0.0, 0.0, 2]), size=case.shape)
    lengths = None
    if case.lengths:
        lengths = rng.integers(0, case.shape[-1] + 1, size=case.shape[:-1]).astype(np.int32)
    return scores, case.k, lengths


def scores(name: str) -> jax.Array:
    """Normal scores of a benchmark."""
    return jax.random.normal(jax.random.key(0), BENCHMARKS[name].shape, jnp.float32)


def _repeats(name: str) -> int:
    rows, size = BENCHMARKS[name].shape
    return _REPEATS if rows * size <= 64 * 65536 else 1


def benchmark(name: str) -> Benchmark:
    """The selection as a set, in increasing order of index; bytes: scores read, indices written."""
    case = BENCHMARKS[name]
    array = scores(name)

    def select(scores, implementation):
        if case.block > 1:
            return topk_blocks(scores, case.k, case.block, implementation=implementation)
        return topk(scores, case.k, order="index", implementation=implementation)

    def largest(scores):
        return jnp.sort(jax.lax.top_k(scores, case.k)[1], axis=-1)

    def variant(function):
        return Variant(
            lambda implementation: repeated(function(implementation), _repeats(name)),
            (array,),
            flops=0.0,
            bytes=float(array.nbytes + 4 * case.shape[0] * case.k),
            tolerance=0.0,
            repeats=_repeats(name),
        )

    return Benchmark(
        reference=functools.partial(select, implementation="xla"),
        variants={
            "float32": variant(lambda name: functools.partial(select, implementation=name)),
        },
        rivals={} if case.block > 1 else {"lax.top_k": variant(lambda _: largest)},
    )


def tpu_accounts() -> dict[str, Account]:
    """What the TPU kernel takes for the benchmarks that it does in one round."""
    return {
        f"{name}, {case.k} of {' x '.join(map(str, case.shape))}": mosaic_tpu.account(
            *case.shape, case.k, case.block
        )
        for name, case in BENCHMARKS.items()
        if name in ("C1", "C3", "C5", "C6_64")
    }


def tuning(name: str) -> Tuning:
    """Tiles, segments and warpgroups for one benchmark."""
    case = BENCHMARKS[name]
    rows, size = case.shape[0], case.shape[1] // case.block

    def function(config):
        if case.block > 1:
            return lambda scores: mosaic_gpu.topk_blocks(scores, case.k, case.block, config=config)
        return lambda scores: mosaic_gpu.topk(scores, case.k, order="index", config=config)

    return Tuning(
        TABLE,
        mosaic_gpu.shape_class(rows, size, case.k, case.block),
        [
            TuningConfig(tile=tile, histogram=histogram, **{field: number})
            for field, number in (("team", 1), ("team", 4), ("warpgroups", 5))
            for tile in (1024, 2048)
            for histogram in (False, True)
        ],
        lambda config: repeated(function(config), _repeats(name)),
        (scores(name),),
        repeats=_repeats(name),
    )
