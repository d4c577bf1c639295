"""Named argument sets of sparse_attention, for tests and benchmarks."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import tpu
from pallas_kernels.measure import Benchmark
from pallas_kernels.packed_rows import ranges
from pallas_kernels.sparse_attention import (
    Fp4Table,
    backward_cases,
    forward_cases,
    mosaic_tpu,
    mosaic_tpu_backward,
    mosaic_tpu_mass,
)
from pallas_kernels.tuning import Tuning


@dataclasses.dataclass(frozen=True)
class Case:
    """Shapes of one call.

    Attributes:
        documents: lengths of the documents of each batch row; there are as many rows.
        queries: T, the last T tokens of the row are asked about.
        tokens: S, length of the row, at least T. S > T is decoding or a later chunk of a prefill.
        heads: H.
        dim: D.
        window: W.
        ratio: tokens per main row; 0 for a layer without main rows.
        selected: K; 0 for all visible main rows (no indices).
        untidy: indices out of order, repeated, and outside of the rows among them.
    """

    documents: tuple[tuple[int, ...], ...]
    queries: int
    tokens: int
    heads: int = 3
    dim: int = 32
    window: int = 5
    ratio: int = 0
    selected: int = 0
    untidy: bool = False


# Small shapes: odd lengths, documents that end inside a group, padding between them and at the end.
CASES = {
    "window_only": Case(((19, 3, 9), (43,)), queries=43, tokens=43),
    "packed": Case(((19, 3, 9), (43,)), queries=43, tokens=43, ratio=2, selected=6),
    "untidy": Case(((19, 3, 9), (43,)), queries=43, tokens=43, ratio=2, selected=6, untidy=True),
    "few_rows": Case(((7,), (9,)), queries=9, tokens=9, ratio=2, selected=11),
    "every_row": Case(((19, 3, 9), (43,)), queries=43, tokens=43, ratio=1),
    "decode": Case(((128,), (101,)), queries=1, tokens=128, window=128, ratio=1, selected=6),
    "later_chunk": Case(
        ((145,), (90, 41)), queries=17, tokens=145, window=128, ratio=2, selected=6
    ),
}

BENCHMARKS = {**forward_cases.BENCHMARKS, **backward_cases.BENCHMARKS}


def arguments(case: Case, dtype: Any = np.float32, seed: int = 0) -> tuple[tuple, dict[str, Any]]:
    """Random arguments of one case.

    Args:
        case: the shapes.
        dtype: of queries and rows (anything NumPy casts to, `ml_dtypes.bfloat16` too).
        seed: of the values and the selection.

    Returns:
        Positional and keyword arguments of `sparse_attention`, as NumPy arrays.
    """
    rng = np.random.default_rng(seed)
    batch, asked = len(case.documents), slice(case.tokens - case.queries, None)
    visible = [ranges(d, case.tokens, case.window, max(case.ratio, 1)) for d in case.documents]
    window_lo, window_hi, main_lo, main_hi = (
        np.stack([r[i][asked] for r in visible]) for i in range(4)
    )

    def normal(*shape):
        return rng.normal(size=shape).astype(dtype)

    q = normal(batch, case.queries, case.heads, case.dim)
    window_rows = normal(batch, case.tokens, case.dim)
    sink = rng.normal(size=case.heads).astype(np.float32)
    main_rows, indices, keywords = None, None, {"window": case.window}
    if case.ratio:
        entries = case.tokens // case.ratio
        main_rows = normal(batch, entries, case.dim)
        if case.selected:
            indices = _choose(rng, main_lo, main_hi, case.selected)
            if case.untidy:
                # Once in a while: a row of another query, a repetition, and what is no row at all.
                odd = rng.choice([0, entries - 1, entries, entries + 7, -1, -5], size=indices.shape)
                indices = np.where(rng.random(indices.shape) < 0.4, odd, indices).astype(np.int32)
                indices = rng.permuted(indices, axis=-1)
        else:
            keywords |= {"main_lo": main_lo, "main_hi": main_hi}
    return (q, window_rows, window_lo, window_hi, main_rows, indices, sink), keywords


def _choose(rng, lo, hi, count: int) -> np.ndarray:
    """Distinct visible entries of each query, ascending, -1 at the end."""
    result = np.full((*lo.shape, count), -1, np.int32)
    for at in np.ndindex(lo.shape):
        visible = max(int(hi[at] - lo[at]), 0)
        chosen = rng.choice(visible, size=min(count, visible), replace=False)
        result[at][: len(chosen)] = lo[at] + np.sort(chosen)
    return result


def tpu_accounts() -> dict[str, tpu.Account]:
    """What the TPU kernels take: A1, the backward of its first half, a decode step."""

    def shape(*sizes, dtype=jnp.int32):
        return jax.ShapeDtypeStruct(sizes, dtype)

    def call(case, sequences=1, main_rows=None):
        rows = shape(sequences, case.tokens, case.dim, dtype=jnp.bfloat16)
        bound = shape(sequences, case.queries)
        return (
            shape(sequences, case.queries, case.heads, case.dim, dtype=jnp.bfloat16),
            rows,
            bound,
            bound,
            rows if main_rows is None else main_rows,
            shape(sequences, case.queries, case.selected),
            shape(case.heads, dtype=jnp.float32),
        )

    case = Case(((8192,),), 4096, 8192, 64, 512, window=128, ratio=1, selected=512)
    decode = dataclasses.replace(case, queries=1, tokens=case.window + 1)
    arguments = call(case)
    q, *rest = call(dataclasses.replace(case, queries=case.queries // 2))
    lse = shape(*q.shape[:3], dtype=jnp.float32)
    keywords = {"window": case.window, "scale": case.dim**-0.5}
    pool = 128 * 32768
    table = Fp4Table(shape(1, pool // 2, 128), shape(1, pool // 16, 128))
    forward = functools.partial(mosaic_tpu.forward, **keywords)
    backward = functools.partial(mosaic_tpu_backward.backward, **keywords)
    mass = functools.partial(mosaic_tpu_mass.forward, scale=keywords["scale"])
    stated = {
        "A1": tpu.accounts_of(forward, *arguments),
        "A1/2": tpu.accounts_of(backward, q, *rest, q, lse, q, lse),
        "A1/2 mass": tpu.accounts_of(mass, q, *rest[3:5], lse),
        "decode, 128 x 1, Fp4Table": tpu.accounts_of(forward, *call(decode, 128, table)),
    }
    return {
        what if len(kernels) == 1 else f"{what}, {name.removeprefix('sparse_attention_')}": account
        for what, kernels in stated.items()
        for name, account in kernels
    }


def benchmark(name: str) -> Benchmark:
    """See `forward_cases`, and `backward_cases` for A6 and its like."""
    cases = forward_cases if name in forward_cases.BENCHMARKS else backward_cases
    return cases.benchmark(name)


def tuning(name: str) -> Tuning | None:
    """See `forward_cases`; there is nothing to tune in the backward."""
    return forward_cases.tuning(name) if name in forward_cases.BENCHMARKS else None
