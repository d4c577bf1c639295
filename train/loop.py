"""The training loop, from a configuration and a folder to a finished run.

`run` is one linear story: set-up, restore, loop (with evaluation and saving), closing. It returns
when the run is complete; the same call on the same folder goes on where the last one stopped.
"""

from __future__ import annotations

import dataclasses
import math
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from jax.experimental import multihost_utils
from ml_collections import ConfigDict

from eval.tasks import byte_ngram
from train import flops as flops_lib
from train import metrics as metrics_lib
from train import optimizer as optimizer_lib
from train import plots, runinfo, sample
from train import stages as stages_lib
from train import step as step_lib
from train.data import pipeline
from train.ledger import Dispatched, Ledger, TrainingDiverged
from train.settings import SettingsError, check_resume, to_json
from v41flash import sharding
from v41flash.checkpoints.orbax import Checkpoints
from v41flash.nn import ced


def _check_batch(stage: stages_lib.Stage, mesh: jax.sharding.Mesh) -> None:
    batch, accumulation = stage.settings.data.batch_size, stage.settings.train.accumulation
    shards = step_lib.data_shards(mesh)
    if batch % (accumulation * shards):
        raise SettingsError(
            f"data.batch_size = {batch}: must be a multiple of train.accumulation {accumulation} "
            f"times the {shards} devices that share the rows"
        )


def _heldout(eval_step: Any, params: Any, data: pipeline.Data, mesh: Any, limit: int) -> dict:
    """Held-out cross entropy: nats per token and bits per byte of the same batches."""
    nats = tokens = correct = size = 0.0
    hosts = dict(host_index=jax.process_index(), host_count=jax.process_count())
    for batch in data.heldout_batches(limit=limit, **hosts):
        batch, host = pipeline.split_host_fields(batch)
        sums = jax.device_get(eval_step(params, step_lib.to_device(batch, mesh)))
        nats, tokens, correct = nats + sums.nats, tokens + sums.tokens, correct + sums.correct
        size += _over_hosts(host["row_bytes"].sum())
    if not tokens:
        raise SettingsError("the held-out split has no tokens: raise data.held_out_fraction")
    return {
        "heldout_loss": float(nats / tokens),
        "heldout_bits_per_byte": float(nats / math.log(2) / size),
        "heldout_accuracy": float(correct / tokens),
    }


def _over_hosts(value: Any) -> float:
    if jax.process_count() == 1:
        return float(value)
    return float(np.sum(multihost_utils.process_allgather(np.asarray(value))))


def _peak_memory() -> dict[str, int]:
    stats = jax.local_devices()[0].memory_stats()
    return {"peak_memory_bytes": stats["peak_bytes_in_use"]} if stats else {}


@dataclasses.dataclass
class _Plan:
    """A checked run: nothing in it has been written yet."""

    config: dict[str, Any]
    stages: tuple[stages_lib.Stage, ...]
    models: list[ced.CED]
    optimizer: optax.GradientTransformation
    mesh: jax.sharding.Mesh
    abstract: step_lib.TrainState
    data: pipeline.Data
    # The newest checkpoint's step and note; None where there is none.
    done: int | None
    saved: dict[str, Any] | None


def _prepare(config: ConfigDict, workdir: Path) -> _Plan | None:
    """Checks everything that can be wrong with a run before it starts; None: it is complete."""
    stages = stages_lib.resolve_stages(config)
    settings = stages[0].settings
    plain_config = to_json(config)
    done = saved = None
    if (workdir / "checkpoints").is_dir():
        with Checkpoints(workdir / "checkpoints") as stored:
            done = stored.latest_step()
            saved = stored.meta(done) if done is not None else None
    if done is not None:
        check_resume(saved["config"], plain_config)
        if done >= settings.train.steps:
            print(f"The run in {workdir} is complete: {done} of {settings.train.steps} steps done.")
            return None
    mesh = sharding.make_mesh(settings.mesh.sizes())
    optimizer = optimizer_lib.build(settings.optimizer)
    models = [ced.CED(s.settings.model, s.settings.kernels, indexer_loss=True) for s in stages]
    abstract = step_lib.abstract_state(models[0], optimizer, mesh)
    for stage in stages:
        _check_batch(stage, mesh)
    for stage, model in zip(stages[1:], models[1:], strict=True):
        params = step_lib.abstract_params(model, mesh)
        stages_lib.check_same_parameters(stage, abstract.params, params)
    current = stages[stages_lib.stage_at(stages, done or 0)].settings
    data = pipeline.from_config(current.data, current.model)
    return _Plan(plain_config, stages, models, optimizer, mesh, abstract, data, done, saved)


def run(config: ConfigDict, workdir: Path) -> None:
    """Trains to `config.train.steps` in `workdir`, going on from its newest checkpoint.

    Raises:
        SettingsError: the configuration cannot be run, or is not the one of the run in `workdir`.
        TrainingDiverged: see there. The newest checkpoint is from before it.
    """
    # ---------------------------------------------------------------------------------------------
    # Set-up: nothing is written before all of the configuration has been checked.
    # ---------------------------------------------------------------------------------------------
    try:
        plan = _prepare(config, workdir)
    except ValueError as error:
        raise SettingsError(str(error)) from error
    if plan is None:
        return
    stages, models, optimizer, mesh = plan.stages, plan.models, plan.optimizer, plan.mesh
    abstract, data, done = plan.abstract, plan.data, plan.done
    settings = stages[0].settings
    train, evaluation = settings.train, settings.eval
    active = jax.process_index() == 0
    hosts = dict(host_index=jax.process_index(), host_count=jax.process_count())
    step = done or 0
    stage_index = stages_lib.stage_at(stages, step)

    activated = flops_lib.activated_parameters(settings.model, abstract.params)
    ceiling = train.peak_flops or flops_lib.matmul_ceiling()
    if ceiling:
        ceiling *= jax.device_count()
    if active:
        workdir.mkdir(parents=True, exist_ok=True)
        runinfo.write_json(workdir / "config.json", plan.config)
        runinfo.write_json(workdir / "versions.json", runinfo.versions())
        table = runinfo.parameter_table(abstract.params, activated)
        runinfo.write_text(workdir / "params.txt", table)
    reporter = metrics_lib.Reporter(workdir, first_step=step, last_step=train.steps, active=active)
    checkpoints = Checkpoints(workdir / "checkpoints", keep=train.keep_checkpoints)
    total = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(abstract.params))
    reporter.line(
        f"{total:,} parameters ({activated:,} activated per token), {jax.device_count()} "
        f"{jax.devices()[0].device_kind} device(s), {data.describe()}"
    )

    tracing = False
    with jax.set_mesh(mesh):
        try:
            # -------------------------------------------------------------------------------------
            # Restore, or start.
            # -------------------------------------------------------------------------------------
            data_state = None
            if done is None:
                state = step_lib.init_state(models[0], optimizer, abstract, train.seed)
                ledger = Ledger(train.max_loss_spike)
            else:
                params, opt_state = checkpoints.restore(
                    done, params=abstract.params, opt_state=abstract.opt_state
                )
                count = jax.device_put(np.int32(done), abstract.step.sharding)
                state = step_lib.TrainState(count, params, opt_state)
                ledger = Ledger(train.max_loss_spike, plan.saved["recent_losses"])
                if done > stages[stage_index].start:
                    data_state = plan.saved["data"]
                reporter.line(f"going on from step {done}")

            # -------------------------------------------------------------------------------------
            # Loop: one round per stage.
            # -------------------------------------------------------------------------------------
            while step < train.steps:
                stage, model = stages[stage_index], models[stage_index]
                stop = min([train.steps, *(later.start for later in stages[stage_index + 1 :])])
                if stage.overrides:
                    reporter.line(f"stage from step {stage.start}: {stage.overrides}")
                iterator = data.train_iterator(step, **hosts)
                if data_state is not None:
                    iterator.set_state(data_state)
                    data_state = None
                length = stage.settings.data.sequence_length
                attention_flops = flops_lib.attention_flops(model.config, length)
                plain_model = ced.CED(model.config, model.kernels)
                eval_step = step_lib.make_eval_step(plain_model, train.loss_chunk_tokens)
                update = None

                while step < stop:
                    # A batch, its useful work, and the update.
                    batch, host = pipeline.split_host_fields(next(iterator))
                    queries = batch["positions"][batch["segment_ids"] > 0]
                    flops = 6.0 * activated * queries.size + 3.0 * attention_flops[queries].sum()
                    batch = step_lib.to_device(batch, mesh)
                    if update is None:
                        started = time.perf_counter()
                        update = step_lib.make_train_step(model, optimizer, stage.settings)
                        update = step_lib.compile_train_step(update, abstract, batch, mesh)
                        reporter.line(f"compiled in {time.perf_counter() - started:.1f} s")
                        ledger.restart_clock()
                    if train.profile_steps and step == train.profile_from:
                        jax.profiler.start_trace(str(workdir / "profile"))
                        tracing = True
                    state, metrics = update(state, batch)
                    step += 1
                    ids = host["document_ids"]
                    ledger.add(Dispatched(step, metrics, ids, flops * jax.process_count()))

                    # The numbers of the step before; of this one too where something hangs on it.
                    last = step == train.steps
                    due_eval = last or bool(evaluation.every and step % evaluation.every == 0)
                    due_log = due_eval or step == 1 or step % train.log_every == 0
                    due_save = last or step % train.checkpoint_every == 0
                    trace_ends = tracing and step == train.profile_from + train.profile_steps
                    wait = due_log or due_save or trace_ends or step == stop
                    settled = ledger.settle(keep=0 if wait else 1)
                    if settled is not None:
                        reporter.advance(settled, ledger.values["loss"], ledger.tokens_per_second())
                    if trace_ends:
                        jax.profiler.stop_trace()
                        tracing = False

                    # Log, evaluate, save.
                    if due_log:
                        row = {"step": step, **ledger.values, **ledger.rates(ceiling)}
                        row |= _peak_memory()
                        if due_eval:
                            row |= _heldout(eval_step, state.params, data, mesh, evaluation.batches)
                        reporter.write(row)
                    if due_save:
                        checkpoints.save(
                            step,
                            params=state.params,
                            opt_state=state.opt_state,
                            meta={
                                "config": plan.config,
                                "data": iterator.state(),
                                "recent_losses": list(ledger.recent_losses),
                            },
                        )
                    if due_log or due_save:
                        ledger.restart_clock()

                iterator.close()
                if step < train.steps:
                    stage_index += 1
                    following = stages[stage_index].settings
                    data = pipeline.from_config(following.data, following.model)

            # -------------------------------------------------------------------------------------
            # Closing: wait for the last checkpoint; sample, plot, summary.
            # -------------------------------------------------------------------------------------
            checkpoints.wait()
            text = None
            if evaluation.sample_tokens:
                text = sample.generate(
                    plain_model,
                    state.params,
                    mesh,
                    data.tokenizer,
                    lambda tokens, positions: data.hasher.rows(data.token_map[tokens], positions),
                    prompt=evaluation.sample_prompt,
                    count=evaluation.sample_tokens,
                    temperature=evaluation.sample_temperature,
                    seed=evaluation.sample_seed,
                )
        except TrainingDiverged as error:
            checkpoints.wait()
            good = checkpoints.latest_step()
            where = "none" if good is None else f"step {good} in {workdir / 'checkpoints'}"
            raise TrainingDiverged(f"{error}; last good checkpoint: {where}") from None
        finally:
            if tracing:
                jax.profiler.stop_trace()
            reporter.close()
            checkpoints.close()
    if active:
        _close(workdir, row, data, evaluation.byte_ngram, text)


def _close(
    workdir: Path, row: dict[str, Any], data: pipeline.Data, with_ngram: bool, text: str | None
) -> None:
    """Plot, sample file and the summary that ends a run."""
    ngram = None
    if with_ngram and data.tokenizer.name == "byte":
        ngram = byte_ngram.ngram_bits_per_byte(
            data.document_bytes("train"), data.document_bytes("heldout")
        )
    plots.loss_plot(metrics_lib.read(workdir), workdir / "loss.png", baseline=ngram)
    if text is not None:
        runinfo.write_text(workdir / "sample.txt", text + "\n")
        print(f"\nsample:\n{text}\n")
    print(f"done: {row['step']} steps, loss {row['loss']:.4f}")
    print(f"held-out: {row['heldout_bits_per_byte']:.4f} bits per byte")
    if ngram is not None:
        print(f"order-2 byte n-gram fitted on the same data: {ngram:.4f} bits per byte")
    print(f"run folder: {workdir} (checkpoints, metrics.jsonl, loss.png)")
