"""From image files to the patches that the encoder sees, by Pillow.

Whatever is wrong with a file ends in an `ImageError` with its name: no image at all, cut short,
animated, or larger than what anybody should have to decode. The size is looked at before a pixel is
decoded, so that a small file cannot unfold into gigabytes.
"""

from __future__ import annotations

import base64
import binascii
import io
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from v41flash.config import VisionConfig
from v41flash.errors import InputError
from v41flash.images import Grid, ImagePlan, plan

if TYPE_CHECKING:
    from PIL.Image import Image

# What is never decoded, and files that are never read.
MAX_PIXELS = 1 << 26
MAX_BYTES = 1 << 26
# Decoded by compiled code that starts no other program. Pillow reads much of BMP and PPM a byte at
# a time in Python, so that a small file would keep it busy for long.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
_MISSING = "images need the package pillow: pip install 'v41flash[images]'"
# Fills what an image's proportions leave free of its patches.
_GREY = (127, 127, 127)


class ImageError(InputError):
    """A file that is no usable image; the text begins with its name."""


class Patches(NamedTuple):
    """An image as the encoder takes it: N image tokens of R = r*r patches.

    Attributes:
        pixels: uint8 [N, R, 3 * patch_size^2], channel-major; 0 where there is no patch.
        places: int32 [N, R, 2], row and column of each patch; -1 where there is none.
        plan: how the image is laid out.
    """

    pixels: np.ndarray
    places: np.ndarray
    plan: ImagePlan


def from_data_url(url: str, name: str = "image") -> Image:
    """Decodes the image of a data URL; see `decode_data_url` and `from_bytes`."""
    return from_bytes(decode_data_url(url, name), name)


def from_file(path: str | Path) -> Image:
    """Decodes an image file; see `read_file` and `from_bytes`."""
    return from_bytes(read_file(path), str(path))


def decode_data_url(url: str, name: str = "image") -> bytes:
    """Contents of a `data:image/..;base64,..` URL; other URLs are refused, nothing is fetched.

    Raises:
        ImageError: another URL, broken base64, or more than `MAX_BYTES`.
    """
    head, comma, body = url.partition(",")
    if not comma or not head.startswith("data:") or not head.endswith(";base64"):
        raise ImageError(f"{name}: must be a URL of the form data:image/..;base64,..")
    if len(body) > MAX_BYTES * 4 // 3 + 4:
        raise ImageError(f"{name}: larger than {MAX_BYTES:,} bytes")
    try:
        return base64.b64decode(body, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ImageError(f"{name}: broken base64: {error}") from error


def read_file(path: str | Path) -> bytes:
    """Contents of a file; never waits for one, and never reads more than `MAX_BYTES` and a byte.

    Raises:
        ImageError: it cannot be read, is no regular file, or has more than `MAX_BYTES`.
    """
    try:
        with open(path, "rb", opener=_open_now) as file:
            status = os.fstat(file.fileno())
            # Devices and /proc give their size as 0, and a pipe has none.
            regular = stat.S_ISREG(status.st_mode)
            small = status.st_size <= MAX_BYTES
            data = file.read(MAX_BYTES + 1) if regular and small else b""
    except (OSError, ValueError) as error:  # a path with a null byte is a ValueError
        raise ImageError(f"{path}: cannot be read: {error}") from error
    if not regular:
        raise ImageError(f"{path}: cannot be read: must be a regular file")
    _check_size(max(status.st_size, len(data)), str(path))
    return data


def _open_now(path: str, flags: int) -> int:
    # To open a pipe would otherwise wait for whoever writes into it.
    return os.open(path, flags | os.O_NONBLOCK)


def _check_size(size: int, name: str) -> None:
    if size > MAX_BYTES:
        raise ImageError(f"{name}: {size:,} bytes: must be at most {MAX_BYTES:,}")


def from_bytes(data: bytes, name: str = "image", max_pixels: int = MAX_PIXELS) -> Image:
    """Decodes one still image.

    Args:
        data: the file's contents.
        name: of the file, for errors.
        max_pixels: largest width times height.

    Returns:
        An RGB image; transparency is dropped, as the published code does (what lies below shows).
        The orientation that a camera notes is not followed.

    Raises:
        ImageError: see the text.
        InputError: Pillow is not installed, which is no fault of the file.
    """
    try:
        import PIL.Image
    except ImportError as error:
        raise InputError(_MISSING) from error
    if not data:
        raise ImageError(f"{name}: empty")
    _check_size(len(data), name)
    try:
        image = PIL.Image.open(io.BytesIO(data), formats=FORMATS)
        width, height = image.size
        # Cameras append thumbnails to a JPEG and call it MPO; its first frame is the picture.
        frames = 1 if image.format == "MPO" else getattr(image, "n_frames", 1)
    except PIL.UnidentifiedImageError as error:
        raise ImageError(f"{name}: not an image of {', '.join(FORMATS)}") from error
    except Exception as error:  # decoders raise whatever a broken file makes them stumble over
        raise ImageError(f"{name}: not a readable image: {_line(error)}") from error
    if width * height > max_pixels:
        raise ImageError(f"{name}: {width} x {height}: must be at most {max_pixels:,} pixels")
    if width < 1 or height < 1:
        raise ImageError(f"{name}: {width} x {height}: holds no pixels")
    if frames > 1:
        raise ImageError(f"{name}: {frames} frames: must be a still image")
    try:
        if image.mode.startswith("I"):  # 16 bits of grey: Pillow would cut them off at 255
            grey = np.asarray(image)
            image = PIL.Image.fromarray((np.clip(grey, 0, 65535) // 257).astype(np.uint8))
        return image.convert("RGB")
    except Exception as error:  # as above
        raise ImageError(f"{name}: damaged or cut short: {_line(error)}") from error


def _line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def plan_of(config: VisionConfig, width: int, height: int) -> ImagePlan:
    """The resize plan of an image under a model's limits."""
    return plan(
        width,
        height,
        max_image_tokens=config.max_image_tokens,
        min_pixels=config.min_pixels,
        patch_size=config.patch_size,
        downsample_ratio=config.downsample_ratio,
        max_wh_ratio=config.max_wh_ratio,
    )


def planned(config: VisionConfig, width: int, height: int, name: str = "image") -> ImagePlan:
    """`plan_of`, for images of which something is left in it.

    Raises:
        ImageError: one side is so short beside the other that it would vanish.
    """
    result = plan_of(config, width, height)
    size = result.pixels
    scale = min(size.width / width, size.height / height)
    if round(scale * min(width, height)) < 1:
        raise ImageError(
            f"{name}: {width} x {height}: too long and narrow for {size.width} x {size.height}"
        )
    return result


def to_patches(config: VisionConfig, image: Image, name: str = "image") -> Patches:
    """Resizes an image by its plan (bicubic, proportions kept, the rest grey) and cuts it.

    Raises:
        ImageError: see `planned`.
    """
    from PIL import Image as pillow
    from PIL import ImageOps

    result = planned(config, *image.size, name)
    size = (result.pixels.width, result.pixels.height)
    padded = ImageOps.pad(image, size, method=pillow.Resampling.BICUBIC, color=_GREY)
    return cut(config, np.asarray(padded), result)


def cut(config: VisionConfig, pixels: np.ndarray, layout: ImagePlan) -> Patches:
    """Cuts uint8 pixels [height, width, 3] of the planned size into patches, token by token."""
    side, ratio = config.patch_size, config.downsample_ratio
    rows, columns = layout.patches
    whole = Grid(*(ratio * tokens for tokens in layout.tokens))
    patches = np.zeros((*whole, 3, side, side), np.uint8)
    patches[:rows, :columns] = pixels.reshape(rows, side, columns, side, 3).transpose(0, 2, 4, 1, 3)
    places = np.full((*whole, 2), -1, np.int32)
    places[:rows, :columns] = np.stack(np.mgrid[:rows, :columns], axis=-1)

    def by_token(x: np.ndarray) -> np.ndarray:
        grid = (layout.tokens.height, ratio, layout.tokens.width, ratio)
        x = x.reshape(*grid, -1).transpose(0, 2, 1, 3, 4)
        return np.ascontiguousarray(x.reshape(-1, ratio * ratio, x.shape[-1]))

    return Patches(by_token(patches), by_token(places), layout)
