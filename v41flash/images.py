"""From the size of an image to the tokens that stand for it: the resize plan.

An image is resized, cut into square patches, and `downsample_ratio`^2 neighbouring patches become
one image token. In the text it is a span of h rows of w image tokens, each row closed by a newline
token, between a start and an end token.
"""

from __future__ import annotations

import math
from typing import NamedTuple


class Grid(NamedTuple):
    """Rows and columns."""

    height: int
    width: int


class ImagePlan(NamedTuple):
    """How an image is laid out.

    Attributes:
        tokens: grid of image tokens.
        patches: grid of patches that the encoder sees; it is filled up with zeros to whole tokens.
        pixels: size to resize the image to.
        span: tokens of its span in the text, `h * (w + 1) + 2`.
    """

    tokens: Grid
    patches: Grid
    pixels: Grid
    span: int


def plan(
    width: int,
    height: int,
    *,
    max_image_tokens: int,
    min_pixels: int,
    patch_size: int = 14,
    downsample_ratio: int = 3,
    max_wh_ratio: float | None = None,
) -> ImagePlan:
    """Plans one image (V4.1 report, section on vision).

    A small image is enlarged to `min_pixels`. One whose span would exceed `max_image_tokens` is
    shrunk to the largest grid of its proportions that fits.

    Args:
        width: of the image, in pixels.
        height: likewise.
        max_image_tokens: longest span.
        min_pixels: smallest area.
        patch_size: pixels along the side of a patch.
        downsample_ratio: patches along the side of an image token.
        max_wh_ratio: an image wider than this many times its height counts as that wide.

    Returns:
        The `ImagePlan`.

    Raises:
        ValueError: an image without pixels, or no span of `max_image_tokens` holds a token.
    """
    if width < 1 or height < 1:
        raise ValueError(f"an image of {width} x {height} pixels: both must be at least 1")
    if max_image_tokens < 4:
        raise ValueError(f"max_image_tokens is {max_image_tokens}: must be at least 4")
    if max_wh_ratio is not None:
        width = min(width, max_wh_ratio * height)
    enlarge = max(1.0, math.sqrt(min_pixels / (width * height)))
    width, height = width * enlarge, height * enlarge
    patches = Grid(math.ceil(height / patch_size), math.ceil(width / patch_size))
    tokens = Grid(*(math.ceil(side / downsample_ratio) for side in patches))
    if _span(tokens) > max_image_tokens:
        tokens, patches = _shrunk(width, height, max_image_tokens - 2, patch_size, downsample_ratio)
    pixels = Grid(*(side * patch_size for side in patches))
    return ImagePlan(tokens, patches, pixels, _span(tokens))


def _span(tokens: Grid) -> int:
    return tokens.height * (tokens.width + 1) + 2


def _shrunk(width: float, height: float, most: int, patch: int, ratio: int) -> tuple[Grid, Grid]:
    """(tokens, patches) of the largest grid with `h * (w + 1) <= most`."""
    proportion = width / height
    rows = (math.sqrt(1 + 4 * proportion * most) - 1) / (2 * proportion)
    columns = proportion * rows
    if rows < 1 or columns < 1:
        tokens = Grid(1, most - 1) if rows < 1 else Grid(most // 2, 1)
        return tokens, Grid(*(side * ratio for side in tokens))
    tokens = Grid(math.floor(rows), math.floor(columns))
    # The image keeps its proportions inside the grid, so one side may fill it only in part.
    scale = min(tokens.width * patch * ratio / width, tokens.height * patch * ratio / height)
    patches = Grid(math.floor(height * scale / patch), math.floor(width * scale / patch))
    return Grid(*(math.ceil(side / ratio) for side in patches)), patches
