"""The state that a run starts with: fresh, another run's, or its newest intact checkpoint.

A checkpoint that cannot be read, or holds other values than were saved, is passed over for the one
before. Once an intact one has been read (so that the fault is not the reader's), the others are
moved out of the way, into the folder `damaged` beside the checkpoints, and named. Where none is
intact nothing is moved, and the run does not start.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from train import plan as plan_lib
from train import step as step_lib
from train.plan import Plan, Saved
from train.step import TrainState
from v41flash.checkpoints import workdirs
from v41flash.checkpoints.orbax import Checkpoints, DamagedCheckpoint

FOLDER = "damaged"


def start(plan: Plan, workdir: Path, damaged: dict[int, str]) -> tuple[Plan, TrainState]:
    """Makes a fresh state, or restores the newest intact one.

    Args:
        plan: of the run; its mesh must be set.
        workdir: the run folder.
        damaged: from `train.plan.newest`: step -> what is wrong; grows.

    Returns:
        (the plan from the checkpoint on that was used, the state).

    Raises:
        InputError: there are checkpoints, but none that is intact.
    """
    if plan.saved is not None:
        saved, state = newest_intact(workdir, plan.saved, plan.abstract, damaged)
        return plan.going_on_from(saved), state
    train, abstract = plan.settings.train, plan.abstract
    if train.init_from:
        params = workdirs.start(Path(train.init_from), abstract.params)
        return plan, step_lib.state_of(params, plan.optimizer, abstract)
    return plan, step_lib.init_state(plan.models[0], plan.optimizer, abstract, train.seed)


def newest_intact(
    workdir: Path, saved: Saved, abstract: TrainState, damaged: dict[int, str]
) -> tuple[Saved, TrainState]:
    """Restores the newest checkpoint that is what was saved; those passed over are set aside.

    Args:
        workdir: the run folder.
        saved: from `train.plan.newest`: where to begin.
        abstract: the state, as shapes with shardings.
        damaged: as in `start`.

    Returns:
        (what was restored, the state).

    Raises:
        InputError: none is intact.
    """
    while (state := _restored(workdir, saved.step, abstract, damaged)) is None:
        saved = plan_lib.newest(workdir, damaged)
    if damaged:
        _set_aside(workdir, damaged)
    return saved, state


def restore(abstract: TrainState, checkpoints: Checkpoints, step: int) -> TrainState:
    """Reads one checkpoint onto the shapes and shardings of a state.

    Raises:
        DamagedCheckpoint: it is not what was saved.
    """
    params, opt_state = checkpoints.restore(
        step, params=abstract.params, opt_state=abstract.opt_state
    )
    return TrainState(jax.device_put(np.int32(step), abstract.step.sharding), params, opt_state)


def _restored(
    workdir: Path, step: int, abstract: TrainState, damaged: dict[int, str]
) -> TrainState | None:
    """The state of a step; None, and an entry in `damaged`, where it is not intact."""
    state, fault = None, ""
    try:
        with Checkpoints(workdir / plan_lib.CHECKPOINTS) as stored:
            state = restore(abstract, stored, step)
    except DamagedCheckpoint as error:
        fault = str(error)
    if _anywhere(bool(fault)):
        damaged[step] = fault or f"checkpoint {step}: another process cannot read it"
        return None
    return state


def _anywhere(flag: bool) -> bool:
    """Whether it holds in any process."""
    if jax.process_count() == 1:
        return flag
    return bool(np.any(multihost_utils.process_allgather(np.asarray(flag))))


def _set_aside(workdir: Path, damaged: dict[int, Any]) -> None:
    if jax.process_index() == 0:
        (workdir / FOLDER).mkdir(exist_ok=True)
        for step, fault in sorted(damaged.items()):
            target = workdir / FOLDER / str(step)
            number = 1
            while target.exists():
                target, number = workdir / FOLDER / f"{step}.{number}", number + 1
            (workdir / plan_lib.CHECKPOINTS / str(step)).rename(target)
            print(f"warning: {fault}; it is now {target}", file=sys.stderr, flush=True)
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("damaged checkpoints are out of the way")
