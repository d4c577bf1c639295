"""Lists of the rows that groups of queries visit, against counting them one by one."""

import collections
import functools

import jax
import numpy as np
import pytest

from pallas_kernels.sparse_attention.cases import CASES, arguments
from pallas_kernels.sparse_attention.tiles import MEMBER_BITS, TILE, rows_of, tiles_of


@functools.partial(jax.jit, static_argnames=("members", "window", "window_size", "main_size"))
def _tiles(lo, hi, indices, **sizes):
    return tiles_of(lo, hi, indices, **sizes)


@pytest.mark.parametrize("members", [1, 2, 4])
@pytest.mark.parametrize("name", ["packed", "untidy", "later_chunk"])
def test_every_query_sees_its_rows_as_often_as_it_lists_them(name, members):
    (q, window_rows, lo, hi, main_rows, indices, _), keywords = arguments(CASES[name])
    sizes = {"window_size": window_rows.shape[1], "main_size": main_rows.shape[1]}
    tiles = _tiles(lo, hi, indices, members=members, window=keywords["window"], **sizes)
    lists = np.asarray(tiles.words).reshape(q.shape[0], -1, tiles.words.shape[1])
    counts = np.asarray(tiles.counts).reshape(lists.shape[:2])
    per_batch = sum(sizes.values())
    for b, t in np.ndindex(q.shape[:2]):
        near = [b * per_batch + s for s in range(lo[b, t], hi[b, t])]
        start = b * per_batch + sizes["window_size"]
        far = [start + int(j) for j in indices[b, t] if 0 <= j < sizes["main_size"]]
        words = lists[b, t // members]
        seen = words[(words >> t % members) & 1 != 0] >> MEMBER_BITS
        assert collections.Counter(seen.tolist()) == collections.Counter(near + far)
    assert counts.min() >= 1 and lists.shape[-1] % TILE == 0
    behind = np.arange(lists.shape[-1]) >= counts[..., None] * TILE
    assert (lists[behind] == 0).all()


def test_what_neighbours_share_is_listed_once():
    lo = hi = np.zeros((1, 4), np.int32)
    indices = np.broadcast_to(np.arange(100, dtype=np.int32)[::-1], (1, 4, 100))
    tiles = _tiles(lo, hi, indices, members=4, window=0, window_size=0, main_size=100)
    assert int(tiles.counts[0]) == 2
    rows = np.asarray(rows_of(tiles.words[0]))
    assert rows[:100].tolist() == list(range(100)) and (rows[100:] == -1).all()
    assert (np.asarray(tiles.words[0, :100]) & 15 == 15).all()


@pytest.mark.parametrize("members", [1, 4])
def test_window_alone(members):
    hi = np.arange(1, 6, dtype=np.int32)[None]
    nothing = np.zeros((1, 5, 0), np.int32)
    tiles = _tiles(hi - 1, hi, nothing, members=members, window=1, window_size=5, main_size=0)
    rows = np.asarray(rows_of(tiles.words))
    assert sorted(rows[rows >= 0].tolist()) == [0, 1, 2, 3, 4]


def test_too_many_rows():
    bound = jax.ShapeDtypeStruct((1, 4), np.int32)
    indices = jax.ShapeDtypeStruct((1, 4, 8), np.int32)
    sizes = {"members": 1, "window": 0, "window_size": 0, "main_size": 2**27}
    with pytest.raises(ValueError, match="1 x 134217728 rows"):
        jax.eval_shape(functools.partial(tiles_of, **sizes), bound, bound, indices)
