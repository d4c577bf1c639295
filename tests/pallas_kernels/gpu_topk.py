"""Checks the top-k kernel on a GPU against XLA's sort: `python -m tests.pallas_kernels.gpu_topk`.

One line a case and configuration: whether every index is right, and whether a second call gives the
same. Exit status 1 where one is not. Tracing takes most of the time, and one core: numbers of
configurations as arguments (`gpu_topk 0`) leave the others to further processes.
"""

from __future__ import annotations

import concurrent.futures
import sys

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.topk import mosaic_gpu, topk, topk_blocks
from pallas_kernels.topk.mosaic_gpu import TuningConfig

CONFIGS = (None, TuningConfig(team=4, histogram=True), TuningConfig(warpgroups=5, tile=1024))
LENGTHS = (16384, 0, 1, 511, 512, 513, 2048, 2049, 4095, 5000, 3, 16383, 2047, -5, 99999, 700)
# rows, size, k, kind of scores; further arguments.
CASES = (
    (300, 16384, 512, "normal", {}),
    (300, 16384, 512, "few values", {}),
    (300, 16384, 512, "ascending", {}),
    (300, 16384, 512, "outliers", {}),
    (300, 16384, 512, "sample deceives", {}),
    (300, 16384, 512, "nothing", {}),
    (64, 16384, 512, "normal", {}),
    (64, 16384, 512, "few values", {}),
    (64, 16384, 512, "equal", {}),
    (64, 16384, 512, "ascending", {}),
    (64, 16384, 512, "sample deceives", {}),
    (16, 16384, 512, "normal", {"lengths": LENGTHS}),
    (16, 16381, 512, "few values", {"lengths": LENGTHS}),
    (16, 16382, 512, "normal", {"lengths": LENGTHS, "dtype": jnp.bfloat16}),
    (300, 131072, 512, "normal", {"order": "score"}),
    (300, 131072, 512, "ascending", {}),
    (200, 50000, 300, "normal", {"dtype": jnp.bfloat16, "order": "score"}),
    (8, 65536, 512, "few values", {}),
    (1, 2**20, 512, "normal", {}),
    (1, 2**20, 512, "sample deceives", {"order": "score"}),
    (3, 2**21, 4096, "normal", {}),
    (70000, 200, 64, "normal", {}),
    (150, 40000, 4096, "few values", {}),
    (150, 1000, 1, "normal", {}),
    (5, 130, 100, "few values", {"order": "score"}),
    (16, 131072, 700, "normal", {"block": 8, "lengths": tuple(8 * n for n in LENGTHS)}),
    (150, 131072, 2048, "few values", {"block": 8}),
    (16, 65536, 300, "normal", {"block": 16, "dtype": jnp.bfloat16}),
)


def scores_like(kind, rows, size, dtype):
    scores = jax.random.normal(jax.random.key(0), (rows, size), jnp.float32)
    place = jnp.arange(size)
    match kind:
        case "few values":
            scores = jnp.round(2 * scores) / 2
            scores = jnp.where(scores == 1, -jnp.inf, jnp.where(scores == 2, jnp.nan, scores))
            scores = jnp.where(place % 7 == 3, -scores, scores)  # -0.0 among them
        case "equal":
            scores = jnp.full_like(scores, -0.25)
        case "nothing":
            scores = jnp.full_like(scores, -jnp.inf)
        case "ascending":
            scores = jnp.sort(scores)
        case "outliers":
            scores = jnp.where(place % 900 == 5, 1e30 * scores, scores)
            scores = jnp.where(place % 4000 == 6, jnp.inf, scores)
        case "sample deceives":
            # Where the sample looks first there is nothing but large scores, elsewhere few.
            scores = jnp.where(place % 1000 < 3, 5 + scores, -1.0)
            scores = jnp.where(place < 128, 9.0, scores)
    return scores.astype(dtype)


def check(config, rows, size, k, kind, *, lengths=None, dtype=jnp.float32, order="index", block=1):
    """Compiles both forms; returns a function that runs them and describes the result."""
    scores = scores_like(kind, rows, size, dtype)
    lengths = None if lengths is None else jnp.asarray(lengths, jnp.int32)

    def kernel(scores):
        if block > 1:
            return mosaic_gpu.topk_blocks(scores, k, block, lengths, config=config)
        return mosaic_gpu.topk(scores, k, lengths, order=order, config=config)

    def sort(scores):
        if block > 1:
            return topk_blocks(scores, k, block, lengths, implementation="xla")
        return topk(scores, k, lengths, order=order, implementation="xla")

    kernel, sort = (jax.jit(f).lower(scores).compile() for f in (kernel, sort))

    def run():
        found, again, expected = (np.asarray(f(scores)) for f in (kernel, kernel, sort))
        name = f"{rows}x{size} k={k} {kind} {jnp.dtype(dtype).name} {order}"
        name += f" blocks of {block}" * (block > 1) + " lengths" * (lengths is not None)
        wrong, same = int((found != expected).sum()), bool((found == again).all())
        return wrong == 0 and same, f"{name}, {config}: {wrong} wrong, second call {same=}"

    return run


def main() -> int:
    print(jax.devices()[0].device_kind, "jax", jax.__version__)
    failed = 0
    configs = [CONFIGS[int(number)] for number in sys.argv[1:]] or CONFIGS
    with concurrent.futures.ThreadPoolExecutor() as pool:
        todo = [(config, *case[:4], case[4]) for config in configs for case in CASES]
        runs = [pool.submit(check, *case, **keywords) for *case, keywords in todo]
        for run in runs:
            right, line = run.result()()
            failed += not right
            print("ok   " if right else "WRONG", line, flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
