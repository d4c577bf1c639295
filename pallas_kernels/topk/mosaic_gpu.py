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
from pallas_kernels.topk.batching import batched
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
# Of the histogram that a search begins with.
_BINS = 1024
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
        team: warpgroups that work on a row together, where there are few rows.
        histogram: whether searches begin with a histogram of the scores.
    """

    tile: int = 2048
    room: int = 2560
    segment: int = 4096
    warpgroups: int = 1
    team: int = 1
    histogram: bool = False


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
    return batched(select, *((scores,) if lengths is None else (scores, lengths)))


def _select(scores, lengths=None, *, k, block, order, config, interpret):
    rows, size = scores.shape[0], scores.shape[1] // block
    if rows == 0:
        return jnp.zeros((0, k), jnp.int32)
    if config is None:
        config = TABLE.lookup(shape_class(rows, size, k, block), TuningConfig())
    indices = None
    segments = 0
    while segments != 1:
        plan = _plan(scores, k, block, order, config, interpret is not None)
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


def _plan(scores, k, block, order, config, interpreted) -> _Plan:
    rows, size = scores.shape[0], scores.shape[1] // block
    # Interpret mode knows no teams.
    team = config.team if rows <= 2 * _MULTIPROCESSORS and not interpreted else 1
    tile = min(max(THREADS * team, config.tile * team // block), 1 << (size.bit_length() - 1))
    team = min(team, tile // THREADS)
    slots = _round_up(k, THREADS * team)
    segment = _round_up(_segment(rows, size, slots, team, config), tile)
    segments = -(-size // segment)
    chunk = min(_CHUNK, tile)
    sampled = min(size, segment) >= 2 * _SAMPLE
    # What is left of a full buffer may be half as much again as k; a tile has to fit then.
    capacity = max(k + config.room, k + k // 2 + tile, _SAMPLE * sampled)
    capacity = _round_up(capacity, chunk)
    part = tile // team // THREADS
    return _Plan(
        rows=rows,
        size=size,
        block=block,
        segment=segment,
        segments=segments,
        k=k,
        slots=slots,
        tile=tile,
        vec=1 if block > 1 else math.gcd(16 // scores.dtype.itemsize, size, part),
        chunk=chunk,
        chunk_vec=math.gcd(4, chunk // team // THREADS),
        capacity=capacity,
        sampled=sampled,
        scored=segments > 1 or order == "score",
        histogram=config.histogram,
        team=team,
        warpgroups=max(
            1,
            min(
                1 if team > 1 else config.warpgroups,
                _SHARED_MEMORY // (8 * capacity + 4 * _BINS + 4 * SCRATCH_WORDS),
                rows * segments // _MULTIPROCESSORS,
            ),
        ),
    )


def _segment(rows: int, size: int, slots: int, team: int, config: TuningConfig) -> int:
    """How many entries each team reads."""
    # Up to here another round costs more than it saves.
    longest = config.segment * (4 if team == 1 else 8)
    if rows >= _MULTIPROCESSORS or size <= longest:
        return size
    # This round reads a segment, the next one the results of all: both alike is shortest. Where
    # that is long, two more rounds are shorter than one.
    length = math.sqrt(size * slots)
    if length > longest:
        length = (size * slots**2) ** (1 / 3)
    teams = _MULTIPROCESSORS * (8 if team == 1 else 1)
    return math.ceil(max(length, config.segment, size * rows / teams, 2 * slots))


# Jitted, so that the layers of a model trace and compile one kernel.
@functools.partial(jax.jit, static_argnames=("plan", "interpret"))
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
        row = lax.axis_index("block")
        if plan.warpgroups > 1:
            mine = lax.axis_index("warpgroup")
            row = row * plan.warpgroups + mine
            refs = [ref.at[mine] for ref in refs]
        wg = Warpgroup(refs.pop(), interpreted=interpret is not None, team=plan.team)
        buffer = _Buffer(plan, wg, *refs)

        @pl.when(row < plan.rows)
        def work():
            source = _Source.of(plan, wg, scores, payload_ref, lengths_ref, row)
            _work(plan, source, buffer, *out)

    def shared(*shape):
        return plgpu.SMEM((plan.warpgroups, *shape)[plan.warpgroups == 1 :], jnp.int32)

    threads = plan.warpgroups * plan.team
    several = {} if threads == 1 else {"thread_name": "warpgroup"}
    shape = (plan.rows, plan.segments * plan.slots)
    found = plgpu.kernel(
        body,
        out_type=tuple(
            jax.ShapeDtypeStruct(shape, dtype)
            for dtype in (jnp.int32, jnp.float32)[: 1 + plan.scored]
        ),
        # The last axis alone may have more than 65,535 blocks.
        grid=(plan.segments, -(-plan.rows // plan.warpgroups)),
        grid_names=("segment", "block"),
        num_threads=threads if several else None,
        scratch_types=[
            shared(2, plan.capacity),
            shared(_BINS),
            shared(SCRATCH_WORDS * plan.team),
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
        histogram: whether searches begin with a histogram.
        team: warpgroups that work on a row together.
        warpgroups: of a block, each of which has a row of its own; 1 where there is a team.
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
    histogram: bool
    team: int
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
    piece = THREADS * plan.team * math.gcd(plan.slots // (THREADS * plan.team), 8)
    place = wg.iota(piece, 1)
    start = lax.axis_index("segment") * plan.slots

    def write(n, _):
        some = wg.part(n * piece, piece)
        there = wg.part(start + n * piece, piece)
        found = place + n * piece < count
        indices = jnp.where(found, buffer.load_indices(some, 1), -1)
        wg.store(out_indices.at[source.row, there], indices, 1)
        if out_scores is not None:
            scores = jnp.where(found, buffer.load(some, 1), -jnp.inf)
            wg.store(out_scores.at[source.row, there], scores, 1)
        return 0

    lax.fori_loop(0, plan.slots // piece, write, 0)


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

    def _read(self, some, vec):
        return self.wg.load(self.scores.at[self.row, some], vec * self.plan.block)

    def _of_entries(self, scores, start, complete):
        """One score per entry.

        Args:
            scores: as they were read.
            start: entry of the first, where not complete.
            complete: whether the scores of all blocks take part.
        """
        block, scores = self.plan.block, scores.astype(jnp.float32)
        if block == 1:
            return scores
        if not complete:
            place = self.wg.iota(scores.shape[0] * self.plan.team, block) + start * block
            scores = jnp.where(place < self.end, scores, -jnp.inf)
        return self.wg.block_max(scores, block)

    def first_limit(self, buffer):
        """A score that more than k entries of the segment probably exceed; uses the buffer."""
        plan, wg, length = self.plan, self.wg, self.entries
        # A thread has this many loads under way.
        mine = _PIECES // plan.team
        group = min(mine, 32 // plan.block)

        def sample():
            # Pieces that are evenly spread.
            step = (length - THREADS) // (_PIECES - 1)

            def read(n, _):
                pieces = [wg.mine * mine + n * group + piece for piece in range(group)]
                places = [(self.begin + piece * step) * plan.block for piece in pieces]
                read = [self._read(pl.ds(at, THREADS * plan.block), 1) for at in places]
                for piece, scores in zip(pieces, read, strict=True):
                    scores = self._of_entries(scores, None, complete=True)
                    scores = jnp.where(scores > -jnp.inf, scores, -jnp.inf)  # no NaN
                    buffer.store(pl.ds(piece * THREADS, THREADS), scores, 1)
                return 0

            lax.fori_loop(0, mine // group, read, 0)
            wg.sync()
            # Of the sample `expected` entries are among the k largest, give or take sqrt(expected).
            # Four of these on top, and sqrt(e) <= e / (2 s) + s / 2 for any s.
            expected = (_SAMPLE * plan.k + length - 1) // length
            rank = expected + 4 + jnp.minimum(2 * expected + 2, expected // 4 + 16)
            limit = buffer.estimate(_SAMPLE, rank)
            wg.sync()
            return limit

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
            some = wg.part(start_of(n) * plan.block, plan.tile * plan.block)
            scores = self._read(some, plan.vec)
            if self.payload is None:
                return (scores,)
            return scores, wg.load(self.payload.at[self.row, some], plan.vec)

        def take(n, tile, count, limit, masked):
            place = wg.iota(plan.tile, plan.vec) + start_of(n)
            scores = self._of_entries(tile[0], start_of(n), complete=not masked)
            chosen = scores > limit
            if masked:
                first = self.begin + n * plan.tile
                chosen = chosen & (place >= first) & (place < self.begin + self.entries)
            indices = place if self.payload is None else tile[1]
            return buffer.append(chosen, scores, indices, count, n & 1, plan.vec)

        def step(n, state):
            tile, count, limit = state
            # The next tile is on its way while this one is worked on.
            following = load(n + 1)
            count = take(n, tile, count, limit, masked=False)
            full_buffer = count + plan.tile > plan.capacity
            state = lax.cond(full_buffer, buffer.make_room, lambda *s: s, count, limit)
            return following, *state

        tile, count, limit = lax.fori_loop(0, full, step, (load(0), jnp.int32(0), limit))
        count = lax.cond(
            full * plan.tile < self.entries,
            lambda tile, count: take(full, tile, count, limit, masked=True),
            lambda _, count: count,
            tile,
            count,
        )
        wg.sync()
        return count, limit


@dataclasses.dataclass(frozen=True)
class _Histogram:
    """Scores of a buffer by equal parts of their range.

    Attributes:
        useful: whether there is such a range; if not, nothing was counted.
        high: key of the largest score.
        least: only scores above it count.
        smallest: of these.
        scale: bins per score.
        cut: highest bin that has, with those above it, as many scores as wanted.
        above: how many that is.
        beyond: without the scores in the bin itself.
    """

    useful: jax.Array
    high: jax.Array
    least: jax.Array
    smallest: jax.Array
    scale: jax.Array
    cut: jax.Array | None = None
    above: jax.Array | None = None
    beyond: jax.Array | None = None

    def bin_of(self, scores):
        """The bins of scores, in the same order: rounding keeps it."""
        bins = ((scores - self.smallest) * self.scale).astype(jnp.int32)
        return jnp.clip(bins, 0, _BINS - 1)


@dataclasses.dataclass(frozen=True)
class _Buffer:
    """Scores and indices in shared memory, in the order of their places.

    Attributes:
        plan: the plan.
        wg: the warpgroup.
        entries: reference to i32 `[2, capacity]`: the bits of the scores, and the indices.
        bins: reference to the counts of a histogram.
    """

    plan: _Plan
    wg: Warpgroup
    entries: jax.Array
    bins: jax.Array

    def append(self, chosen, scores, indices, count, turn, vec):
        """Appends chosen entries; returns the new number."""
        return self.wg.compress(chosen, (scores, indices), self.entries, count, turn, vec)

    def load(self, some, vec):
        """Scores of a slice."""
        bits = self.wg.load(self.entries.at[0, some], vec)
        return lax.bitcast_convert_type(bits, jnp.float32)

    def load_indices(self, some, vec):
        """Indices of a slice."""
        return self.wg.load(self.entries.at[1, some], vec)

    def store(self, some, scores, vec):
        """Overwrites the scores of a slice."""
        bits = lax.bitcast_convert_type(scores, jnp.int32)
        self.wg.store(self.entries.at[0, some], bits, vec)

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
        scores = jnp.where(self._places(last) < count, self._load(last), -jnp.inf)
        self.store(self._chunk(last), scores, plan.chunk_vec)
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
            scores = self._load(n)
            stays = (scores > worst) & ((scores > limit) | (self._places(n) < cut))
            indices = self.load_indices(self._chunk(n), plan.chunk_vec)
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
        if self.plan.histogram:
            histogram = self._histogram(count, low, want)
            bracket = lax.cond(
                histogram.useful,
                lambda: self._borders(count, low, histogram),
                lambda: (low, histogram.high, count, jnp.int32(0)),
            )
        else:
            bracket = low, self._highest(count, low), count, jnp.int32(0)
        self.wg.sync()
        low, high, above, _ = self._search(count, bracket, want, most)
        return low, high, above

    def estimate(self, count, want):
        """A score that about `want` of the first `count` exceed, or more."""
        low = jnp.int32(_LEAST)
        most = want + want // 8
        if not self.plan.histogram:
            return _score(self.divide(jnp.int32(count), low, want, most)[0])
        histogram = self._histogram(count, low, want)
        self.wg.sync()

        def search():
            bracket = (low, histogram.high, jnp.int32(count), jnp.int32(0))
            return _score(self._search(count, bracket, want, most)[0])

        return lax.cond(
            histogram.useful & (histogram.above <= want + want // 2),
            lambda: histogram.smallest + histogram.cut.astype(jnp.float32) / histogram.scale,
            search,
        )

    def _highest(self, count, low):
        """The key of the largest score, but at least `low`."""

        def larger(n, best):
            return jnp.maximum(best, self._load(n))

        best = lax.fori_loop(1, self._chunks(count), larger, self._load(0))
        return jnp.maximum(self._max(best, 1), low)

    def _search(self, count, bracket, want, most):
        """The rest of `divide`.

        Args:
            count, want, most: as there.
            bracket: low, high, above, beyond: keys, of which at least `want` scores exceed the
                lower and fewer the higher one, and how many exceed each.

        Returns:
            As the bracket.
        """

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

        *bracket, _ = lax.while_loop(unsettled, split, (*bracket, jnp.int32(0)))
        self.wg.sync()
        return bracket

    def _histogram(self, count, low, want) -> _Histogram:
        """Counts the scores by equal parts of their range."""
        plan, wg = self.plan, self.wg
        least = _score(low)

        def extremes(n, state):
            scores = self._load(n)
            largest, smallest = state
            return (
                jnp.maximum(largest, scores),
                jnp.minimum(smallest, jnp.where(scores > least, scores, jnp.inf)),
            )

        none = wg.full(plan.chunk, plan.chunk_vec, -np.inf)
        largest, smallest = lax.fori_loop(0, self._chunks(count), extremes, (none, -none))
        high = jnp.maximum(self._max(largest, 1), low)
        smallest = -_score(self._max(-smallest, 0))
        span = _score(high) - smallest
        useful = (span > 1e-30) & (span < jnp.inf)
        counted = _Histogram(useful, high, least, smallest, (_BINS - 1) / span)

        def tally():
            vec = _BINS // (THREADS * plan.team)
            bins = self.bins.at[wg.part(0, _BINS)]
            wg.store(bins, wg.full(_BINS, vec, 0), vec)
            wg.sync()

            def add(n, _):
                scores = self._load(n)
                wg.tally(self.bins, counted.bin_of(scores), scores > least, plan.chunk_vec)
                return 0

            lax.fori_loop(0, self._chunks(count), add, 0)
            wg.sync()
            return wg.upper_bin(wg.load(bins, vec), want, jnp.int32(1))

        zero = jnp.int32(0)
        cut, above, beyond = lax.cond(useful, tally, lambda: (zero, zero, zero))
        return dataclasses.replace(counted, cut=cut, above=above, beyond=beyond)

    def _borders(self, count, low, histogram):
        """The bracket that the bin of the last wanted score makes."""
        plan = self.plan

        def larger(n, state):
            scores = self._load(n)
            bins = jnp.where(scores > histogram.least, histogram.bin_of(scores), -1)
            under, inside = state
            return (
                jnp.maximum(under, jnp.where(bins < histogram.cut, scores, -jnp.inf)),
                jnp.maximum(inside, jnp.where(bins == histogram.cut, scores, -jnp.inf)),
            )

        none = self.wg.full(plan.chunk, plan.chunk_vec, -np.inf)
        under, inside = lax.fori_loop(0, self._chunks(count), larger, (none, none))
        low = jnp.maximum(self._max(under, 0), low)
        return low, self._max(inside, 1), histogram.above, histogram.beyond

    def _max(self, scores, turn):
        """The key of the largest score."""
        return self.wg.max(_key(scores), jnp.int32(turn), self.plan.chunk_vec)

    def _number(self, count, condition, turn):
        """How many scores meet `condition(scores, chunk)`."""
        plan = self.plan

        def add(n, total):
            return total + condition(self._load(n), n).astype(jnp.int32)

        zero = self.wg.full(plan.chunk, plan.chunk_vec, 0)
        total = lax.fori_loop(0, self._chunks(count), add, zero)
        return self.wg.sum(total, turn, plan.chunk_vec)

    def _chunks(self, count):
        return (count + self.plan.chunk - 1) // self.plan.chunk

    def _chunk(self, n):
        return self.wg.part(n * self.plan.chunk, self.plan.chunk)

    def _load(self, n):
        return self.load(self._chunk(n), self.plan.chunk_vec)

    def _places(self, n):
        return self.wg.iota(self.plan.chunk, self.plan.chunk_vec) + n * self.plan.chunk
