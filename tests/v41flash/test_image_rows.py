"""Spans and slots of images."""

import json

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st
from PIL import Image

from tests.conftest import GOLDEN
from tests.v41flash.nn.samples import VISION
from v41flash import image_rows
from v41flash.errors import InputError
from v41flash.image_files import to_patches
from v41flash.image_rows import END, FEATURES, NEWLINE, START, TEXT, RowImage
from v41flash.images import Grid


def test_a_span_is_as_recorded():
    recorded = json.loads((GOLDEN / "unit/image_plan.json").read_text())
    ours = image_rows.span(Grid(2, 3), first=5)
    theirs = {0: START, 1: FEATURES, 2: NEWLINE, 3: END}
    assert np.minimum(ours, FEATURES).tolist() == [theirs[t] for t in recorded["token_types_2x3"]]
    assert [mark - FEATURES for mark in ours if mark >= FEATURES] == list(range(5, 11))


@hypothesis.given(st.lists(st.integers(1, 9), max_size=8), st.integers(1, 4), st.integers(1, 12))
def test_slots_hold_every_image_once_or_none(sizes, slots, slot_tokens):
    found = image_rows.into_slots(sizes, slots, slot_tokens)
    if found is None:
        assert sum(sizes) + max(sizes) > slot_tokens or max(sizes) > slot_tokens
        return
    taken = np.zeros((slots, slot_tokens), int)
    for size, (slot, place) in zip(sizes, found, strict=True):
        taken[slot, place : place + size] += 1
        assert place + size <= slot_tokens
    assert taken.max(initial=0) <= 1 and taken.sum() == sum(sizes)


def test_assembled_rows():
    small, large = (to_patches(VISION, Image.new("RGB", size)) for size in ((42, 42), (84, 42)))
    rows = image_rows.assemble(
        VISION, [[RowImage(2, small), RowImage(9, large)], []], length=16, slots=2, slot_tokens=2
    )
    # The larger image has the first slot, the smaller one the second.
    assert rows.segments.tolist() == [[[2, 2], [1, 0]], [[0, 0], [0, 0]]]
    source = [TEXT, TEXT, START, FEATURES + 2, NEWLINE, END, TEXT, TEXT, TEXT]
    source += [START, FEATURES, FEATURES + 1, NEWLINE, END, TEXT, TEXT]
    assert rows.source.tolist() == [source, [TEXT] * 16]
    assert (rows.places >= 0).all(-1).sum() == 27 and (rows.places[1] == -1).all()


def test_images_that_do_not_fit_are_refused():
    image = to_patches(VISION, Image.new("RGB", (84, 42)))
    with pytest.raises(InputError, match=r"\[2, 2\] tokens in one row do not fit 1 slots of 3"):
        image_rows.assemble(VISION, [[RowImage(0, image)] * 2], 32, 1, 3)
    with pytest.raises(InputError, match="5 tokens at 4 leaves a row of 8"):
        image_rows.assemble(VISION, [[RowImage(4, image)]], 8, 1, 3)
