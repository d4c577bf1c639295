"""Pages of handwritten digits: a small task for a model that sees.

The digits are those that scikit-learn ships (1,797 images of 8 x 8). A page of grey paper has one
or two lines of one or two digits, each enlarged, turned and moved a little inside its cell of 16 x
16 pixels; its text is the digits in reading order. Held-out pages are written with other digits
than training pages: every fifth image is kept for them.
"""

from __future__ import annotations

import functools
import io
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

# Part of a stored corpus's key: raise it with every change of what a page looks like.
VERSION = 1
# Stands in a page's text where its image goes.
IMAGE = "<image>"
CELL = 16
LINES, COLUMNS = (1, 2), (1, 2)
_TRAINING_PAGES = 10_000
_TRAINING_SEED, _HELD_OUT_SEED = 0, 1


class Page(NamedTuple):
    """A page: its digits in reading order, and the picture as a PNG file."""

    text: str
    png: bytes


def source_file() -> Path:
    """The file of scikit-learn that holds the digits."""
    import sklearn.datasets

    return Path(sklearn.datasets.__file__).parent / "data" / "digits.csv.gz"


@functools.cache
def _digits(held_out: bool) -> tuple[np.ndarray, np.ndarray]:
    """(images uint8 [n, 8, 8], labels [n]) of one side."""
    from sklearn.datasets import load_digits

    loaded = load_digits()
    mine = (np.arange(len(loaded.target)) % 5 == 4) == held_out
    return (loaded.images[mine] * (255 / 16)).astype(np.uint8), loaded.target[mine]


def pages(seed: int, *, held_out: bool) -> Iterator[Page]:
    """Endless pages, the same for the same arguments."""
    from PIL import Image

    images, labels = _digits(held_out)
    rng = np.random.default_rng(seed)
    while True:
        lines, columns = int(rng.choice(LINES)), int(rng.choice(COLUMNS))
        page = Image.new("L", (columns * CELL, lines * CELL))
        text = ""
        for line, column in np.ndindex(lines, columns):
            number = int(rng.integers(len(labels)))
            text += str(labels[number])
            size = int(rng.integers(12, 17))
            digit = Image.fromarray(images[number]).resize((size, size), Image.Resampling.BICUBIC)
            digit = digit.rotate(float(rng.uniform(-8, 8)), Image.Resampling.BICUBIC)
            x, y = (int(at) for at in rng.integers(0, CELL - size, 2, endpoint=True))
            page.paste(digit, (column * CELL + x, line * CELL + y))
        file = io.BytesIO()
        # Black on grey: grey is what the encoder sees as zero.
        page.point(lambda ink: 127 - ink // 2).save(file, "PNG")
        yield Page(text, file.getvalue())


def training_pages() -> Iterator[Page]:
    """The pages of the training corpus."""
    return itertools.islice(pages(_TRAINING_SEED, held_out=False), _TRAINING_PAGES)


def heldout_pages(count: int) -> list[Page]:
    """The first `count` held-out pages."""
    return list(itertools.islice(pages(_HELD_OUT_SEED, held_out=True), count))
