"""Compares optimizers: many learning rates and seeds of one configuration in one process.

    python -m train.compare --config=configs/optimizers.py --workdir=DIR \
        --runs="name=adamw learning_rate=1e-3,2e-3,4e-3" \
        --runs="name=v41 learning_rate=2e-3,4e-3 seed=0,1" [--config.train.steps=100 ...]

Each --runs stands for all combinations of its values; its keys are those of config.optimizer and
`seed`, what it leaves out is as in the configuration. All runs get the same batches and go through
one compiled program side by side (`train.lanes`), which suits models that leave the device idle.
One device, one stage, no checkpoints: a comparison is done in one go.

    --also="unrounded: model.main_kv_format=none [model.index_topk=16 ...]"

takes, at the end, the held-out numbers of the trained parameters under another model too, which
must have the same parameters: heldout_loss_under_unrounded and so on. There may be several.

DIR holds config.json, versions.json, runs.json (the runs in order), curves.jsonl (an object every
config.train.log_every steps: of each run the mean of every number since the last; held-out numbers
every config.eval.every steps), summary.json and curves.png; `train.study` puts such folders
together. Numbers that are not finite are null; a run that has them goes on beside the others.
Exit status: 0 complete, 2 the flags or the configuration are wrong, 130 interrupted.
"""

from __future__ import annotations

import ast
import dataclasses
import itertools
import json
import math
import re
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import flags
from ml_collections import ConfigDict

from train import closing, lanes, plots, runinfo, study
from train import main as main_lib
from train import plan as plan_lib
from train import stages as stages_lib
from train import step as step_lib
from train.data import pipeline
from train.settings import OptimizerSettings, SettingsError, closest, flatten, to_json
from v41flash import command_line
from v41flash.config import ModelConfig
from v41flash.nn import ced

CURVES = "curves.jsonl"


def parse_runs(config: ConfigDict, texts: Sequence[str]) -> list[lanes.Run]:
    """The runs that the values of --runs stand for.

    Raises:
        SettingsError: one line that names the key and value.
    """
    known = [*(field.name for field in dataclasses.fields(OptimizerSettings)), "seed"]
    if not texts:
        raise SettingsError('--runs is missing: give some, such as --runs="name=v41 seed=0,1"')
    runs = []
    for text in texts:
        choices = {}
        for item in text.split():
            key, equals, values = item.partition("=")
            if not equals or key not in known:
                raise SettingsError(
                    f"--runs={text!r}: {item!r} must be KEY=VALUE[,VALUE...], the key one of "
                    f"{', '.join(known)}{closest(key, known)}"
                )
            if key in choices:
                raise SettingsError(f"--runs={text!r}: {key} is there twice; {key}=VALUE,VALUE")
            choices[key] = [_value(value) for value in values.split(",")]
        for chosen in itertools.product(*choices.values()):
            runs.append(_run(config, text, dict(zip(choices, chosen, strict=True))))
    base = stages_lib.resolve_stages(config)[0].settings.optimizer
    for run in runs:
        if runs.count(run) > 1:
            raise SettingsError(f"--runs: {label(run, base)} is there more than once")
        if run.optimizer.final_learning_rate is not None:
            raise SettingsError(
                f"optimizer.final_learning_rate = {run.optimizer.final_learning_rate}: must be "
                "None in a comparison (a tenth of each run's rate)"
            )
    return runs


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def parse_also(config: ConfigDict, texts: Sequence[str]) -> dict[str, ModelConfig]:
    """Name -> the model that a value of --also stands for.

    Raises:
        SettingsError: one line that names the key and value.
    """
    models: dict[str, ModelConfig] = {}
    known = flatten(config.to_dict())
    for text in texts:
        name, colon, values = text.partition(":")
        if not colon or not re.fullmatch(r"[\w.-]+", name) or name in models:
            raise SettingsError(
                f"--also={text!r}: must be a name of its own, a colon and KEY=VALUE ..."
            )
        section = ConfigDict(config.to_dict())
        for item in values.split():
            key, equals, value = item.partition("=")
            if not equals or key not in known or not key.startswith("model."):
                raise SettingsError(
                    f"--also={text!r}: {item!r} must be KEY=VALUE, the key one of the model's"
                    f"{closest(key, known)}"
                )
            try:
                section.update_from_flattened_dict({key: _value(value)})
            except (TypeError, ValueError) as error:
                raise SettingsError(f"--also={text!r}: {error}") from error
        try:
            models[name] = stages_lib.resolve_stages(section)[0].settings.model
        except SettingsError as error:
            raise SettingsError(f"--also={text!r}: {error}") from error
    return models


def _run(config: ConfigDict, text: str, chosen: dict[str, Any]) -> lanes.Run:
    section, seed = ConfigDict(config.to_dict()), chosen.pop("seed", config.train.seed)
    try:
        section.optimizer.update(chosen)
        section.train.seed = seed
        settings = stages_lib.resolve_stages(section)[0].settings
    except (TypeError, ValueError) as error:
        raise SettingsError(f"--runs={text!r}: {error}") from error
    return lanes.Run(settings.optimizer, settings.train.seed)


def label(run: lanes.Run, base: OptimizerSettings) -> str:
    """Optimizer, learning rate and seed in a few words, and whatever else is not as in `base`."""
    return f"{family(run, base)} {run.optimizer.learning_rate:g} seed {run.seed}"


def family(run: lanes.Run, base: OptimizerSettings) -> str:
    """The label without learning rate and seed."""
    values = dataclasses.asdict(run.optimizer)
    usual = dataclasses.asdict(base) | {key: values[key] for key in ("name", "learning_rate")}
    return " ".join(
        [run.optimizer.name]
        + [f"{key}={values[key]}" for key in values if values[key] != usual[key]]
    )


def _check(config: ConfigDict, workdir: Path) -> plan_lib.Plan:
    stages = stages_lib.resolve_stages(config)
    if len(stages) > 1:
        raise SettingsError(
            f"train.stages, train.indexer_warmup_steps: a comparison has one stage, not "
            f"{len(stages)}"
        )
    train, evaluation = stages[0].settings.train, stages[0].settings.eval
    if train.init_from:
        raise SettingsError(
            f"train.init_from = {train.init_from!r}: must be empty, a comparison starts from seeds"
        )
    if evaluation.tasks:
        raise SettingsError(f"eval.tasks = {evaluation.tasks!r}: must be () in a comparison")
    for key, value in (("train.steps", train.steps), ("eval.every", evaluation.every)):
        if value % train.log_every:
            raise SettingsError(
                f"{key} = {value}: must be a multiple of train.log_every, {train.log_every}"
            )
    if (workdir / CURVES).exists() or (workdir / "config.json").exists():
        raise SettingsError(f"--workdir={workdir}: holds a run already; give another folder")
    plan = plan_lib.prepare(stages, workdir, None)
    if plan.mesh.size > 1:
        raise SettingsError(
            f"a comparison runs on one device, there are {plan.mesh.size}: choose one, with "
            "CUDA_VISIBLE_DEVICES or the like"
        )
    return plan


def _check_parameters(plan: plan_lib.Plan, others: Mapping[str, ModelConfig]) -> None:
    """Refuses models of --also that the trained parameters do not fit."""

    def shapes(params: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf.shape, params)

    own = shapes(plan.abstract.params)
    for name, model in others.items():
        other = step_lib.abstract_params(ced.CED(model), plan.mesh)
        if shapes(other) != own:
            raise SettingsError(f"--also={name}: is a model with other parameters than the runs'")


class _Comparison:
    """A comparison under way."""

    def __init__(
        self,
        plan: plan_lib.Plan,
        runs: Sequence[lanes.Run],
        workdir: Path,
        also: Mapping[str, ModelConfig],
        compiler_options: Mapping[str, Any] | None,
    ):
        """Makes the states and compiles the step."""
        self.plan, self.workdir = plan, workdir
        self.groups = lanes.group(runs, plan.settings)
        self.runs = lanes.lane_order(self.groups)
        self.labels = [label(run, plan.settings.optimizer) for run in self.runs]
        self.iterator = plan.data[0].train_iterator(0)
        self.next_batch = self._batch()
        init = lanes.make_init(plan.models[0], self.groups, plan.mesh)
        keys = lanes.keys(self.groups)
        shapes = jax.eval_shape(init, keys)
        chunk = plan.settings.train.loss_chunk_tokens

        def evaluation(model: ced.CED) -> Future:
            one_run = step_lib.make_eval_step(model, chunk)

            def evaluate(params: Sequence[Any], batch: step_lib.Batch) -> Any:
                return jax.vmap(one_run, in_axes=(0, None))(lanes.joined(params), batch)

            params = [state.params for state in shapes]
            lowered = jax.jit(evaluate).lower(params, self.next_batch)
            return self.pool.submit(lowered.compile, compiler_options)

        # The largest program first; the others are traced while it compiles.
        self.pool = ThreadPoolExecutor()
        self.step = lanes.Step(
            plan.models[0], self.groups, shapes, self.next_batch, self.pool, compiler_options
        )
        self.eval_step = evaluation(plan.inference_model(0))
        kernels = plan.models[0].kernels
        self.also = {name: evaluation(ced.CED(model, kernels)) for name, model in also.items()}
        self.states = jax.jit(init, compiler_options=step_lib.init_options())(keys)

    def close(self) -> None:
        """Ends the threads."""
        self.iterator.close()
        self.pool.shutdown(cancel_futures=True)

    def _batch(self) -> step_lib.Batch:
        batch, _ = pipeline.split_host_fields(next(self.iterator))
        return step_lib.to_device(batch, self.plan.mesh)

    def train(self) -> dict[str, Any]:
        """Does all steps; writes and returns the last numbers."""
        train, every = self.plan.settings.train, self.plan.settings.eval.every
        row: dict[str, Any] = {}
        pending = []
        with open(self.workdir / CURVES, "w", buffering=1) as curves:
            started = time.perf_counter()
            for done in range(1, train.steps + 1):
                self.states, metrics = self.step(self.states, self.next_batch)
                pending.append(metrics)
                self.next_batch = self._batch()  # while the device is busy
                if done % train.log_every:
                    continue
                row = {"step": done, **_means(pending)}
                row["step_seconds"] = (time.perf_counter() - started) / len(pending)
                pending = []
                if done == train.steps or (every and done % every == 0):
                    params = [state.params for state in self.states]
                    row |= closing.heldout(self.plan, 0, self.eval_step.result(), params)
                if done == train.steps:
                    for name, eval_step in self.also.items():
                        found = closing.heldout(self.plan, 0, eval_step.result(), params)
                        row |= {f"{key}_under_{name}": found[key] for key in found}
                curves.write(json.dumps(_finite(row)) + "\n")
                self._progress(row)
                started = time.perf_counter()
        return row

    def _progress(self, row: dict[str, Any]) -> None:
        best = np.nanargmin(row["ce"]) if np.isfinite(row["ce"]).any() else 0
        text = f"step {row['step']}  {1e3 * row['step_seconds']:.1f} ms a step"
        text += f"  lowest cross entropy {row['ce'][best]:.4f} ({self.labels[best]})"
        if closing.NUMBERS in row:
            numbers = " ".join(f"{number:.4f}" for number in row[closing.NUMBERS])
            text += f"\n  held-out bits per byte: {numbers}"
        print(text, flush=True)

    def summary(self, row: dict[str, Any]) -> dict[str, Any]:
        """What summary.json holds: the last numbers of every run, and what each group costs."""
        results = [
            {
                "run": self.labels[i],
                "family": family(run, self.plan.settings.optimizer),
                "optimizer": dataclasses.asdict(run.optimizer),
                "seed": run.seed,
            }
            | {name: values[i] for name, values in row.items() if isinstance(values, list)}
            for i, run in enumerate(self.runs)
        ]
        costs = []
        for group, state in zip(self.groups, self.states, strict=True):
            named = family(group.runs[0], self.plan.settings.optimizer)
            cost: dict[str, Any] = {"optimizer": named}
            cost |= {"runs": len(group.runs), "state_bytes": lanes.state_bytes(state)}
            if self.plan.settings.train.time_optimizer:
                alone = step_lib.TrainState(state.step, *_first((state.params, state.opt_state)))
                cost["update_ms"] = step_lib.optimizer_milliseconds(group.transform, alone)
            costs.append(cost)
        return {"step": row["step"], "runs": results, "groups": costs}


@jax.jit
def _first(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf[0], tree)


def _means(metrics: Sequence[dict[str, jax.Array]]) -> dict[str, list[float]]:
    """Of each number, the mean over some steps for every run."""
    read = jax.device_get(metrics)
    return {name: np.mean([row[name] for row in read], axis=0).tolist() for name in read[0]}


def compare(
    config: ConfigDict,
    texts: Sequence[str],
    workdir: Path,
    compiler_options: Mapping[str, Any] | None = None,
    also: Sequence[str] = (),
) -> dict[str, Any]:
    """Runs a comparison; returns what it writes to summary.json.

    Args:
        config: the configuration of all runs.
        texts: values of --runs.
        workdir: folder for the results.
        compiler_options: of XLA.
        also: values of --also.

    Raises:
        InputError: one line that names what is wrong.
    """
    runs, others = parse_runs(config, texts), parse_also(config, also)
    plan = _check(config, workdir)
    _check_parameters(plan, others)
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        runinfo.write_json(workdir / "config.json", to_json(config))
        runinfo.write_json(workdir / "versions.json", runinfo.versions())
    except OSError as error:
        raise SettingsError(f"--workdir={workdir}: cannot be written: {error}") from error
    print(f"{len(runs)} runs; {plan.data[0].describe()}", flush=True)
    work = _Comparison(plan, runs, workdir, others, compiler_options)
    listed = [dataclasses.asdict(run.optimizer) | {"seed": run.seed} for run in work.runs]
    runinfo.write_json(workdir / "runs.json", listed)
    try:
        row = work.train()
    finally:
        work.close()
    summary = _finite(work.summary(row))
    runinfo.write_json(workdir / "summary.json", summary)
    plots.comparison_plot(study.of_folder(workdir), workdir / "curves.png")
    for result in sorted(summary["runs"], key=_place):
        number = result[closing.NUMBERS]
        shown = "not finite" if number is None else f"{number:.4f} bits per byte"
        print(f"{shown}  {result['run']}")
    return summary


def _place(result: Mapping[str, Any]) -> float:
    """What finished runs are sorted by; a run that is no longer finite comes last."""
    loss = result["heldout_loss"]
    return math.inf if loss is None else loss


def _finite(value: Any) -> Any:
    """`value` with None for numbers that are not finite, which JSON has no words for."""
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@command_line.program(__doc__, interrupted="interrupted")
def main(arguments: Sequence[str]) -> int:
    """Runs the command line; returns the exit status."""
    values = flags.FlagValues()
    runs = flags.DEFINE_multi_string("runs", [], "KEY=VALUE[,VALUE...] ...", flag_values=values)
    also = flags.DEFINE_multi_string("also", [], "NAME: KEY=VALUE ...", flag_values=values)
    config, workdir = main_lib.parse(arguments, values)
    # grain's workers ask absl whether flags have been parsed.
    flags.FLAGS.mark_as_parsed()
    compare(config, runs.value, workdir, also=also.value)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
