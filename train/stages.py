"""`config.train.stages`: overrides that take effect from a step on.

    config.train.stages = (
        (0, {"model.use_candidate_pool": False, "data.sequence_length": 1024}),
        (500, {"model.use_candidate_pool": True}),
    )

Later stages apply on top of earlier ones. `train.indexer_warmup_steps` is a first stage of its own
with `model.dense_selection=True`. At a boundary the loop builds model, step and data anew;
parameters and optimizer state go on, so their shapes must not change.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from ml_collections import ConfigDict

from train.settings import Settings, SettingsError, closest, flatten, resolve

# Sections and keys that may change during a run. The rest is either state (the optimizer's) or has
# no meaning per stage.
STAGED = (
    "model.",
    "data.",
    "train.accumulation",
    "train.balance_weight",
    "train.indexer_weight",
    "train.router_bias_speed",
    "train.freeze_vision",
)


@dataclasses.dataclass(frozen=True)
class Stage:
    """Settings in force for the updates start, start + 1, ... up to the next stage's start.

    Attributes:
        start: number of updates done before this stage's first one.
        settings: the whole configuration with all overrides applied.
        overrides: what differs from the base configuration, for the log.
    """

    start: int
    settings: Settings
    overrides: dict[str, Any]


def _allowed(key: str) -> bool:
    return any(key.startswith(entry) if entry.endswith(".") else key == entry for entry in STAGED)


def _entries(config: ConfigDict) -> list[tuple[int, dict[str, Any]]]:
    known = flatten(config.to_dict())
    previous = -1
    entries = []
    for entry in config.train.stages:
        if not (
            isinstance(entry, (tuple, list))
            and len(entry) == 2
            and isinstance(entry[0], int)
            and isinstance(entry[1], dict)
        ):
            raise SettingsError(
                f"train.stages: {entry!r} must be (from_step, {{'section.key': value}})"
            )
        start, overrides = entry
        if start <= previous:
            raise SettingsError(
                f"train.stages: from_step {start} follows {previous}; steps must increase from 0"
            )
        previous = start
        for key in overrides:
            if key not in known:
                raise SettingsError(f"train.stages: {key} is no key{closest(key, known)}")
            if not _allowed(key):
                raise SettingsError(
                    f"train.stages: {key} cannot change during a run; these can: "
                    f"{', '.join(STAGED)}"
                )
        entries.append((start, dict(overrides)))
    return entries


def _with_overrides(config: ConfigDict, overrides: dict[str, Any]) -> ConfigDict:
    changed = ConfigDict(config.to_dict())
    for key, value in overrides.items():
        section, name = key.split(".", 1)
        if isinstance(value, list):
            value = tuple(value)
        try:
            changed[section].update_from_flattened_dict({name: value})
        except (TypeError, KeyError, ValueError) as error:
            raise SettingsError(
                f"train.stages: {key} = {value!r} does not fit, the base configuration has "
                f"{config[section].to_dict().get(name)!r}"
            ) from error
    return changed


def resolve_stages(config: ConfigDict) -> tuple[Stage, ...]:
    """All stages of a run, first one at step 0.

    Raises:
        SettingsError: malformed stages, or overrides that are unknown or cannot be run.
    """
    base = resolve(config)
    entries = _entries(config)
    warmup = base.train.indexer_warmup_steps
    starts = sorted({0, warmup} | {start for start, _ in entries})
    stages = []
    for start in starts:
        overrides: dict[str, Any] = {}
        for from_step, changes in entries:
            if from_step <= start:
                overrides |= changes
        if start < warmup:
            overrides["model.dense_selection"] = True
        if stages and stages[-1].overrides == overrides:
            continue
        try:
            settings = resolve(_with_overrides(config, overrides))
        except SettingsError as error:
            # The base configuration has been resolved above: the overrides are at fault.
            raise SettingsError(f"train.stages, from step {start}: {error}") from error
        stages.append(Stage(start, settings, overrides))
    return tuple(stages)


def stage_at(stages: tuple[Stage, ...], step: int) -> int:
    """Index of the stage that makes update number `step` (counted from 0)."""
    return max(index for index, stage in enumerate(stages) if stage.start <= step)


def check_same_parameters(stage: Stage, first: Any, params: Any) -> None:
    """Refuses a stage whose (abstract) parameters are not those of the first stage.

    Raises:
        SettingsError: a name, shape or dtype differs; names the stage, the parameter and both.
    """

    def described(tree):
        leaves = jax.tree_util.tree_leaves_with_path(tree)
        return {
            jax.tree_util.keystr(path): f"{jax.numpy.dtype(leaf.dtype)}{list(leaf.shape)}"
            for path, leaf in leaves
        }

    before, after = described(first), described(params)
    for name in sorted(before.keys() | after.keys()):
        if before.get(name) != after.get(name):
            raise SettingsError(
                f"train.stages, from step {stage.start}: overrides {sorted(stage.overrides)} "
                f"change parameter {name} from {before.get(name, 'absent')} to "
                f"{after.get(name, 'absent')}; a stage must keep all parameters"
            )
