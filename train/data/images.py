"""Images of documents: read and checked once, kept as files beside the tokens, cut for batches.

A row of a JSONL, Parquet or ArrayRecord source may carry images; its text says by a marker where
each one stands. In the tokens an image is a span of the model's image token. The files themselves
are kept as they came: they are decoded and resized again for every batch, in the threads that
prepare it, and were decoded once when the store was built, so that no broken one is met later.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from train.data import packing
from v41flash import image_files
from v41flash.config import VisionConfig
from v41flash.image_files import ImageError
from v41flash.image_rows import TEXT, RowImage, assemble, into_slots
from v41flash.images import Grid, ImagePlan

# Arrays of a store with images, beside those of its texts.
ARRAYS = ("image_bytes", "image_offsets", "image_first", "image_starts", "image_grids")


class Interleaved(NamedTuple):
    """A row with images: its text, with a marker for each, and what the row gives of them."""

    text: str | bytes
    images: Sequence[Any]


class PlannedImage(NamedTuple):
    """A checked image: its name for messages, its file, and how it is laid out."""

    name: str
    data: bytes
    plan: ImagePlan


@dataclasses.dataclass(frozen=True)
class ImageFields:
    """How rows carry images.

    Attributes:
        field: JSON field or Parquet column: one image or a list of them, each a path (relative to
            the file's folder, and inside it), a data URL, bytes, or an object with "bytes" or
            "path".
        marker: what stands in the text in place of an image.
        vision: the model's limits.
        token_id: the model's image token.
        strict: a bad image is an error; else its row is counted and left out.
    """

    field: str
    marker: str
    vision: VisionConfig
    token_id: int
    strict: bool

    def read(self, values: Sequence[Any], name: str, folder: Path) -> tuple[PlannedImage, ...]:
        """Reads, decodes and plans the images of a row.

        Raises:
            ImageError: one of them cannot be used; the text names it.
        """
        images = []
        for number, value in enumerate(values):
            where, data = _contents(value, f"{name}: image {number}", folder)
            image = image_files.from_bytes(data, where)
            planned = image_files.planned(self.vision, *image.size, where)
            images.append(PlannedImage(where, data, planned))
        return tuple(images)


def listed(value: Any) -> list[Any]:
    """What a field holds, as a list."""
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _contents(value: Any, name: str, folder: Path) -> tuple[str, bytes]:
    """(name, contents) of what a row gives of an image."""
    if isinstance(value, dict):
        given = value.get("bytes")
        value = given if given is not None else value.get("path")
    if isinstance(value, bytes):
        return name, value
    if not isinstance(value, str):
        raise ImageError(f"{name}: must be a path, a data URL or bytes")
    if value.startswith("data:"):
        return name, image_files.decode_data_url(value, name)
    try:
        # Links are followed first: what they point to must lie in the folder as well.
        path, folder = (folder / value).resolve(), folder.resolve()
    except (OSError, RuntimeError, ValueError) as error:  # a link to itself, a null byte
        raise ImageError(f"{name}: path {value!r}: cannot be read: {error}") from error
    if not path.is_relative_to(folder):
        raise ImageError(f"{name}: path {value!r}: must lie inside {folder}")
    return str(path), image_files.read_file(path)


class ImageWriter:
    """Collects the images of a store under construction."""

    def __init__(self, folder: Path):
        """Writes below `folder`."""
        self._folder = folder
        self._file = (folder / "image_bytes").open("wb")
        self._sizes: list[int] = []
        self._first = [0]
        self._starts: list[int] = []
        self._grids: list[Grid] = []

    def add(self, images: Sequence[PlannedImage], starts: Sequence[int]) -> None:
        """Adds a document's images, their spans beginning at `starts` in its tokens."""
        for image, start in zip(images, starts, strict=True):
            self._file.write(image.data)
            self._sizes.append(len(image.data))
            self._starts.append(start)
            self._grids.append(image.plan.tokens)
        self._first.append(len(self._sizes))

    def close(self) -> bool:
        """Writes the arrays and says whether there are any: not without an image."""
        self._file.close()
        raw = self._folder / "image_bytes"
        if self._sizes:
            offsets = np.concatenate(([0], np.cumsum(self._sizes, dtype=np.int64)))
            _as_array(raw, self._folder / "image_bytes.npy", int(offsets[-1]))
            np.save(self._folder / "image_offsets.npy", offsets)
            np.save(self._folder / "image_first.npy", np.array(self._first, np.int64))
            np.save(self._folder / "image_starts.npy", np.array(self._starts, np.int32))
            np.save(self._folder / "image_grids.npy", np.array(self._grids, np.int32))
        raw.unlink()
        return bool(self._sizes)


def _as_array(raw: Path, target: Path, size: int) -> None:
    """Copies a file's bytes into a .npy file, a block at a time."""
    flat = np.lib.format.open_memmap(target, "w+", np.uint8, (size,))
    place = 0
    with raw.open("rb") as file:
        while block := file.read(1 << 24):
            flat[place : place + len(block)] = np.frombuffer(block, np.uint8)
            place += len(block)
    flat.flush()


@dataclasses.dataclass(frozen=True)
class ImageStore:
    """Images of an open store: I of them, in the order of its documents.

    Attributes:
        image_bytes: uint8, memory-mapped, all files one after the other.
        image_offsets: i64[I+1].
        image_first: i64[N+1], the first image of every document.
        image_starts: i32[I], where a span begins in its document's tokens.
        image_grids: i32[I,2], image tokens of each: rows and columns.
    """

    image_bytes: np.ndarray
    image_offsets: np.ndarray
    image_first: np.ndarray
    image_starts: np.ndarray
    image_grids: np.ndarray

    def of(self, document: int) -> range:
        """Numbers of a document's images."""
        return range(self.image_first[document], self.image_first[document + 1])

    @property
    def sizes(self) -> np.ndarray:
        """i64[I], image tokens of each (START, NEWLINE and END not counted)."""
        return self.image_grids.astype(np.int64).prod(-1)

    def row_image(self, vision: VisionConfig, number: int, document_start: int) -> RowImage:
        """An image, decoded and cut; its document begins at `document_start` in the row."""
        low, high = self.image_offsets[number : number + 2]
        image = image_files.from_bytes(self.image_bytes[low:high].tobytes(), f"image {number}")
        patches = image_files.to_patches(vision, image, f"image {number}")
        return RowImage(document_start + int(self.image_starts[number]), patches)


@dataclasses.dataclass(frozen=True)
class ImageLayout:
    """The room that a batch has for images: S slots a row, of N image tokens each."""

    vision: VisionConfig
    slots: int
    slot_tokens: int

    def fits(self, sizes: Sequence[int]) -> bool:
        """Whether images of these sizes go into one row."""
        return into_slots(sizes, self.slots, self.slot_tokens) is not None

    def add(
        self, batch: dict[str, np.ndarray], rows: Sequence[Sequence[RowImage]]
    ) -> dict[str, np.ndarray]:
        """The batch with its images, and no loss where the target is a part of one."""
        length = batch["tokens"].shape[1]
        made = assemble(self.vision, rows, length, self.slots, self.slot_tokens)
        follows = np.pad(made.source != TEXT, ((0, 0), (0, 1)))[:, 1:]
        mask = np.where(follows, 0, batch["loss_mask"])
        images = {f"image_{name}": value for name, value in made._asdict().items()}
        return batch | images | {"loss_mask": mask}


def usable(lengths: np.ndarray, images: ImageStore, row: int, layout: ImageLayout) -> np.ndarray:
    """bool[N], documents that fit: those with images are never cut, so they must fit one row."""
    fitting = np.ones(len(lengths), bool)
    sizes = images.sizes
    for document in np.flatnonzero(np.diff(images.image_first)):
        own = images.of(document)
        fitting[document] = lengths[document] - 1 <= row and layout.fits(
            sizes[own.start : own.stop].tolist()
        )
    return fitting


def row_limit(images: ImageStore, documents: np.ndarray, layout: ImageLayout) -> packing.Limit:
    """The limit that images set to what is packed into a row; pieces by index in `documents`."""
    sizes = images.sizes

    def weights(piece: int) -> list[int]:
        own = images.of(documents[piece])
        return sizes[own.start : own.stop].tolist()

    return packing.Limit(weights, layout.fits)
