"""Run folders of `train.main` and of imports, as something to start from."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from v41flash.checkpoints import streams
from v41flash.checkpoints.names import MODEL
from v41flash.checkpoints.orbax import Checkpoints
from v41flash.errors import InputError

CONFIG, CHECKPOINTS = "config.json", "checkpoints"


def read(workdir: Path, step: int | None = None) -> tuple[Mapping[str, Any], Path]:
    """(config.json, folder of a step's checkpoint) of a run folder; the newest step by default.

    Raises:
        InputError: no such folder, step or configuration.
    """
    try:
        config = json.loads((workdir / CONFIG).read_text())
        steps = sorted(int(p.name) for p in (workdir / CHECKPOINTS).iterdir() if p.name.isdigit())
    except (OSError, ValueError) as error:
        raise InputError(f"{workdir}: not a run folder: {' '.join(str(error).split())}") from None
    if not steps or step not in (None, *steps):
        raise InputError(f"{workdir}: has checkpoints of steps {steps}, not of {step}")
    chosen = steps[-1] if step is None else step
    return config, (workdir / CHECKPOINTS / str(chosen)).absolute()


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
