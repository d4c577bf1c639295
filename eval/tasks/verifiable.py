"""Tasks whose answers can be checked: what reinforcement learning and effort sweeps ask for.

A task makes problems by number, without a state of its own, and scores answers:

    task = open_task("jsonl:problems.jsonl")
    problem = task.problem("train", 17)
    score = task.score(problem, answer)          # 0 .. 1

| name | problems |
|---|---|
| `modular_walk` | modular arithmetic at levels of set difficulty (`eval.tasks.modular_walk`) |
| `jsonl:FILE` | rows with "prompt" and "answer" (a text, or a number), and perhaps "level" |
| `reasoning_gym:NAME` | a dataset of the reasoning-gym package (`pip install -e '.[reasoning]'`) |
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from v41flash.errors import InputError

SPLITS = ("train", "heldout")
_HELD_OUT = 0.1
_NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?(?:[eE][-+]?\d+)?")
# Problems that are drawn from a procedural dataset, in each split.
_GYM_SIZE = 100_000


class Problem(NamedTuple):
    """One problem.

    Attributes:
        prompt: the user's message.
        level: which difficulty it has; one of `Task.levels`.
        truth: what `Task.score` compares with.
    """

    prompt: str
    level: str
    truth: Any


class Task(Protocol):
    """Problems and their scores.

    Attributes:
        levels: difficulties, easiest first.
    """

    levels: tuple[str, ...]

    def problem(self, split: str, number: int) -> Problem:
        """Problem `number` >= 0 of a split ("train" or "heldout"): always the same one.

        Problems of all levels follow each other; finite tasks begin again.
        """
        ...

    def score(self, problem: Problem, answer: str) -> float:
        """How right an answer (what follows the reasoning) is, 0 .. 1."""
        ...


def open_task(name: str) -> Task:
    """The task that a name of the table above stands for.

    Raises:
        InputError: no such task, or one that cannot be opened.
    """
    # Here and not on top: the tasks build on what stands above.
    from eval.tasks.modular_walk import ModularWalk

    kind, _, argument = name.partition(":")
    if kind == "modular_walk" and not argument:
        return ModularWalk()
    if kind == "jsonl" and argument:
        return Rows(argument)
    if kind == "reasoning_gym" and argument:
        return ReasoningGym(argument)
    raise InputError(f"task {name!r}: must be modular_walk, jsonl:FILE or reasoning_gym:NAME")


class Rows:
    """A JSONL file; each tenth row or so is held out, by its content.

    A numeric answer is right where the last number of what is answered is equal to it (relative
    1e-6); a text where the answer is the same but for case and white space.
    """

    def __init__(self, path: str):
        """Reads the file.

        Raises:
            InputError: it cannot be read, a row is not one, or a split is empty.
        """
        self._problems: dict[str, list[Problem]] = {split: [] for split in SPLITS}
        levels: dict[str, None] = {}
        try:
            lines = Path(path).expanduser().read_text().splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"task jsonl:{path}: {error}") from error
        for number, line in enumerate(lines, 1):
            if line.strip():
                problem = _read(f"{path}:{number}", line)
                levels[problem.level] = None
                digest = hashlib.blake2b(problem.prompt.encode(), digest_size=4).digest()
                held_out = int.from_bytes(digest, "little") < _HELD_OUT * 2**32
                self._problems[SPLITS[held_out]].append(problem)
        self.levels = tuple(sorted(levels))
        for split, problems in self._problems.items():
            if not problems:
                raise InputError(f"task jsonl:{path}: no row falls into the split {split!r}")

    def problem(self, split: str, number: int) -> Problem:
        """See `Task.problem`."""
        problems = self._problems[split]
        return problems[number % len(problems)]

    def score(self, problem: Problem, answer: str) -> float:
        """See `Task.score`."""
        truth = problem.truth
        if isinstance(truth, str):
            return float(answer.split() == truth.split() or _plain(answer) == _plain(truth))
        numbers = _NUMBER.findall(answer)
        if not numbers:
            return 0.0
        given = float(numbers[-1].replace(",", ""))
        return float(math.isclose(given, truth, rel_tol=1e-6, abs_tol=1e-9))


def _plain(text: str) -> str:
    return " ".join(text.split()).casefold()


def _read(name: str, line: str) -> Problem:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise InputError(f"{name}: not JSON: {error}") from error
    if not isinstance(row, dict) or not isinstance(row.get("prompt"), str):
        raise InputError(f'{name}: must be an object with a text "prompt"')
    answer, level = row.get("answer"), row.get("level", "all")
    numeric = isinstance(answer, int | float) and not isinstance(answer, bool)
    if not numeric and not isinstance(answer, str):
        raise InputError(f'{name}: "answer" = {answer!r}: must be a text or a number')
    return Problem(row["prompt"], str(level), float(answer) if numeric else answer)


class ReasoningGym:
    """A procedural dataset of the reasoning-gym package, with its own scores."""

    def __init__(self, name: str):
        """Makes the dataset.

        Raises:
            InputError: the package is missing, or has no such dataset.
        """
        try:
            import reasoning_gym
        except ImportError as error:
            raise InputError(
                f"task reasoning_gym:{name} needs the package reasoning-gym: "
                "pip install -e '.[reasoning]'"
            ) from error
        try:
            self._data = {
                split: reasoning_gym.create_dataset(name, size=_GYM_SIZE, seed=seed)
                for seed, split in enumerate(SPLITS)
            }
        except ValueError as error:
            raise InputError(f"task reasoning_gym:{name}: {error}") from error
        self.levels = (name,)

    def problem(self, split: str, number: int) -> Problem:
        """See `Task.problem`."""
        entry = self._data[split][number % _GYM_SIZE]
        return Problem(entry["question"], self.levels[0], entry)

    def score(self, problem: Problem, answer: str) -> float:
        """See `Task.score`."""
        return float(self._data["train"].score_answer(answer=answer.strip(), entry=problem.truth))
