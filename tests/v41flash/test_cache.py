"""Caches: bytes counted from the arrays, exact storage, pages, rings and partial groups."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import fp4
from v41flash.cache import CompressorState, GlobalCache, RowFormat, WindowCache
from v41flash.nn.context import make_context
from v41flash.presets import tiny, v41_flash

# Two sources: layer 1 with m = 2, layer 4 with m = 1.
CONFIG = tiny()
TABLE = np.array([[3, 0, -1], [4, -1, -1], [1, 5, 2]], np.int32)


def rounded(rng, shape, fmt):
    x = jnp.asarray(rng.normal(size=shape), jnp.float32)
    return x if fmt == "none" else quantize(x, fmt)


@functools.partial(jax.jit, static_argnames="row")
def stored(values, row):
    packed = row.pack(values.astype(row.dtype))
    assert packed.dtype == jnp.uint8 and packed.shape == (*values.shape[:-1], row.width)
    return row.unpack(packed)


quantize = jax.jit(fp4.fake_quantize, static_argnames="fmt")


def bits(x):
    return np.asarray(x, np.float32).view(np.uint32)


# -- Bytes ------------------------------------------------------------------------------------


def test_published_bytes():
    config = v41_flash()
    small = GlobalCache.create(config, 3, np.array([[0, 2]]))
    assert small.bytes_per_token == 890
    assert sum(a.nbytes for a in small.main + small.keys) == 3 * 128 * 890
    assert [a.shape for a in small.main] == [(3, 64, 288)] * 3 + [(3, 128, 288)]
    assert [a.shape for a in small.keys] == [(3, 64, 68)] * 3 + [(3, 128, 68)]
    million = jax.eval_shape(lambda: GlobalCache.create(config, 8192, np.arange(8192)[None]))
    assert million.bytes_per_token == 890
    assert sum(a.size for a in million.main + million.keys) == 890 * 2**20
    window = WindowCache.create(config, 2)
    assert window.bytes_per_sequence == 2_703_360 == 40 * 128 * 528
    parts = [WindowCache.create(config, 1, layers) for layers in (range(20), range(20, 40))]
    assert sum(part.bytes_per_sequence for part in parts) == 2_703_360
    states = CompressorState.create(config, 2)
    assert {i: state.kv.shape for i, state in states.items()} == {
        i: (2, 1, 512) for i in (2, 8, 14)
    }


# -- Rows that are rounded already are stored exactly -----------------------------------------


@pytest.mark.parametrize("fmt", ["fp4", "mxfp4", "fp8"])
def test_rounded_values_survive(fmt):
    rng = np.random.default_rng(0)
    block = fp4.FORMATS[fmt].block
    # Block maxima over the whole range, densely around the smallest scales.
    magnitude = np.exp2(rng.uniform(-30, 12, (4096, 1)))
    magnitude[:2048] = np.exp2(rng.uniform(-10, -3, (2048, 1)))
    x = (rng.uniform(-1, 1, (4096, block)) * magnitude).astype(np.float32)
    x[:, 0] = magnitude[:, 0]
    x[::7] = 0
    x[::5, 1] = -0.0
    value = quantize(jnp.asarray(x).reshape(-1, 2 * block), fmt)
    for dtype in ("float32", "bfloat16"):
        held = stored(value, RowFormat(fmt, 2 * block, dtype))
        assert held.dtype == dtype
        np.testing.assert_array_equal(bits(held), bits(value))
    if fmt == "fp4":
        # What makes `pack` of the kernels not enough: 9 to 10 units of 2^-9 round to 8.
        assert (quantize(value, fmt) != value).any()


@settings(max_examples=30, deadline=None)
@given(
    fmt=st.sampled_from(["fp4", "mxfp4", "fp8"]),
    values=st.lists(st.floats(-3000, 3000, width=32), min_size=64, max_size=64),
    power=st.integers(-24, 0),
)
def test_any_rounded_values_survive(fmt, values, power):
    value = quantize(jnp.asarray(values, jnp.float32) * 2.0**power, fmt)
    held = stored(value, RowFormat(fmt, 64, "float32"))
    np.testing.assert_array_equal(bits(held), bits(value))


# -- Global cache -----------------------------------------------------------------------------


@jax.jit
def append_all(cache, rows, new):
    for layer, (main, keys) in rows.items():
        cache = cache.append(layer, main, keys, new)
    return cache.advance(new)


@functools.partial(jax.jit, static_argnames=("start", "count"))
def read_all(cache, start, count):
    return {
        i: (cache.main_rows(i).read(start, count), cache.index_keys(i).read(start, count))
        for i in cache.sources
    }


@functools.partial(jax.jit, static_argnames="count")
def read_each(cache, starts, count):
    return {i: cache.main_rows(i).read(starts, count) for i in cache.sources}


@jax.jit
def gather_main(cache, indices):
    return {i: cache.main_rows(i).gather(indices) for i in cache.sources}


def entries(rng, config, tokens):
    """Rows of all entries of three sequences of `tokens` tokens, per source."""
    result = {}
    for i in config.kv_source_layer_ids:
        shape = (3, tokens // config.layers[i].ratio)
        main = rounded(rng, (*shape, config.head_dim), config.main_kv_format)
        result[i] = (main, rounded(rng, (*shape, config.index_head_dim), config.index_format))
    return result


def chunk_of(rows, ratio, lengths, bound):
    """The `bound` entries from each sequence's next one on, garbage behind the last."""
    at = np.asarray(lengths)[:, None] // ratio + np.arange(bound)
    padded = np.concatenate([rows, np.full_like(rows, 9.0)], axis=1)
    return jnp.asarray(np.take_along_axis(padded, np.minimum(at, rows.shape[1])[..., None], 1))


@pytest.mark.parametrize(
    "formats",
    [
        {},
        dict(main_kv_format="none", index_format="none"),
        dict(main_kv_format="fp8", dtype="bfloat16"),
    ],
)
def test_appends_of_different_lengths(formats):
    config = dataclasses.replace(CONFIG, **formats)
    rng = np.random.default_rng(1)
    truth = entries(rng, config, 384)
    cache = GlobalCache.create(config, 6, TABLE)
    lengths, chunk = np.zeros(3, int), 48
    for _ in range(6):
        new = np.minimum(rng.integers(0, chunk + 1, 3), [256, 128, 384] - lengths)
        rows = {}
        for i, pair in truth.items():
            m = config.layers[i].ratio
            rows[i] = [chunk_of(np.asarray(r), m, lengths, -(-chunk // m)) for r in pair]
        cache.check_room(new)
        cache = append_all(cache, rows, jnp.asarray(new))
        lengths += new
    np.testing.assert_array_equal(cache.lengths, lengths)
    assert any(lengths % 2) and max(lengths) > 128
    found = read_all(cache, 0, 200)
    for i, pair in truth.items():
        for b, tokens in enumerate(lengths):
            stored = tokens // config.layers[i].ratio
            for values, expected in zip(found[i], pair, strict=True):
                assert values.dtype == config.dtype
                np.testing.assert_array_equal(
                    bits(values[b, :stored]), bits(expected[b, :stored].astype(config.dtype))
                )
                # The group in progress and the padding of chunks are not there.
                assert not np.any(values[b, stored:])
    indices = rng.integers(-1, 200, (3, 4, 8)).astype(np.int32)
    indices[:, 0, :2] = [[-1, 5000]]
    gathered = gather_main(cache, indices)
    for i in truth:
        whole = np.asarray(found[i][0], np.float32)
        at = np.clip(indices, 0, 199).reshape(3, -1, 1)
        expected = np.take_along_axis(whole, at, 1).reshape(3, 4, 8, -1)
        expected[(indices < 0) | (indices >= 200)] = 0
        np.testing.assert_array_equal(bits(gathered[i]), bits(expected))


def full_cache(config=CONFIG):
    cache = GlobalCache.create(config, 6, TABLE)
    truth = entries(np.random.default_rng(2), config, 384)
    return append_all(cache, truth, jnp.array([256, 128, 384])), truth


def test_reads_from_anywhere():
    cache, truth = full_cache()
    expected = {i: np.zeros((3, 600, CONFIG.head_dim), np.float32) for i in truth}
    for i, (main, _) in truth.items():
        for b, tokens in enumerate([256, 128, 384]):
            stored = tokens // CONFIG.layers[i].ratio
            expected[i][b, :stored] = main[b, :stored]
    # On page boundaries of both sources, of one, of none; to the end of the table and beyond.
    for start, count in [(128, 256), (64, 64), (37, 200)]:
        for i, (values, _) in read_all(cache, start, count).items():
            np.testing.assert_array_equal(values, expected[i][:, start : start + count])
    for starts in ([0, 37, 128], [190, 5, 64]):
        for i, values in read_each(cache, jnp.asarray(starts), 200).items():
            for b, start in enumerate(starts):
                np.testing.assert_array_equal(values[b], expected[i][b, start : start + 200])


def test_writes_stay_in_their_pages():
    cache, _ = full_cache()
    # Pages of the other sequences keep their bytes when the last one starts over and runs on.
    restarted = dataclasses.replace(cache, lengths=jnp.array([256, 128, 0]))
    rows = entries(np.random.default_rng(3), CONFIG, 384)
    again = append_all(restarted, rows, jnp.array([100, 100, 384]))
    for before, after in zip(cache.main + cache.keys, again.main + again.keys, strict=True):
        np.testing.assert_array_equal(before[np.array([3, 0, 4])], after[np.array([3, 0, 4])])
        assert (np.asarray(before[2]) != np.asarray(after[2])).any()
    np.testing.assert_array_equal(again.room(), [-100, -100, 0])


def test_sequences_share_a_prefix_page():
    cache, truth = full_cache()
    shared = dataclasses.replace(
        cache,
        page_table=jnp.array([[3, 1, -1], [3, 2, -1], [-1, 0, 0]]),
        lengths=jnp.array([128, 128, 0]),
    )
    rows = entries(np.random.default_rng(3), CONFIG, 384)
    step = {i: (main[:, :64], keys[:, :64]) for i, (main, keys) in rows.items()}
    after = append_all(shared, step, jnp.array([40, 30, 20]))
    values = read_all(after, 0, 200)[4][0]
    np.testing.assert_array_equal(values[0, :128], truth[4][0][0, :128])
    np.testing.assert_array_equal(values[1, :128], truth[4][0][0, :128])
    np.testing.assert_array_equal(values[0, 128:168], rows[4][0][0, :40])
    np.testing.assert_array_equal(values[1, 128:158], rows[4][0][1, :30])
    # A hole in the table ends the room; what falls into it is dropped.
    np.testing.assert_array_equal(after.room(), [256 - 168, 256 - 158, -20])
    assert not np.any(values[2, :128])


def test_replay_does_not_overwrite_a_cached_prefix():
    cache, _ = full_cache()
    cache = dataclasses.replace(cache, lengths=jnp.array([200, 101, 128]))
    rows = entries(np.random.default_rng(4), CONFIG, 64)[1]
    # Forty tokens that are in the cache already, then eleven more.
    first = (cache.lengths - 40) // 2
    append = jax.jit(lambda cache, *args: cache.append(1, *args))
    after = append(cache, *rows, jnp.full(3, 11), first)
    before, values = (read_all(c, 0, 200)[1][0] for c in (cache, after))
    for b, tokens in enumerate([200, 101, 128]):
        lo, hi = tokens // 2, (tokens + 11) // 2
        np.testing.assert_array_equal(values[b, :lo], before[b, :lo])
        expected = rows[0][b, lo - int(first[b]) : hi - int(first[b])]
        np.testing.assert_array_equal(values[b, lo:hi], expected)
        np.testing.assert_array_equal(values[b, hi:], before[b, hi:])


def test_donated_pages_are_written_in_place():
    cache = jax.eval_shape(lambda: GlobalCache.create(CONFIG, 10_000, TABLE))
    rows = {i: (jax.ShapeDtypeStruct((3, 8, 32), jnp.float32),) * 2 for i in cache.sources}
    new = jax.ShapeDtypeStruct((3,), jnp.int32)
    compiled = jax.jit(append_all, donate_argnums=0).lower(cache, rows, new).compile()
    memory = compiled.memory_analysis()
    assert memory.temp_size_in_bytes < cache.page_bytes * 100
    assert memory.alias_size_in_bytes >= cache.page_bytes * 10_000


def test_packed_rows_can_be_appended():
    cache, truth = full_cache()
    empty = GlobalCache.create(CONFIG, 6, TABLE)
    pack = jax.jit(fp4.pack, static_argnames="fmt")
    packed = {i: (pack(main, "fp4"), pack(keys, "mxfp4")) for i, (main, keys) in truth.items()}
    again = append_all(empty, packed, jnp.array([256, 128, 384]))
    jax.tree.map(np.testing.assert_array_equal, cache, again)


def test_global_cache_refuses():
    cache = GlobalCache.create(CONFIG, 6, TABLE)
    main, keys = jnp.zeros((3, 9, 32)), jnp.zeros((3, 9, 32))
    new = jnp.zeros(3, int)
    with pytest.raises(ValueError, match=r"layer 2 .*\(1, 4\)"):
        cache.append(2, main, keys, new)
    with pytest.raises(ValueError, match=r"keys is \[3, 9, 31\]: must be \[3, 9, 32\]"):
        cache.append(1, main, keys[..., 1:], new)
    with pytest.raises(ValueError, match="main is"):
        cache.append(1, main[:2], keys[:2], new)
    with pytest.raises(ValueError, match="exceed the 3 pages"):
        cache.append(4, jnp.zeros((3, 385, 32)), jnp.zeros((3, 385, 32)), new)
    with pytest.raises(ValueError, match="sequence 1: 129 more tokens after 0.* room for 128"):
        cache.check_room(np.array([256, 129, 0]))
    with pytest.raises(ValueError, match="page 5; must be below 5"):
        GlobalCache.create(CONFIG, 5, TABLE)
    with pytest.raises(ValueError, match=r"page_table is \[3\]"):
        GlobalCache.create(CONFIG, 5, TABLE[0])
    with pytest.raises(ValueError, match="num_pages = 0"):
        GlobalCache.create(CONFIG, 0, TABLE)


# -- Window cache -----------------------------------------------------------------------------


@jax.jit
def window_step(cache, values, new):
    window_rows = cache.unroll(1, values)
    ranges = cache.ranges(values.shape[1], new)
    return window_rows, ranges, cache.append(1, values, new).advance(new)


def seen(window_rows, ranges, b, t):
    return bits(window_rows[b, int(ranges.lo[b, t]) : int(ranges.hi[b, t])])


@pytest.mark.parametrize(("chunk", "fmt"), [(1, "fp8"), (11, "fp8"), (3, "none")])
def test_windows_are_those_of_the_whole_sequence(chunk, fmt):
    config = dataclasses.replace(CONFIG, window_kv_format=fmt)
    window, total = config.sliding_window, 23
    rng = np.random.default_rng(chunk)
    truth = rounded(rng, (2, total, config.head_dim), fmt)
    whole = make_context(
        config, jnp.broadcast_to(jnp.arange(total), (2, total)), jnp.ones((2, total), int), None
    ).window["encoder"]
    cache = WindowCache.create(config, 2)
    lengths = np.zeros(2, int)
    while lengths.min() < total:
        new = np.minimum(rng.integers(0, chunk + 1, 2), total - lengths)
        values = chunk_of(np.asarray(truth), 1, lengths, chunk)
        window_rows, ranges, cache = window_step(cache, values, jnp.asarray(new))
        assert window_rows.shape == (2, window + chunk, config.head_dim)
        assert np.isfinite(window_rows).all()
        lo, hi = np.asarray(ranges.lo), np.asarray(ranges.hi)
        assert (np.diff(hi, axis=1) == 1).all() and (hi - lo <= window).all()
        for b in range(2):
            for t in range(chunk):
                if t >= new[b]:
                    assert lo[b, t] == hi[b, t]
                    continue
                p = lengths[b] + t
                expected = truth[b, int(whole.lo[b, p]) : int(whole.hi[b, p])]
                np.testing.assert_array_equal(seen(window_rows, ranges, b, t), bits(expected))
        lengths += new
    np.testing.assert_array_equal(cache.lengths, total)
    # The other layers are untouched.
    assert not np.any(np.delete(np.asarray(cache.rows), 1, axis=0))


def test_window_after_a_replay():
    cache = WindowCache.create(CONFIG, 2)
    old = rounded(np.random.default_rng(0), (2, 11, 32), "fp8")
    new = rounded(np.random.default_rng(1), (2, 3, 32), "fp8")
    _, _, cache = window_step(cache, old, jnp.array([11, 9]))
    cache = cache.restart(np.array([6, 9]))
    window_rows, ranges, cache = window_step(cache, new, jnp.array([3, 2]))
    assert not np.any(np.asarray(ranges.lo) < CONFIG.sliding_window)
    np.testing.assert_array_equal(seen(window_rows, ranges, 0, 2), bits(new[0, :3]))
    window_rows, ranges, _ = window_step(cache, new, jnp.array([3, 3]))
    expected = np.concatenate([new[0, :3], new[0, :3]])
    np.testing.assert_array_equal(seen(window_rows, ranges, 0, 0), bits(expected[:4]))
    np.testing.assert_array_equal(seen(window_rows, ranges, 0, 1), bits(expected[1:5]))
    assert int(ranges.hi[1, 0] - ranges.lo[1, 0]) == 3


def test_layers_can_be_scanned():
    cache = WindowCache.create(CONFIG, 2, range(2, 5))
    values = rounded(np.random.default_rng(0), (3, 2, 4, 32), "fp8")
    new = jnp.full(2, 4)

    @jax.jit
    def run(cache):
        def body(cache, layer):
            return cache.append(layer, values[layer - 2], new), cache.unroll(layer, values[0])

        return jax.lax.scan(body, cache, jnp.arange(2, 5))[0].advance(new)

    cache = run(cache)
    unroll = jax.jit(lambda cache, layer: cache.unroll(layer, values[0]))
    for layer in (2, 3, 4):
        np.testing.assert_array_equal(unroll(cache, layer)[:, :4], values[layer - 2])
    with pytest.raises(ValueError, match="layer 5: this cache holds 2 to 4"):
        cache.unroll(5, values[0])
    with pytest.raises(ValueError, match=r"must be \[2, T, 32\]"):
        cache.append(2, values[0, :1], new)
    for bad in (range(3, 9), range(0), range(0, 6, 2)):
        with pytest.raises(ValueError, match="consecutive layers of 8"):
            WindowCache.create(CONFIG, 2, bad)


# -- Partial groups ---------------------------------------------------------------------------


push = jax.jit(lambda state, *args: state.push(*args))


@pytest.mark.parametrize(("m", "chunk"), [(1, 2), (2, 1), (2, 5), (4, 11)])
def test_groups_complete_across_steps(m, chunk):
    rng = np.random.default_rng(m)
    total = 37
    kv, score = rng.normal(size=(2, 3, total, 6)).astype(np.float32)
    state = CompressorState(*[jnp.zeros((3, m - 1, 6))] * 2)
    lengths, found = np.zeros(3, int), [[] for _ in range(3)]
    while lengths.min() < total:
        new = np.minimum(rng.integers(0, chunk + 1, 3), total - lengths)
        at = [jnp.asarray(chunk_of(x, 1, lengths, chunk)) for x in (kv, score)]
        groups, state = push(state, *at, jnp.asarray(lengths), jnp.asarray(new))
        assert groups.kv.shape == (3, (chunk + m - 1) // m, m, 6)
        for b in range(3):
            assert int(groups.first[b]) == len(found[b])
            count = int(groups.count[b])
            found[b] += list(zip(groups.kv[b, :count], groups.score[b, :count], strict=True))
        lengths += new
        for b, left in enumerate(lengths % m):
            tail = kv[b, lengths[b] - left : lengths[b]]
            np.testing.assert_array_equal(state.kv[b, :left], tail)
            assert not np.any(state.score[b, left:])
    for b in range(3):
        assert len(found[b]) == total // m
        for values, whole in zip(zip(*found[b], strict=True), (kv, score), strict=True):
            grouped = whole[b, : total // m * m].reshape(-1, m, 6)
            np.testing.assert_array_equal(np.stack(values), grouped)
