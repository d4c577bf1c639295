"""Index tensors of every kind: out of range, negative, repeated, none at all; by hypothesis.

Truth is a loop over what is in range; gradients must be those of that loop's places alone.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from pallas_kernels.engram_gather import engram_gather
from pallas_kernels.indexer import scores_at
from pallas_kernels.sparse_attention import selected_mass, sparse_attention
from tests.pallas_kernels.test_indexer import numpy_scores
from tests.pallas_kernels.test_sparse_attention import loop_attention

BATCH, QUERIES, HEADS, DIM, ENTRIES, LISTED = 2, 3, 2, 16, 7, 5
_EXTREMES = [-1, -2, ENTRIES, ENTRIES + 1, 2**31 - 1, -(2**31), 2**30, -ENTRIES]
_INDICES = hnp.arrays(
    np.int32,
    (BATCH, QUERIES, LISTED),
    elements=st.one_of(st.integers(0, ENTRIES - 1), st.sampled_from(_EXTREMES)),
)
_SIZES = pytest.mark.parametrize("examples", [30, pytest.param(1000, marks=pytest.mark.slow)])


def _for_all(check, examples):
    fixed = dict(deadline=None, derandomize=True, database=None)
    fixed["suppress_health_check"] = list(HealthCheck)
    settings(max_examples=examples, **fixed)(given(_INDICES)(check))()


def _normal(*shape, seed):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def _in_range(indices):
    return (indices >= 0) & (indices < ENTRIES)


def _named(indices):
    """bool [B, G]: entries that some query of a sequence names."""
    named = np.zeros((BATCH, ENTRIES), bool)
    b, t, k = np.nonzero(_in_range(indices))
    named[b, indices[b, t, k]] = True
    return named


@_SIZES
def test_attention(examples):
    q, rows = _normal(BATCH, QUERIES, HEADS, DIM, seed=0), _normal(BATCH, ENTRIES, DIM, seed=1)
    window, ends = _normal(BATCH, QUERIES, DIM, seed=2), np.tile(np.arange(QUERIES), (BATCH, 1))
    lo, hi, sink = ends.astype(np.int32), (ends + 1).astype(np.int32), np.float32([0.5, -np.inf])
    # The first query sees nothing but what is listed.
    hi[:, 0] = 0

    @jax.jit
    def run(indices):
        def out(q, rows):
            return sparse_attention(q, window, lo, hi, rows, indices, sink, window=1)

        made, back = jax.vjp(out, q, rows)
        mass = selected_mass(q, rows, indices, jnp.logaddexp(made[1], sink))
        return *made, mass, back((jnp.ones_like(made[0]), jnp.zeros_like(made[1])))

    def check(indices):
        out, lse, mass, (to_q, to_rows) = run(indices)
        expected = loop_attention((q, window, lo, hi, rows, indices, sink), {})
        for ours, right in zip((out, lse, mass), expected, strict=True):
            np.testing.assert_allclose(ours, right, atol=3e-6)
        assert np.isfinite(to_q).all() and np.isfinite(to_rows).all()
        assert not np.any(np.asarray(to_rows)[~_named(indices)])

    _for_all(check, examples)


@_SIZES
def test_index_scores(examples):
    q, w = _normal(BATCH, QUERIES, HEADS, 32, seed=3), _normal(BATCH, QUERIES, HEADS, seed=4)
    k = _normal(BATCH, ENTRIES, 32, seed=5)
    everywhere = numpy_scores(q, w, k)

    @jax.jit
    def run(indices):
        made, back = jax.vjp(functools.partial(scores_at, indices=indices), q, w, k)
        return made, back(jnp.ones_like(made))

    def check(indices):
        made, (to_q, to_w, to_k) = run(indices)
        valid = _in_range(indices)
        right = np.take_along_axis(everywhere, np.where(valid, indices, 0), axis=-1)
        np.testing.assert_allclose(made, np.where(valid, right, 0), atol=1e-5)
        assert not np.any(np.asarray(to_k)[~_named(indices)])
        silent = ~valid.any(axis=-1)
        assert not np.any(np.asarray(to_q)[silent]) and not np.any(np.asarray(to_w)[silent])

    _for_all(check, examples)


@_SIZES
def test_table_rows(examples):
    table = _normal(ENTRIES, 4, seed=6)

    @jax.jit
    def run(indices):
        made, back = jax.vjp(lambda table: engram_gather(table, indices), table)
        return made, back(jnp.ones_like(made))[0]

    def check(indices):
        made, to_table = run(indices)
        valid = _in_range(indices)
        right = np.where(valid[..., None], table[np.where(valid, indices, 0)], 0)
        np.testing.assert_array_equal(made, right.reshape(BATCH, QUERIES, -1))
        times = np.bincount(indices[valid], minlength=ENTRIES)
        np.testing.assert_array_equal(to_table, np.broadcast_to(times[:, None], table.shape))

    _for_all(check, examples)
