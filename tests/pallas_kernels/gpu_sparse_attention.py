"""Checks the attention kernels on a GPU: `python -m tests.pallas_kernels.gpu_sparse_attention`.

One line a case: the relative error of out against the float32 reference beside that of the bfloat16
reference, the largest error of lse, the relative error of the selected mass, and whether a second
call gives the same bits. Exit status 1 where something is off. `gpu_sparse_attention packed` checks
FP4 rows alone, `plain` the others: compiling takes most of the time, and one core.
"""

from __future__ import annotations

import concurrent.futures
import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import fp4
from pallas_kernels.sparse_attention import mosaic_gpu, reference, selected_mass
from pallas_kernels.sparse_attention.cases import Case, arguments

_FULL = {"heads": 64, "dim": 512, "window": 128}
# Odd lengths, padding between documents, empty rows, fewer rows than slots, every kind of index.
CASES = {
    "64 heads": Case(((60, 3, 9), (43,)), 82, 82, **_FULL, ratio=2, selected=130),
    "untidy": Case(((60, 3, 9), (43,)), 82, 82, **_FULL, ratio=1, selected=70, untidy=True),
    "16 heads": Case(((60, 3, 9),), 82, 82, 16, 512, 17, 2, selected=64, untidy=True),
    "128 heads": Case(((70, 3),), 77, 77, 128, 512, 128, 2, selected=64, untidy=True),
    "window alone": Case(((60, 3, 9),), 82, 82, **_FULL),
    "later chunk": Case(((145,), (90, 41)), 17, 145, **_FULL, ratio=2, selected=6),
    "one row": Case(((1,),), 1, 1, **_FULL, ratio=1, selected=3),
    "many rows": Case(((40000,),), 65, 40000, **_FULL, ratio=1, selected=512),
    "a million rows": Case(((2**20,),), 9, 2**20, **_FULL, ratio=1, selected=512),
    "decode": Case(((700,), (300,)), 1, 700, **_FULL, ratio=1, selected=512),
    "dim 256": Case(((60, 3, 9),), 82, 82, 8, 256, 128, 2, selected=130),
}


def _error(x, y) -> float:
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    return float(np.linalg.norm(x - y) / max(np.linalg.norm(y), 1e-30))


def check(name: str, packed: bool, shares: int = 0):
    """Compiles one case; returns a function that runs it: (whether it is right, its line).

    `shares` blocks share out a query's keys; 0: as many as the kernel itself chooses.
    """
    args, keywords = arguments(CASES[name], dtype=jnp.bfloat16)
    args = jax.tree.map(jnp.asarray, args)
    args = (*args[:6], args[6].at[1].set(jnp.inf).at[2].set(-jnp.inf))
    if packed:
        args = (*args[:4], fp4.pack(args[4], "fp4"), *args[5:])
    exact = jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x, args)
    window = keywords["window"]
    scale = args[0].shape[-1] ** -0.5
    config = mosaic_gpu.TuningConfig(104, 160, 88, shares=shares) if shares else None

    def compiled(function, *shapes):
        return jax.jit(function).lower(*shapes).compile()

    kernel = functools.partial(mosaic_gpu.forward, window=window, scale=scale, config=config)
    kernel = compiled(kernel, *args)
    plain = functools.partial(reference.sparse_attention, window=window)
    usual, right = compiled(plain, *args), compiled(plain, *exact)
    if args[4] is not None:
        mass = functools.partial(selected_mass, implementation="mosaic_gpu")
        lse = jax.ShapeDtypeStruct(args[0].shape[:3], jnp.float32)
        mass = compiled(mass, args[0], *args[4:6], lse)
        right_mass = compiled(reference.selected_mass, exact[0], *exact[4:6], lse)

    def run():
        out, lse = kernel(*args)
        again = kernel(*args)
        expected, expected_lse = right(*exact)
        error, allowed = _error(out, expected), _error(usual(*args)[0], expected)
        finite = np.isfinite(expected_lse)
        difference = np.asarray(lse)[finite] - np.asarray(expected_lse)[finite]
        lse_error = float(np.abs(difference).max())
        mass_error = 0.0
        if args[4] is not None:
            total = jnp.logaddexp(expected_lse, args[6])
            masses = mass(args[0], *args[4:6], total), right_mass(exact[0], *exact[4:6], total)
            mass_error = _error(*masses)
        same = all(np.array_equal(x, y) for x, y in zip((out, lse), again, strict=True))
        passed = (
            error <= min(1e-2, 1.5 * allowed)
            and lse_error < 1e-4
            and mass_error < 1e-2
            and same
            and bool((np.isfinite(lse) == finite).all())
        )
        return passed, (
            f"{name}, packed {packed:d}, shares {shares}: out {error:.1e} (bfloat16 {allowed:.1e}),"
            f" lse {lse_error:.1e}, mass {mass_error:.1e}, second call {same=}"
        )

    return run


def main() -> int:
    """Returns the exit status."""
    todo = [(name, packed, 0) for name in CASES for packed in (False, True)]
    todo = [(name, packed, n) for name, packed, n in todo if CASES[name].ratio or not packed]
    todo += [("decode", True, n) for n in (1, 5, 10)] + [("decode", False, n) for n in (1, 2)]
    kinds = [{"plain": False, "packed": True}[kind] for kind in sys.argv[1:]] or (False, True)
    print(jax.devices()[0].device_kind, "jax", jax.__version__)
    failed = 0
    with concurrent.futures.ThreadPoolExecutor() as pool:
        runs = [pool.submit(check, *case) for case in todo if case[1] in kinds]
        for run in runs:
            passed, line = run.result()()
            failed += not passed
            print("ok   " if passed else "WRONG", line, flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
