"""The indexer's kernels on a Hopper GPU against float32, one line a case; run by hand.

    python -m tests.pallas_kernels.gpu_indexer

Scores are compared with those of NumPy in float64, selections with what the reference selects from
integers, whose scores are exact in any order, and gradients with the reference in float32, beside
the reference's own error in bfloat16. Exit status 1 where a case fails. Arguments name the cases
to run by how they begin (`gpu_indexer select recall`).
"""

from __future__ import annotations

import functools
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from pallas_kernels import fp4, indexer
from pallas_kernels.indexer.cases import Case, arguments


def data(rng, batch, queries, heads, entries):
    """Queries, weights and keys of widely different magnitudes."""
    q = rng.normal(size=(batch, queries, heads, 128))
    w = rng.normal(size=(batch, queries, heads)).astype(np.float32)
    k = rng.normal(size=(batch, entries, 128)) * np.exp2(
        rng.integers(-3, 4, size=(batch, entries, 1))
    )
    return q.astype(ml_dtypes.bfloat16), w, k.astype(ml_dtypes.bfloat16)


def on_grid(x):
    """`x` rounded to the format "mxfp4"."""
    return np.asarray(fp4.fake_quantize(jnp.asarray(x), "mxfp4"))


def numpy_scores(q, w, k):
    """Scores of every entry in float64."""
    q, k = q.astype(np.float64), k.astype(np.float64)
    result = np.zeros((*w.shape[:2], k.shape[1]))
    for h in range(q.shape[2]):
        dots = np.einsum("btd,bgd->btg", q[:, :, h], k, optimize=True)
        result += w[:, :, h, None].astype(np.float64) * np.maximum(dots, 0)
    return result


def relative(result, expected):
    """Norm of the difference over that of what is expected."""
    result, expected = (np.asarray(x, np.float64) for x in (result, expected))
    return float(np.linalg.norm(result - expected) / max(np.linalg.norm(expected), 1e-30))


def scores_case(rng, heads, queries, entries, kind):
    """All scores, with ranges that begin and end anywhere, some of them empty."""
    q, w, k = data(rng, 2, queries, heads, entries)
    keys = k
    if kind != "bfloat16":
        q, k = on_grid(q), on_grid(k)
        keys = np.asarray(fp4.pack(jnp.asarray(k), "mxfp4")) if kind == "packed" else k
    lo = rng.integers(0, entries + 1, size=(2, queries)).astype(np.int32)
    hi = rng.integers(0, entries + 1, size=(2, queries)).astype(np.int32)
    lo[0, 0], hi[0, 0] = 0, entries
    run = functools.partial(indexer.scores, implementation="mosaic_gpu", on_grid=kind != "bfloat16")
    run = jax.jit(run)
    result = np.asarray(run(q, w, keys, lo, hi))
    j = np.arange(entries)
    visible = (j >= lo[..., None]) & (j < hi[..., None])
    error = relative(result[visible], numpy_scores(q, w, k)[visible])
    same = np.array_equal(result, run(q, w, keys, lo, hi))
    hidden = bool((result[~visible] == -np.inf).all())
    return error < 1e-5 and same and hidden, f"error {error:.1e}, again equal {same}"


def listed_case(rng, heads, entries, listed, kind, queries=9):
    """Scores of listed entries and their gradients: duplicates, -1, out of range, an empty row."""
    q, w, k = data(rng, 1, queries, heads, entries)
    indices = rng.integers(-2, entries + 2, size=(1, queries, listed)).astype(np.int32)
    indices[0, 3] = -1
    indices[0, 4] = indices[0, 4, 0]
    valid = (indices >= 0) & (indices < entries)
    keys = k
    if kind == "packed":
        k = on_grid(k)
        keys = np.asarray(fp4.pack(jnp.asarray(k), "mxfp4"))
    run = jax.jit(functools.partial(indexer.scores_at, implementation="mosaic_gpu"))
    result = run(q, w, keys, indices)
    every = np.take_along_axis(numpy_scores(q, w, k), np.where(valid, indices, 0), axis=-1)
    error = relative(result, np.where(valid, every, 0))
    same = np.array_equal(result, run(q, w, keys, indices))
    passed, text = error < 1e-5 and same, f"error {error:.1e}, again equal {same}"
    if kind == "packed":
        return passed, text
    g = rng.normal(size=indices.shape).astype(np.float32)

    def gradients(implementation, *inputs):
        scores = functools.partial(indexer.scores_at, implementation=implementation)
        return jax.vjp(lambda *a: scores(*a, indices), *inputs)[1](g)

    ours = jax.jit(functools.partial(gradients, "mosaic_gpu"))(q, w, k)
    other = jax.jit(functools.partial(gradients, "xla"))
    exact = other(q.astype(np.float32), w, k.astype(np.float32))
    for name, a, b, x in zip(("dq", "dw", "dk"), ours, other(q, w, k), exact, strict=True):
        error, allowed = relative(a, x), max(1.5 * relative(b, x), 1e-6)
        passed &= error <= 1e-2
        text += f", {name} {error:.1e} of {allowed:.1e}"
        if name == "dq":
            # One entry listed again and again: terms cancel that are rounded one by one.
            a, b, x = (np.delete(np.asarray(y, np.float64), 4, axis=1) for y in (a, b, x))
            error, allowed = relative(a, x), 1.5 * relative(b, x)
            text += f" (without repeated entries {error:.1e} of {allowed:.1e})"
        passed &= error <= allowed
    return passed, text


def select_case(documents, top_k, pool, ratio, packed, promise):
    """Indices, pool, and indices from the pool, where scores tie often."""
    tokens = max(sum(lengths) + 8 * len(lengths) for lengths in documents)
    case = Case(documents, tokens, tokens, ratio, top_k, heads=32, dim=128, pool=pool)
    q, w, k, lo, hi = arguments(case, dtype=ml_dtypes.bfloat16, ties=True)
    keys = np.asarray(fp4.pack(jnp.asarray(k), "mxfp4")) if packed else k

    def both(implementation, keys):
        keywords = dict(top_k=top_k, implementation=implementation, on_grid=promise)
        indices, made = indexer.select(q, w, keys, lo, hi, make_pool=pool, **keywords)
        if made is None:
            return [indices]
        return [indices, made.blocks, indexer.select(q, w, keys, lo, hi, pool=made, **keywords)[0]]

    ours = jax.jit(functools.partial(both, "mosaic_gpu"))(keys)
    expected = jax.jit(functools.partial(both, "xla"))(k)
    equal = [bool(np.array_equal(a, b)) for a, b in zip(ours, expected, strict=True)]
    return all(equal), f"equal {equal}"


def recall_case(rng, entries):
    """Selections by FP8 from normal values on the grid against those of float64."""
    q, w, k = data(rng, 1, 16, 32, entries)
    q, k = on_grid(q), on_grid(k)
    lo, hi = np.zeros((1, 16), np.int32), np.full((1, 16), entries, np.int32)
    run = functools.partial(indexer.select, top_k=512, on_grid=True, implementation="mosaic_gpu")
    chosen = np.asarray(jax.jit(run)(q, w, k, lo, hi)[0])[0]
    scores = numpy_scores(q, w, k)[0]
    best = np.argsort(-scores, axis=-1, kind="stable")[:, :512]
    recall = np.mean([np.isin(a, b).mean() for a, b in zip(chosen, best, strict=True)])
    return recall >= 0.999, f"recall {recall:.5f}"


def cases(rng):
    """(name, function) of every case."""
    for heads, queries, entries in [(8, 3, 1), (16, 17, 77), (32, 9, 1000), (32, 130, 4096)]:
        for kind in ("bfloat16", "float8", "packed"):
            name = f"scores, {heads} heads, {queries} queries, {entries} entries, {kind}"
            yield name, functools.partial(scores_case, rng, heads, queries, entries, kind)
    for heads, entries, listed in [(8, 1, 1), (16, 300, 64), (32, 2**20, 130), (64, 500, 512)]:
        for kind in ("bfloat16", "packed"):
            name = f"scores_at, {heads} heads, {listed} of {entries} entries, {kind}"
            yield name, functools.partial(listed_case, rng, heads, entries, listed, kind)
    # More than a grid has along the axes that are not its last.
    many = functools.partial(listed_case, rng, 8, 100, 64, "bfloat16", queries=66_000)
    yield "scores_at, 66000 queries", many
    for name, *arguments_of in [
        ("documents, ratio 2", ((150, 3, 90), (261,)), 20, None, 2, False, False),
        ("pool of aligned blocks, FP8", ((160, 8, 90), (261,)), 20, (7, 8), 1, False, True),
        ("pool at any entry, packed", ((44, 3, 92), (147,)), 20, (5, 8), 2, True, False),
        ("pool of other blocks", ((150, 3, 90), (261,)), 20, (5, 6), 1, False, False),
        ("more than there is", ((40,),), 64, (9, 8), 1, False, False),
    ]:
        yield f"select, {name}", functools.partial(select_case, *arguments_of)
    for entries in (4096, 131072):
        yield f"recall of FP8, {entries} entries", functools.partial(recall_case, rng, entries)


def main() -> int:
    """Returns the exit status."""
    device = jax.devices()[0]
    print(f"{device.device_kind}, jax {jax.__version__}")
    failed = 0
    for name, case in cases(np.random.default_rng(0)):
        if not name.startswith(tuple(sys.argv[1:]) or ""):
            continue
        passed, text = case()
        failed += not passed
        print(f"{'ok    ' if passed else 'FAILED'} {name}: {text}", flush=True)
    print(f"{failed} failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
