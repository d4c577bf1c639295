"""Images of a batch, as arrays: where their spans lie, and slots of patches for the encoder.

A span in the text is START, h rows of w image tokens and a NEWLINE, END. The encoder takes images
in slots, S a row of the text with room for N image tokens each; a slot holds one image or several.
NumPy only: it runs in the data pipeline and in front of a prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from v41flash.config import VisionConfig
from v41flash.errors import InputError
from v41flash.image_files import Patches
from v41flash.images import Grid

# What a row of the text is; an image token is FEATURES + its place among the row's S * N.
TEXT, START, NEWLINE, END, FEATURES = range(5)


class RowImage(NamedTuple):
    """An image in a row: the place of its START, and its patches."""

    start: int
    patches: Patches


class ImageRows(NamedTuple):
    """The arrays of `v41flash.nn.vision.ImageBatch`."""

    patches: np.ndarray
    places: np.ndarray
    segments: np.ndarray
    source: np.ndarray


def span(tokens: Grid, first: int) -> np.ndarray:
    """What each row of a span is, int32 [h * (w + 1) + 2]; `first` is the first image token's
    place among those of the row's slots."""
    grid = np.full((tokens.height, tokens.width + 1), NEWLINE, np.int32)
    count = tokens.height * tokens.width
    grid[:, :-1] = FEATURES + first + np.arange(count).reshape(tokens)
    return np.concatenate(([START], grid.reshape(-1), [END])).astype(np.int32)


def into_slots(sizes: Sequence[int], slots: int, slot_tokens: int) -> list[tuple[int, int]] | None:
    """First-fit, largest first: (slot, place in it) of every image; None where they do not fit.

    Args:
        sizes: image tokens of each image (without START, NEWLINE, END).
        slots: S.
        slot_tokens: N.
    """
    used = [0] * slots
    found: list[tuple[int, int]] = [(0, 0)] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        room = (s for s in range(slots) if used[s] + sizes[index] <= slot_tokens)
        slot = next(room, None)
        if slot is None:
            return None
        found[index] = (slot, used[slot])
        used[slot] += sizes[index]
    return found


def assemble(
    config: VisionConfig,
    rows: Sequence[Sequence[RowImage]],
    length: int,
    slots: int,
    slot_tokens: int,
) -> ImageRows:
    """The arrays of a batch.

    Args:
        config: of the encoder.
        rows: the images of each of the B rows.
        length: T.
        slots: S.
        slot_tokens: N.

    Returns:
        `ImageRows`.

    Raises:
        InputError: the images of a row do not fit its slots, or a span leaves the row.
    """
    patches_a_token = config.downsample_ratio**2
    lead = (len(rows), slots, slot_tokens)
    out = ImageRows(
        np.zeros((*lead, patches_a_token, 3 * config.patch_size**2), np.uint8),
        np.full((*lead, patches_a_token, 2), -1, np.int32),
        np.zeros(lead, np.int32),
        np.zeros((len(rows), length), np.int32),
    )
    for row, images in enumerate(rows):
        sizes = [len(image.patches.pixels) for image in images]
        slotted = into_slots(sizes, slots, slot_tokens)
        if slotted is None:
            raise InputError(
                f"images of {sizes} tokens in one row do not fit {slots} slots of {slot_tokens}"
            )
        for number, (image, size, (slot, place)) in enumerate(
            zip(images, sizes, slotted, strict=True)
        ):
            here = (row, slot, slice(place, place + size))
            out.patches[here] = image.patches.pixels
            out.places[here] = image.patches.places
            out.segments[here] = number + 1
            marks = span(image.patches.plan.tokens, slot * slot_tokens + place)
            if not 0 <= image.start <= length - len(marks):
                raise InputError(
                    f"an image of {len(marks)} tokens at {image.start} leaves a row of {length}"
                )
            out.source[row, image.start : image.start + len(marks)] = marks
    return out
