"""Pages of digits, and reading them with a model."""

import io

import numpy as np
import pytest

pytest.importorskip("sklearn")
from PIL import Image

from eval import digits
from eval.tasks import digit_pages


def test_pages_are_the_same_every_time_and_use_digits_of_their_own():
    pages = digit_pages.heldout_pages(50)
    assert pages == digit_pages.heldout_pages(50)
    shapes = set()
    for page in pages:
        image = Image.open(io.BytesIO(page.png))
        columns, lines = (side // digit_pages.CELL for side in image.size)
        assert len(page.text) == columns * lines and page.text.isdecimal()
        shapes.add((lines, columns))
        ink = np.asarray(image)
        assert ink.max() == 127 and ink.min() < 40
    assert len(shapes) == len(digit_pages.LINES) * len(digit_pages.COLUMNS)
    (train, labels), (held_out, _) = (digit_pages._digits(side) for side in (False, True))
    assert len(train) + len(held_out) == 1797 and set(labels.tolist()) == set(range(10))
    assert len(held_out) == 359


def test_scores():
    assert digits.scores(["12", "345"], ["12", "346"]) == (0.5, 0.8)
    assert digits.scores(["1", "3456", ""], ["12", "345", "6"]) == (0.0, 4 / 6)


@pytest.mark.parametrize("arguments", [[], ["--workdir=/nowhere"], ["--pages=1", "--workdir=x"]])
def test_usage_is_one_line(arguments, capsys):
    assert digits.main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and len(error.splitlines()) == 1
