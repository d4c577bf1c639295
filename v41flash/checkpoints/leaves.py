"""The arrays of a checkpoint of ours as views onto a published folder: any slice, read when asked.

In `PACKED` form a quantised weight is two uint8 arrays as in the files, elements and scales, with
the experts of a layer and the layers of a group stacked; an Engram table is one array of canonical
rows (`pallas_kernels.fp4`). Otherwise a weight is dequantised, and its scales are kept beside the
parameters, in a tree of their own (`SCALES`), for the way back.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator

import numpy as np
from ml_dtypes import bfloat16

from v41flash.checkpoints.inventory import Storage, scale_name
from v41flash.checkpoints.names import Parameter, Source, parameters
from v41flash.checkpoints.published import FileError, Published
from v41flash.config import ModelConfig
from v41flash.layout import Layout

PACKED = "packed"
# Forms of the weights of a checkpoint: dtype of what is quantised in the files, None: packed.
FORMS = {PACKED: None, "bfloat16": np.dtype(bfloat16), "float32": np.dtype(np.float32)}
SCALES = "scales"

Fetch = Callable[[str, int, int], np.ndarray]


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One array.

    Attributes:
        path: keys, beginning with the item of the checkpoint that it belongs to.
        lead: sizes of the leading axes that its layers are stacked over.
        layout: how a layer's part lies in published tensors.
        sources: index on the leading axes -> names of its tensors.
        dtype: of the values.
        fetch: (name, first row, last row) -> rows of a tensor.
    """

    path: tuple[str, ...]
    lead: tuple[int, ...]
    layout: Layout
    sources: dict[tuple[int, ...], tuple[str, ...]]
    dtype: np.dtype
    fetch: Fetch

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole array."""
        return (*self.lead, *self.layout.shape)

    def read(self, index: tuple[slice, ...]) -> np.ndarray:
        """The part of the array at slices with steps of 1, one an axis."""
        spans = [s.indices(size)[:2] for s, size in zip(index, self.shape, strict=True)]
        lead, own = spans[: len(self.lead)], spans[len(self.lead) :]
        out = np.empty([last - first for first, last in spans], self.dtype)
        for position in itertools.product(*(range(*span) for span in lead)):
            place = tuple(i - first for i, (first, _) in zip(position, lead, strict=True))
            out[place] = self._part(self.sources[position], own)
        return out

    def _part(self, names: tuple[str, ...], own: list[tuple[int, int]]) -> np.ndarray:
        """Of one layer: gathered along the published axes, then put into our order."""
        how, depth = self.layout, len(self.layout.stack)
        spans = [own[how.order.index(axis)] for axis in range(len(how.axes))]
        out = np.empty([last - first for first, last in spans], self.dtype)
        merged = math.prod(how.split[1 : how.rows])
        first, last = (end * merged for end in spans[depth])
        inside = tuple(slice(*span) for span in spans[depth + 1 :])
        for position in itertools.product(*(range(*span) for span in spans[:depth])):
            number = 0
            for i, size in zip(position, how.stack, strict=True):
                number = number * size + i
            rows = self.fetch(names[number], first, last)
            rows = rows.reshape(spans[depth][1] - spans[depth][0], *how.split[1:])
            place = tuple(i - span[0] for i, span in zip(position, spans, strict=False))
            out[place] = rows[(slice(None), *inside)]
        return out.transpose(how.order)

    def chunk(self, limit: int) -> tuple[int, ...]:
        """A chunk shape of at most about `limit` bytes whose chunks read no row twice.

        Whole layers first, then some of the experts, then rows of one tensor.
        """
        how = self.layout
        sizes = list(how.axes)
        width = self.dtype.itemsize
        for axis in range(len(how.stack) + 1):
            others = math.prod(sizes) // max(sizes[axis], 1) * width
            if others * sizes[axis] > limit:
                sizes[axis] = max(limit // max(others, 1), 1)
        return (*(1 for _ in self.lead), *(sizes[axis] for axis in how.order))


def chunks(shape: tuple[int, ...], chunk: tuple[int, ...]) -> Iterator[tuple[slice, ...]]:
    """The slices of every chunk of an array, row-major."""
    starts = (range(0, size, step) for size, step in zip(shape, chunk, strict=True))
    for start in itertools.product(*starts):
        yield tuple(
            slice(first, min(first + step, size))
            for first, step, size in zip(start, chunk, shape, strict=True)
        )


def packed_layouts(storage: Storage, how: Layout) -> tuple[Layout, Layout]:
    """Layouts of the elements and the scales of a weight that stays as published."""
    out, inner = how.published
    bytes_in = inner * storage.bits // 8
    blocks = tuple(-(-size // part) for size, part in zip((out, inner), storage.block, strict=True))
    depth = tuple(range(len(how.stack) + 2))
    return Layout((out, bytes_in), depth, how.stack), Layout(blocks, depth, how.stack)


def is_table(storage: Storage, how: Layout) -> bool:
    """Whether a weight is looked up by rows, each with its own scales: a packed canonical row."""
    return storage.bits == 8 and storage.block[0] == 1 and how.order == (0, 1)


def table_layout(storage: Storage, how: Layout) -> Layout:
    """Layout of packed canonical rows: the elements of a row, then its scales."""
    rows, width = how.split
    return Layout((rows, width + -(-width // storage.block[1])), (0, 1))


def _names(parameter: Parameter, rename: Callable[[str], str] | None = None) -> dict:
    def of(source: Source) -> tuple[str, ...]:
        return source.names if rename is None else tuple(map(rename, source.names))

    return {index: of(source) for index, source in parameter.sources.items()}


def scale_path(path: tuple[str, ...]) -> tuple[str, ...]:
    """Where the scales of the weight at `path` are."""
    return (*path[:-1], f"{path[-1]}_scale")


def leaves(published: Published, form: str) -> Iterator[Leaf]:
    """Every array of a checkpoint in one of `FORMS`."""
    config: ModelConfig = published.config
    dense = FORMS[form]
    raw = published.raw
    uint8 = np.dtype(np.uint8)

    def dequantized(name: str, first: int, last: int) -> np.ndarray:
        return _exact(published.values(name, first, last), dense, name)

    def row(name: str, first: int, last: int) -> np.ndarray:
        scales = raw(scale_name(name), first, last)
        return np.concatenate([raw(name, first, last), scales], axis=-1)

    for parameter in parameters(config):
        how, path = parameter.layout, (parameter.tree, *parameter.path)
        name = next(iter(parameter.sources.values())).names[0]
        storage = published.storage(name)
        names = _names(parameter)
        if not storage.bits:
            stored = published.raw(name, 0, 0).dtype
            # What float32 checkpoints hold is what training updates.
            wanted = stored if dense is None else max(stored, dense, key=lambda d: d.itemsize)
            fetch = raw if wanted == stored else _cast(raw, wanted)
            yield Leaf(path, parameter.lead, how, names, wanted, fetch)
            continue
        elements, scales = packed_layouts(storage, how)
        scale_names = _names(parameter, scale_name)
        if dense is not None:
            yield Leaf(path, parameter.lead, how, names, dense, dequantized)
            place = scale_path((SCALES, *path))
            yield Leaf(place, parameter.lead, scales, scale_names, uint8, raw)
        elif is_table(storage, how):
            yield Leaf(path, parameter.lead, table_layout(storage, how), names, uint8, row)
        else:
            yield Leaf(path, parameter.lead, elements, names, uint8, raw)
            yield Leaf(scale_path(path), parameter.lead, scales, scale_names, uint8, raw)


def _cast(fetch: Fetch, dtype: np.dtype) -> Fetch:
    return lambda name, first, last: fetch(name, first, last).astype(dtype)


def _exact(values: np.ndarray, dtype: np.dtype, name: str) -> np.ndarray:
    """Casts; FileError where the values are not all kept (they are not those of any sane file)."""
    cast = values.astype(dtype)
    if dtype != values.dtype and not (cast.astype(values.dtype) == values).all():
        raise FileError(f"{name}: holds values that {dtype} does not; keep it packed")
    if not np.isfinite(values).all():
        raise FileError(f"{name}: holds values that are not finite; keep it packed")
    return cast
