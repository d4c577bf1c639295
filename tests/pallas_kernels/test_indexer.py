"""The indexer against a NumPy selection with the same ties, recorded pools, and itself unpacked."""

from pathlib import Path

import chex
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import fp4, indexer
from pallas_kernels.indexer.cases import CASES, arguments
from pallas_kernels.indexer.reference import pool_from_scores
from pallas_kernels.packed_rows import document_starts

GOLDEN = Path(__file__).parents[1] / "golden" / "unit" / "candidate_blocks.npz"
POOL_CASES = [name for name, case in CASES.items() if case.pool]


def numpy_scores(q, w, k):
    dots = np.einsum("bthd,bgd->bthg", q.astype(np.float64), k.astype(np.float64))
    return np.einsum("bthg,bth->btg", np.maximum(dots, 0), w.astype(np.float64))


def numpy_blocks(scores, blocks, size):
    """Blocks of the pool of one query from the scores of its visible entries."""
    if not len(scores):
        return []
    best = [max(scores[i : i + size]) for i in range(0, len(scores), size)]
    best[-1] = np.inf
    order = np.argsort(-np.asarray(best), kind="stable")[:blocks]
    return sorted(int(b) for b in order if best[b] > -np.inf)


def numpy_topk(scores, entries, count):
    """The `count` of `entries` with the largest scores, the first among equals, ascending."""
    entries = np.asarray(entries, int)
    order = np.argsort(-scores[entries], kind="stable")[:count]
    return sorted(int(e) for e in entries[order])


def padded(values, count):
    return np.asarray(list(values) + [-1] * (count - len(values)), np.int32)


def numpy_select(q, w, k, lo, hi, top_k, pool):
    """Indices from all entries, the pool's blocks, and indices from the pool alone."""
    scores = numpy_scores(q, w, k)
    blocks, size = pool or (1, 1)
    everywhere = np.zeros((*lo.shape, top_k), np.int32)
    pools = np.zeros((*lo.shape, blocks), np.int32)
    inside = np.zeros_like(everywhere)
    for at in np.ndindex(lo.shape):
        first, last = int(lo[at]), int(hi[at])
        everywhere[at] = padded(numpy_topk(scores[at], range(first, last), top_k), top_k)
        chosen = numpy_blocks(scores[at][first:last], blocks, size)
        pools[at] = padded(chosen, blocks)
        entries = [
            j for b in chosen for j in range(first + b * size, min(first + b * size + size, last))
        ]
        inside[at] = padded(numpy_topk(scores[at], entries, top_k), top_k)
    return everywhere, pools, inside


def select_all(case, args, chunk=None):
    """Indices from all entries, the pool, and indices from the pool alone, in one program."""

    def both(q, w, k, lo, hi):
        keywords = {"top_k": case.top_k, "chunk": chunk}
        indices, pool = indexer.select(q, w, k, lo, hi, make_pool=case.pool, **keywords)
        if pool is None:
            return indices, None, None
        return indices, pool, indexer.select(q, w, k, lo, hi, pool=pool, **keywords)[0]

    return jax.jit(both)(*args)


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_select_equals_numpy(name, ties):
    case = CASES[name]
    args = arguments(case, ties=ties)
    everywhere, pools, inside = numpy_select(*args, case.top_k, case.pool)
    indices, pool, from_pool = select_all(case, args)
    np.testing.assert_array_equal(indices, everywhere)
    if case.pool:
        assert pool.size == case.pool[1]
        np.testing.assert_array_equal(pool.blocks, pools)
        np.testing.assert_array_equal(from_pool, inside)


def test_cases_cover_what_they_claim():
    args = arguments(CASES["pool"], ties=True)
    scores = numpy_scores(*args[:3])
    assert len(np.unique(scores)) < 30, "many exact ties"
    everywhere, pools, inside = numpy_select(*args, CASES["pool"].top_k, CASES["pool"].pool)
    assert (everywhere != inside).any(), "the pool restricts"
    assert (args[3] % CASES["pool"].pool[1] != 0).any(), "blocks that are not aligned to the row"
    assert (args[3] >= args[4]).any(), "padding"


@pytest.mark.parametrize("chunk", [1, 7])
def test_chunks_change_nothing(chunk):
    case = CASES["pool"]
    args = arguments(case, ties=True)
    chex.assert_trees_all_equal(select_all(case, args, chunk), select_all(case, args))


@pytest.mark.parametrize("name", ["packed", "pool", "pool_of_pairs"])
def test_packed_documents_select_what_they_select_alone(name):
    case = CASES[name]
    q, w, k, lo, hi = arguments(case, ties=True)
    packed = select_all(case, (q, w, k, lo, hi))
    for row, lengths in enumerate(case.documents):
        for start, length in zip(document_starts(lengths), lengths, strict=True):
            tokens = slice(start, start + length)
            first = start // case.ratio
            entries = slice(first, first + length // case.ratio)
            alone = select_all(
                case,
                (
                    q[row : row + 1, tokens],
                    w[row : row + 1, tokens],
                    k[row : row + 1, entries],
                    lo[row : row + 1, tokens] - first,
                    hi[row : row + 1, tokens] - first,
                ),
            )
            for ours, theirs in ((packed[0], alone[0]), (packed[2], alone[2])):
                if ours is None:
                    continue
                shifted = np.where(theirs[0] >= 0, theirs[0] + first, -1)
                np.testing.assert_array_equal(ours[row, tokens], shifted)
            if case.pool:
                np.testing.assert_array_equal(packed[1].blocks[row, tokens], alone[1].blocks[0])


@pytest.mark.parametrize("number", range(4))
def test_recorded_pools(number):
    golden = np.load(GOLDEN)
    logits, visible = golden[f"case{number}.logits"], golden[f"case{number}.visible"]
    blocks, size = (int(x) for x in golden[f"case{number}.params"])
    pool = pool_from_scores(logits[None], np.zeros_like(visible)[None], visible[None], blocks, size)
    kept = (np.asarray(pool.blocks)[0, :, :, None] == np.arange(-(-logits.shape[1] // size))).any(1)
    mask = np.repeat(kept, size, axis=-1)[:, : logits.shape[1]]
    np.testing.assert_array_equal(mask, golden[f"case{number}.mask"])


make_pool_of = jax.jit(pool_from_scores, static_argnums=(3, 4))


@hypothesis.settings(max_examples=40, deadline=None)
@hypothesis.given(
    data=st.data(),
    shape=st.sampled_from([(1, 1), (2, 3), (3, 8), (20, 4)]),
    seed=st.integers(0, 2**31),
)
def test_pool_of_any_ranges(data, shape, seed):
    entries, queries = 21, 5
    rng = np.random.default_rng(seed)
    lo = np.asarray(data.draw(st.lists(st.integers(0, entries), min_size=5, max_size=5)), np.int32)
    hi = np.asarray(data.draw(st.lists(st.integers(0, entries), min_size=5, max_size=5)), np.int32)
    scores = rng.integers(-2, 3, size=(queries, entries)).astype(np.float32)
    j = np.arange(entries)
    scores[(j < lo[:, None]) | (j >= hi[:, None])] = -np.inf
    pool = make_pool_of(scores[None], lo[None], hi[None], *shape)
    for t in range(queries):
        expected = padded(numpy_blocks(scores[t, lo[t] : hi[t]], *shape), shape[0])
        np.testing.assert_array_equal(pool.blocks[0, t], expected)


def test_pool_reads_no_key_outside_of_it():
    case = CASES["decode"]
    q, w, k, lo, hi = arguments(case)
    _, pool, expected = select_all(case, (q, w, k, lo, hi))
    poisoned = np.full_like(k, np.nan)
    for row in range(len(k)):
        for block in np.asarray(pool.blocks)[row, 0]:
            entries = slice(lo[row, 0] + block * pool.size, lo[row, 0] + (block + 1) * pool.size)
            poisoned[row, entries] = k[row, entries]
    indices, none = indexer.select(q, w, poisoned, lo, hi, top_k=case.top_k, pool=pool)
    assert none is None
    np.testing.assert_array_equal(indices, expected)


def test_keys_of_other_documents_do_not_matter():
    case = CASES["pool"]
    q, w, k, lo, hi = arguments(case)
    start = document_starts(case.documents[0])[1]
    poisoned = k.copy()
    poisoned[0, start:] = np.nan
    chosen = select_all(case, (q, w, k, lo, hi))
    again = select_all(case, (q, w, poisoned, lo, hi))
    for ours, theirs in zip(jax.tree.leaves(chosen), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(ours[0, :start], theirs[0, :start])


def test_signed_zero_scores_tie():
    # One head of negative weight and no positive dot product: every score is -0.0 or 0.0.
    q = -np.ones((1, 1, 1, 32), np.float32)
    k = np.ones((1, 6, 32), np.float32) * np.asarray([1, 0, 1, 0, 1, 0])[:, None]
    for weight in (-1.0, 1.0):
        w = np.full((1, 1, 1), weight, np.float32)
        lo, hi = np.asarray([[1]]), np.asarray([[6]])
        indices, _ = indexer.select(q, w, k.astype(np.float32), lo, hi, top_k=3)
        np.testing.assert_array_equal(indices[0, 0], [1, 2, 3])


@pytest.mark.parametrize("dtype, tolerance", [(np.float32, 1e-5), (jnp.bfloat16, 1e-5)])
def test_scores_accumulate_in_float32(dtype, tolerance):
    q, w, k, lo, hi = arguments(CASES["packed"], dtype=dtype)
    expected = numpy_scores(q, w, k)
    j = np.arange(k.shape[1])
    expected[(j < lo[..., None]) | (j >= hi[..., None])] = -np.inf
    scores = indexer.scores(q, w, k, lo, hi, chunk=16)
    assert scores.dtype == jnp.float32
    np.testing.assert_allclose(scores, expected, atol=tolerance * 10, rtol=tolerance)


@pytest.mark.parametrize("chunk", [None, 7])
def test_scores_at_and_its_gradients(chunk):
    case = CASES["packed"]
    q, w, k, lo, hi = arguments(case)
    indices, _ = indexer.select(q, w, k, lo, hi, top_k=case.top_k)
    indices = np.asarray(indices).copy()
    indices[0, 0] = k.shape[1] + 3  # out of range, like -1
    valid = (indices >= 0) & (indices < k.shape[1])
    assert not valid.all() and valid.any()
    weight = np.random.default_rng(1).normal(size=indices.shape).astype(np.float32)

    def plain(q, w, k):
        dots = jnp.einsum("bthd,bgd->bthg", q, k, precision="highest")
        all_scores = (w[..., None] * jnp.maximum(dots, 0)).sum(2)
        chosen = jnp.take_along_axis(all_scores, np.where(valid, indices, 0), axis=-1)
        return jnp.where(valid, chosen, 0)

    def ours(q, w, k):
        return indexer.scores_at(q, w, k, indices, chunk=chunk)

    args = [jnp.asarray(x) for x in (q, w, k)]
    np.testing.assert_allclose(ours(*args), plain(*args), atol=1e-5)
    grads = [
        jax.jit(jax.grad(lambda *a, f=f: (f(*a) * weight).sum(), argnums=(0, 1, 2)))(*args)
        for f in (ours, plain)
    ]
    chex.assert_trees_all_close(*grads, atol=2e-5)


def test_scores_at_minus_one_is_zero_without_gradient():
    q, w, k, _, _ = arguments(CASES["packed"])
    indices = np.full((*q.shape[:2], 3), -1, np.int32)
    value, grads = jax.value_and_grad(
        lambda *a: (indexer.scores_at(*a, indices) ** 2 + indexer.scores_at(*a, indices)).sum(),
        argnums=(0, 1, 2),
    )(*(jnp.asarray(x) for x in (q, w, k)))
    assert value == 0
    assert all(not np.any(g) for g in grads)


def test_select_passes_no_gradient():
    case = CASES["few_entries"]
    q, w, k, lo, hi = (jnp.asarray(x) for x in arguments(case))

    def through(q):
        indices, _ = indexer.select(q, w, k, lo, hi, top_k=case.top_k)
        return jnp.sum(indices * q.sum())

    expected = indexer.select(q, w, k, lo, hi, top_k=case.top_k)[0].sum()
    np.testing.assert_allclose(jax.grad(through)(q), jnp.full(q.shape, float(expected)))


def test_no_entries():
    q, w, k, lo, hi = arguments(CASES["few_entries"])
    k, hi = k[:, :0], np.zeros_like(hi)
    indices, pool = indexer.select(q, w, k, lo, hi, top_k=4, make_pool=(2, 3))
    assert (np.asarray(indices) == -1).all() and (np.asarray(pool.blocks) == -1).all()
    again, _ = indexer.select(q, w, k, lo, hi, top_k=4, pool=pool)
    assert (np.asarray(again) == -1).all()
    assert not np.any(indexer.scores_at(q, w, k, indices))
    assert indexer.scores(q, w, k, lo, hi).shape == (*q.shape[:2], 0)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"top_k": 0}, "top_k must be at least 1"),
        ({"make_pool": (2, 0)}, "make_pool must be"),
        ({"w": np.zeros((2, 43))}, r"w must be \[2, 43, 2\]"),
        ({"k": np.zeros((2, 21, 16))}, r"k must be \[2, G, 32\]"),
        ({"lo": np.zeros((2, 1), np.int32)}, r"lo must be \[2, 43\]"),
        ({"k": np.zeros((2, 21, 32), np.uint8)}, r"k must be \[2, G, 17\], got uint8"),
        ({"q": np.zeros((2, 43, 2, 32), np.int8)}, "q must be float32 or bfloat16"),
        ({"chunk": 0}, "chunk must be at least 1"),
        ({"pool": indexer.Pool(np.zeros((2, 1, 3), np.int32), 4)}, r"pool.blocks must be \[2, 43"),
    ],
)
def test_bad_arguments(change, message):
    names = ("q", "w", "k", "lo", "hi")
    keywords = dict(zip(names, arguments(CASES["packed"]), strict=True)) | {"top_k": 4}
    with pytest.raises(ValueError, match=message):
        indexer.select(**(keywords | change))


def test_packed_keys_are_read_as_what_they_stand_for():
    case = CASES["pool"]
    q, w, k, lo, hi = arguments(case, ties=True)
    rows = fp4.pack(k, "mxfp4")
    assert rows.shape[-1] == 17
    # The small integers of this case lie on the grid.
    packed, plain = (select_all(case, (q, w, keys, lo, hi)) for keys in (rows, k))
    chex.assert_trees_all_equal(packed, plain)
    indices = plain[0]
    np.testing.assert_array_equal(
        indexer.scores_at(q, w, rows, indices), indexer.scores_at(q, w, k, indices)
    )
    np.testing.assert_array_equal(
        indexer.scores(q, w, rows, lo, hi), indexer.scores(q, w, k, lo, hi)
    )
    gradient = jax.grad(lambda q: indexer.scores_at(q, w, rows, indices).sum())(q)
    assert np.any(gradient)


def test_pool_cannot_be_used_and_made_at_once():
    args = arguments(CASES["packed"])
    pool = indexer.Pool(np.zeros((2, 43, 3), np.int32), 4)
    with pytest.raises(ValueError, match="exclude each other"):
        indexer.select(*args, top_k=4, pool=pool, make_pool=(3, 4))
