"""The recorded run with images, for `tests.golden_check`.

Keys of the text model are those of the other runs; `imageJ.*` are the image encoder's.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from v41flash.config import VisionConfig
from v41flash.image_files import cut, plan_of
from v41flash.image_rows import FEATURES, RowImage, assemble
from v41flash.nn.vision import ImageBatch, normalized

# What the recorded file says about the pixels rather than about the model.
GIVEN = ("pixels", "grid_vit_hw", "grid_llm_hw", "start")


def recorded_images(vision: VisionConfig, arrays: Any, prefix: str = "") -> list[RowImage]:
    """The images of a recorded run, cut as the model takes them; arrays are `<prefix>imageJ.*`.

    Raises:
        ValueError: they are laid out in another way than recorded.
    """
    images: list[RowImage] = []
    while (key := f"{prefix}image{len(images)}.") + "pixels" in arrays:
        pixels = arrays[f"{key}pixels"]
        planned = plan_of(vision, pixels.shape[1], pixels.shape[0])
        for ours, name in ((planned.patches, "grid_vit_hw"), (planned.tokens, "grid_llm_hw")):
            if tuple(arrays[key + name]) != ours:
                raise ValueError(f"{key}{name}: recorded {arrays[key + name]}, planned {ours}")
        images.append(RowImage(int(arrays[f"{key}start"]), cut(vision, pixels, planned)))
    return images


def image_batch(vision: VisionConfig, images: list[RowImage], length: int) -> ImageBatch:
    """All images of a run in one slot, with room to spare."""
    tokens = sum(len(image.patches.pixels) for image in images) + 1
    return ImageBatch(*assemble(vision, [images], length, 1, tokens))


def token_types(source: np.ndarray) -> np.ndarray:
    """Recorded types of `ImageBatch.source`: -1 text, 0 start, 1 image, 2 newline, 3 end."""
    return np.array([-1, 0, 2, 3, 1])[np.minimum(source, FEATURES)]


def image_value(
    vision: VisionConfig, images: list[RowImage], kept: dict[str, Any], key: str
) -> np.ndarray:
    """Our value of the recorded `imageJ.<name>`, from the intermediates `kept`.

    Raises:
        KeyError: there is no such value.
    """
    prefix, _, name = key.partition(".")
    number = int(prefix.removeprefix("image"))
    # Slots are filled largest first; the recorded images come in that order.
    first = sum(len(image.patches.pixels) for image in images[:number])
    patches = images[number].patches
    last, each = first + len(patches.pixels), vision.downsample_ratio**2
    if name == "aligner.out":
        return kept["images"]["features"][0][0, first:last]

    if name == "patches":
        values = np.asarray(normalized(patches.pixels)).reshape(
            -1, 3, vision.patch_size, vision.patch_size
        )
    else:
        encoder = kept["images"]["vision"]
        if name.startswith("vit.block"):
            block, _, part = name.removeprefix("vit.block").partition(".")
            layer = encoder["blocks"][part or "out"][0][int(block)]
        else:
            layer = encoder[name.removeprefix("vit.")][0]
        values = layer[0, first * each : last * each]
    # Recorded row by row of the image; ours lie token by token, with gaps at the edges.
    places = patches.places.reshape(-1, 2)
    order = np.lexsort((places[:, 1], places[:, 0]))
    return values[order[places[order, 0] >= 0]]
