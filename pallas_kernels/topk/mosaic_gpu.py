"""Exact top-k for Hopper GPUs, in one reading of the scores.

A warpgroup streams a row (or one of several segments of it) through registers and appends to a
buffer in shared memory what exceeds a threshold, in the order of the indices. Nothing at or below
the threshold can belong to the result, because k entries before it are above or equal: where the
buffer fills, a search on the scores' order-preserving integers finds a threshold that leaves k or
slightly more, and the rest is dropped. So any input is handled exactly, in the same pass; a row in
ascending order costs most.

The first threshold comes from a sample of the row, at a rank that leaves more than k entries with
overwhelming probability. Where it does not (the sample was not typical), the row is read again
without it.

Few long rows are cut into segments, one for each warpgroup; the segments' results are then rows of
(score, index) pairs for the next, shorter round.

An entry may also stand for several scores, of which the largest counts (`topk_blocks`).
"""

from __future__ import annotations

import dataclasses
import functools
import math
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import hopper
from pallas_kernels.tuning import Table
from pallas_kernels.warpgroup import COMPILER_PARAMS, SCRATCH_WORDS, THREADS, Warpgroup

MAX_K = 4096
_MULTIPROCESSORS = 132
_SHARED_MEMORY = 224 * 1024  # of a block, leaving some to the compiler
# Entries of a sample: as many pieces of 128.
_PIECES = 8
_SAMPLE = _PIECES * THREADS
# Entries of the buffer that are read at a time.
_CHUNK = 1024
# The key of -inf, see `_key`.
_LEAST = np.int32(np.float32(-np.inf).view(np.int32) ^ 0x7FFFFFFF)


@dataclasses.dataclass(frozen=True)
class TuningConfig:
    """How a row is worked through.

    Attributes:
        tile: scores read at a time.
        room: entries that the buffer has room for beyond k.
        segment: entries of the shortest piece that a row is cut into.
        warpgroups: of a block, where there are enough rows; each has a row of its own. Many leave
            few registers to each.
    """

    tile: int = 2048
    room: int = 2560
    segment: int = 4096
    warpgroups: int = 1


TABLE = Table(pathlib.Path(__file__).parent / "tuned.json", TuningConfig)


def shape_class(rows: int, size: int, k: int, block: int = 1) -> str:
    """What shapes share a configuration: the same powers of two of all these numbers."""
    return "x".join(str(1 << max(0, n - 1).bit_length()) for n in (rows, size, k, block))


def topk(scores, k, lengths=None, *, order="score", config=None, interpret=None):
    """See `pallas_kernels.topk.topk`.

    Args:
        scores, k, lengths, order: as there.
        config: looked up in the table when None.
        interpret: parameters of Pallas's interpret mode, in which it runs on any device.

    Raises:
        NotImplementedError: not on a Hopper GPU; k above 4096 or 0; rows shorter than 128.
    """
    return _checked("topk", scores, k, lengths, 1, order, config, interpret)


def topk_blocks(scores, k, block, lengths=None, *, config=None, interpret=None):
    """See `pallas_kernels.topk.topk_blocks`.

    Args:
        scores, k, block, lengths: as there.
        config, interpret: as for `topk`.

    Raises:
        NotImplementedError: not on a Hopper GPU; k above 4096 or 0; blocks that are not of 4, 8 or
            16 scores or do not divide the row; rows shorter than 128 blocks.
    """
    if block not in (4, 8, 16) or scores.shape[-1] % block:
        raise NotImplementedError(
            f"topk_blocks: the kernel takes blocks of 4, 8 or 16 that divide the rows, not {block} "
            f"of {scores.shape[-1]}"
        )
    return _checked("topk_blocks", scores, k, lengths, block, "index", config, interpret)


def _checked(op, scores, k, lengths, block, order, config, interpret):
    if interpret is None:
        hopper.require(op)
    size = scores.shape[-1] // block
    if not 1 <= k <= MAX_K:
        raise NotImplementedError(f"{op}: the kernel takes k from 1 to {MAX_K}, not {k}")
    if size < THREADS:
        raise NotImplementedError(f"{op}: the kernel takes rows of at least {THREADS}, not {size}")
    if scores.dtype not in (jnp.float32, jnp.bfloat16):
        raise NotImplementedError(
            f"{op}: the kernel takes float32 and bfloat16, not {scores.dtype}"
        )
    select = functools.partial(
        _select, k=k, block=block, order=order, config=config, interpret=interpret
    )
    scores = lax.stop_gradient(scores)
    return _batched(select, *((scores,) if lengths is None else (scores, lengths)))


def _batched(select, *arguments):
    """`select` of `[rows, size]` and `[rows]`, over any leading axes and under `jax.vmap`."""

    @jax.custom_batching.custom_vmap
    def flat(scores, *lengths):
        rows = scores.reshape(-1, scores.shape[-1])
        return select(rows, *(n.reshape(-1) for n in lengths)).reshape(*scores.shape[:-1], -1)

    @flat.def_vmap
    def batch(axis_size, batched, *arguments):
        arguments = (
            x if is_batched else jnp.broadcast_to(x, (axis_size, *x.shape))
            for x, is_batched in zip(arguments, batched, strict=True)
        )
        return _batched(select, *arguments), True

    return flat(*arguments)


def _select(scores, lengths=None, *, k, block, order, config, interpret):
    rows, size = scores.shape[0], scores.shape[1] // block
    if rows == 0:
        return jnp.zeros((0, k), jnp.int32)
    if config is None:
        config = TABLE.lookup(shape_class(rows, size, k, block), TuningConfig())
    indices = None
    segments = 0
    while segments != 1:
        plan = _plan(scores, k, block, order, config)
        segments = plan.segments
        indices, scores = _round(plan, scores, indices, lengths, interpret)
        lengths, block = None, 1
    if order == "score":
        # Both zeros are equal. Entries that are missing have -inf, and come last.
        scores = jnp.where(scores == 0, 0.0, scores)
        _, indices = lax.sort((-scores, indices), num_keys=2)
    return indices[:, :k]


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _plan(scores, k, block, order, config) -> _Plan:
    rows, size = scores.shape[0], scores.shape[1] // block
    tile = min(max(THREADS, config.tile // block), 1 << (size.bit_length() - 1))
    slots = _round_up(k, THREADS)
    segment = _round_up(_segment(rows, size, slots, config), tile)
    segments = -(-size // segment)
    chunk = min(_CHUNK, tile)
    sampled = min(size, segment) >= 2 * _SAMPLE
    # What is left of a full buffer may be half as much again as k; a tile has to fit then.
    capacity = max(k + config.room, k + k // 2 + tile, _SAMPLE * sampled)
    capacity = _round_up(capacity, chunk)
    return _Plan(
        rows=rows,
        size=size,
        block=block,
        segment=segment,
        segments=segments,
        k=k,
        slots=slots,
        tile=tile,
        vec=1 if block > 1 else math.gcd(16 // scores.dtype.itemsize, size, tile // THREADS),
        chunk=chunk,
        chunk_vec=math.gcd(4, chunk // THREADS),
        capacity=capacity,
        sampled=sampled,
        scored=segments > 1 or order == "score",
        warpgroups=max(
            1,
            min(
                config.warpgroups,
                _SHARED_MEMORY // (8 * capacity + 4 * SCRATCH_WORDS),
                rows * segments // _MULTIPROCESSORS,
            ),
        ),
    )


def _segment(rows: int, size: int, slots: int, config: TuningConfig) -> int:
    """How many entries each warpgroup reads."""
    if rows >= _MULTIPROCESSORS:
        return size
    # This round reads a segment, the next one the results of all: both alike is shortest. Where
    # that is long, two more rounds are shorter than one.
    length = math.sqrt(size * slots)
    if length > 4 * config.segment:
        length = (size * slots**2) ** (1 / 3)
    length = max(length, config.segment, size * rows / (8 * _MULTIPROCESSORS), 2 * slots)
    return math.ceil(length)


def _round(plan, scores, payload, lengths, interpret):
    """Selects in every segment of every row.

    Args:
        plan: of it.
        scores: `[rows, size]`.
        payload: i32 `[rows, size]` indices that stand for the places in the row; or None.
        lengths: i32 `[rows]`; or None.
        interpret: as for `topk`.

    Returns:
        i32 indices and f32 scores `[rows, segments * plan.slots]`. Those of a segment are in the
        order of their places, followed by -1 and -inf. The scores are None where not asked for.
    """

    def body(scores, *refs):
        refs = list(refs)
        payload_ref = None if payload is None else refs.pop(0)
        lengths_ref = None if lengths is None else refs.pop(0)
        out = refs.pop(0), refs.pop(0) if plan.scored else None
        row, buffered, indices, scratch = lax.axis_index("block"), *refs
        if plan.warpgroups > 1:
            mine = lax.axis_index("warpgroup")
            row = row * plan.warpgroups + mine
            buffered, indices, scratch = (ref.at[mine] for ref in (buffered, indices, scratch))
        wg = Warpgroup(scratch, interpreted=interpret is not None)
        buffer = _Buffer(plan, wg, buffered, indices)

        @pl.when(row < plan.rows)
        def work():
            source = _Source.of(plan, wg, scores, payload_ref, lengths_ref, row)
            _work(plan, source, buffer, *out)

    def shared(size, dtype):
        return plgpu.SMEM((plan.warpgroups, size)[plan.warpgroups == 1 :], dtype)

    several = {} if plan.warpgroups == 1 else {"thread_name": "warpgroup"}
    shape = (plan.rows, plan.segments * plan.slots)
    found = plgpu.kernel(
        body,
        out_type=tuple(
            jax.ShapeDtypeStruct(shape, dtype)
            for dtype in (jnp.int32, jnp.float32)[: 1 + plan.scored]
        ),
        grid=(-(-plan.rows // plan.warpgroups), plan.segments),
        grid_names=("block", "segment"),
        num_threads=plan.warpgroups if several else None,
        scratch_types=[
            shared(plan.capacity, jnp.float32),
            shared(plan.capacity, jnp.int32),
            shared(SCRATCH_WORDS, jnp.int32),
        ],
        compiler_params=COMPILER_PARAMS,
        interpret=interpret,
        kernel_name="topk",
        **several,
    )(*(x for x in (scores, payload, lengths) if x is not None))
    return found if plan.scored else (found[0], None)


@dataclasses.dataclass(frozen=True)
class _Plan:
    """The work of one round.

    Attributes:
        rows: number of rows.
        size: entries of a row.
        block: scores that an entry stands for.
        segment: entries of a segment.
        segments: of a row.
        k: of the selection.
        slots: of the results of a segment.
        tile: entries read at a time.
        vec: entries that a thread reads at once.
        chunk: entries of the buffer read at a time.
        chunk_vec: entries of the buffer that a thread reads at once.
        capacity: of the buffer.
        sampled: whether segments are long enough to take a sample first.
        scored: whether the scores of what is selected are written.
        warpgroups: of a block; each has a row of its own.
    """

    rows: int
    size: int
    block: int
    segment: int
    segments: int
    k: int
    slots: int
    tile: int
    vec: int
    chunk: int
    chunk_vec: int
    capacity: int
    sampled: bool
    scored: bool
    warpgroups: int


def _work(plan, source, buffer, out_indices, out_scores) -> None:
    """Selects in one segment, and writes what is found."""

    def passes(state):
        count, first, _ = state
        return (count < 0) | ((count < plan.k) & (first > -jnp.inf))

    def one_pass(state):
        count, first, _ = state
        first = jnp.where(count < 0, first, -jnp.inf)
        count, limit = source.stream(buffer, first)
        return count, first, limit

    first = source.first_limit(buffer) if plan.sampled else jnp.float32(-jnp.inf)
    count, _, limit = lax.while_loop(passes, one_pass, (jnp.int32(-1), first, first))
    count, _ = lax.cond(
        count > plan.k,
        lambda: buffer.reduce(count, limit, plan.k),
        lambda: (count, limit),
    )

    wg = source.wg
    place = wg.iota(THREADS, 1)
    start = lax.axis_index("segment") * plan.slots

    def write(n, _):
        some = pl.ds(n * THREADS, THREADS)
        there = pl.ds(start + n * THREADS, THREADS)
        found = place + n * THREADS < count
        indices = jnp.where(found, wg.load(buffer.indices.at[some], 1), -1)
        wg.store(out_indices.at[source.row, there], indices, 1)
        if out_scores is not None:
            scores = jnp.where(found, wg.load(buffer.scores.at[some], 1), -jnp.inf)
            wg.store(out_scores.at[source.row, there], scores, 1)
        return 0

    lax.fori_loop(0, plan.slots // THREADS, write, 0)


def _key(scores):
    """Integers of the same order as the scores."""
    bits = lax.bitcast_convert_type(scores, jnp.int32)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def _score(key):
    return lax.bitcast_convert_type(key ^ ((key >> 31) & 0x7FFFFFFF), jnp.float32)


@dataclasses.dataclass(frozen=True)
class _Source:
    """The entries of one segment in main memory.

    Attributes:
        plan: the plan.
        wg: the warpgroup.
        scores: reference to `[rows, size * block]` scores.
        payload: reference to the `[rows, size]` indices of the entries, or None: their places.
        row: of both.
        begin: first entry of the segment.
        end: one past the last score of the segment that takes part.
    """

    plan: _Plan
    wg: Warpgroup
    scores: jax.Array
    payload: jax.Array | None
    row: jax.Array
    begin: jax.Array
    end: jax.Array

    @classmethod
    def of(cls, plan, wg, scores, payload, lengths, row) -> _Source:
        """The segment that this program works on."""
        begin = lax.axis_index("segment") * plan.segment
        end = jnp.minimum(begin + plan.segment, plan.size) * plan.block
        if lengths is not None:
            end = jnp.clip(lengths[row], begin * plan.block, end)
        return cls(plan, wg, scores, payload, row, begin, end)

    @property
    def entries(self):
        """How many of the segment take part."""
        return (self.end + self.plan.block - 1) // self.plan.block - self.begin

    def _read(self, start, size, vec):
        block = self.plan.block
        return self.wg.load(
            self.scores.at[self.row, pl.ds(start * block, size * block)], vec * block
        )

    def _of_entries(self, scores, start, complete):
        """One score per entry.

        Args:
            scores: as they were read.
            start: entry of the first.
            complete: whether the scores of all blocks take part.
        """
        block, scores = self.plan.block, scores.astype(jnp.float32)
        if block == 1:
            return scores
        if not complete:
            place = self.wg.iota(scores.shape[0], block) + start * block
            scores = jnp.where(place < self.end, scores, -jnp.inf)
        return self.wg.block_max(scores, block)

    def first_limit(self, buffer):
        """A score that more than k entries of the segment probably exceed; uses the buffer."""
        plan, wg, length = self.plan, self.wg, self.entries
        # A thread has this many loads under way.
        group = min(_PIECES, 32 // plan.block)

        def sample():
            # Pieces that are evenly spread.
            step = (length - THREADS) // (_PIECES - 1)

            def read(n, _):
                pieces = [n * group + piece for piece in range(group)]
                read = [self._read(self.begin + piece * step, THREADS, 1) for piece in pieces]
                for piece, scores in zip(pieces, read, strict=True):
                    scores = self._of_entries(scores, self.begin + piece * step, complete=True)
                    scores = jnp.where(scores > -jnp.inf, scores, -jnp.inf)  # no NaN
                    wg.store(buffer.scores.at[pl.ds(piece * THREADS, THREADS)], scores, 1)
                return 0

            lax.fori_loop(0, _PIECES // group, read, 0)
            wg.sync()
            # Of the sample `expected` entries are among the k largest, give or take sqrt(expected).
            # Four of these on top, and sqrt(e) <= e / (2 s) + s / 2 for any s.
            expected = (_SAMPLE * plan.k + length - 1) // length
            rank = expected + 4 + jnp.minimum(2 * expected + 2, expected // 4 + 16)
            low, _, _ = buffer.divide(jnp.int32(_SAMPLE), _LEAST, rank, rank + rank // 8)
            wg.sync()
            return _score(low)

        # Not where most entries would be taken anyway.
        worth = (length >= 2 * _SAMPLE) & (length >= 4 * plan.k)
        return lax.cond(worth, sample, lambda: jnp.float32(-jnp.inf))

    def stream(self, buffer, limit):
        """Appends all that may belong to the result.

        Args:
            buffer: empty.
            limit: score that entries have to exceed.

        Returns:
            The number of entries in the buffer, and the limit in force at the end.
        """
        plan, wg = self.plan, self.wg
        # Tiles of which every score takes part, and one of the rest.
        full = (self.end // plan.block - self.begin) // plan.tile

        def start_of(n):
            # The last tile of a row may overlap the one before.
            return jnp.minimum(self.begin + n * plan.tile, plan.size - plan.tile)

        def load(n):
            scores = self._read(start_of(n), plan.tile, plan.vec)
            if self.payload is None:
                return (scores,)
            some = pl.ds(start_of(n), plan.tile)
            return scores, wg.load(self.payload.at[self.row, some], plan.vec)

        def take(n, tile, state, masked):
            count, limit = lax.cond(
                state[0] + plan.tile > plan.capacity, buffer.make_room, lambda *s: s, *state
            )
            place = wg.iota(plan.tile, plan.vec) + start_of(n)
            scores = self._of_entries(tile[0], start_of(n), complete=not masked)
            chosen = scores > limit
            if masked:
                first = self.begin + n * plan.tile
                chosen = chosen & (place >= first) & (place < self.begin + self.entries)
            indices = place if self.payload is None else tile[1]
            return buffer.append(chosen, scores, indices, count, n & 1, plan.vec), limit

        def step(n, state):
            tile, state = state[0], state[1:]
            # The next tile is on its way while this one is worked on.
            following = load(n + 1)
            return (following, *take(n, tile, state, masked=False))

        def rest(tile, *state):
            return take(full, tile, state, masked=True)

        tile, *state = lax.fori_loop(0, full, step, (load(0), jnp.int32(0), limit))
        state = lax.cond(full * plan.tile < self.entries, rest, lambda _, *s: s, tile, *state)
        wg.sync()
        return state


@dataclasses.dataclass(frozen=True)
class _Buffer:
    """Scores and indices in shared memory, in the order of their places.

    Attributes:
        plan: the plan.
        wg: the warpgroup.
        scores: reference to them.
        indices: reference to them.
    """

    plan: _Plan
    wg: Warpgroup
    scores: jax.Array
    indices: jax.Array

    def append(self, chosen, scores, indices, count, turn, vec):
        """Appends chosen entries; returns the new number."""
        refs = (self.scores, self.indices)
        return self.wg.compress(chosen, (scores, indices), refs, count, turn, vec)

    def make_room(self, count, limit):
        """Drops what cannot belong to the result; returns the new number and limit."""
        self.wg.sync()
        return self.reduce(count, limit, self.plan.k + self.plan.k // 2)

    def reduce(self, count, limit, most):
        """Keeps the k largest, or up to `most`.

        Args:
            count: entries in the buffer, more than k.
            limit: score that no entry is below, -inf aside.
            most: at least k.

        Returns:
            The number of entries kept, and a score that only better ones exceed.
        """
        plan, wg = self.plan, self.wg
        # What lies behind the last entry must not count.
        last = self._chunks(count) - 1
        wg.store(
            self.scores.at[pl.ds(last * plan.chunk, plan.chunk)],
            jnp.where(self._places(last) < count, self._load(self.scores, last), -jnp.inf),
            plan.chunk_vec,
        )
        low, high, above = self.divide(count, jnp.maximum(_key(limit) - 1, _LEAST), plan.k, most)

        # Too many are left only where they equal `high`: of those the first ones stay.
        tied = above > most
        best = _score(high)

        def better():
            return self._number(count, lambda scores, _: scores > best, jnp.int32(0))

        better = lax.cond(tied, better, lambda: jnp.int32(0))

        def narrow(state):
            first, end, turn = state
            middle = (first + end) // 2
            found = self._number(
                count, lambda scores, n: (scores == best) & (self._places(n) < middle), turn
            )
            enough = better + found >= plan.k
            return jnp.where(enough, first, middle), jnp.where(enough, middle, end), 1 - turn

        _, cut, _ = lax.while_loop(
            lambda state: tied & (state[1] - state[0] > 1),
            narrow,
            (jnp.int32(0), count, jnp.int32(1)),
        )
        wg.sync()
        worst, limit = _score(low), _score(low + 1)

        def keep(n, kept):
            scores = self._load(self.scores, n)
            stays = (scores > worst) & ((scores > limit) | (self._places(n) < cut))
            indices = self._load(self.indices, n)
            return self.append(stays, scores, indices, kept, n & 1, plan.chunk_vec)

        kept = lax.fori_loop(0, self._chunks(count), keep, jnp.int32(0))
        wg.sync()
        # k entries are at least `limit`, all of them before what is still to come.
        return kept, limit

    def divide(self, count, low, want, most):
        """Finds a key that `want` scores exceed, or up to `most`.

        Args:
            count: scores in the buffer; up to the end of their last chunk no other exceeds `low`.
            low: key that at least `want` exceed.
            want: at least 1.
            most: at least `want`.

        Returns:
            low: key that at least `want` exceed.
            high: key that fewer exceed.
            above: how many exceed `low`. More than `most` only where all that is too much equals
                `high = low + 1`.
        """
        plan, wg = self.plan, self.wg

        def unsettled(state):
            low, high, above, _, _ = state
            return (above > most) & (high > low) & (high - 1 != low)

        def split(state):
            low, high, above, beyond, turn = state
            # By turns in the middle of the keys and where `want` would be if they were spread
            # evenly between the two: the first is sure to end, the second mostly fast.
            half = (low & high) + ((low ^ high) >> 1)
            span = high.astype(jnp.float32) - low.astype(jnp.float32)
            share = (above - want).astype(jnp.float32) / (above - beyond).astype(jnp.float32)
            guess = low + jnp.minimum(span * share, 2.0**30).astype(jnp.int32)
            middle = jnp.where(turn == 0, half, jnp.clip(guess, low + 1, high - 1))
            score = _score(middle)
            found = self._number(count, lambda scores, _: scores > score, turn)
            enough = found >= want
            return (
                jnp.where(enough, middle, low),
                jnp.where(enough, high, middle),
                jnp.where(enough, found, above),
                jnp.where(enough, beyond, found),
                1 - turn,
            )

        def larger(n, best):
            return jnp.maximum(best, self._load(self.scores, n))

        best = lax.fori_loop(1, self._chunks(count), larger, self._load(self.scores, 0))
        high = jnp.maximum(wg.max(_key(best), jnp.int32(1), plan.chunk_vec), low)
        state = (low, high, count, jnp.int32(0), jnp.int32(0))
        low, high, above, _, _ = lax.while_loop(unsettled, split, state)
        wg.sync()
        return low, high, above

    def _number(self, count, condition, turn):
        """How many scores meet `condition(scores, chunk)`."""
        plan = self.plan

        def add(n, total):
            return total + condition(self._load(self.scores, n), n).astype(jnp.int32)

        zero = self.wg.full(plan.chunk, plan.chunk_vec, 0)
        total = lax.fori_loop(0, self._chunks(count), add, zero)
        return self.wg.sum(total, turn, plan.chunk_vec)

    def _chunks(self, count):
        return (count + self.plan.chunk - 1) // self.plan.chunk

    def _load(self, ref, n):
        plan = self.plan
        return self.wg.load(ref.at[pl.ds(n * plan.chunk, plan.chunk)], plan.chunk_vec)

    def _places(self, n):
        return self.wg.iota(self.plan.chunk, self.plan.chunk_vec) + n * self.plan.chunk
