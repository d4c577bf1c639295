"""Visible ranges against masks written out one query and key at a time."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import packed_rows
from pallas_kernels.packed_rows import document_starts
from tests.v41flash.nn import samples
from train.data import packing
from v41flash.config_checks import DOCUMENT_ALIGNMENT
from v41flash.nn import ced
from v41flash.nn.context import make_context

# One token; shorter than m = 2's group plus one; longer than window and segment; the rest.
LENGTHS = (1, 3, 37, 12)
T = 76


def test_kernels_and_packing_align_documents_alike():
    assert packed_rows.ALIGNMENT == packing.ALIGNMENT == ced.ALIGNMENT == DOCUMENT_ALIGNMENT


def mask(ranges, count):
    """bool [T, count] of the ranges of row 0."""
    j = np.arange(count)
    lo, hi = (np.asarray(x)[0][:, None] for x in ranges)
    return (j >= lo) & (j < hi)


def packed_row():
    return samples.packed([np.zeros(n, np.int32) for n in LENGTHS], T)


def documents():
    """Yields (row of the first token, length)."""
    yield from zip(document_starts(LENGTHS), LENGTHS, strict=True)


@pytest.mark.parametrize("segment", [0, 8, 16])
def test_windows(segment):
    """Keys in [max(s, i - W + 1), i] of the document, s the start of the decoder's segment."""
    config = samples.five_layers(sliding_window=5, replay_segment=segment)
    _, positions, segment_ids = packed_row()
    context = make_context(config, jnp.asarray(positions), jnp.asarray(segment_ids), None)
    expected = {part: np.zeros((T, T), bool) for part in ("encoder", "decoder")}
    for start, length in documents():
        for i in range(length):
            for j in range(length):
                for part in expected:
                    s = i - i % segment if segment and part == "decoder" else 0
                    seen = max(s, i - 5 + 1) <= j <= i
                    expected[part][start + i, start + j] = seen
    for part, value in expected.items():
        np.testing.assert_array_equal(mask(context.window[part], T), value, err_msg=part)
        hi = np.asarray(context.window[part].hi)[0]
        assert set(np.diff(hi)) <= {0, 1}


def test_windows_after_a_replay():
    """From the replay's start s on, the decoder's keys are in [max(s, i - W + 1), i]."""
    config = samples.five_layers(sliding_window=5)
    _, positions, segment_ids = packed_row()
    starts = np.zeros_like(positions)
    for number, (start, length) in enumerate(documents()):
        starts[0, start : start + length] = 3 * number
    context = make_context(
        config, *map(jnp.asarray, (positions, segment_ids)), None, None, jnp.asarray(starts)
    )
    plain = make_context(config, jnp.asarray(positions), jnp.asarray(segment_ids), None)
    seen, usual = mask(context.window["decoder"], T), mask(plain.window["decoder"], T)
    for number, (start, length) in enumerate(documents()):
        s = start + 3 * number
        usual[s : start + length, start:s] = False
    np.testing.assert_array_equal(seen, usual)
    encoder = mask(context.window["encoder"], T)
    np.testing.assert_array_equal(encoder, mask(plain.window["encoder"], T))


def test_visible_groups():
    """Query t sees the groups j < (t + 1) // m of its document, and a query of padding none."""
    config = samples.five_layers()
    _, positions, segment_ids = packed_row()
    context = make_context(config, jnp.asarray(positions), jnp.asarray(segment_ids), None)
    assert set(context.main) == {1, 2}
    for ratio, ranges in context.main.items():
        expected = np.zeros((T, T // ratio), bool)
        for start, length in documents():
            for t in range(length):
                first = start // ratio
                expected[start + t, first : first + (t + 1) // ratio] = True
        np.testing.assert_array_equal(mask(ranges, T // ratio), expected)
    padding = segment_ids[0] == 0
    assert padding.any() and not np.asarray(context.valid)[0, padding].any()


def test_angles_count_from_the_start_of_a_document():
    config = dataclasses.replace(samples.five_layers(), max_position_embeddings=T)
    _, positions, segment_ids = packed_row()
    context = make_context(config, jnp.asarray(positions), jnp.asarray(segment_ids), None)
    for table in context.angles.values():
        for start, length in documents():
            np.testing.assert_array_equal(
                table.cos[0, start : start + length], table.cos[0, 16 : 16 + length]
            )
