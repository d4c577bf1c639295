"""A run that has been checked as a whole: what `train.loop` starts from.

Everything that can be wrong with a configuration, a corpus, a mesh or a run folder is found here,
for all stages, before anything is written.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any, NamedTuple

import jax
import optax
from jax.sharding import Mesh

from train import optimizer as optimizer_lib
from train import stages as stages_lib
from train import step as step_lib
from train.data import pipeline
from train.data.stream import check_fingerprint
from train.settings import Settings, SettingsError
from v41flash import sharding
from v41flash.checkpoints import workdirs
from v41flash.checkpoints.orbax import Checkpoints, DamagedCheckpoint
from v41flash.errors import InputError
from v41flash.nn import ced

# Folder of a run that they lie in.
CHECKPOINTS = workdirs.CHECKPOINTS


class Saved(NamedTuple):
    """The newest checkpoint: updates done, and the note that the loop saved with it."""

    step: int
    meta: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Plan:
    """A checked run. Per stage: its settings, its model (with the indexers' loss), its data.

    Attributes:
        stages: from `train.stages`.
        models: one per stage; all have the same parameters.
        data: one per stage.
        optimizer: the transform.
        mesh: all devices.
        abstract: the state, as shapes with shardings.
        saved: where to go on from; None starts anew.
    """

    stages: tuple[stages_lib.Stage, ...]
    models: tuple[ced.CED, ...]
    data: tuple[pipeline.Data, ...]
    optimizer: optax.GradientTransformation
    mesh: Mesh
    abstract: step_lib.TrainState
    saved: Saved | None

    @property
    def settings(self) -> Settings:
        """Of the first stage; what cannot be staged is the same in all."""
        return self.stages[0].settings

    @property
    def first_step(self) -> int:
        """Updates done before this process's first one."""
        return self.saved.step if self.saved else 0

    def going_on_from(self, saved: Saved) -> Plan:
        """The same run from a checkpoint on.

        Raises:
            InputError: it was made with other data.
        """
        made_in = stages_lib.stage_at(self.stages, saved.step - 1)
        stream = saved.meta["data"]["fingerprint"]
        check_fingerprint(stream, self.data[made_in].fingerprint)
        return dataclasses.replace(self, saved=saved)

    def inference_model(self, index: int) -> ced.CED:
        """The model of a stage without the indexers' loss."""
        model = self.models[index]
        return ced.CED(model.config, model.kernels)


def newest(workdir: Path, damaged: dict[int, str]) -> Saved | None:
    """The newest checkpoint of a run folder whose note is what was saved.

    Args:
        workdir: the folder.
        damaged: step -> what is wrong with its checkpoint. These are passed over; those found here
            are added.

    Raises:
        InputError: there are checkpoints, but none that is intact.
    """
    if not (workdir / CHECKPOINTS).is_dir():
        return None
    with Checkpoints(workdir / CHECKPOINTS) as stored:
        steps = stored.steps()
        for step in reversed(steps):
            if step in damaged:
                continue
            try:
                return Saved(step, stored.meta(step))
            except DamagedCheckpoint as error:
                damaged[step] = str(error)
    if steps:
        first = damaged[steps[-1]]
        raise InputError(
            f"{workdir}: none of its checkpoints {steps} can be used; of the newest: {first}; to "
            "start anew, move the folder away"
        )
    return None


def prepare(stages: tuple[stages_lib.Stage, ...], workdir: Path, saved: Saved | None) -> Plan:
    """Checks all stages of a run.

    Raises:
        InputError: one line that names what is wrong.
    """
    # What is quick comes first: tokenising a corpus may take long.
    settings = stages[0].settings
    _check_folder(workdir)
    for stage in stages:
        pipeline.check_config(stage.settings.data)
    mesh = sharding.make_mesh(settings.mesh.sizes())
    for stage in stages:
        check_layout(stage.settings, mesh)
    models = tuple(
        ced.CED(stage.settings.model, stage.settings.kernels, indexer_loss=True) for stage in stages
    )
    params = step_lib.abstract_params(models[0], mesh)
    optimizer = optimizer_lib.build(settings.optimizer, params)
    abstract = step_lib.abstract_state(params, optimizer)
    if settings.train.init_from and saved is None:
        workdirs.check_start(Path(settings.train.init_from), abstract.params)
    for stage, model in zip(stages[1:], models[1:], strict=True):
        if model != models[0]:
            theirs = step_lib.abstract_params(model, mesh)
            stages_lib.check_same_parameters(stage, params, theirs)
    data = pipeline.from_sections([(s.settings.data, s.settings.model) for s in stages])
    plan = Plan(stages, models, tuple(data), optimizer, mesh, abstract, None)
    return plan if saved is None else plan.going_on_from(saved)


def _check_folder(workdir: Path) -> None:
    try:
        folder = workdir
        while not folder.exists():
            folder = folder.parent
        usable = folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)
    except OSError:
        usable = False
    if not usable:
        raise SettingsError(f"--workdir={workdir}: must be a folder that can be written to")


def check_layout(settings: Settings, mesh: Mesh) -> None:
    """Refuses a batch that does not divide over the mesh.

    Raises:
        SettingsError: one line that names the key.
    """
    batch, accumulation = settings.data.batch_size, settings.train.accumulation
    shards, hosts = step_lib.data_shards(mesh), jax.process_count()
    if batch % (accumulation * shards):
        raise SettingsError(
            f"data.batch_size = {batch}: must be a multiple of train.accumulation {accumulation} "
            f"times the {shards} devices that share the rows"
        )
    if shards % hosts:
        raise SettingsError(
            f"mesh: the rows of a batch are split over {shards} devices (data * fsdp * expert), "
            f"which must be a multiple of the {hosts} hosts"
        )
    length, context = settings.data.sequence_length, mesh.shape["context"]
    aligned = context * ced.ALIGNMENT if context > 1 else 1
    if length % aligned:
        raise SettingsError(
            f"data.sequence_length = {length}: must be a multiple of {aligned}, which is "
            f"{ced.ALIGNMENT} times mesh.context"
        )
    slots = settings.data.image_slots
    if settings.data.image_field and slots % context:
        raise SettingsError(
            f"data.image_slots = {slots}: must be a multiple of mesh.context {context}, over which "
            "images are spread"
        )
