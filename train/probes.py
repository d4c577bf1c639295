"""Tasks at intervals during training: `config.eval.tasks`, such as ("needle:256", "copy:1024").

A task and a length (`eval.tasks.long_context`), measured with the held-out numbers: the share of
the answers' tokens, without the bracket that ends them, that are the likeliest ones after the right
tokens before. Problems are held-out ones, at depths from the beginning of the text to its end.
Whatever has to be generated is measured on checkpoints, by `eval.long_context` and `eval.harness`.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from eval.tasks import long_context
from train import step as step_lib
from train.data import pipeline
from train.plan import Plan
from train.settings import Settings, SettingsError
from v41flash.nn import ced


def parse(name: str) -> tuple[str, int]:
    """"needle:256" -> ("needle", 256).

    Raises:
        SettingsError: no such task, or an impossible length.
    """
    task, _, length = name.partition(":")
    try:
        long_context.problem(task, int(length), 0.0, 0)
    except ValueError as error:
        raise SettingsError(
            f"eval.tasks: {name!r} must be a task and a length, such as 'needle:256': {error}"
        ) from error
    return task, int(length)


def check(settings: Settings) -> None:
    """Refuses tasks that cannot be measured.

    Raises:
        SettingsError: one line that names the task.
    """
    positions = settings.model.max_position_embeddings
    for name in settings.eval.tasks:
        if not isinstance(name, str):
            raise SettingsError(f"eval.tasks: {name!r} must be a text such as 'needle:256'")
        if parse(name)[1] > positions:
            raise SettingsError(
                f"eval.tasks: {name!r} exceeds model.max_position_embeddings = {positions}"
            )


def scores(plan: Plan, index: int, eval_step: Any, params: Any) -> dict[str, float]:
    """The share of right tokens of every task of `eval.tasks`: {"task_needle_256": share, ..}.

    Args:
        plan: of the run.
        index: the stage whose model is meant.
        eval_step: from `train.step.make_eval_step`; compiled once more for every length.
        params: of the model.
    """
    found = {}
    for name in plan.settings.eval.tasks:
        task, length = parse(name)
        batch = _batch(plan, index, task, length)
        sums = jax.device_get(eval_step(params, step_lib.to_device(batch, plan.mesh)))
        found[f"task_{task}_{length}"] = float(sums.correct / sums.tokens)
    return found


def _batch(plan: Plan, index: int, task: str, length: int) -> dict[str, np.ndarray]:
    """This process's rows: one problem each."""
    data, shards = plan.data[index], step_lib.data_shards(plan.mesh)
    count = -(-plan.settings.eval.task_problems // shards) * shards
    local = pipeline.check_hosts(count, jax.process_count())
    unit = ced.ALIGNMENT * plan.mesh.shape["context"]
    depths = np.linspace(0.0, 1.0, count)
    rows = []
    for number in range(jax.process_index() * local, (jax.process_index() + 1) * local):
        problem = long_context.problem(task, length, float(depths[number]), number)
        before = [data.tokenizer.bos_id, *data.tokenizer.encode(problem.prompt)]
        tokens = [*before, *data.tokenizer.encode(problem.answer[:-1])]
        rows.append((tokens, len(before) - 1))
    width = max(-(-len(tokens) // unit) * unit for tokens, _ in rows)
    shape = (local, _largest(width))
    batch = dict(
        tokens=np.full(shape, data.tokenizer.pad_id, np.int32),
        targets=np.full(shape, data.tokenizer.pad_id, np.int32),
        loss_mask=np.zeros(shape, np.float32),
        segment_ids=np.zeros(shape, np.int32),
        positions=np.zeros(shape, np.int32),
    )
    for b, (tokens, first) in enumerate(rows):
        size = len(tokens) - 1
        batch["tokens"][b, :size], batch["targets"][b, :size] = tokens[:-1], tokens[1:]
        batch["loss_mask"][b, first:size] = 1.0
        batch["segment_ids"][b, :size] = 1
        batch["positions"][b, :size] = np.arange(size)
    batch["engram_rows"] = data.engram_rows(batch["tokens"], batch["positions"])
    return batch


def _largest(width: int) -> int:
    """Over all processes."""
    if jax.process_count() == 1:
        return width
    return int(np.max(multihost_utils.process_allgather(np.asarray(width))))
