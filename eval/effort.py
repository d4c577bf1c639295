"""Effort against the length of reasoning and its success, by difficulty.

    python -m eval.effort --workdir=DIR [--workdir=OTHER ..] [--task=modular_walk --problems=48
        --efforts=5,10,..,100 --out=FOLDER]

Every held-out problem is asked under every effort. Then the first half of the reasoning is given
back with its end, so that the answer has to follow from that: what the second half was worth.
FOLDER (by default DIR/effort, of the first run) gets

    effort.jsonl   one object a run, level and effort: mean tokens, score, halved_score, finished
    fits.json      a run and level: slope (tokens a point of effort), intercept and R^2 of the
                   straight line through the mean tokens, by least squares
    effort.png     the curves
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
import numpy as np  # noqa: E402
from absl import flags  # noqa: E402

from eval.tasks.asking import Asking  # noqa: E402
from eval.tasks.verifiable import Problem, Task, open_task  # noqa: E402
from v41flash import command_line  # noqa: E402
from v41flash.effort import HIGHEST, LOWEST  # noqa: E402
from v41flash.errors import InputError  # noqa: E402
from v41flash.serving import Generator, Options  # noqa: E402

_ANSWER_TOKENS = 64


class Arguments(NamedTuple):
    """The command line."""

    workdirs: tuple[Path, ...]
    task: str
    efforts: tuple[int, ...]
    problems: int
    max_tokens: int
    batch_size: int
    seed: int
    out: Path


class Line(NamedTuple):
    """A straight line through points, by least squares."""

    slope: float
    intercept: float
    r2: float


def parse(arguments: Sequence[str]) -> Arguments:
    """Reads the command line (without the program); InputError in one line."""
    values = flags.FlagValues()
    here, least = dict(flag_values=values), dict(lower_bound=1)
    flags.DEFINE_multi_string("workdir", [], "Folder of a run; one or several.", **here)
    flags.DEFINE_string("task", "modular_walk", "As eval.tasks.verifiable names it.", **here)
    flags.DEFINE_list("efforts", [str(b) for b in range(5, 101, 5)], "Whole numbers.", **here)
    flags.DEFINE_integer("problems", 48, "Of every level.", **least, **here)
    flags.DEFINE_integer("max_tokens", 256, "Of an answer with its reasoning.", **least, **here)
    flags.DEFINE_integer("batch_size", 256, "Sequences decoded together.", **least, **here)
    flags.DEFINE_integer("seed", 0, "Of the draws.", lower_bound=0, **here)
    flags.DEFINE_string("out", None, "Folder of the results.", **here)
    (efforts,) = command_line.read(values, arguments, efforts=int)
    if not values.workdir:
        raise InputError("--workdir is missing: give the folder of a run")
    if len(set(efforts)) < 3 or not all(LOWEST <= effort <= HIGHEST for effort in efforts):
        raise InputError(f"--efforts={values.efforts}: must be three or more, {LOWEST}..{HIGHEST}")
    workdirs = tuple(Path(name) for name in values.workdir)
    return Arguments(
        workdirs,
        values.task,
        tuple(sorted(set(efforts))),
        values.problems,
        values.max_tokens,
        values.batch_size,
        values.seed,
        Path(values.out) if values.out else workdirs[0] / "effort",
    )


def heldout(task: Task, count: int) -> list[Problem]:
    """The first `count` held-out problems of every level.

    Raises:
        InputError: a level is not met often enough.
    """
    chosen: dict[str, list[Problem]] = {level: [] for level in task.levels}
    for number in range(100 * count * len(task.levels)):
        problem = task.problem("heldout", number)
        if len(chosen[problem.level]) < count:
            chosen[problem.level].append(problem)
        if all(len(problems) == count for problems in chosen.values()):
            return [problem for problems in chosen.values() for problem in problems]
    lacking = [level for level, problems in chosen.items() if len(problems) < count]
    raise InputError(f"held-out problems of level {lacking[0]!r} are too rare: {count} not found")


def first_half(reasoning: str) -> str:
    """The first half of a text, up to its last space."""
    half = reasoning[: len(reasoning) // 2]
    return half[: half.rfind(" ") + 1] or half


def sweep(generator: Generator, task: Task, arguments: Arguments) -> list[dict[str, Any]]:
    """One row a level and effort; see the module."""
    asking, problems = Asking(generator.tokenizer), heldout(task, arguments.problems)
    asked = [(problem, effort) for effort in arguments.efforts for problem in problems]
    prompts = [asking.prompt(*question) for question in asked]
    draws = dict(seed=arguments.seed)
    results = generator.generate(prompts, max_tokens=arguments.max_tokens, **draws)
    replies = [asking.read(result.tokens) for result in results]
    halves = [asking.interrupted(first_half(reply.reasoning)) for reply in replies]
    cut = [np.concatenate(pair) for pair in zip(prompts, halves, strict=True)]
    rest = generator.generate(cut, max_tokens=_ANSWER_TOKENS, **draws)

    found: dict[tuple[str, int], list[tuple[float, ...]]] = {}
    for index, (problem, effort) in enumerate(asked):
        halved = asking.read(np.concatenate([halves[index], rest[index].tokens]))
        numbers = (
            len(results[index].tokens),
            task.score(problem, replies[index].answer),
            task.score(problem, halved.answer),
            results[index].finish == "stop",
        )
        found.setdefault((problem.level, effort), []).append(numbers)
    names = ("tokens", "score", "halved_score", "finished")
    return [
        {"level": level, "effort": effort}
        | dict(zip(names, np.mean(found[level, effort], axis=0).tolist(), strict=True))
        for level in task.levels
        for effort in arguments.efforts
    ]


def fit(efforts: Sequence[float], tokens: Sequence[float]) -> Line:
    """The line of mean tokens over effort; R^2 is 0 where the tokens do not vary."""
    x, y = np.asarray(efforts, float), np.asarray(tokens, float)
    slope, intercept = np.polyfit(x, y, 1)
    spread = np.sum((y - y.mean()) ** 2)
    left = np.sum((y - intercept - slope * x) ** 2)
    return Line(float(slope), float(intercept), float(1 - left / spread) if spread else 0.0)


def fits(rows: Sequence[dict[str, Any]]) -> dict[str, Line]:
    """Level -> line, of one run's rows."""
    lines = {}
    for level in dict.fromkeys(row["level"] for row in rows):
        own = [row for row in rows if row["level"] == level]
        lines[level] = fit([row["effort"] for row in own], [row["tokens"] for row in own])
    return lines


def plot(runs: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """Length and scores over effort, a row of axes for every run."""
    figure, axes = plt.subplots(
        len(runs), 2, figsize=(11, 4 * len(runs)), layout="constrained", squeeze=False
    )
    for (name, rows), (left, right) in zip(runs.items(), axes, strict=True):
        for number, (level, line) in enumerate(fits(rows).items()):
            own = [row for row in rows if row["level"] == level]
            efforts, color = [row["effort"] for row in own], f"C{number}"
            label = f"{level}: {line.slope:.2f} tokens a point, R² {line.r2:.3f}"
            left.plot(efforts, [row["tokens"] for row in own], "o", color=color, label=label)
            ends = np.array([efforts[0], efforts[-1]])
            left.plot(ends, line.intercept + line.slope * ends, color=color)
            right.plot(efforts, [row["score"] for row in own], color=color, label=level)
            right.plot(efforts, [row["halved_score"] for row in own], "--", color=color)
        left.set(xlabel="effort", ylabel="mean tokens", title=name)
        right.set(xlabel="effort", ylabel="score (dashed: half of the reasoning)", ylim=(0, 1))
        for axis in (left, right):
            axis.grid(alpha=0.3)
            axis.legend()
    figure.savefig(path, format="png", dpi=120)
    plt.close(figure)


@command_line.program(__doc__)
def main(arguments: Sequence[str]) -> int:
    """Runs the command line; returns the exit status."""
    chosen = parse(arguments)
    task, runs = open_task(chosen.task), {}
    for workdir in chosen.workdirs:
        options = Options(batch_size=chosen.batch_size)
        generator = Generator.from_workdir(workdir, options=options)
        runs[str(workdir)] = sweep(generator, task, chosen)
        for level, line in fits(runs[str(workdir)]).items():
            print(f"{workdir} {level}: {line.slope:.3f} tokens a point, R2 {line.r2:.4f}")
    chosen.out.mkdir(parents=True, exist_ok=True)
    rows = [{"run": name} | row for name, own in runs.items() for row in own]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (chosen.out / "effort.jsonl").write_text(lines)
    found = {n: {k: v._asdict() for k, v in fits(own).items()} for n, own in runs.items()}
    (chosen.out / "fits.json").write_text(json.dumps(found, indent=2) + "\n")
    plot(runs, chosen.out / "effort.png")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
