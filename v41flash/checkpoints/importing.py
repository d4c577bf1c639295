"""From the published layout to a run folder, or to arrays on devices, slice by slice.

A run folder is written in chunks of `streams.CHUNK_BYTES`, and arrays on devices grow by such
chunks where they live, so that an import needs little more than two chunks of host memory, whatever
the size of shards, tensors and parameters. Rows of a tensor are read whole: for a run folder once,
for arrays on devices once for each shard that has a part of them, which is more than once where an
inner axis is sharded.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from v41flash.checkpoints import streams, workdirs
from v41flash.checkpoints.leaves import PACKED, Leaf, chunks, leaves
from v41flash.checkpoints.names import MODEL, insert
from v41flash.checkpoints.published import Published
from v41flash.checkpoints.workdirs import CHECKPOINTS, CONFIG, TOKENIZER
from v41flash.config import ConfigError, ModelConfig
from v41flash.errors import InputError
from v41flash.text import tokenizer as tokenizer_lib
from v41flash.text.tokenizer import file_fingerprint

# What serving asks of the training of a run: none, which tells an import's config.json from others.
_TRAIN = {"stages": [], "indexer_warmup_steps": 0}


def model_config(published: Published, form: str) -> ModelConfig:
    """The configuration of the model that runs on weights in one of `FORMS`."""
    if form != PACKED:
        return published.config
    try:
        return dataclasses.replace(published.config, weight_form=PACKED, activation_format="fp8")
    except ConfigError as error:
        raise InputError(
            f"{published.folder}: weights are not FP8 and FP4, and cannot stay packed; take"
            f" --weights=bfloat16 or float32 ({error})"
        ) from error


def to_workdir(published: Published, workdir: Path, form: str, tokenizer: str | None = None) -> str:
    """Writes a run folder: tokenizer.json if there is one, config.json, checkpoints/0.

    config.json holds what serving reads of the configuration of a run. An interrupted import may be
    done again in the same folder.

    Args:
        published: what to import.
        workdir: must hold no run yet.
        form: of the weights, one of `FORMS`.
        tokenizer: as `v41flash.text.tokenizer.load` names it; a file is copied. None: the folder's
            own tokenizer.json or, if it has none, "published".

    Returns:
        The tokenizer's name in config.json; that of a file is relative to the run folder.

    Raises:
        InputError: the folder has a run, there is no such tokenizer or it is not the model's, or
            weights cannot be had in this form.
        OSError: the folder cannot be written.
    """
    workdir = workdir.absolute()
    _check_free(workdir)
    if tokenizer is None:
        own = published.folder / TOKENIZER
        tokenizer = str(own) if own.is_file() else "published"
    source = workdirs.tokenizer_file(tokenizer)
    if source is not None:
        _check_tokenizer(source, published.config)
    config = {
        "model": model_config(published, form).to_dict(),
        "data": {"tokenizer": tokenizer if source is None else TOKENIZER},
        "train": _TRAIN,
        "kernels": {},
    }
    workdir.mkdir(parents=True, exist_ok=True)
    if source is not None:
        workdirs.copy_tokenizer(source, workdir)
    partial = workdir / (CONFIG + ".partial")
    partial.write_text(json.dumps(config, indent=2) + "\n")
    os.replace(partial, workdir / CONFIG)
    # Last: a folder with checkpoints is a whole run.
    meta = {"config": config, "imported": {"weights": form}}
    if source is not None:
        ids = (config["model"][f"{role}_token_id"] for role in ("bos", "eos", "pad"))
        meta["tokenizer"] = file_fingerprint(source.read_bytes(), *ids)
    streams.write(workdir / CHECKPOINTS, leaves(published, form), meta)
    return config["data"]["tokenizer"]


def _check_tokenizer(file: Path, config: ModelConfig) -> None:
    tokenizer = tokenizer_lib.load(
        str(file),
        bos_id=config.bos_token_id,
        eos_id=config.eos_token_id,
        pad_id=config.pad_token_id,
    )
    if tokenizer.vocab_size > config.vocab_size:
        raise InputError(
            f"{file}: has {tokenizer.vocab_size:,} ids; the model's vocab_size is"
            f" {config.vocab_size:,}; name another with --tokenizer"
        )


def _check_free(workdir: Path) -> None:
    """A folder with a run is refused, not one that an interrupted import has left."""
    if (workdir / CHECKPOINTS).exists():
        raise InputError(f"{workdir}: holds checkpoints already; choose another folder")
    path = workdir / CONFIG
    if not path.exists():
        return
    try:
        found = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict) or found.get("train") != _TRAIN:
        raise InputError(f"{path}: belongs to another run; choose another folder")


def to_devices(published: Published, abstract: Any, form: str, tree: str = MODEL) -> Any:
    """Reads parameters onto devices.

    Args:
        published: what to read.
        abstract: a tree of `jax.ShapeDtypeStruct` with shardings, such as
            `train.step.abstract_params` makes of the model; its dtypes count. What the folder has
            beyond them is not read.
        form: of the weights, one of `FORMS`.
        tree: `names.MODEL` or `names.DRAFT`.

    Returns:
        A tree like `abstract`.

    Raises:
        InputError: a parameter is not in the folder, or has another shape there.
    """
    found = {leaf.path[1:]: leaf for leaf in leaves(published, form) if leaf.path[0] == tree}
    wanted = dict(_flat(abstract))
    for path in wanted.keys() - found.keys():
        raise InputError(f"{published.folder}: there is no parameter {'/'.join(path)}")
    params: dict[str, Any] = {}
    for path, like in wanted.items():
        if found[path].shape != like.shape:
            raise InputError(
                f"{published.folder}: parameter {'/'.join(path)} is {list(found[path].shape)}; the"
                f" model has {list(like.shape)}"
            )
        insert(params, path, _place(found[path], like))
    return params


def _flat(tree: Any, above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _flat(value, (*above, key))
        else:
            yield (*above, key), value


def _place(leaf: Leaf, like: jax.ShapeDtypeStruct) -> jax.Array:
    """One array, made of its addressable shards; equal shards are read once."""
    sharding: Sharding = like.sharding
    parts: dict[tuple, jax.Array] = {}
    shards = []
    for device, index in sharding.addressable_devices_indices_map(leaf.shape).items():
        spans = tuple(s.indices(size)[:2] for s, size in zip(index, leaf.shape, strict=True))
        if spans in parts:
            shards.append(jax.device_put(parts[spans], device))
            continue
        parts[spans] = _grow(leaf, spans, like.dtype, device)
        shards.append(parts[spans])
    return jax.make_array_from_single_device_arrays(leaf.shape, sharding, shards)


def _grow(leaf: Leaf, spans: tuple, dtype: Any, device: jax.Device) -> jax.Array:
    """The part of a leaf between `spans`, on one device."""
    shape = tuple(last - first for first, last in spans)
    size = math.prod(shape) * np.dtype(dtype).itemsize
    whole = tuple(slice(*span) for span in spans)
    if size <= streams.CHUNK_BYTES:
        return jax.device_put(leaf.read(whole).astype(dtype), device)
    with jax.default_device(device):
        array = jnp.zeros(shape, dtype)
    step = tuple(min(pair) for pair in zip(leaf.chunk(streams.CHUNK_BYTES), shape, strict=True))
    for index in chunks(shape, step):
        moved = tuple(
            slice(first + s.start, first + s.stop)
            for (first, _), s in zip(spans, index, strict=True)
        )
        part = jax.device_put(leaf.read(moved).astype(dtype), device)
        array = _update(array, part, tuple(s.start for s in index))
    return array


@functools.partial(jax.jit, donate_argnums=0)
def _update(array: jax.Array, part: jax.Array, start: tuple[int, ...]) -> jax.Array:
    return jax.lax.dynamic_update_slice(array, part, start)
