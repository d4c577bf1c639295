"""Selecting among cached keys."""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.indexer import Pool
from v41flash import presets
from v41flash.cache import PagedRows, RowFormat
from v41flash.nn.context import Ranges
from v41flash.nn.indexer import IndexQuery, select, select_in_pool


def test_only_the_keys_of_the_pool_are_read():
    """NaN wherever no block of a query's pool lies: nothing changes, nothing else is selected."""
    config = presets.tiny(index_format="none", index_topk=6, candidate_block_size=4)
    heads, dim, entries = config.index_n_heads, config.index_head_dim, 64
    rng = np.random.default_rng(0)
    queries = IndexQuery(
        jnp.asarray(rng.standard_normal((2, 1, heads, dim)), jnp.float32),
        jnp.asarray(rng.standard_normal((2, 1, heads)), jnp.float32),
    )
    # Two pages of 32 entries a sequence, in any order.
    pages = rng.standard_normal((4, 32, dim)).astype(np.float32)
    table = np.array([[2, 0], [1, 3]])
    blocks = np.array([[[1, 9, 13]], [[0, 5, -1]]])
    visible = Ranges(jnp.zeros((2, 1), jnp.int32), jnp.array([[54], [23]], jnp.int32))
    pool = Pool(jnp.asarray(blocks, jnp.int32), 4)
    whole = pages[table].reshape(2, entries, dim)
    expected, _ = select(
        config, queries, whole, visible, make_pool=False, pool=pool, implementation="xla"
    )

    inside = (np.arange(entries) // 4 == blocks[..., None]).any(axis=(1, 2))
    poisoned = np.full_like(pages, np.nan)
    poisoned[table] = np.where(inside[..., None], whole, np.nan).reshape(2, 2, 32, dim)
    keys = PagedRows(jnp.asarray(poisoned), jnp.asarray(table), RowFormat("none", dim, "float32"))
    found = jax.jit(lambda q, k, v, p: select_in_pool(config, q, k, v, p, implementation="xla"))(
        queries, keys, visible, pool
    )
    np.testing.assert_array_equal(found, expected)
    for row, held, count in zip(np.asarray(found)[:, 0], inside, (54, 23), strict=True):
        row = row[row >= 0]
        assert len(row) == 6 and held[row].all() and (row < count).all()
