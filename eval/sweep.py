"""What a sweep is: variants times seeds, and the claims that they decide.

A sweep file has `get_sweep()`, which returns a `Sweep`:

    from eval.sweep import Claim, Evaluation, Sweep, Training, Variant

    def get_sweep():
        quick = Training("configs/quickstart.py", {"train.steps": 100})
        return Sweep(
            variants=(
                Variant("base", quick),
                Variant("slow", quick.but({"optimizer.learning_rate": 1e-4})),
            ),
            seeds=(0, 1),
            claims=(Claim("the rate matters", "base", "slow"),),
        )

A variant trains (`train.main`, or all its seeds in one process: `train.compare`), evaluates, or
both: an evaluation is a program that takes `--workdir=DIR --json=FILE` and writes an object of
numbers. A variant without a training evaluates a run folder that is there. One variant under one
seed is a point; its id is "name@seed".
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import importlib.machinery
import importlib.util
import json
import re
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from v41flash.config import ConfigError, ModelConfig
from v41flash.errors import InputError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
KINDS = ("better", "no worse")


class SweepError(InputError):
    """A sweep that cannot be run; one line."""


@dataclasses.dataclass(frozen=True)
class Training:
    """Trains a configuration.

    Attributes:
        config: configuration file.
        overrides: {"section.key": value}, as flags --config.section.key=value give them.
        together: all seeds of the variant side by side in one process (`train.compare`), which
            compiles once and leaves no checkpoints.
        also: name -> model overrides ({"model.key": value}) under which the trained parameters'
            held-out numbers are taken too, as "heldout_..._under_NAME"; needs `together`.
    """

    config: str
    overrides: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    together: bool = False
    also: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)

    def but(self, overrides: Mapping[str, Any], **fields: Any) -> Training:
        """The same with further overrides, and with other fields."""
        return dataclasses.replace(self, overrides={**self.overrides, **overrides}, **fields)


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Runs `python -m program --workdir=DIR --json=FILE --flag=value ...`.

    Attributes:
        program: module with that command line, such as "eval.long_context".
        flags: the others; "{seed}" in a value stands for the point's seed.
    """

    program: str
    flags: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Variant:
    """One way to do something.

    Attributes:
        name: letters, digits, ".", "_" and "-"; unique in the sweep.
        training: what is trained, or None.
        evaluations: what runs on the checkpoint.
        workdir: run folder of the checkpoint where nothing is trained; "{seed}" stands for the
            point's seed.
        group: heading of its table in the report.
    """

    name: str
    training: Training | None = None
    evaluations: tuple[Evaluation, ...] = ()
    workdir: str = ""
    group: str = "all"

    def definition(self) -> dict[str, Any]:
        """What decides the results, as JSON values: equal where results may be merged."""
        own = dataclasses.asdict(self)
        return json.loads(json.dumps({k: own[k] for k in ("training", "evaluations", "workdir")}))


@dataclasses.dataclass(frozen=True)
class Claim:
    """A statement that the numbers of two variants decide.

    Attributes:
        statement: in words; claims of the same statement share a plot.
        variant: name of what the statement speaks for.
        alternative: name of what it speaks against.
        metric: the number compared; the sweep's own when None.
        other_metric: the alternative's, where it goes by another name; `metric` when None.
        kind: "better", or "no worse": by no more than `margin`.
        margin: in the metric's unit.
        equal: what both have in common but for a few percent: of "parameters" and "activated".
    """

    statement: str
    variant: str
    alternative: str
    metric: str | None = None
    other_metric: str | None = None
    kind: str = "better"
    margin: float = 0.0
    equal: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Sweep:
    """See the module.

    Attributes:
        variants: in the order of the report.
        seeds: of every variant.
        metric: the number that tables and claims are about.
        lower_is_better: of the metric.
        claims: decided in the report.
        shown: further numbers that the tables have beside the metric.
    """

    variants: tuple[Variant, ...]
    seeds: tuple[int, ...] = (0,)
    metric: str = "heldout_bits_per_byte"
    lower_is_better: bool = True
    claims: tuple[Claim, ...] = ()
    shown: tuple[str, ...] = ()

    def variant(self, name: str) -> Variant:
        """The variant of a name that is there."""
        return next(variant for variant in self.variants if variant.name == name)


@dataclasses.dataclass(frozen=True)
class Point:
    """A variant under a seed."""

    variant: Variant
    seed: int

    @property
    def id(self) -> str:
        """"name@seed"."""
        return f"{self.variant.name}@{self.seed}"


def points(sweep: Sweep) -> tuple[Point, ...]:
    """All of them, variants outermost."""
    return tuple(Point(variant, seed) for variant in sweep.variants for seed in sweep.seeds)


def load(path: str) -> Sweep:
    """Reads and checks a sweep file.

    Raises:
        SweepError: there is no such file, its code fails, or it is no sweep.
    """
    sweep = _call(path, "get_sweep", f"--sweep={path}")
    if not isinstance(sweep, Sweep):
        raise SweepError(f"--sweep={path}: get_sweep() must return an eval.sweep.Sweep")
    return sweep


def changed(sweep: Sweep, settings: Sequence[str], seeds: Sequence[int] | None) -> Sweep:
    """A sweep with `settings` (KEY=VALUE of every training's overrides) and other seeds."""
    overrides = {}
    for text in settings:
        key, equals, value = text.partition("=")
        if not equals:
            raise SweepError(f"--set={text}: must be KEY=VALUE, such as train.steps=20")
        overrides[key] = value

    def with_overrides(variant: Variant) -> Variant:
        if variant.training is None:
            return variant
        return dataclasses.replace(variant, training=variant.training.but(overrides))

    variants = tuple(map(with_overrides, sweep.variants)) if overrides else sweep.variants
    return dataclasses.replace(
        sweep, variants=variants, seeds=sweep.seeds if seeds is None else tuple(seeds)
    )


def check(sweep: Sweep) -> None:
    """Checks everything that can be without running a point.

    Raises:
        SweepError: what is wrong first.
    """
    if not sweep.variants:
        raise SweepError("variants: there must be at least one")
    _check_seeds(sweep.seeds)
    names = [variant.name for variant in sweep.variants]
    known: dict[str, Mapping[str, Any]] = {}
    for variant in sweep.variants:
        if not _NAME.fullmatch(str(variant.name)):
            raise SweepError(
                f"variant {variant.name!r}: a name is made of letters, digits, '.', '_' and '-'"
            )
        if names.count(variant.name) > 1:
            raise SweepError(f"variant {variant.name!r}: there more than once")
        _check_variant(variant, known)
    for claim in sweep.claims:
        for name in (claim.variant, claim.alternative):
            if name not in names:
                raise SweepError(
                    f"claim {claim.statement!r}: no variant {name!r}{_closest(name, names)}"
                )
        if claim.kind not in KINDS:
            raise SweepError(
                f"claim {claim.statement!r}: kind {claim.kind!r} must be one of {', '.join(KINDS)}"
            )


def _check_seeds(seeds: Sequence[int]) -> None:
    whole = all(isinstance(seed, int) and seed >= 0 for seed in seeds)
    if not seeds or not whole or len(set(seeds)) < len(seeds):
        raise SweepError(f"seeds = {tuple(seeds)}: must be different whole numbers from 0 up")


def _check_variant(variant: Variant, known: dict[str, Mapping[str, Any]]) -> None:
    where, training = f"variant {variant.name!r}", variant.training
    if training is None:
        if not variant.workdir or not variant.evaluations:
            raise SweepError(f"{where}: must train, or have a workdir and evaluations")
    else:
        if variant.workdir:
            raise SweepError(f"{where}: workdir = {variant.workdir!r} must be empty, it trains")
        if training.together and variant.evaluations:
            raise SweepError(f"{where}: no evaluations, seeds trained together leave no checkpoint")
        if training.also and not training.together:
            raise SweepError(f"{where}: also needs together=True")
        if training.config not in known:
            known[training.config] = flat_config(training.config)
        keys = known[training.config]
        under = [key for overrides in training.also.values() for key in overrides]
        for key in (*training.overrides, *under):
            if key not in keys:
                raise SweepError(
                    f"{where}: {training.config} has no key {key!r}{_closest(key, keys)}"
                )
        for key in under:
            if not key.startswith("model."):
                raise SweepError(f"{where}: also: {key} must be a key of the model")
        for name in training.also:
            if not _NAME.fullmatch(name):
                raise SweepError(f"{where}: also: {name!r} is no name")
        for overrides in ({}, *training.also.values()):
            try:
                model(training.but(overrides), keys)
            except SweepError as error:
                raise SweepError(f"{where}: {error}") from error
        if "train.seed" in training.overrides:
            raise SweepError(f"{where}: train.seed is not overridden, seeds are the sweep's")
    for evaluation in variant.evaluations:
        try:
            found = importlib.util.find_spec(evaluation.program)
        except ModuleNotFoundError:
            found = None
        if found is None:
            raise SweepError(f"{where}: there is no program {evaluation.program!r}")


def model(training: Training, keys: Mapping[str, Any]) -> ModelConfig:
    """The model that a training makes; `keys` is `flat_config` of its file.

    Raises:
        SweepError: there is no such model.
    """
    fields = {**keys, **{key: _value(value) for key, value in training.overrides.items()}}
    prefix = "model."
    own = {key.removeprefix(prefix): fields[key] for key in fields if key.startswith(prefix)}
    try:
        return ModelConfig.from_dict(own)
    except ConfigError as error:
        raise SweepError(f"model.{error}") from error


def _value(value: Any) -> Any:
    """As a flag would read it."""
    try:
        return ast.literal_eval(value) if isinstance(value, str) else value
    except (ValueError, SyntaxError):
        return value


def flat_config(path: str) -> dict[str, Any]:
    """{"section.key": value} of a configuration file.

    Raises:
        SweepError: there is no such file, or its code fails.
    """
    config = _call(path, "get_config", f"config {path}")
    if not isinstance(config, ConfigDict):
        raise SweepError(f"config {path}: get_config() must return a ConfigDict")
    return {
        f"{section}.{key}": value
        for section, values in config.items()
        for key, value in values.items()
    }


def _closest(name: str, known: Any) -> str:
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.75)
    return f"; did you mean {near[0]}?" if near else ""


def _call(path: str, function: str, shown: str) -> Any:
    """Runs a Python file and a function of it; its own mistakes are reported with their line."""
    if not Path(path).is_file():
        raise SweepError(f"{shown}: there is no such file")
    loader = importlib.machinery.SourceFileLoader("sweep_file", path)
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("sweep_file", loader))
    try:
        loader.exec_module(module)
        made = getattr(module, function, None)
        if made is not None:
            return made()
    except Exception as error:  # whatever the file's own code raises is a mistake in it
        lines = [
            frame.lineno
            for frame in traceback.extract_tb(error.__traceback__)
            if Path(frame.filename).resolve() == Path(path).resolve()
        ]
        line = f"line {lines[-1]}: " if lines else ""
        text = " ".join(str(error).split())
        raise SweepError(f"{shown}: {line}{type(error).__name__}: {text}") from error
    raise SweepError(f"{shown}: has no {function}()")
