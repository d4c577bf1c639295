"""Files of tensors in the safetensors container: a checked header, and rows by position.

A file is eight bytes of header length, a JSON header {name: {dtype, shape, data_offsets}} and the
tensors' bytes. Headers are held to the letter of the format before anything is believed, and no
more than the rows asked for is ever in memory, so that a damaged or hostile file costs an error.
The library of that name reads tensors whole, and not the 8-bit formats into NumPy.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from ml_dtypes import bfloat16

from v41flash.errors import InputError

# The header of the whole released model, 96,085 tensors, is about 12 MB; Python objects take up to
# 25 times the bytes of their JSON.
MAX_HEADER_BYTES = 1 << 24
_METADATA = "__metadata__"
_MAX_AXES = 16
# How each dtype is read. Bytes of quantised values and scales stay bytes.
_DTYPES = {
    "F8_E4M3": np.dtype(np.uint8),
    "F8_E8M0": np.dtype(np.uint8),
    "I8": np.dtype(np.uint8),
    "BF16": np.dtype(bfloat16),
    "F32": np.dtype(np.float32),
    # Known, so that a file with them is told apart from a damaged one.
    "F8_E5M2": np.dtype(np.uint8),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
    "F16": np.dtype(np.float16),
    "I16": np.dtype(np.int16),
    "U16": np.dtype(np.uint16),
    "I32": np.dtype(np.int32),
    "U32": np.dtype(np.uint32),
    "F64": np.dtype(np.float64),
    "I64": np.dtype(np.int64),
    "U64": np.dtype(np.uint64),
}


class FileError(InputError):
    """A file that is not what it should be; the text names it."""


class Entry(NamedTuple):
    """A tensor in a file: dtype name, shape, and where its bytes begin."""

    dtype: str
    shape: tuple[int, ...]
    start: int

    @property
    def bytes(self) -> int:
        """Of its data."""
        return math.prod(self.shape) * _DTYPES[self.dtype].itemsize


def parse_json(path: Path, text: bytes) -> Any:
    """Parses JSON from outside; FileError names the file, whatever is wrong with it."""
    try:
        return json.loads(text.decode("utf-8"), object_pairs_hook=_no_duplicates)
    except (ValueError, RecursionError) as error:
        reason = str(error) if isinstance(error, ValueError) else "nested too deeply"
        raise FileError(f"{path}: not JSON: {_short(reason)}") from None


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key occurs twice")
    return found


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else repr(value)
    text = " ".join(text.split())
    return text if len(text) <= 120 else text[:117] + "..."


class TensorFile:
    """An open file.

    Attributes:
        path: of the file.
        entries: tensors by name.
        missing_bytes: how much of the data the file lacks at its end; 0 for a complete file.
    """

    def __init__(self, path: Path):
        """Reads and checks the header.

        Raises:
            FileError: there is no such file, or its header is not that of a safetensors file.
        """
        self.path = path
        try:
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                head = file.read(8)
                length = int.from_bytes(head, "little")
                if len(head) < 8:
                    raise FileError(f"{path}: {size} bytes; too short for a safetensors file")
                if length > MAX_HEADER_BYTES:
                    raise FileError(
                        f"{path}: a header of {length} bytes; must be at most {MAX_HEADER_BYTES}"
                        " (not a safetensors file?)"
                    )
                header = file.read(length)
        except OSError as error:
            raise FileError(f"{path}: {error.strerror}") from None
        if len(header) < length:
            raise FileError(f"{path}: truncated inside its header of {length} bytes")
        end = 8 + length
        self.entries: dict[str, Entry] = {}
        for name, start, stop, entry in _entries(path, parse_json(path, header)):
            if end + start < 0 or stop - start != entry.bytes:
                raise FileError(
                    f"{path}: {_short(name)}: data_offsets span {stop - start} bytes; {entry.dtype}"
                    f" {_short(list(entry.shape))} takes {entry.bytes}"
                )
            self.entries[name] = entry._replace(start=end + start)
        stop = _check_contiguous(path, end, self.entries)
        self.missing_bytes = max(stop - size, 0)
        if size > stop:
            raise FileError(f"{path}: {size - stop} bytes after the last tensor")

    def read(self, name: str, first: int = 0, last: int | None = None) -> np.ndarray:
        """Rows first..last-1 (along axis 0) of a tensor; all of it by default.

        Returns:
            An array of its own memory, [last - first, ...]; 8-bit floats and I8 come as uint8.

        Raises:
            FileError: the file cannot be read that far.
        """
        entry = self.entries[name]
        dtype = _DTYPES[entry.dtype]
        last = (entry.shape[0] if entry.shape else 1) if last is None else last
        shape = (last - first, *entry.shape[1:]) if entry.shape else ()
        row = math.prod(entry.shape[1:]) * dtype.itemsize
        out = np.empty(shape, dtype)
        view = memoryview(out.reshape(-1).view(np.uint8))
        try:
            with self.path.open("rb", buffering=0) as file:
                file.seek(entry.start + first * row)
                done = 0
                while done < len(view):
                    count = file.readinto(view[done:])
                    if not count:
                        raise FileError(f"{self.path}: truncated inside {name}")
                    done += count
        except OSError as error:
            raise FileError(f"{self.path}: {error.strerror}") from None
        return out


def _entries(path: Path, header: Any) -> Iterator[tuple[str, int, int, Entry]]:
    """(name, first and last offset, entry without a place) of everything in a header."""
    if not isinstance(header, dict):
        raise FileError(f"{path}: the header must be a JSON object")
    for name, value in header.items():
        if name == _METADATA:
            texts = value.items() if isinstance(value, dict) else [(None, None)]
            if not all(isinstance(text, str) for pair in texts for text in pair):
                raise FileError(f"{path}: {_METADATA} must map texts to texts")
            continue
        if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
            raise FileError(f"{path}: {_short(name)}: must have dtype, shape and data_offsets")
        dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
        if not isinstance(dtype, str) or dtype not in _DTYPES:
            raise FileError(f"{path}: {_short(name)}: dtype {_short(dtype)} is unknown")
        if not _counts(shape) or len(shape) > _MAX_AXES:
            raise FileError(f"{path}: {_short(name)}: shape {_short(shape)} must be sizes")
        if not _counts(offsets) or len(offsets) != 2:
            raise FileError(
                f"{path}: {_short(name)}: data_offsets {_short(offsets)} must be two positions"
            )
        yield name, *offsets, Entry(dtype, tuple(shape), 0)


def _counts(values: Any) -> bool:
    """Whether these are numbers that a file position can be."""
    return isinstance(values, list) and all(type(v) is int and 0 <= v < 2**63 for v in values)


def _check_contiguous(path: Path, end: int, entries: dict[str, Entry]) -> int:
    """The end of the data. Tensors follow one another without gaps or overlaps."""
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].bytes)):
        if entry.start != end:
            what = "overlaps the tensor before it" if entry.start < end else "leaves a gap"
            raise FileError(f"{path}: {_short(name)} {what}")
        end += entry.bytes
    return end


class Item(NamedTuple):
    """A tensor to be written: name, dtype name, shape, and its bytes piece by piece."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    pieces: Iterable[np.ndarray]


def write(path: Path, items: list[Item]) -> None:
    """Writes a file of the given tensors, a piece at a time, under its final name at the end."""
    header: dict[str, Any] = {_METADATA: {"format": "pt"}}
    position = 0
    for item in items:
        size = Entry(item.dtype, item.shape, 0).bytes
        offsets = [position, position + size]
        header[item.name] = {"dtype": item.dtype, "shape": item.shape, "data_offsets": offsets}
        position += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for item in items:
            before = file.tell()
            for piece in item.pieces:
                file.write(np.ascontiguousarray(piece).reshape(-1).view(np.uint8).data)
            if file.tell() - before != Entry(item.dtype, item.shape, 0).bytes:
                raise RuntimeError(f"{item.name}: wrote {file.tell() - before} bytes")
    os.replace(partial, path)
