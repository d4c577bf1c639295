"""Checkpoints written and read a slice at a time, for arrays that memory does not hold.

Orbax saves and restores whole arrays. What it leaves on disk is, for every array, a zarr array
under the array's dotted path. `write` has orbax save a checkpoint of the right structure with one
number an array, then lays the real arrays in their places, chunk by chunk, through tensorstore, the
library below orbax. Reading opens the same arrays, whoever wrote them. Any number of hosts then
restores the result like any other checkpoint.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts

from v41flash.checkpoints import checksums
from v41flash.checkpoints.leaves import chunks
from v41flash.checkpoints.names import insert
from v41flash.errors import InputError

# Of an array that is written at once; two are in memory.
CHUNK_BYTES = 128 << 20
# Chunks that are kept because what is read next often lies in the same: the experts of a layer.
_CACHED_CHUNKS = 3
_META = "meta"


class Array(Protocol):
    """What `write` asks of an array: `v41flash.checkpoints.leaves.Leaf` is one."""

    path: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: np.dtype

    def read(self, index: tuple[slice, ...]) -> np.ndarray:
        """A part of it."""

    def chunk(self, limit: int) -> tuple[int, ...]:
        """Shape of the parts that it is best read in."""


def write(directory: Path, arrays: Iterable[Array], meta: dict[str, Any]) -> None:
    """Writes step 0 of a folder of checkpoints.

    Args:
        directory: must not exist; gets its name when everything is written.
        arrays: the first key of their paths is the item ("params", ...).
        meta: JSON values, the item "meta".
    """
    partial = directory.with_name(directory.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    arrays = list(arrays)
    _write_structure(partial, arrays, meta)
    for array in arrays:
        item, *keys = array.path
        _fill(partial / "0" / item / ".".join(keys), array)
    partial.rename(directory)


def _write_structure(directory: Path, arrays: list[Array], meta: dict[str, Any]) -> None:
    trees: dict[str, Any] = {}
    for array in arrays:
        insert(trees, array.path, np.zeros(1, np.uint8))
    # One folder an array, not one database of all.
    handlers = {item: ocp.PyTreeCheckpointHandler(use_ocdbt=False) for item in trees}
    with ocp.CheckpointManager(
        directory,
        item_names=(*trees, _META),
        item_handlers={**handlers, _META: ocp.JsonCheckpointHandler()},
        options=ocp.CheckpointManagerOptions(enable_async_checkpointing=False),
    ) as manager:
        items = {item: ocp.args.PyTreeSave(tree) for item, tree in trees.items()}
        items[_META] = ocp.args.JsonSave(checksums.sealed(meta))
        manager.save(0, args=ocp.args.Composite(**items))


def _fill(folder: Path, array: Array) -> None:
    # Zarr wants at least one number a chunk, of an empty array too.
    chunk = [max(size, 1) for size in array.chunk(CHUNK_BYTES)]
    spec = {
        "driver": "zarr",
        "kvstore": {"driver": "file", "path": f"{folder}/"},
        "context": {"file_io_sync": False},
        "metadata": {"shape": array.shape, "chunks": chunk, "compressor": None},
    }
    stored = ts.open(spec, dtype=ts.dtype(array.dtype), create=True, delete_existing=True).result()
    pending = None
    for index in chunks(array.shape, tuple(chunk)):
        part = array.read(index)
        # The next part is read while this one is written.
        if pending is not None:
            pending.result()
        pending = stored[index].write(part)
    if pending is not None:
        pending.result()


def open_item(step: Path, item: str) -> dict[tuple[str, ...], Any] | None:
    """The arrays of an item of a checkpoint, opened but not read.

    Args:
        step: folder of the step.
        item: "params", ...

    Returns:
        {path: array}: sliced like NumPy's, with shape and dtype; `.read().result()` reads. None
        where there is no such item.

    Raises:
        InputError: the folder is not one that orbax wrote.
    """
    folder = step / item
    if not folder.is_dir():
        return None
    try:
        tree = ocp.PyTreeCheckpointHandler().metadata(folder).tree
        described = json.loads((folder / "_METADATA").read_text())
    except (OSError, ValueError, KeyError) as error:
        raise InputError(f"{folder}: not a checkpoint: {' '.join(str(error).split())}") from None
    driver = "zarr3" if described.get("use_zarr3") else "zarr"
    together = (folder / "manifest.ocdbt").exists()
    context = ts.Context({"cache_pool": {"total_bytes_limit": _CACHED_CHUNKS * CHUNK_BYTES}})
    return {path: _open(folder, path, driver, together, context) for path in _paths(tree)}


def _paths(tree: Mapping[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _paths(value, (*above, key))
        else:
            yield (*above, key)


def _open(
    folder: Path, path: tuple[str, ...], driver: str, together: bool, context: ts.Context
) -> Any:
    name = ".".join(path)
    if together:
        store = {"driver": "ocdbt", "base": f"file://{folder}/", "path": f"{name}/"}
    else:
        store = {"driver": "file", "path": f"{folder / name}/"}
    spec = {"driver": driver, "kvstore": store}
    return ts.open(spec, open=True, read=True, context=context).result()
