"""Run folders of `train.main` and of imports, as something to start from."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from v41flash.checkpoints import streams
from v41flash.checkpoints.names import MODEL
from v41flash.checkpoints.orbax import Checkpoints
from v41flash.config import ModelConfig
from v41flash.errors import InputError

CONFIG, CHECKPOINTS = "config.json", "checkpoints"
TOKENIZER = "tokenizer.json"
# Tokenizers that are no file.
_NAMED_TOKENIZERS = ("byte", "published")
_SECTIONS = ("model", "data", "train")


def read(workdir: Path, step: int | None = None) -> tuple[Mapping[str, Any], Path]:
    """(config.json, folder of a step's checkpoint) of a run folder; the newest step by default.

    Raises:
        InputError: no such folder, step or configuration.
    """
    try:
        config = json.loads((workdir / CONFIG).read_text())
        steps = sorted(int(p.name) for p in (workdir / CHECKPOINTS).iterdir() if p.name.isdigit())
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{workdir}: not a run folder: {' '.join(str(error).split())}") from None
    _check_config(workdir / CONFIG, config)
    if not steps or step not in (None, *steps):
        raise InputError(f"{workdir}: has checkpoints of steps {steps}, not of {step}")
    chosen = steps[-1] if step is None else step
    return config, (workdir / CHECKPOINTS / str(chosen)).absolute()


def _check_config(path: Path, config: Any) -> None:
    """Holds the keys that are read of a run's configuration against what they must be."""
    if not isinstance(config, dict):
        raise InputError(f"{path}: not the configuration of a run: must be a JSON object")
    for section in _SECTIONS:
        if not isinstance(config.get(section), dict):
            raise InputError(f"{path}: not the configuration of a run: {section} must be an object")
    texts = {
        "data.tokenizer": config["data"].get("tokenizer"),
        "train.init_from": config["train"].get("init_from", ""),
    }
    for key, value in texts.items():
        if not isinstance(value, str):
            raise InputError(f"{path}: {key} = {value!r}: must be a text")


def model_config(workdir: Path, config: Mapping[str, Any]) -> ModelConfig:
    """The model of a run.

    Args:
        workdir: the run folder, for messages.
        config: what `read` found in it.

    Raises:
        InputError: its model section does not make one.
    """
    try:
        return ModelConfig.from_dict(config["model"])
    except (TypeError, ValueError, OverflowError, AttributeError) as error:
        reason = " ".join(str(error).split())
        raise InputError(f"{workdir / CONFIG}: model: {reason}") from None


def tokenizer_file(name: str, workdir: Path | None = None) -> Path | None:
    """The file of a tokenizer.

    Args:
        name: as `v41flash.text.tokenizer.load` names it.
        workdir: run folder whose configuration has this name: the file in it, if there is one,
            comes before a path that the run was started with.

    Returns:
        The file; None for a tokenizer that is no file.

    Raises:
        InputError: there is no such file.
    """
    if name in _NAMED_TOKENIZERS:
        return None
    paths = [Path(name)] if workdir is None else [workdir / name, Path(name)]
    for path in paths:
        if path.is_file():
            return path
    raise InputError(f"tokenizer {name!r}: no such file: {' or '.join(map(str, paths))}")


def copy_tokenizer(source: Path, folder: Path) -> None:
    """Copies a tokenizer's file into a folder as its tokenizer.json."""
    target = folder / TOKENIZER
    if not (target.exists() and target.samefile(source)):
        shutil.copyfile(source, target)


def check_start(workdir: Path, abstract: Any) -> None:
    """Checks that a model can start from the newest parameters of a run folder.

    Args:
        workdir: the folder.
        abstract: parameter tree of the model, in anything that has shapes.

    Raises:
        InputError: there is no checkpoint, its weights are packed, or a parameter is missing, is
            one too many or has another shape.
    """
    _, step = read(workdir)
    stored = streams.open_item(step, MODEL) or {}
    leaves = jax.tree_util.tree_leaves_with_path(abstract)
    wanted = {tuple(key.key for key in path): leaf for path, leaf in leaves}
    if any(path[-1].endswith("_scale") for path in stored.keys() - wanted.keys()):
        raise InputError(
            f"{workdir}: holds packed weights; import them with --weights=bfloat16 to train"
        )
    for path in sorted(wanted.keys() | stored.keys()):
        if path not in wanted or path not in stored:
            where = "the model" if path in stored else "the checkpoint"
            raise InputError(f"{workdir}: {where} has no parameter {'/'.join(path)}")
        if tuple(stored[path].shape) != wanted[path].shape:
            raise InputError(
                f"{workdir}: parameter {'/'.join(path)} is {list(stored[path].shape)}; the model"
                f" has {list(wanted[path].shape)}"
            )


def start(workdir: Path, abstract: Any) -> Any:
    """The newest parameters of a run folder, on the shardings and in the dtypes of `abstract`."""
    _, step = read(workdir)
    with Checkpoints(step.parent) as checkpoints:
        return checkpoints.restore_params(int(step.name), abstract)
