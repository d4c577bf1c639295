"""A folder in the published layout: configuration, index, tensors by name, and what is wrong.

`Published.open` believes nothing: every tensor that the configuration asks for must be there once,
with its shape and dtype, in a complete file; `problems` lists everything that is not so.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from v41flash.checkpoints import formats, inventory
from v41flash.checkpoints.inventory import Storage, Weight, scale_name
from v41flash.checkpoints.tensor_files import FileError, TensorFile, parse_json
from v41flash.config import ConfigError, ModelConfig

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
_MAX_CONFIG_BYTES = 1 << 20
_MAX_INDEX_BYTES = 1 << 25
# Counts that would make an inventory, or the headers of a folder's files, endless.
_MAX_COUNT = 1 << 16
_MAX_TENSORS = 1 << 21
_OTHER_MODELS = ("deepseek_v4", "deepseek_v3", "deepseek_v32")
# Parts that V4 has and V4.1 has not: routing by token id, the head's own mixing, position biases.
_V4_PARTS = ("ffn.gate.tid2eid", "hc_head_fn", "attn.compressor.ape")


def read_json(path: Path, limit: int) -> Any:
    """Parses a JSON file of at most `limit` bytes; FileError otherwise."""
    try:
        with path.open("rb") as file:
            text = file.read(limit + 1)
    except OSError as error:
        raise FileError(f"{path}: {error.strerror}") from None
    if len(text) > limit:
        raise FileError(f"{path}: more than {limit} bytes")
    return parse_json(path, text)


def read_config(folder: Path) -> ModelConfig:
    """The model that a folder's `config.json` describes.

    Raises:
        FileError: no such file, not JSON, or not a V4.1-Flash model that can be.
    """
    path = folder / CONFIG
    values = read_json(path, _MAX_CONFIG_BYTES)
    if not isinstance(values, dict):
        raise FileError(f"{path}: must be a JSON object")
    kind = values.get("model_type")
    if kind in _OTHER_MODELS:
        name = "DeepSeek-V4" if kind == "deepseek_v4" else kind
        raise FileError(
            f"{path}: a {name} model, which is another architecture; only V4.1-Flash"
            " (model_type 'deepseek_v41') is supported"
        )
    try:
        config = ModelConfig.from_hf(values)
    except ConfigError as error:
        raise FileError(f"{path}: {' '.join(str(error).split())}") from None
    except (TypeError, ValueError, OverflowError, AttributeError) as error:
        reason = " ".join(str(error).split())
        raise FileError(f"{path}: a section is not what it should be: {reason}") from None
    _check_countable(path, config)
    return config


def _check_countable(path: Path, config: ModelConfig) -> None:
    counts = {
        "n_routed_experts": config.n_routed_experts,
        "dspark_n_routed_experts": config.dspark_n_routed_experts,
        "num_hidden_layers": config.num_hidden_layers,
        "num_nextn_predict_layers": config.num_nextn_predict_layers,
    }
    if config.vision is not None:
        counts["vision_config.num_hidden_layers"] = config.vision.num_hidden_layers
    for key, count in counts.items():
        if count > _MAX_COUNT:
            raise FileError(f"{path}: {key} = {count}: must be at most {_MAX_COUNT}")
    _, tensors = inventory.totals(config)
    if tensors > _MAX_TENSORS:
        raise FileError(f"{path}: describes {tensors} tensors; must be at most {_MAX_TENSORS}")


class _Files:
    """The tensor files of a folder: which tensor is where, and complaints about the files."""

    def __init__(self, folder: Path):
        self.complaints: list[str] = []
        self.places: dict[str, TensorFile] = {}
        # Tensors of files that cannot be read: the file's complaint stands for them.
        self.out_of_reach: set[str] = set()
        index = folder / INDEX
        listed: dict[str, str] | None = None
        if index.exists():
            listed = _weight_map(index)
            paths = [folder / name for name in sorted(set(listed.values()))]
        else:
            paths = sorted(folder.glob("*.safetensors"))
        if not paths:
            raise FileError(f"{folder}: holds no *.safetensors file")
        if len(paths) > _MAX_COUNT:
            raise FileError(f"{folder}: {len(paths)} tensor files; must be at most {_MAX_COUNT}")
        entries = 0
        for path in paths:
            try:
                file = TensorFile(path)
            except FileError as error:
                self.complaints.append(str(error))
                lost = {name for name, file in (listed or {}).items() if file == path.name}
                if lost:
                    self.complaints.append(f"{path}: {len(lost)} tensors are out of reach")
                self.out_of_reach |= lost
                continue
            # Each header is bounded; together they stay in memory.
            entries += len(file.entries)
            if entries > _MAX_TENSORS:
                raise FileError(
                    f"{path}: with this file {entries} tensors; a folder has at most {_MAX_TENSORS}"
                )
            if file.missing_bytes:
                self.complaints.append(f"{path}: truncated: {file.missing_bytes} bytes are missing")
            for name in file.entries:
                if name in self.places:
                    other = self.places[name].path.name
                    self.complaints.append(f"{path}: {name} is also in {other}")
                elif listed is not None and listed.get(name) != path.name:
                    self.complaints.append(f"{path}: {name} is not listed there by {INDEX}")
                self.places[name] = file
        for name, file_name in (listed or {}).items():
            if name in self.out_of_reach:
                continue
            found = self.places.get(name)
            if found is None or found.path.name != file_name:
                self.complaints.append(f"{index}: {name} is not in {file_name}")


def _weight_map(path: Path) -> dict[str, str]:
    """Tensor -> file name. Names that lead out of the folder are refused."""
    index = read_json(path, _MAX_INDEX_BYTES)
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise FileError(f"{path}: must hold a weight_map")
    for name, file in weight_map.items():
        good = isinstance(file, str) and file.endswith(".safetensors") and "\0" not in file
        if not good or "/" in file or "\\" in file or file.startswith("."):
            raise FileError(
                f"{path}: weight_map[{name[:80]!r}] = {str(file)[:80]!r}: must be the name of a"
                " .safetensors file in the same folder"
            )
    return weight_map


def problems(folder: Path) -> Iterator[str]:
    """What is wrong with a folder, a line each; nothing for a good one.

    Raises:
        FileError: there is no configuration of a V4.1-Flash model, or no tensor file, to hold the
            folder against.
    """
    return _problems(folder, read_config(folder), _Files(folder))


def _problems(folder: Path, config: ModelConfig, files: _Files) -> Iterator[str]:
    foreign = [name for name in files.places if name.endswith(_V4_PARTS)]
    if foreign:
        raise FileError(
            f"{folder}: {foreign[0]} is a part of DeepSeek-V4-Flash, which is another architecture;"
            " only V4.1-Flash is supported"
        )
    yield from files.complaints
    wanted = {tensor.name: tensor for tensor in inventory.inventory(config)}
    for name, tensor in wanted.items():
        file = files.places.get(name)
        if name in files.out_of_reach:
            continue
        if file is None:
            yield f"missing: {name} {tensor.dtype} {list(tensor.shape)}"
            continue
        entry = file.entries[name]
        if entry.shape != tensor.shape:
            yield f"{file.path}: {name}: shape {list(entry.shape)}; must be {list(tensor.shape)}"
        if entry.dtype != tensor.dtype:
            yield f"{file.path}: {name}: dtype {entry.dtype}; must be {tensor.dtype}"
    for name, file in files.places.items():
        if name not in wanted:
            yield f"{file.path}: unexpected: {name[:200]}"
    yield from _size_problem(folder, config)


def _size_problem(folder: Path, config: ModelConfig) -> Iterator[str]:
    path = folder / INDEX
    if not path.exists():
        return
    metadata = read_json(path, _MAX_INDEX_BYTES).get("metadata")
    stated = metadata.get("total_size") if isinstance(metadata, dict) else None
    size, _ = inventory.totals(config)
    if stated is not None and stated != size:
        yield f"{path}: total_size is {str(stated)[:40]}; must be {size}"


@dataclasses.dataclass(frozen=True)
class Published:
    """A folder that is whole.

    Attributes:
        folder: where it is.
        config: the model.
    """

    folder: Path
    config: ModelConfig
    _places: dict[str, TensorFile]
    _weights: dict[str, Weight]

    @classmethod
    def open(cls, folder: Path) -> Published:
        """Opens a folder.

        Raises:
            FileError: anything is wrong with it; the first problem is named, and how many more
                there are.
        """
        config, files = read_config(folder), _Files(folder)
        found = list(_problems(folder, config, files))
        if found:
            more = f" (and {len(found) - 1} more; see inspect)" if len(found) > 1 else ""
            raise FileError(found[0] + more)
        return cls(folder, config, files.places, inventory.by_name(config))

    def __contains__(self, name: str) -> bool:
        """Whether a weight of this name is part of the model."""
        return name in self._weights

    def storage(self, name: str) -> Storage:
        """How the weight `name` is stored."""
        return Storage.of(self.config, self._weights[name])

    def raw(self, name: str, first: int = 0, last: int | None = None) -> np.ndarray:
        """Rows of a tensor as they are in the file; see `TensorFile.read`."""
        return self._places[name].read(name, first, last)

    def values(self, name: str, first: int = 0, last: int | None = None) -> np.ndarray:
        """Rows of a weight, dequantised: float32, or as stored where it is not quantised."""
        elements, storage = self.raw(name, first, last), self.storage(name)
        if not storage.bits:
            return elements
        rows = storage.block[0]
        begin = first // rows
        scales = self.raw(scale_name(name), begin, -(-(first + len(elements)) // rows))
        # The first block may begin before the first row.
        skip = first - begin * rows
        if skip:
            elements = np.concatenate([np.zeros_like(elements[:1]).repeat(skip, 0), elements])
        return formats.dequantize(elements, scales, storage.bits, storage.block)[skip:]
