"""The training loop, from a configuration and a folder to a finished run.

`run` is one linear story: set-up, restore, stages (step by step, with saving and evaluation),
closing. It returns when the run is complete; the same call on the same folder goes on where the
last one stopped.
"""

from __future__ import annotations

import contextlib
import math
import time
from pathlib import Path
from typing import Any

import jax
from ml_collections import ConfigDict

from pallas_kernels import dispatch
from pallas_kernels.checks import Checks, KernelMismatch
from train import closing, probes, profile, recovery, runinfo
from train import flops as flops_lib
from train import metrics as metrics_lib
from train import plan as plan_lib
from train import stages as stages_lib
from train import step as step_lib
from train.data import pipeline
from train.data.stream import TrainIterator
from train.ledger import Dispatched, Ledger, TrainingDiverged
from train.plan import Plan
from train.settings import SettingsError, check_resume, to_json
from train.step import TrainState
from train.stopping import Stop, end_after
from v41flash.checkpoints.orbax import Checkpoints, SaveError


def run(config: ConfigDict, workdir: Path, stop: Stop | None = None) -> None:
    """Trains to `config.train.steps` in `workdir`, going on from its newest intact checkpoint.

    Args:
        config: the configuration.
        workdir: folder of the run.
        stop: where the run is asked to stop; None: nobody asks.

    Raises:
        InputError: the configuration cannot be run, or is not the one of the run in `workdir`.
        Stopped: it was asked to stop, and has saved.
        TrainingDiverged: see there. The newest checkpoint is from before it.
        ReportError: the run's numbers cannot be written.
        SaveError: a checkpoint cannot be written.
        KernelMismatch: `train.check_kernels` has found something.
    """
    # ---------------------------------------------------------------------------------------------
    # Set-up: nothing is written before all of the run has been checked.
    # ---------------------------------------------------------------------------------------------
    stop = stop or Stop()
    stages = stages_lib.resolve_stages(config)
    steps = stages[0].settings.train.steps
    probes.check(stages[0].settings)
    damaged: dict[int, str] = {}
    saved = plan_lib.newest(workdir, damaged)
    if saved is not None:
        check_resume(saved.meta["config"], to_json(config))
    if saved is not None and saved.step >= steps:
        print(f"The run in {workdir} is complete: {saved.step} steps done, {steps} asked for.")
        _close_again(stages, workdir, saved)
        return
    plan = plan_lib.prepare(stages, workdir, saved)
    stop.before_anything()

    with jax.set_mesh(plan.mesh):
        # -----------------------------------------------------------------------------------------
        # Start or restore, then stage by stage.
        # -----------------------------------------------------------------------------------------
        plan, state = recovery.start(plan, workdir, damaged)
        job = _Run(plan, state, workdir, to_json(config), stop)
        try:
            job.train()

            # -------------------------------------------------------------------------------------
            # Closing: wait for the last checkpoint; sample, plot, summary.
            # -------------------------------------------------------------------------------------
            job.checkpoints.wait()
            if plan.settings.eval.sample_tokens:
                last = stages_lib.stage_at(stages, job.step - 1)
                closing.write_sample(plan, last, job.state.params, workdir)
        finally:
            job.close()
    if jax.process_index() == 0:
        closing.write_plot(workdir)
        closing.print_summary(workdir)


def _close_again(
    stages: tuple[stages_lib.Stage, ...], workdir: Path, saved: plan_lib.Saved
) -> None:
    """Makes up for what a process that was stopped after the last step did not get to."""
    active = jax.process_index() == 0
    lacking = closing.missing(workdir, stages[0].settings.eval)
    if set(lacking) - {closing.PLOT}:
        plan = plan_lib.prepare(stages, workdir, saved)
        index = stages_lib.stage_at(stages, saved.step - 1)
        with jax.set_mesh(plan.mesh), Checkpoints(workdir / plan_lib.CHECKPOINTS) as checkpoints:
            params = checkpoints.restore_params(saved.step, plan.abstract.params)
            if closing.NUMBERS in lacking:
                chunk = plan.settings.train.loss_chunk_tokens
                eval_step = step_lib.make_eval_step(plan.inference_model(index), chunk)
                arguments = (plan, index, eval_step, params)
                row = saved.meta["row"] | closing.heldout(*arguments) | probes.scores(*arguments)
                if plan.settings.eval.byte_ngram:
                    row |= closing.ngram(plan, index)
                if active:
                    metrics_lib.replace_last(workdir, row)
            if closing.SAMPLE in lacking:
                closing.write_sample(plan, index, params, workdir)
    if active:
        if lacking:
            closing.write_plot(workdir)
        closing.print_summary(workdir)


class _Run:
    """A run under way: the state on the device, and everything that follows it.

    Attributes:
        checkpoints: of the run folder.
        state: after `step` updates.
        step: updates given to the device.
    """

    def __init__(
        self, plan: Plan, state: TrainState, workdir: Path, config: dict[str, Any], stop: Stop
    ):
        """Writes what the folder says about the run, and opens its files."""
        train = plan.settings.train
        self.plan, self.workdir, self.config = plan, workdir, config
        self.state, self.stop = state, stop
        self.settings, self.evaluation = train, plan.settings.eval
        self.step = plan.first_step
        self.activated = flops_lib.activated_parameters(plan.settings.model, plan.abstract.params)
        self.ceiling = train.peak_flops or flops_lib.matmul_ceiling()
        if self.ceiling:
            self.ceiling *= jax.device_count()
        self.tracing = False
        self.optimizer_timed = not train.time_optimizer
        active = jax.process_index() == 0
        try:
            if active:
                workdir.mkdir(parents=True, exist_ok=True)
                runinfo.write_json(workdir / "config.json", config)
                runinfo.write_json(workdir / "versions.json", runinfo.versions())
                table = runinfo.parameter_table(plan.abstract.params, self.activated)
                runinfo.write_text(workdir / "params.txt", table)
                closing.forget(workdir)
            self.reporter = metrics_lib.Reporter(
                workdir, first_step=self.step, last_step=train.steps, active=active
            )
        except OSError as error:
            raise SettingsError(f"--workdir={workdir}: cannot be written: {error}") from error
        self.checkpoints = Checkpoints(
            workdir / plan_lib.CHECKPOINTS, keep=train.keep_checkpoints, writes=True
        )
        self.checks = Checks()
        self.rewinds_left = train.max_rewinds
        # (stage, number of the batch) of batches that are left out.
        self.left_out: set[tuple[int, int]] = set()
        self._announce()
        self._take_note()

    def close(self) -> None:
        """Finishes what is pending, whatever happened."""
        if self.tracing:
            jax.profiler.stop_trace()
        self.reporter.close()
        self.checkpoints.close()

    def _announce(self) -> None:
        plan = self.plan
        total = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(plan.abstract.params))
        index = stages_lib.stage_at(plan.stages, self.step)
        self.reporter.line(
            f"{total:,} parameters ({self.activated:,} activated per token), "
            f"{jax.device_count()} {jax.devices()[0].device_kind} device(s), "
            f"{plan.data[index].describe()}"
        )
        if plan.saved is not None:
            self.reporter.line(f"going on from step {self.step}")
        elif self.settings.init_from:
            self.reporter.line(f"started with the parameters of {self.settings.init_from}")

    def _take_note(self) -> None:
        """Goes on from what the note of a checkpoint says, if there is one."""
        recent = ()
        if self.plan.saved is not None:
            meta = self.plan.saved.meta
            recent = meta["recent_ce"]
            self.left_out |= {(index, number) for index, number in meta["left_out"]}
            # The process may have been stopped between saving and writing the step's numbers.
            rows = metrics_lib.read(self.workdir)
            if not rows or rows[-1]["step"] < self.step:
                self.reporter.write(meta["row"])
        self.ledger = Ledger(self.plan.settings.model, self.settings.max_loss_spike, recent)

    def train(self) -> None:
        """Does all updates that are still to do, going back where that is asked for."""
        done = False
        while not done:
            try:
                first = stages_lib.stage_at(self.plan.stages, self.step)
                for index in range(first, len(self.plan.stages)):
                    if self.plan.stages[index].start < self.settings.steps:
                        self.train_stage(index)
                done = True
            except TrainingDiverged as error:
                self._rewind(error)

    def _rewind(self, error: TrainingDiverged) -> None:
        """Goes back to the newest checkpoint and leaves out the batch, or gives up."""
        self.checkpoints.wait()
        good = self.checkpoints.latest_step()
        where = "none" if good is None else f"step {good} in {self.workdir / plan_lib.CHECKPOINTS}"
        if good is None or not self.rewinds_left:
            raise TrainingDiverged(f"{error}; last good checkpoint: {where}") from None
        self.rewinds_left -= 1
        index = stages_lib.stage_at(self.plan.stages, error.step - 1)
        self.left_out.add((index, error.batch))
        self.state = recovery.restore(self.plan.abstract, self.checkpoints, good)
        self.plan = self.plan.going_on_from(plan_lib.Saved(good, self.checkpoints.meta(good)))
        self.step = good
        self.reporter.rewind(good)
        self.reporter.line(
            f"{error}; going back to step {good} and leaving the batch out "
            f"({self.rewinds_left} more times allowed)"
        )
        self._take_note()

    def train_stage(self, index: int) -> None:
        """Does the updates of a stage that are still to do."""
        plan, stage = self.plan, self.plan.stages[index]
        stop = min([self.settings.steps, *(later.start for later in plan.stages[index + 1 :])])
        if stage.overrides:
            self.reporter.line(f"stage from step {stage.start}: {stage.overrides}")
        if self.step == stage.start:
            self.ledger.forget()
        hosts = dict(host_index=jax.process_index(), host_count=jax.process_count())
        iterator = plan.data[index].train_iterator(self.step, **hosts)
        if plan.saved is not None and stage.start < self.step == plan.first_step:
            iterator.set_state(plan.saved.meta["data"])
        length = stage.settings.data.sequence_length
        attention_flops = flops_lib.attention_flops(stage.settings.model, length)
        eval_step = step_lib.make_eval_step(
            plan.inference_model(index), self.settings.loss_chunk_tokens
        )
        update, checked = None, False
        try:
            while self.step < stop:
                while (index, iterator.step) in self.left_out:
                    next(iterator)
                number = iterator.step
                batch, host = pipeline.split_host_fields(next(iterator))
                queries = batch["positions"][batch["segment_ids"] > 0]
                flops = 6.0 * self.activated * queries.size + 3.0 * attention_flops[queries].sum()
                flops += 3.0 * flops_lib.image_flops(stage.settings.model, batch)
                batch = step_lib.to_device(batch, plan.mesh)
                check = self.step - plan.first_step < self.settings.check_kernels
                if update is None or checked != check:
                    update, checked = self._compile(index, batch, check), check
                    if self.step == plan.first_step:
                        self.stop.before_anything()
                done = Dispatched(
                    self.step + 1,
                    number,
                    self._update(update, batch),
                    host["document_ids"],
                    flops * jax.process_count(),
                )
                self.ledger.add(done)
                if checked:
                    self._check_kernels(done.metrics)
                self._follow(index, iterator, eval_step, boundary=self.step == stop)
        finally:
            iterator.close()

    def _check_kernels(self, metrics: dict[str, Any]) -> None:
        """Waits for a checked step; raises KernelMismatch."""
        jax.block_until_ready(metrics)
        jax.effects_barrier()
        try:
            self.reporter.line(f"step {self.step}: {self.checks.verdict()}")
        except KernelMismatch as error:
            raise KernelMismatch(f"step {self.step}: {error}") from None

    def _compile(self, index: int, batch: step_lib.Batch, check: bool) -> Any:
        plan = self.plan
        started = time.perf_counter()
        self.reporter.line("compiling the step; this takes a while and prints nothing")
        update = step_lib.make_train_step(
            plan.models[index], plan.optimizer, plan.stages[index].settings
        )
        options = None
        if self.settings.profile_steps:
            options = profile.PLATFORM_OPTIONS.get(step_lib.platform(plan.mesh))
        watched = self.checks.tracing() if check else contextlib.nullcontext()
        with watched, dispatch.recorded() as heard:
            update = step_lib.compile_train_step(update, plan.abstract, batch, plan.mesh, options)
        if heard:
            self.reporter.line(f"kernels: {dispatch.summary(heard)}")
        self.reporter.line(f"compiled in {time.perf_counter() - started:.1f} s")
        self.ledger.restart_clock()
        return update

    def _update(self, update: Any, batch: step_lib.Batch) -> dict[str, Any]:
        """Gives the device its next step; returns its metrics."""
        if self.settings.profile_steps and self.step == self.settings.profile_from:
            profile.begin(self.workdir, update)
            self.tracing = True
        self.state, metrics = update(self.state, batch)
        self.step += 1
        return metrics

    def _follow(
        self, index: int, iterator: TrainIterator, eval_step: Any, *, boundary: bool
    ) -> None:
        """Reads the numbers of the step before (or of this one), logs, saves, evaluates."""
        step, train, every = self.step, self.settings, self.evaluation.every
        last = step == train.steps
        stopping = self.stop.agreed(self.plan.mesh) and not last
        due_eval = last or bool(every and step % every == 0 and not stopping)
        due_save = boundary or stopping or step % train.checkpoint_every == 0
        # Every saved step is logged, so that a run that ends there knows its numbers.
        due_log = due_eval or due_save or step == 1 or step % train.log_every == 0
        trace_ends = self.tracing and step == train.profile_from + train.profile_steps
        settled = self.ledger.settle(keep=0 if due_log or trace_ends else 1)
        if settled is not None:
            rate = self.ledger.tokens_per_second()
            self.reporter.advance(settled, self.ledger.values["loss"], rate)
        if trace_ends:
            jax.profiler.stop_trace()
            self.tracing = False
        if not due_log:
            return

        row = {"step": step, **self.ledger.values, **self.ledger.rates(self.ceiling)}
        row |= _peak_memory()
        if not self.optimizer_timed:
            self.optimizer_timed = True
            row["optimizer_ms"] = step_lib.optimizer_milliseconds(self.plan.optimizer, self.state)
        # Saved before evaluating: what goes wrong there costs no training.
        if due_save:
            self._save(iterator, row, must=last or stopping)
        try:
            if due_eval:
                row = row | self._evaluate(index, eval_step, last)
        finally:
            self.reporter.write(row)
        if stopping:
            end_after(step, self.checkpoints)
        self.ledger.restart_clock()

    def _save(self, iterator: TrainIterator, row: dict[str, Any], *, must: bool) -> None:
        """Starts to save; `must`: a failure ends the run, whatever it is configured to do."""
        meta = {
            "config": self.config,
            "data": iterator.state(),
            "tokenizer": self.plan.data[0].tokenizer.fingerprint,
            "recent_ce": list(self.ledger.recent),
            "left_out": sorted(self.left_out),
            "row": row,
        }
        arrays = dict(params=self.state.params, opt_state=self.state.opt_state)
        # The failure of the save before shows first: then this one is still to be done.
        for _ in range(2):
            try:
                self.checkpoints.save(self.step, **arrays, meta=meta)
                return
            except SaveError as error:
                alone = jax.process_count() == 1
                if must or not alone or self.settings.on_save_error == "stop":
                    raise
                self.reporter.line(f"warning: {error}; training goes on without it")
                if error.step == self.step:
                    return

    def _evaluate(self, index: int, eval_step: Any, last: bool) -> dict[str, float]:
        arguments = (self.plan, index, eval_step, self.state.params)
        numbers = closing.heldout(*arguments) | probes.scores(*arguments)
        if last and self.evaluation.byte_ngram:
            numbers |= closing.ngram(self.plan, index)
        return numbers


def _peak_memory() -> dict[str, int]:
    stats = jax.local_devices()[0].memory_stats()
    return {"peak_memory_bytes": stats["peak_bytes_in_use"]} if stats else {}
