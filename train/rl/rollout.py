"""Trajectories: asked, sampled by the serving code, scored, and packed into rows to learn from."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from eval.tasks.asking import Asking
from eval.tasks.verifiable import Problem, Task
from train.data import packing
from train.rl.settings import RLSettings
from v41flash.errors import InputError
from v41flash.serving import Generator

# Draws of one step have seeds of their own; the sampler's seeds are 32 bits wide.
_SEEDS = 2**31


class Question(NamedTuple):
    """A problem under an effort; its trajectories are a group."""

    problem: Problem
    effort: int


@dataclasses.dataclass(frozen=True)
class Trajectory:
    """One answer.

    Attributes:
        question: that was asked.
        prompt: int32 [n], its ids.
        tokens: int32 [l], generated ids; the end counts.
        logprobs: float32 [l], of each, the sampler's.
        score: of the answer, 0 .. 1.
        finished: it ended by itself.
    """

    question: Question
    prompt: np.ndarray
    tokens: np.ndarray
    logprobs: np.ndarray
    score: float
    finished: bool


def questions(task: Task, settings: RLSettings, seed: int, step: int) -> list[Question]:
    """What update `step` (from 0) asks: a function of the arguments alone."""
    rng = np.random.default_rng([seed, step])
    asked = []
    for number in range(step * settings.problems, (step + 1) * settings.problems):
        problem = task.problem("train", number)
        efforts = rng.choice(settings.effort_values, settings.efforts, replace=False)
        asked += [Question(problem, int(effort)) for effort in efforts]
    return asked


def sample(
    generator: Generator,
    asking: Asking,
    task: Task,
    asked: Sequence[Question],
    settings: RLSettings,
    seed: int,
    step: int,
) -> list[Trajectory]:
    """Answers every question `settings.samples` times; a group's trajectories follow each other."""
    prompts = [asking.prompt(*question) for question in asked]
    repeated = [prompt for prompt in prompts for _ in range(settings.samples)]
    first = (seed * 1_000_003 + step * len(repeated)) % _SEEDS
    results = generator.generate(repeated, max_tokens=settings.max_tokens, seed=first)
    trajectories = []
    for index, (prompt, result) in enumerate(zip(repeated, results, strict=True)):
        question = asked[index // settings.samples]
        answer = asking.read(result.tokens).answer
        trajectories.append(
            Trajectory(
                question,
                prompt,
                result.tokens,
                result.logprobs,
                task.score(question.problem, answer),
                result.finish == "stop",
            )
        )
    return trajectories


def pack(
    trajectories: Sequence[Trajectory],
    advantages: np.ndarray,
    *,
    length: int,
    rows_multiple: int,
    replay: int,
    pad_id: int,
    engram_rows: Callable[[np.ndarray, np.ndarray], np.ndarray],
) -> dict[str, np.ndarray]:
    """Rows of trajectories, each a document whose generated tokens are the targets.

    Args:
        trajectories: none longer than `length`.
        advantages: f32, of each.
        length: T, tokens a row.
        rows_multiple: what the number of rows is made a multiple of.
        replay: R, tokens of a prompt that the decoder of the sampler went over.
        pad_id: on padding.
        engram_rows: (tokens, positions), i32 [B, T] each -> table rows.

    Returns:
        What `train.data.pipeline` calls tokens, targets, loss_mask, segment_ids, positions and
        engram_rows; decoder_starts i32 [B, T]; sampled_logprobs and advantages f32 [B, T].

    Raises:
        InputError: a trajectory does not fit a row.
    """
    sizes = np.array([len(t.prompt) + len(t.tokens) - 1 for t in trajectories])
    if sizes.max() > length:
        raise InputError(
            f"data.sequence_length = {length}: a trajectory of {sizes.max()} tokens does not fit"
        )
    units = -(-sizes // packing.ALIGNMENT)
    row, offset, count = packing.best_fit(units, length // packing.ALIGNMENT)
    shape = (-(-count // rows_multiple) * rows_multiple, length)
    names = ("tokens", "targets", "segment_ids", "positions", "decoder_starts")
    batch = {name: np.zeros(shape, np.int32) for name in names}
    batch["tokens"][:] = batch["targets"][:] = pad_id
    for name in ("loss_mask", "sampled_logprobs", "advantages"):
        batch[name] = np.zeros(shape, np.float32)
    for number, trajectory in enumerate(trajectories):
        whole = np.concatenate([trajectory.prompt, trajectory.tokens])
        first, size, asked = offset[number] * packing.ALIGNMENT, sizes[number], trajectory.prompt
        place = row[number], slice(first, first + size)
        written = row[number], slice(first + len(asked) - 1, first + size)
        batch["tokens"][place], batch["targets"][place] = whole[:-1], whole[1:]
        # Any numbers that differ within a row; padding has 0.
        batch["segment_ids"][place] = number + 1
        batch["positions"][place] = np.arange(size)
        batch["decoder_starts"][place] = max(len(asked) - replay, 0)
        batch["loss_mask"][written] = 1
        batch["sampled_logprobs"][written] = trajectory.logprobs
        batch["advantages"][written] = advantages[number]
    batch["engram_rows"] = engram_rows(batch["tokens"], batch["positions"])
    return batch
