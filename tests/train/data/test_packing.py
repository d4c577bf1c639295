"""Packing: every prediction exactly once, aligned, inside one row, repeatable."""

import time

import chex
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from train.data import packing

lengths_strategy = st.lists(st.integers(0, 200), max_size=60).map(np.array)


@settings(max_examples=80, deadline=None)
@given(
    lengths=lengths_strategy,
    sequence_length=st.sampled_from([8, 16, 40, 64]),
    epoch=st.integers(0, 3),
    window=st.integers(1, 50),
)
def test_every_prediction_exactly_once(lengths, sequence_length, epoch, window):
    plan = packing.pack(lengths, sequence_length, seed=3, epoch=epoch, window=window)
    seen = [np.zeros(max(n - 1, 0), int) for n in lengths]
    assert plan.row_first[0] == 0 and plan.row_first[-1] == len(plan.document)
    for row in range(plan.num_rows):
        used = np.zeros(sequence_length, int)
        assert plan.row_first[row] < plan.row_first[row + 1], "a row without a piece"
        end = 0
        for piece in range(plan.row_first[row], plan.row_first[row + 1]):
            offset, length = plan.offset[piece], plan.length[piece]
            assert offset % 8 == 0 and offset >= end and length > 0
            end = offset + length
            assert end <= sequence_length
            used[offset:end] += 1
            start = plan.start[piece]
            seen[plan.document[piece]][start : start + length] += 1
        assert used.max() == 1
    assert all((s == 1).all() for s in seen)
    targets = sum(len(s) for s in seen)
    total = plan.num_rows * sequence_length
    assert plan.padding_rate == pytest.approx(1 - targets / total if total else 0)


@settings(max_examples=30, deadline=None)
@given(lengths=lengths_strategy, seed=st.integers(0, 2**31), epoch=st.integers(0, 100))
def test_a_function_of_its_arguments(lengths, seed, epoch):
    first = packing.pack(lengths, 32, seed=seed, epoch=epoch, window=16)
    second = packing.pack(lengths.copy(), 32, seed=seed, epoch=epoch, window=16)
    chex.assert_trees_all_equal(vars(first), vars(second))


def test_epochs_and_seeds_differ():
    lengths = np.random.default_rng(0).integers(2, 300, 200)
    plans = [
        packing.pack(lengths, 64, seed=seed, epoch=epoch)
        for seed, epoch in ((0, 0), (0, 1), (1, 0))
    ]
    orders = [plan.document.tolist() for plan in plans]
    assert orders[0] != orders[1] != orders[2] != orders[0]
    assert len({plan.length.sum() for plan in plans}) == 1


def test_long_documents_overlap_by_the_token_that_was_the_last_target():
    document, start, length = packing.cut(np.array([1, 17, 18, 2]), 16)
    assert document.tolist() == [1, 2, 2, 3]
    assert start.tolist() == [0, 0, 16, 0]
    assert length.tolist() == [16, 16, 1, 1]


def reference_best_fit(units, capacity):
    """Every row is looked at; rows with equal room: the one that got it last."""
    rooms, rows = [], []
    for size in sorted(units.tolist(), reverse=True):
        fitting = [room for room in rooms if room >= size]
        if fitting:
            rooms.remove(min(fitting))
            room = min(fitting)
        else:
            room = capacity
            rows.append(None)
        if room > size:
            rooms.append(room - size)
    return len(rows)


@settings(max_examples=50, deadline=None)
@given(units=st.lists(st.integers(1, 12), max_size=50).map(lambda x: np.array(x, np.int64)))
def test_best_fit_uses_as_many_rows_as_the_plain_search(units):
    row, offset, rows = packing.best_fit(units, 12)
    assert rows == reference_best_fit(units, 12)
    assert sorted(set(row.tolist())) == list(range(rows))
    filled = np.zeros((rows, 12), int)
    for r, o, size in zip(row, offset, units, strict=True):
        filled[r, o : o + size] += 1
    assert filled.max(initial=0) <= 1


def test_hundred_thousand_documents_pack_tightly_and_quickly():
    lengths = np.random.default_rng(0).lognormal(5.5, 1.2, 100_000).astype(int) + 2
    started = time.process_time()
    plan = packing.pack(lengths, 1024, seed=0, epoch=0)
    assert time.process_time() - started < 5
    assert plan.padding_rate < 0.02
    # Length order does not show: the first tenth of the rows is like the rest.
    pieces = np.diff(plan.row_first)
    assert pieces[: len(pieces) // 10].mean() == pytest.approx(pieces.mean(), rel=0.1)


@pytest.mark.parametrize("sequence_length", [0, 12, -8])
def test_bad_sequence_length(sequence_length):
    with pytest.raises(ValueError, match=f"sequence_length={sequence_length}"):
        packing.pack(np.array([5]), sequence_length, seed=0, epoch=0)


def test_bad_window():
    with pytest.raises(ValueError, match="pack_window=0"):
        packing.pack(np.array([5]), 8, seed=0, epoch=0, window=0)
