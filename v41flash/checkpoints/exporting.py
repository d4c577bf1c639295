"""From a run folder to the published layout, slice by slice.

Packed weights go back byte for byte. Others are rounded to the configuration's
`quantization_config`, block by block: to the scale that the block was imported with where that
holds the values exactly, as it does for all that was not trained, else to a new one. Without a
`quantization_config` they are written as they are.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from ml_dtypes import bfloat16

from v41flash.checkpoints import formats, inventory, streams, tensor_files
from v41flash.checkpoints.leaves import (
    PACKED,
    SCALES,
    is_table,
    packed_layouts,
    scale_path,
    table_layout,
)
from v41flash.checkpoints.names import DRAFT, MODEL, Parameter, Source, parameters
from v41flash.checkpoints.published import CONFIG, INDEX
from v41flash.checkpoints.tensor_files import Item
from v41flash.checkpoints.workdirs import copy_tokenizer
from v41flash.config import ModelConfig
from v41flash.errors import InputError
from v41flash.layout import Layout

SHARD_BYTES = 4 << 30
# Rows of a tensor that are read, rounded and written at once.
_PIECE_BYTES = 64 << 20
_FILE_DTYPES = {"BF16": np.dtype(bfloat16), "F32": np.dtype(np.float32)}

Keys = tuple[str, ...]
Rows = Callable[[int, int], np.ndarray]


class _Stored:
    """The arrays of one checkpoint or several; the first that has an array gives it."""

    def __init__(self, steps: list[Path]):
        self._items: dict[Keys, Any] = {}
        for step in steps:
            for item in (MODEL, DRAFT, SCALES):
                for path, array in (streams.open_item(step, item) or {}).items():
                    self._items.setdefault((item, *path), array)
        self._whole: tuple[Keys | None, np.ndarray | None] = (None, None)

    def __contains__(self, path: Keys) -> bool:
        return path in self._items

    def has(self, item: str) -> bool:
        return any(path[0] == item for path in self._items)

    def shape(self, path: Keys) -> tuple[int, ...]:
        return tuple(self._items[path].shape)

    def read(self, path: Keys, index: tuple) -> np.ndarray:
        """A part of an array. One whose chunks are large is read whole, once, and then cut."""
        array = self._items[path]
        size = math.prod(array.chunk_layout.read_chunk.shape) * array.dtype.numpy_dtype.itemsize
        if size <= streams.CHUNK_BYTES:
            return array[index].read().result()
        if self._whole[0] != path:
            self._whole = (None, None)
            self._whole = (path, array.read().result())
        return self._whole[1][index]


class _Exporter:
    def __init__(self, config: ModelConfig, stored: _Stored):
        self.config, self.stored = config, stored
        self.packed = config.weight_form == PACKED
        self.weights = inventory.by_name(config)

    def items(self) -> Iterator[Item]:
        """Every tensor of the published layout, parameter by parameter."""
        for parameter in parameters(self.config):
            for index, source in parameter.sources.items():
                for number in range(len(source.names)):
                    yield from self._tensors(parameter, index, source, number)

    def _tensors(
        self, parameter: Parameter, index: tuple[int, ...], source: Source, number: int
    ) -> Iterator[Item]:
        """A weight, and its scales where it has any."""
        name, how = source.names[number], parameter.layout
        path = (parameter.tree, *parameter.path)
        storage = inventory.Storage.of(self.config, self.weights[name])
        tensors = inventory.stored(self.config, self.weights[name])

        def rows(path: Keys, layout: Layout) -> Rows:
            self._check(path, (*parameter.lead, *layout.shape))
            return lambda first, last: _rows(
                self.stored, path, layout, (*index, *_position(number, how.stack)), first, last
            )

        if not storage.bits:
            values = rows(path, how)
            dtype = _FILE_DTYPES[tensors[0].dtype]
            yield _item(tensors[0], lambda a, b: values(a, b).astype(dtype), _step(how))
            return
        if self.packed and is_table(storage, how):
            whole, width = rows(path, table_layout(storage, how)), how.split[1]
            yield _item(tensors[0], lambda a, b: whole(a, b)[:, :width], 1)
            yield _item(tensors[1], lambda a, b: whole(a, b)[:, width:], 1)
            return
        elements, scales = packed_layouts(storage, how)
        if self.packed:
            yield _item(tensors[0], rows(path, elements), 1)
            yield _item(tensors[1], rows(scale_path(path), scales), 1)
            return
        values, kept = rows(path, how), None
        if scale_path((SCALES, *path)) in self.stored:
            kept = rows(scale_path((SCALES, *path)), scales)
        (out, inner), height = how.published, storage.block[0]

        def quantized(first: int, last: int) -> tuple[np.ndarray, np.ndarray]:
            x = values(first, last).astype(np.float32)
            if not np.isfinite(x).all():
                raise InputError(f"{name}: holds values that are not finite")
            before = None if kept is None else kept(first // height, -(-last // height))
            return formats.quantize(x, before, storage.bits, storage.block)

        def quantized_scales(first: int, last: int) -> np.ndarray:
            return quantized(first * height, min(last * height, out))[1]

        step = math.lcm(_step(how), height)
        yield _item(tensors[0], lambda a, b: quantized(a, b)[0], step, 4 * inner)
        yield _item(tensors[1], quantized_scales, step // height, 4 * inner * height)

    def _check(self, path: Keys, shape: tuple[int, ...]) -> None:
        if path not in self.stored:
            raise InputError(f"the checkpoint holds no array {'/'.join(path)}")
        if self.stored.shape(path) != shape:
            raise InputError(
                f"array {'/'.join(path)} of the checkpoint is {list(self.stored.shape(path))}; the"
                f" configuration makes it {list(shape)}"
            )


def _step(how: Layout) -> int:
    """Published rows that belong together: those of one entry of the first axis."""
    return math.prod(how.split[1 : how.rows])


def _position(number: int, stack: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(int(i) for i in np.unravel_index(number, stack)) if stack else ()


def _rows(
    stored: _Stored,
    path: Keys,
    how: Layout,
    place: tuple[int, ...],
    first: int,
    last: int,
) -> np.ndarray:
    """Published rows first..last-1 of one tensor of a parameter.

    Args:
        stored: the arrays.
        path: of the parameter.
        how: its layout.
        place: index on its leading axes, then on the stack of its tensors.
        first: a multiple of `_step(how)`, as is last.
        last: see first.
    """
    lead = len(place) - len(how.stack)
    step = _step(how)
    natural = [slice(i, i + 1) for i in place[lead:]]
    natural += [slice(first // step, last // step)]
    natural += [slice(0, size) for size in how.split[1:]]
    part = stored.read(path, (*place[:lead], *(natural[axis] for axis in how.order)))
    part = part.transpose([how.order.index(axis) for axis in range(len(how.order))])
    return part.reshape(last - first, *how.published[1:])


def _item(tensor: inventory.Tensor, rows: Rows, step: int, row_bytes: int = 0) -> Item:
    """A tensor in pieces of whole `step`s of rows; `row_bytes`: what one takes in memory."""
    out = tensor.shape[0]
    row_bytes = row_bytes or max(tensor.bytes // max(out, 1), 1)
    count = max(_PIECE_BYTES // (row_bytes * step), 1) * step

    def pieces() -> Iterator[np.ndarray]:
        for first in range(0, out, count):
            yield rows(first, min(first + count, out))

    return Item(tensor.name, tensor.dtype, tensor.shape, pieces())


def without_draft(config: ModelConfig) -> ModelConfig:
    """The same model with no draft head."""
    draft = {f.name: f.default for f in dataclasses.fields(config) if f.name.startswith("dspark_")}
    ratios = config.compress_ratios[: config.num_hidden_layers]
    return dataclasses.replace(config, num_nextn_predict_layers=0, compress_ratios=ratios, **draft)


def export(
    config: ModelConfig,
    steps: list[Path],
    folder: Path,
    shard_bytes: int = SHARD_BYTES,
    tokenizer: Path | None = None,
) -> ModelConfig:
    """Writes a folder in the published layout.

    Args:
        config: the model; `weight_form` is that of the checkpoints.
        steps: folders of checkpoints; an array is taken from the first that has it.
        folder: must not exist, or be empty; gets its name when everything is written.
        shard_bytes: a file holds no more, unless it is a single tensor.
        tokenizer: file that becomes the folder's tokenizer.json; None: it gets none.

    Returns:
        The configuration that was written: without a draft head where the checkpoints have none.

    Raises:
        InputError: arrays are missing or of another shape, or `folder` is in use.
        OSError: it cannot be written.
    """
    folder = folder.resolve()
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder}: is not a folder; choose another name")
    if folder.exists() and any(folder.iterdir()):
        raise InputError(f"{folder}: is not empty; choose another folder")
    stored = _Stored(steps)
    if not stored.has(DRAFT):
        config = without_draft(config)
    shards: list[list[Item]] = [[]]
    size = 0
    for item in _Exporter(config, stored).items():
        nbytes = inventory.Tensor(item.name, item.shape, item.dtype).bytes
        if shards[-1] and size + nbytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(item)
        size += nbytes
    partial = folder.with_name(folder.name + ".partial")
    # What an interrupted export left.
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    weight_map = {}
    for number, items in enumerate(shards, 1):
        name = "model.safetensors"
        if len(shards) > 1:
            name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        tensor_files.write(partial / name, items)
        weight_map |= {item.name: name for item in items}
    if len(shards) > 1:
        total, _ = inventory.totals(config)
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        (partial / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    (partial / CONFIG).write_text(json.dumps(config.to_hf(), indent=2) + "\n")
    if tokenizer is not None:
        copy_tokenizer(tokenizer, partial)
    if folder.exists():
        folder.rmdir()
    os.replace(partial, folder)
    return config
