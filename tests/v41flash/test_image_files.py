"""Reading images: what comes out, and that nothing a file holds gets past its errors."""

import base64
import io
import os
import random
import resource
import struct
import sys
import warnings
import zlib

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st
from PIL import Image, ImageOps

from tests.v41flash.nn.samples import VISION
from v41flash import image_files
from v41flash.errors import InputError
from v41flash.image_files import FORMATS, ImageError


def noise(width=30, height=20, seed=0):
    rng = np.random.default_rng(seed)
    return Image.fromarray(rng.integers(0, 256, (height, width, 3), np.uint8))


def encoded(image, kind="PNG", **options):
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def bomb(width, height):
    """A PNG whose header promises width x height pixels."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(b"\0" * 1000)), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks
    )


@pytest.mark.parametrize("kind", FORMATS)
def test_every_format_is_read(kind):
    image = image_files.from_bytes(encoded(noise(), kind))
    assert (image.mode, image.size) == ("RGB", (30, 20))


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "I;16"])
def test_every_mode_becomes_rgb(mode):
    image = noise().convert("L" if mode == "I;16" else mode)
    image = image.convert("I;16") if mode == "I;16" else image
    assert image_files.from_bytes(encoded(image)).mode == "RGB"
    assert image_files.from_bytes(encoded(noise().convert("CMYK"), "JPEG")).mode == "RGB"


def test_sixteen_bits_of_grey_become_eight():
    grey = np.array([[0, 256, 20_000, 50_000, 65_535]], np.uint16)
    file = io.BytesIO()
    Image.fromarray(grey).save(file, "PNG")
    image = np.asarray(image_files.from_bytes(file.getvalue()))
    np.testing.assert_array_equal(image[0, :, 0], [0, 0, 77, 194, 255])
    assert image.shape == (1, 5, 3)


def test_files_and_data_urls(tmp_path):
    data = encoded(noise())
    path = tmp_path / "a.png"
    path.write_bytes(data)
    url = "data:image/png;base64," + base64.b64encode(data).decode()
    for image in (image_files.from_file(path), image_files.from_data_url(url)):
        np.testing.assert_array_equal(image, noise())


STILL = encoded(noise())
FRAMES = {"save_all": True, "append_images": [noise(seed=1)]}


@pytest.mark.parametrize(
    "data, words",
    [
        (b"", "empty"),
        (b"no image", "not an image of PNG, JPEG"),
        (encoded(noise(), "TIFF"), "not an image of"),
        # Decoded a byte at a time in Python, so that a small file takes long.
        (encoded(noise(), "BMP"), "not an image of"),
        (encoded(noise(), "PPM"), "not an image of"),
        (b"P3 1 1 255 1 2 3", "not an image of"),
        (STILL[:-60], "damaged or cut short"),
        (encoded(noise(), "JPEG")[:300], "not a readable image|damaged or cut short"),
        (encoded(noise(), "GIF", **FRAMES), "2 frames: must be a still image"),
        (encoded(noise(), "WEBP", **FRAMES), "2 frames"),
        (encoded(noise(), "PNG", **FRAMES), "2 frames"),
        (bomb(9000, 9000), "9000 x 9000: must be at most 67,108,864 pixels"),
        (bomb(20_000, 20_000), "20000 x 20000|decompression bomb"),
        (bomb(2**31 - 1, 2**31 - 1), "readable|must be at most|bomb"),
    ],
)
def test_refused_files_are_one_line_with_their_name(data, words):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow's own, about large images
        with pytest.raises(ImageError, match=words) as caught:
            image_files.from_bytes(data, "page 7")
    assert str(caught.value).startswith("page 7: ") and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "url, words",
    [
        ("https://example.com/a.png", "must be a URL of the form data:image"),
        ("file:///etc/passwd", "must be a URL"),
        ("data:image/png,abc", "must be a URL"),
        ("data:image/png;base64,a", "broken base64"),
        ("data:image/png;base64,é", "broken base64"),
        ("data:image/png;base64,", "empty"),
        ("data:image/png;base64,AAAA", "not an image"),
    ],
)
def test_refused_urls(url, words):
    with pytest.raises(ImageError, match=f"^messages: .*{words}"):
        image_files.from_data_url(url, "messages")


def test_files_that_cannot_be_read(tmp_path, monkeypatch):
    for path in (tmp_path, tmp_path / "absent.png", "a\0b"):
        with pytest.raises(ImageError, match="cannot be read"):
            image_files.from_file(path)
    path = tmp_path / "large.png"
    path.write_bytes(STILL)
    monkeypatch.setattr(image_files, "MAX_BYTES", 1000)
    with pytest.raises(ImageError, match="large.png: 1,888 bytes: must be at most 1,000"):
        image_files.from_file(path)
    with pytest.raises(ImageError, match="^page 7: 1,888 bytes: must be at most 1,000"):
        image_files.from_bytes(STILL, "page 7")
    with pytest.raises(ImageError, match="larger than 1,000 bytes"):
        image_files.from_data_url("data:image/png;base64," + "A" * 4000)


def test_what_is_no_regular_file_is_not_read(tmp_path):
    pipe = tmp_path / "pipe.png"
    os.mkfifo(pipe)
    for path in (pipe, "/dev/zero"):
        with pytest.raises(ImageError, match=f"^{path}: cannot be read: must be a regular file"):
            image_files.from_file(path)


def test_a_file_that_says_it_is_smaller_than_it_is(tmp_path, monkeypatch):
    path = tmp_path / "grows.png"
    path.write_bytes(STILL)
    monkeypatch.setattr(image_files, "MAX_BYTES", 1000)
    status = os.stat_result((0o100644, *[0] * 9))
    monkeypatch.setattr(image_files.os, "fstat", lambda _: status)
    with pytest.raises(ImageError, match="grows.png: 1,001 bytes: must be at most 1,000"):
        image_files.read_file(path)


def test_without_pillow_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(InputError, match=r"pip install 'v41flash\[images\]'") as caught:
        image_files.from_bytes(STILL)
    assert not isinstance(caught.value, ImageError)  # which would count against the image


def test_patches_are_the_padded_image_token_by_token():
    image = noise(101, 50)
    patches = image_files.to_patches(VISION, image)
    planned = image_files.plan_of(VISION, 101, 50)
    assert patches.plan == planned and planned.patches == (4, 8) and planned.tokens == (2, 3)
    size = (planned.pixels.width, planned.pixels.height)
    grey = np.asarray(
        ImageOps.pad(image, size, method=Image.Resampling.BICUBIC, color=(127, 127, 127))
    )
    assert patches.pixels.shape == (6, 9, 588) and patches.places.shape == (6, 9, 2)
    seen = set()
    for token, part in np.ndindex(6, 9):
        row, column = 3 * (token // 3) + part // 3, 3 * (token % 3) + part % 3
        if row >= 4 or column >= 8:
            assert (patches.places[token, part] == -1).all()
            assert not patches.pixels[token, part].any()
            continue
        seen.add((row, column))
        assert tuple(patches.places[token, part]) == (row, column)
        block = grey[14 * row : 14 * row + 14, 14 * column : 14 * column + 14]
        np.testing.assert_array_equal(
            patches.pixels[token, part].reshape(3, 14, 14), block.transpose(2, 0, 1)
        )
    assert len(seen) == 32


def test_a_thread_of_pixels_is_refused():
    with pytest.raises(ImageError, match="^thread: 1 x 60000: too long and narrow for"):
        image_files.to_patches(VISION, Image.new("RGB", (1, 60_000)), "thread")


SEEDS = [encoded(noise(17, 9), kind) for kind in FORMATS] + [
    encoded(noise(17, 9).convert("P"), "PNG"),
    encoded(noise(17, 9), "GIF", **FRAMES),
    encoded(noise(17, 9), "JPEG", progressive=True),
    bomb(5000, 5000),
]


@st.composite
def damaged(draw):
    data = bytearray(draw(st.sampled_from(SEEDS)))
    for _ in range(draw(st.integers(0, 6))):
        place = draw(st.integers(0, len(data) - 1))
        # Mostly headers: that is where sizes, counts and offsets stand.
        place = place % 64 if draw(st.booleans()) else place
        what = draw(st.sampled_from(("set", "cut", "insert", "repeat")))
        if what == "set":
            data[place % len(data)] = draw(st.sampled_from((0, 1, 127, 128, 255)))
        elif what == "cut":
            data = data[: max(place, 1)]
        elif what == "insert":
            data[place:place] = random.Random(place).randbytes(draw(st.integers(1, 9)))
        else:
            data[place:place] = data[place : place + 40]
    return bytes(data)


def check_damaged(data):
    limit = 1 << 20
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            image = image_files.from_bytes(data, "some file", max_pixels=limit)
        except ImageError as error:
            assert str(error).startswith("some file: ") and "\n" not in str(error)
            return
    assert image.mode == "RGB" and 0 < image.width * image.height <= limit
    try:
        patches = image_files.to_patches(VISION, image, "some file")
    except ImageError as error:
        assert "too long and narrow" in str(error)
        return
    assert patches.plan.span <= VISION.max_image_tokens


@hypothesis.settings(max_examples=100, deadline=None)
@hypothesis.given(damaged())
def test_a_damaged_file_is_an_image_or_an_error(data):
    check_damaged(data)


@pytest.mark.slow
def test_many_damaged_files_within_bounded_memory():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    @hypothesis.settings(max_examples=2500, deadline=None, database=None)
    @hypothesis.given(damaged())
    def check(data):
        check_damaged(data)

    check()
    # KiB on Linux. An image of 2^20 pixels takes 3 MiB, its copies a few times that.
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10
