"""The code that warpgroup operations emit, executed thread by thread."""

import numpy as np
import pytest

from pallas_kernels import warpgroup
from tests.pallas_kernels.lanes import F32, Block, Value, bits, signed

TEAMS = (1, 4)


def registers(array, team, vec):
    """Per row and element of the layout, one number of every thread."""
    parts = array.reshape(team, -1, 128, vec).transpose(1, 3, 0, 2)
    return [list(row) for row in parts.reshape(*parts.shape[:2], 128 * team)]


@pytest.mark.parametrize("share", [0.03, 1.0])
@pytest.mark.parametrize(
    "team, rows, vec",
    [(1, 1, 4), (1, 4, 4), (1, 5, 4), (1, 2, 8), (1, 16, 1), (1, 3, 2), (4, 2, 4), (4, 5, 1)],
)
def test_compress(monkeypatch, team, rows, vec, share):
    rng = np.random.default_rng(0)
    size = team * rows * 128 * vec
    scratch_words, capacity = warpgroup.SCRATCH_WORDS * team, 3 * size + 8
    block = Block(team, scratch_words + 2 * capacity)
    block.install(monkeypatch)
    count, expected = 5, [[], []]
    # Calls follow on each other without a barrier, by turns.
    for turn in (0, 1, 0):
        mask = rng.random(size) < share
        scores = rng.normal(size=size).astype(np.float32)
        indices = rng.integers(-5, 2**31, size=size)
        end = warpgroup._compress(
            [[Value(bit, "i1") for bit in row] for row in registers(mask, team, vec)],
            [
                [[Value(x, F32) for x in row] for row in registers(scores, team, vec)],
                [[bits(x) for x in row] for row in registers(indices, team, vec)],
            ],
            block.constant(4 * scratch_words),
            4 * capacity,
            block.constant(count),
            block.constant(0),
            block.constant(turn),
            team,
        )
        expected[0].append(scores[mask].view(np.uint32))
        expected[1].append(indices[mask] & 0xFFFFFFFF)
        count += mask.sum()
        assert (end.data == count).all()
    stored = block.memory[scratch_words:].reshape(2, -1)
    for row, parts in zip(stored, expected, strict=True):
        np.testing.assert_array_equal(row[5:count], np.concatenate(parts))
        assert (row[:5] == 0xDEADBEEF).all() and (row[count:] == 0xDEADBEEF).all()


@pytest.mark.parametrize("kind, function", [("add", np.sum), ("max", np.max)])
@pytest.mark.parametrize("team", TEAMS)
def test_reductions(monkeypatch, team, kind, function):
    rng = np.random.default_rng(0)
    block = Block(team, warpgroup.SCRATCH_WORDS * team)
    block.install(monkeypatch)
    for turn in (1, 0, 1):
        numbers = rng.integers(-1000, 1000, size=(3, block.threads))
        result = warpgroup._reduce(
            kind, [bits(x) for x in numbers], block.constant(0), block.constant(turn), team
        )
        assert (signed(result) == function(numbers)).all()


@pytest.mark.parametrize("team", TEAMS)
def test_tally(monkeypatch, team):
    rng = np.random.default_rng(0)
    block = Block(team, 100)
    block.install(monkeypatch)
    block.memory[:] = 7
    places, picked = rng.integers(0, 90, (5, block.threads)), rng.random((5, block.threads)) < 0.5
    warpgroup._tally(
        [bits(x) for x in places], [Value(x, "i1") for x in picked], block.constant(4 * 10)
    )
    expected = np.bincount(10 + places[picked], minlength=100)
    np.testing.assert_array_equal(block.memory, 7 + expected)


@pytest.mark.parametrize("want", [1, 2, 40, 399])
@pytest.mark.parametrize("team", TEAMS)
def test_upper_bin(monkeypatch, team, want):
    rng = np.random.default_rng(want)
    block = Block(team, warpgroup.SCRATCH_WORDS * team)
    block.install(monkeypatch)
    counts = np.bincount(rng.integers(300, 700, size=400), minlength=1024)
    upwards = counts[::-1].cumsum()[::-1]
    expected = np.flatnonzero(upwards >= want)[-1]
    found = warpgroup._upper_bin(
        [bits(x) for x in counts.reshape(block.threads, -1).T],
        block.constant(want),
        block.constant(0),
        block.constant(1),
        team,
    )
    for value, number in zip(
        found, (expected, upwards[expected], upwards[expected] - counts[expected]), strict=True
    ):
        assert (value.data == number).all()


def test_missing_barrier_is_seen(monkeypatch):
    block = Block(1, warpgroup.SCRATCH_WORDS)
    block.install(monkeypatch)
    monkeypatch.setattr(warpgroup, "_barrier", lambda team: None)
    with pytest.raises(AssertionError, match="is read while it is written"):
        warpgroup._reduce("add", [block.constant(1)], block.constant(0), block.constant(0), 1)


def test_same_turn_twice_is_seen(monkeypatch):
    block = Block(1, warpgroup.SCRATCH_WORDS)
    block.install(monkeypatch)
    zero = block.constant(0)
    warpgroup._reduce("add", [zero], zero, zero, 1)
    with pytest.raises(AssertionError, match="is written while it is read"):
        warpgroup._reduce("add", [zero], zero, zero, 1)
