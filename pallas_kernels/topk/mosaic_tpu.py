"""Exact top-k on a TPU: a search for the threshold, and matrix products in place of a sort.

Eight rows are worked on at a time, one to each sublane. Their scores are read once, become
order-preserving integers (keys), and stay in VMEM as tiles of 8 x 128: 32 bytes for each entry of a
row. A key whose block of several scores is selected is the largest of theirs.

1. *Threshold.* The largest value that k entries or more reach is found by halving an interval of
   integers; a step compares and counts. The interval begins at the k-th largest of some thousand
   group maxima (k groups reach it, so k entries do), which costs a fraction of a step, and the
   search ends when exactly k entries are left or nothing is left to halve.
2. *Ties.* Where more entries equal the threshold than are wanted, the first are taken: their ranks
   are prefix sums, that is, products with triangular matrices of ones.
3. *Places.* A chunk of one row is 128 blocks of 128 entries. Prefix sums say which block holds the
   p-th selected entry; a one-hot matrix of (block, slot) times the blocks' inner prefix sums brings
   that block's 128 of them into the slot's column, and how many do not exceed the slot's rank is
   the lane. All of these are integers up to 128, exact in bfloat16.

A row costs one reading of its scores, a comparison an entry for each of some 15 (at most 32) steps,
and about a thousand FLOPs an entry on the matrix unit (`account`).
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import tpu
from pallas_kernels.topk.batching import batched
from pallas_kernels.tpu import LANES, SUBLANES

MAX_K = 4096
# Scores of a block.
BLOCKS = (2, 4, 8, 16, 32, 64, 128)
# Entries of a row that are held in VMEM at a time: 32 MiB, half of the least there is.
MAX_ENTRIES = 2**20
# Fewer than eight rows are cut into segments, down to this many entries, to have eight.
_SEGMENT = 4096
# Scores of a row that are read at a time.
_READ = 8192
# Tiles of a row that make a chunk, and tiles that a step of a search takes at a time.
_CHUNK, _STEP = 128, 16
# Keys: of minus infinity, which nothing selects, and of infinity.
_LEAST = np.int32(np.float32(-np.inf).view(np.int32) ^ 0x7FFFFFFF)
_MOST = np.int32(np.float32(np.inf).view(np.int32))
_UNLIMITED = np.int32(2**30)


def topk(scores, k, lengths=None, *, order="score", interpret=None):
    """See `pallas_kernels.topk.topk`.

    Args:
        scores, k, lengths, order: as there.
        interpret: parameters of Pallas's TPU interpret mode, in which it runs on any device.

    Raises:
        NotImplementedError: not on a TPU; k above 4096 or 0; other dtypes than float32 and
            bfloat16; rows of nothing.
    """
    _accept("topk", scores, k, interpret)

    def select(scores, lengths):
        indices = select_rows(scores, lengths, k=k, interpret=interpret)
        if order == "index":
            return indices
        best = _values(scores, indices, 1)
        # The sort is stable, and indices ascend.
        return lax.sort((-best, indices), num_keys=1)[1]

    return batched(select, lax.stop_gradient(scores), _lengths(scores, lengths))


def topk_blocks(scores, k, block, lengths=None, *, first=None, interpret=None):
    """See `pallas_kernels.topk.topk_blocks`.

    Args:
        scores, k, block, lengths: as there.
        first: i32 `[...]`, a block that is selected before all others, -1 for none. It may lie
            beyond `lengths`.
        interpret: as for `topk`.

    Raises:
        NotImplementedError: as for `topk`; blocks that are not of 2, 4, ... or 128 scores.
    """
    _accept("topk_blocks", scores, k, interpret)
    if block not in BLOCKS:
        raise NotImplementedError(
            f"topk_blocks: the kernel takes blocks of 2, 4, ..., 128 scores, not {block}"
        )
    select = functools.partial(select_rows, k=k, block=block, interpret=interpret)
    rows = (_lengths(scores, lengths),)
    if first is not None:
        rows += (first,)
    return batched(select, lax.stop_gradient(scores), *rows)


def _accept(op: str, scores, k: int, interpret) -> None:
    tpu.require(op, interpret)
    if not 1 <= k <= MAX_K:
        raise NotImplementedError(f"{op}: the kernel takes k from 1 to {MAX_K}, not {k}")
    if scores.dtype not in (jnp.float32, jnp.bfloat16):
        raise NotImplementedError(
            f"{op}: the kernel takes float32 and bfloat16, not {scores.dtype}"
        )
    if not scores.shape[-1]:
        raise NotImplementedError(f"{op}: the kernel takes rows of at least one score")


def _lengths(scores, lengths):
    size = scores.shape[-1]
    if lengths is None:
        return jnp.full(scores.shape[:-1], size, jnp.int32)
    return jnp.clip(lengths, 0, size)


def _values(scores, indices, block: int):
    """The largest score of each listed block; -inf for NaN and at -1; zeros alike."""
    places = jnp.maximum(indices, 0)[..., None] * block + jnp.arange(block)
    places = places.reshape(*indices.shape[:-1], -1)
    values = jnp.take_along_axis(scores, jnp.minimum(places, scores.shape[-1] - 1), axis=-1)
    values = jnp.where(places < scores.shape[-1], values.astype(jnp.float32), -jnp.inf)
    values = jnp.where(values > -jnp.inf, jnp.where(values == 0, 0.0, values), -jnp.inf)
    return jnp.where(indices >= 0, values.reshape(*indices.shape, block).max(axis=-1), -jnp.inf)


def select_rows(scores, lengths, first=None, *, k, block=1, interpret=None):
    """The best blocks of every row, in increasing order of index.

    Args:
        scores: `[rows, size]`.
        lengths: i32 `[rows]` in `[0, size]`.
        first: i32 `[rows]` or None, as for `topk_blocks`.
        k, block, interpret: as for `topk_blocks`; block may be 1.

    Returns:
        i32 `[rows, k]`, -1 at the end.
    """
    rows, size = scores.shape
    if rows == 0:
        return jnp.zeros((0, k), jnp.int32)
    if first is None:
        first = jnp.full((rows,), -1, jnp.int32)
    pieces = max(-(-size // (MAX_ENTRIES * block)), min(SUBLANES // rows, size // _SEGMENT), 1)
    if pieces == 1:
        return _call(scores, lengths, first, k=k, block=block, interpret=interpret)

    # Rows of segments; then the best of all segments, which are in the order of the indices.
    length = -(-size // (pieces * block * LANES)) * block * LANES
    starts = jnp.arange(pieces, dtype=jnp.int32) * length
    cut = jnp.pad(scores, [(0, 0), (0, pieces * length - size)])
    inside = first[:, None] - starts // block
    inside = jnp.where((inside >= 0) & (inside < length // block), inside, -1)
    found = _call(
        cut.reshape(rows * pieces, length),
        jnp.clip(lengths[:, None] - starts, 0, length).reshape(-1),
        inside.reshape(-1),
        k=k,
        block=block,
        interpret=interpret,
    ).reshape(rows, pieces, k)
    found = jnp.where(found >= 0, found + starts[:, None] // block, -1).reshape(rows, -1)
    masked = jnp.where(jnp.arange(size) < lengths[:, None], scores, -jnp.inf)
    best = jnp.where(found == first[:, None], jnp.inf, _values(masked, found, block))
    best = jnp.where(found >= 0, best, -jnp.inf)
    every = jnp.full((rows,), found.shape[1], jnp.int32)
    places = select_rows(best, every, k=k, interpret=interpret)
    chosen = jnp.take_along_axis(found, jnp.maximum(places, 0), axis=-1)
    return jnp.where(places >= 0, chosen, -1)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _tiles(size: int, block: int) -> tuple[int, int]:
    """Scores of a row that are read at a time, and the tiles of keys that VMEM holds."""
    read = min(max(_READ, LANES * block), _round_up(size, LANES * block))
    return read, _round_up(pl.cdiv(size, read) * read // block // LANES, _CHUNK)


def _groups(tiles: int, k: int) -> int:
    """Tiles of group maxima: some groups for each of k entries, unless they are hardly fewer than
    the entries."""
    groups = _round_up(pl.cdiv(4 * k, LANES), _STEP)
    return groups if tiles >= 4 * groups else 0


def account(rows: int, size: int, k: int, block: int = 1) -> tpu.Account:
    """What selecting k of rows of `size` scores uses."""
    read, tiles = _tiles(size, block)
    keys = (tiles + _groups(tiles, k)) * SUBLANES * LANES * 4
    slots = _round_up(k, LANES)
    chunks = tiles // _CHUNK
    # Of a chunk: two products for its prefix sums, and one for each 128 slots that it fills.
    products = 2 * chunks + chunks + slots // LANES
    return tpu.Account(
        vmem_bytes=keys + 2 * SUBLANES * (read + slots) * 4 + 4 * LANES * LANES * 4,
        hbm_bytes=rows * (size + slots) * 4,
        flops=rows * products * 2 * LANES**3,
    )


def _call(scores, lengths, first, *, k: int, block: int, interpret):
    """`select_rows` in one round."""
    rows, size = scores.shape
    read, tiles = _tiles(size, block)
    groups = _groups(tiles, k)
    reads = pl.cdiv(size, read)
    slots = _round_up(k, LANES)
    # Where eight rows end: nothing is read or searched beyond.
    padded = jnp.pad(lengths, (0, -rows % SUBLANES)).reshape(-1, SUBLANES)
    padded_first = jnp.pad(first, (0, -rows % SUBLANES), constant_values=-1)
    last_first = padded_first.reshape(-1, SUBLANES).max(axis=1)
    ends = jnp.maximum(padded.max(axis=1), (last_first + 1) * block)
    needed = jnp.clip(-(-ends // read), 1, reads)
    used = account(rows, size, k, block)
    kernel = functools.partial(_kernel, k=k, block=block, read=read, groups=groups)
    result = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(pl.cdiv(rows, SUBLANES), reads),
            in_specs=[
                pl.BlockSpec((SUBLANES, read), lambda i, j, n: (i, jnp.minimum(j, n[i] - 1))),
                pl.BlockSpec((SUBLANES, 1), lambda i, j, n: (i, 0)),
                pl.BlockSpec((SUBLANES, 1), lambda i, j, n: (i, 0)),
            ],
            out_specs=pl.BlockSpec((SUBLANES, slots), lambda i, j, n: (i, 0)),
            scratch_shapes=[
                pltpu.VMEM((tiles * SUBLANES, LANES), jnp.int32),
                pltpu.VMEM((max(groups, 1) * SUBLANES, LANES), jnp.int32),
                pltpu.VMEM((SUBLANES, LANES), jnp.int32),
                pltpu.VMEM((SUBLANES, LANES), jnp.int32),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct((rows, slots), jnp.int32),
        cost_estimate=tpu.stated("topk" if block == 1 else "topk_blocks", used),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"),
            # With room for what the compiler spills.
            vmem_limit_bytes=used.vmem_bytes + tpu.DEFAULT_VMEM_BYTES,
        ),
        interpret=False if interpret is None else interpret,
    )(needed, scores.astype(jnp.float32), lengths[:, None], first[:, None])
    # A loop that stacks its results would take the kernel into a fusion, which loses its limit.
    return lax.optimization_barrier(result)[:, :k]


def _iota(shape, dimension: int):
    return lax.broadcasted_iota(jnp.int32, shape, dimension)


def _kernel(
    needed, scores, lengths, first, out, keys, maxima, threshold, wanted, *, k, block, read, groups
):
    """One reading of scores; with the last of a row, its selection."""
    group, step = pl.program_id(0), pl.program_id(1)
    tiles = read // block // LANES

    @pl.when(step == 0)
    def _():
        maxima[...] = jnp.full_like(maxima, _LEAST)

    @pl.when(step < needed[group])
    def _():
        def store(n, _):
            tile = step * tiles + n
            start = pl.multiple_of(n * (LANES * block), LANES)
            at = _iota((SUBLANES, LANES * block), 1) + (step * read + start)
            key = _key(scores[:, pl.ds(start, LANES * block)], at < lengths[...])
            key = _block_maxima(key, block)
            entry = _iota((SUBLANES, LANES), 1) + tile * LANES
            key = jnp.where(entry == first[...], _MOST, key)
            keys[pl.ds(pl.multiple_of(tile * SUBLANES, SUBLANES), SUBLANES), :] = key
            place = pl.multiple_of(lax.rem(tile, max(groups, 1)) * SUBLANES, SUBLANES)
            place = pl.ds(place, SUBLANES)
            maxima[place, :] = jnp.maximum(maxima[place, :], key)

        lax.fori_loop(0, tiles, store, None)

    @pl.when(step == pl.num_programs(1) - 1)
    def _():
        used = needed[group] * tiles
        chunks = pl.cdiv(used, _CHUNK)

        def clear(tile, _):
            place = pl.ds(pl.multiple_of(tile * SUBLANES, SUBLANES), SUBLANES)
            keys[place, :] = jnp.full((SUBLANES, LANES), _LEAST)

        lax.fori_loop(used, chunks * _CHUNK, clear, None)
        low = jnp.full((SUBLANES, 1), _LEAST + 1)
        high = maxima[...].reshape(-1, SUBLANES, LANES).max(axis=0)
        high = jnp.max(high, axis=1, keepdims=True) + 1
        if groups:
            low, _ = _search(maxima, groups // _STEP, k, low, high)
        low, count = _search(keys, pl.cdiv(used, _STEP), k, low, high)
        above = _count(keys, pl.cdiv(used, _STEP), low + 1)
        threshold[...] = jnp.broadcast_to(low, threshold.shape)
        equal = jnp.where(count > k, k - above, _UNLIMITED)
        wanted[...] = jnp.broadcast_to(equal, wanted.shape)
        out[...] = jnp.full_like(out, -1)
        lax.fori_loop(
            0, SUBLANES, lambda row, _: _place(row, chunks, keys, threshold, wanted, out), None
        )


def _key(scores, inside):
    """int32 in the order of the scores; zeros are alike, and what is not `inside`, or is NaN, is
    the least."""
    bits = lax.bitcast_convert_type(scores, jnp.int32)
    magnitude = bits & 0x7FFFFFFF
    key = jnp.where(bits < 0, -magnitude - 1, bits)
    key = jnp.where(magnitude == 0, 0, key)
    return jnp.where(inside & (magnitude <= _MOST), key, _LEAST)


def _block_maxima(key, block: int):
    """Maxima `[8, 128]` of `block` neighbours each of `[8, 128 block]`."""
    if block == 1:
        return key
    lane = _iota((SUBLANES, LANES), 1)
    starts = (lane * block) & (LANES - 1)
    best = jnp.full((SUBLANES, LANES), _LEAST)
    for part in range(block):
        piece = key[:, part * LANES : (part + 1) * LANES]
        distance = 1
        while distance < block:
            piece = jnp.maximum(piece, pltpu.roll(piece, LANES - distance, 1))
            distance *= 2
        # Of this piece, each block's first lane holds its maximum.
        piece = jnp.take_along_axis(piece, starts, axis=1)
        best = jnp.where(lane // (LANES // block) == part, piece, best)
    return best


def _count(keys, steps, low):
    """int32 `[8, 1]`: keys of each row that are `low` or more, in `steps` times 16 tiles."""
    low = jnp.broadcast_to(low, (SUBLANES, LANES))

    def add(n, total):
        rows = _STEP * SUBLANES
        tile = keys[pl.ds(pl.multiple_of(n * rows, rows), rows), :]
        reached = tile.reshape(_STEP, SUBLANES, LANES) >= low
        return total + jnp.sum(reached.astype(jnp.float32), axis=0)

    total = lax.fori_loop(0, steps, add, jnp.zeros((SUBLANES, LANES), jnp.float32))
    return jnp.sum(total, axis=1, keepdims=True).astype(jnp.int32)


def _search(keys, steps, k: int, low, high):
    """Halves intervals [low, high) until their low end is a threshold for each row.

    Args:
        keys: tiles.
        steps: times 16 tiles are looked at.
        k: how many are wanted.
        low: i32 `[8, 1]`, reached by k keys or more, or by fewer if nothing else is.
        high: i32 `[8, 1]`, reached by fewer than k keys.

    Returns:
        low: the largest value that k keys or more reach, or one that exactly k reach, or `low`.
        count: of the keys that reach it.
    """

    def unfinished(low, high, count):
        return (count > k) & (high - 1 > low)

    def halve(state):
        low, high, count = state
        active = unfinished(low, high, count)
        middle = (low & high) + ((low ^ high) >> 1)
        reached = _count(keys, steps, middle)
        enough = active & (reached >= k)
        low = jnp.where(enough, middle, low)
        count = jnp.where(enough, reached, count)
        high = jnp.where(active & (reached < k), middle, high)
        return low, high, count

    def again(state):
        return jnp.max(unfinished(*state).astype(jnp.float32)) > 0

    low, _, count = lax.while_loop(again, halve, (low, high, _count(keys, steps, low)))
    return low, count


def _product(a, b):
    return jnp.dot(a, b, preferred_element_type=jnp.float32)


def _transposed_product(a, b):
    """a times b transposed."""
    return lax.dot_general(a, b, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)


def _place(row, chunks, keys, threshold, wanted, out):
    """Writes the indices of the selected entries of one row into its slots."""
    here = pl.ds(row, 1)
    limit = threshold[here, :]
    equal = wanted[here, :].astype(jnp.float32)
    square = (LANES, LANES)
    up_to = (_iota(square, 1) <= _iota(square, 0)).astype(jnp.float32).astype(jnp.bfloat16)

    def chunk(n, carry):
        taken, ties = carry
        start = n * (_CHUNK * SUBLANES) + row
        key = keys[pl.ds(start, _CHUNK, stride=SUBLANES), :]  # [block, lane]
        tied = jnp.where(key == limit, 1.0, 0.0)
        tie_count = jnp.sum(tied)

        def first_ties():
            before = jnp.sum(_product(up_to, tied.astype(jnp.bfloat16)) - tied, 1, keepdims=True)
            rank = before + _transposed_product(tied.astype(jnp.bfloat16), up_to)
            return jnp.where(rank + ties <= equal, tied, 0.0)

        all_of_them = jnp.max(equal) >= ties + tie_count
        tied = lax.cond(all_of_them, lambda: tied, first_ties)
        chosen = jnp.where(key > limit, 1.0, tied)
        count = jnp.sum(chosen)

        @pl.when(count > 0)
        def _():
            _fill(n, chosen, taken, count.astype(jnp.int32), up_to, out, row)

        return taken + count.astype(jnp.int32), ties + tie_count

    lax.fori_loop(0, chunks, chunk, (jnp.int32(0), jnp.float32(0)))


def _fill(chunk, chosen, taken, count, up_to, out, row):
    """Writes the indices of a chunk's `chosen` entries [block, lane], `taken` slots in."""
    own = jnp.sum(chosen, axis=1, keepdims=True)
    chosen = chosen.astype(jnp.bfloat16)
    last = jnp.sum(_product(up_to, chosen), axis=1, keepdims=True)  # [block, 1], this one included
    before = last - own
    inner = _transposed_product(up_to, chosen).astype(jnp.bfloat16)  # [lane, block]

    def slots(n, _):
        start = pl.multiple_of(n * LANES, LANES)
        rank = (_iota((1, LANES), 1) + (start - taken)).astype(jnp.float32)
        holds = jnp.where((before <= rank) & (rank < last), 1.0, 0.0)  # [block, slot]
        block = jnp.sum(jnp.where(last <= rank, 1.0, 0.0), axis=0, keepdims=True)
        rest = rank - jnp.sum(holds * before, axis=0, keepdims=True)
        sums = _product(inner, holds.astype(jnp.bfloat16))  # [lane, slot]
        lane = jnp.sum(jnp.where(sums <= rest, 1.0, 0.0), axis=0, keepdims=True)
        index = ((chunk * _CHUNK + block.astype(jnp.int32)) * LANES) + lane.astype(jnp.int32)
        slot = (slice(None), pl.ds(start, LANES))
        valid = (rank >= 0) & (rank < count.astype(jnp.float32))
        valid = valid & (_iota((SUBLANES, LANES), 0) == row)
        out[slot] = jnp.where(valid, index, out[slot])

    lax.fori_loop(taken // LANES, (taken + count - 1) // LANES + 1, slots, None)
