"""Reinforcement learning on tasks that can be checked: the loop.

A step asks questions under several efforts, samples a group of answers to each by the serving code,
subtracts the price of their length from their scores, and learns from what is better than its
group. The trainer's forward pass begins the decoder where the sampler's replay did and rounds what
the sampler stores, so that both give the same probabilities; by how much they differ is logged, and
a run in which it is too much stops.

All that a step does follows from the parameters, the optimizer's state, the seed and the step: a
run that goes on from a checkpoint is the uninterrupted one.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from eval.tasks.asking import Asking
from eval.tasks.verifiable import open_task
from train import flops, origin, plan, recovery, runinfo
from train import metrics as metrics_lib
from train import optimizer as optimizer_lib
from train import step as step_lib
from train.data import pipeline
from train.ledger import TrainingDiverged
from train.rl import grpo, rollout
from train.rl.rollout import Trajectory
from train.rl.settings import resolve
from train.settings import SettingsError, check_resume, to_json
from train.stopping import Stop, end_after
from v41flash import sharding
from v41flash.checkpoints import workdirs
from v41flash.checkpoints.orbax import Checkpoints
from v41flash.nn import ced
from v41flash.serving import Generator, Options
from v41flash.text import canonical
from v41flash.text import tokenizer as tokenizer_lib
from v41flash.text.engram_hash import EngramHasher


def run(config: ConfigDict, workdir: Path, stop: Stop | None = None) -> None:
    """Trains to `config.train.steps` in `workdir`, going on from its newest intact checkpoint.

    Args:
        config: the configuration.
        workdir: folder of the run.
        stop: where the run is asked to stop; None: nobody asks.

    Raises:
        InputError: the configuration cannot be run, or is not the one of the run in `workdir`.
        Stopped: it was asked to stop, and has saved.
        TrainingDiverged: a number is not finite, or sampler and trainer disagree; the newest
            checkpoint is from before it.
        ReportError: the run's numbers cannot be written.
        SaveError: a checkpoint cannot be written.
    """
    # ---------------------------------------------------------------------------------------------
    # Set-up: nothing is written before all of the run has been checked.
    # ---------------------------------------------------------------------------------------------
    stop = stop or Stop()
    settings, _ = resolve(config)
    damaged: dict[int, str] = {}
    saved = plan.newest(workdir, damaged)
    if saved is not None:
        check_resume(saved.meta["config"], to_json(config))
    steps = settings.train.steps
    if saved is not None and saved.step >= steps:
        print(f"The run in {workdir} is complete: {saved.step} steps done, {steps} asked for.")
        return
    job = _Job(config, workdir, saved, damaged)

    # ---------------------------------------------------------------------------------------------
    # Start or restore, then step by step.
    # ---------------------------------------------------------------------------------------------
    try:
        job.start()
        stop.before_anything()
        while job.step < steps:
            job.update(stop)
        job.checkpoints.wait()
    finally:
        job.close()
    print(f"run folder: {workdir} (checkpoints, metrics.jsonl)")


class _Job:
    """A run under way.

    Attributes:
        checkpoints: of the run folder.
        saved: the checkpoint that it goes on from, if there is one.
        state: after `step` updates.
        step: updates of the policy done.
    """

    def __init__(
        self,
        config: ConfigDict,
        workdir: Path,
        saved: plan.Saved | None,
        damaged: dict[int, str],
    ):
        """Checks everything, makes or restores the state, then opens the folder."""
        self.settings, self.rl = settings, rl = resolve(config)
        self.config, self.workdir = to_json(config), workdir
        pipeline.check_config(settings.data)
        model, train = settings.model, settings.train
        if not train.init_from:
            raise SettingsError("train.init_from is empty: name the run to start with")
        self.tokenizer = tokenizer_lib.load(
            settings.data.tokenizer,
            bos_id=model.bos_token_id,
            eos_id=model.eos_token_id,
            pad_id=model.pad_token_id,
        )
        self.task, self.asking = open_task(rl.task), Asking(self.tokenizer)
        self.price = rl.length_price()
        self.token_map = canonical.canonical_map(self.tokenizer)
        pad = int(self.token_map[model.engram_pad_token_id])
        self.hasher = EngramHasher.from_config(model, pad)
        self.mesh = sharding.make_mesh({}, jax.devices()[:1])
        self.model = ced.CED(model, settings.kernels, indexer_loss=True)
        params = step_lib.abstract_params(self.model, self.mesh)
        self.optimizer = optimizer_lib.build(settings.optimizer, params)
        self.abstract = step_lib.abstract_state(params, self.optimizer)
        workdirs.check_start(Path(train.init_from), self.abstract.params)
        self.saved, self.state = self._state(saved, damaged)
        self.step = self.saved.step if self.saved else 0
        try:
            workdir.mkdir(parents=True, exist_ok=True)
            runinfo.write_json(workdir / "config.json", self.config)
            runinfo.write_json(workdir / "versions.json", runinfo.versions())
            activated = flops.activated_parameters(model, self.abstract.params)
            table = runinfo.parameter_table(self.abstract.params, activated)
            runinfo.write_text(workdir / "params.txt", table)
            self.reporter = metrics_lib.Reporter(
                workdir, first_step=self.step, last_step=train.steps
            )
        except OSError as error:
            raise SettingsError(f"--workdir={workdir}: cannot be written: {error}") from error
        self.checkpoints = Checkpoints(
            workdir / plan.CHECKPOINTS, keep=train.keep_checkpoints, writes=True
        )

    def _state(
        self, saved: plan.Saved | None, damaged: dict[int, str]
    ) -> tuple[plan.Saved | None, step_lib.TrainState]:
        if saved is not None:
            return recovery.newest_intact(self.workdir, saved, self.abstract, damaged)
        params = workdirs.start(Path(self.settings.train.init_from), self.abstract.params)
        return None, step_lib.state_of(params, self.optimizer, self.abstract)

    def close(self) -> None:
        """Finishes what is pending, whatever happened."""
        self.reporter.close()
        self.checkpoints.close()

    def start(self) -> None:
        """Builds the sampler and what the trainer compiles."""
        if self.saved is not None:
            # The process may have been stopped between saving and writing the step's numbers.
            rows = metrics_lib.read(self.workdir)
            if not rows or rows[-1]["step"] < self.step:
                self.reporter.write(self.saved.meta["row"])
            self.reporter.line(f"going on from step {self.step}")
        self.reference = None
        if self.rl.reference_weight:
            origin = Path(self.settings.train.init_from)
            self.reference = workdirs.start(origin, self.abstract.params)
        self.generator = Generator(
            self.settings.model,
            self.state.params,
            self.tokenizer,
            token_map=self.token_map,
            kernels=self.settings.kernels,
            options=Options(batch_size=self.rl.decode_batch),
        )
        chunk, allowed = self.settings.train.loss_chunk_tokens, self.generator.allowed
        objective = grpo.objective(self.rl, allowed, chunk)
        self._part = jax.jit(step_lib.make_share(self.model, self.settings, objective))
        self._join = jax.jit(step_lib.join, donate_argnums=0)
        self._nonfinite = jax.jit(step_lib.nonfinite_counts)
        moved = step_lib.make_update(self.optimizer, self.settings)
        self._move = jax.jit(moved, donate_argnums=0)
        bare = ced.CED(self.settings.model, self.settings.kernels)
        read = functools.partial(grpo.batch_logprobs, allowed=allowed, chunk_tokens=chunk)

        def reference_logprobs(params: Any, batch: step_lib.Batch) -> jax.Array:
            outputs, _, _ = step_lib.model_outputs(bare, params, batch)
            return read(params, outputs.hidden, batch)

        self._reference_logprobs = jax.jit(reference_logprobs)

    def update(self, stop: Stop) -> None:
        """One step: samples, learns, logs, saves; the last one where it is asked to stop."""
        rl, train, seed = self.rl, self.settings.train, self.settings.train.seed
        started = time.perf_counter()
        self.generator.load(self.state.params)
        asked = rollout.questions(self.task, rl, seed, self.step)
        sampled = rollout.sample(self.generator, self.asking, self.task, asked, rl, seed, self.step)
        seconds = {"sample_seconds": time.perf_counter() - started}
        scores = np.array([t.score for t in sampled])
        efforts = np.array([t.question.effort for t in sampled])
        prices = self.price.reward(efforts, np.array([len(t.tokens) for t in sampled]))
        rewards = (scores + prices).reshape(len(asked), rl.samples)
        weights = grpo.advantages(rewards, scale=rl.scale_advantages).ravel()

        started = time.perf_counter()
        values: dict[str, float] = {}
        each = len(asked) // rl.updates * rl.samples
        for first in range(0, len(sampled), each):
            part = slice(first, first + each)
            learned = self._learn(sampled[part], weights[part])
            # How far sampler and trainer are apart only the first update can tell.
            if first == 0:
                self._check_gap(learned["gap"])
                values = learned
        seconds["train_seconds"] = time.perf_counter() - started
        self.step += 1

        last = self.step == train.steps
        stopping = stop.requested and not last
        due_save = last or stopping or self.step % train.checkpoint_every == 0
        row = {"step": self.step, **values, **summary(sampled, rewards), **seconds}
        if due_save:
            self.checkpoints.save(
                self.step,
                params=self.state.params,
                opt_state=self.state.opt_state,
                meta={
                    "config": self.config,
                    "tokenizer": self.tokenizer.fingerprint,
                    "row": row,
                },
            )
        if due_save or self.step == 1 or self.step % train.log_every == 0:
            self.reporter.write(row)
        else:
            self.reporter.advance(self.step, row["loss"], None)
        if stopping:
            end_after(self.step, self.checkpoints)

    def _learn(self, sampled: Sequence[Trajectory], weights: np.ndarray) -> dict[str, float]:
        """One update from some trajectories; its metrics, which are finite."""
        data, replay = self.settings.data, self.settings.model.sliding_window
        packed = rollout.pack(
            sampled,
            weights,
            length=data.sequence_length,
            rows_multiple=data.batch_size,
            replay=replay,
            pad_id=self.tokenizer.pad_id,
            engram_rows=lambda tokens, positions: self.hasher.rows(
                self.token_map[tokens], positions
            ),
        )
        with jax.set_mesh(self.mesh):
            totals = step_lib.counts(packed)
            learned = None
            for first in range(0, len(packed["tokens"]), data.batch_size):
                rows = {name: x[first : first + data.batch_size] for name, x in packed.items()}
                batch = step_lib.to_device(rows, self.mesh)
                if self.reference is not None:
                    batch["reference_logprobs"] = self._reference_logprobs(self.reference, batch)
                part = self._part(self.state.params, batch, totals)
                learned = part if learned is None else self._join(learned, part)
            self.state, values = self._move(self.state, learned)
        values = {name: float(value) for name, value in jax.device_get(values).items()}
        for name in ("loss", "grad_norm", "indexer_grad_norm"):
            if not math.isfinite(values[name]):
                found = jax.device_get(self._nonfinite(learned))
                where = origin.describe(self.settings.model, found)
                raise TrainingDiverged(f"step {self.step + 1}: {name} is {values[name]}; {where}")
        return values

    def _check_gap(self, gap: float) -> None:
        """Stops a run that has gone wrong, before anything of it is saved."""
        if gap > self.rl.max_gap:
            raise TrainingDiverged(
                f"step {self.step + 1}: log-probabilities of sampler and trainer differ by "
                f"{gap:.3g} nats a token in the mean, more than rl.max_gap = {self.rl.max_gap:g}"
            )


def summary(sampled: Sequence[Trajectory], rewards: np.ndarray) -> dict[str, float]:
    """What a step's trajectories are like: means over all, and score and tokens by level."""
    tokens = np.array([len(t.tokens) for t in sampled])
    scores = np.array([t.score for t in sampled])
    levels = np.array([t.question.problem.level for t in sampled])
    row = {
        "reward": float(rewards.mean()),
        "score": float(scores.mean()),
        "tokens": float(tokens.mean()),
        "finished": float(np.mean([t.finished for t in sampled])),
    }
    for level in sorted(set(levels)):
        here = levels == level
        row[f"score/{level}"] = float(scores[here].mean())
        row[f"tokens/{level}"] = float(tokens[here].mean())
    return row
