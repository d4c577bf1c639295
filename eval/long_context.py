"""Whether a model finds what lies far back: accuracy by length and depth, and what it selects.

    python -m eval.long_context --workdir=DIR [--tasks=needle,multi_key,variables,copy
        --lengths=256,1024,4096 --depths=0,0.25,0.5,0.75,1 --count=20 --selection=4
        --out=FOLDER --json=FILE]

The tasks are those of `eval.tasks.long_context`. An answer is what the model writes next, by the
likeliest token at each place, after the prefill that serving uses. Lengths are by default 1, 4, 16
and 64 times the length that the run was trained on, as far as its positions go. For --selection
problems of a cell, the indexers' choices are looked at as well: recall is the share of the answer's
tokens (but the bracket that ends it) whose own entry, in the note, is among the top-k of the query
that has to write it.

FOLDER (by default DIR/long_context) gets a heat map and, where selections are looked at, a curve
for every task; the JSON has {task: {"accuracy": {length: {depth: share}}, "recall": {length:
{layer: share}}}}. Exit status 2: the flags or the run folder are wrong.
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

from eval.selection import Selection, Wanted, chance  # noqa: E402
from eval.tasks import long_context  # noqa: E402
from eval.tasks.long_context import Problem  # noqa: E402
from v41flash import command_line  # noqa: E402
from v41flash.errors import InputError  # noqa: E402
from v41flash.serving import Generator, Options  # noqa: E402
from v41flash.serving.run import Run  # noqa: E402

_STRETCHES = (1, 4, 16, 64)
ALL = "all"


class Arguments(NamedTuple):
    """The command line; `lengths` None: by default."""

    workdir: Path
    tasks: tuple[str, ...]
    lengths: tuple[int, ...] | None
    depths: tuple[float, ...]
    count: int
    selection: int
    batch_size: int
    exact: bool
    out: Path
    json: Path | None


def parse(arguments: Sequence[str]) -> Arguments:
    """Reads the command line (without the program); InputError in one line."""
    values = flags.FlagValues()
    here, least = dict(flag_values=values), dict(lower_bound=1)
    flags.DEFINE_string("workdir", None, "Folder of the run.", **here)
    flags.DEFINE_list("tasks", ["needle"], "Tasks.", **here)
    flags.DEFINE_list("lengths", None, "Characters of a problem.", **here)
    flags.DEFINE_list("depths", ["0", "0.25", "0.5", "0.75", "1"], "Where notes lie.", **here)
    flags.DEFINE_integer("count", 20, "Problems of a cell.", **least, **here)
    flags.DEFINE_integer("selection", 4, "Of them, with their selections.", lower_bound=0, **here)
    flags.DEFINE_integer("batch_size", 8, "Sequences at a time.", **least, **here)
    flags.DEFINE_boolean("exact", False, "Prefill by all layers over all tokens.", **here)
    flags.DEFINE_string("out", None, "Folder for the plots.", **here)
    flags.DEFINE_string("json", None, "File for the numbers.", **here)
    lengths, depths = command_line.read(values, arguments, lengths=int, depths=float)
    if not values.workdir:
        raise InputError("--workdir is missing: give the folder of the run")
    if not depths:
        raise InputError("--depths is empty")
    for task in values.tasks:
        long_context.check_task(task)
    for length in lengths or (long_context.SHORTEST,):
        long_context.problem(values.tasks[0], length, depths[0], 0)
    for depth in depths:
        long_context.problem(values.tasks[0], long_context.SHORTEST, depth, 0)
    workdir = Path(values.workdir)
    return Arguments(
        workdir,
        tuple(values.tasks),
        lengths,
        depths,
        values.count,
        min(values.selection, values.count),
        values.batch_size,
        values.exact,
        Path(values.out) if values.out else workdir / "long_context",
        Path(values.json) if values.json else None,
    )


def default_lengths(workdir: Path, positions: int) -> tuple[int, ...]:
    """Multiples of the run's sequence length that fit its positions, the last one cut to them."""
    length = json.loads((workdir / "config.json").read_text())["data"]["sequence_length"]
    lengths = [max(length, long_context.SHORTEST) * stretch for stretch in _STRETCHES]
    return tuple(dict.fromkeys(min(length, positions) for length in lengths))


def wanted(generator: Generator, problem: Problem) -> Wanted:
    """The queries that write a problem's answer, and the tokens of its note that they need.

    Without the bracket that ends every answer, for which nothing has to be looked up.
    """

    def size(text: str) -> int:
        return 1 + len(generator.tokenizer.encode(text))

    whole = generator.encode(problem.prompt + problem.answer[:-1])
    asked = np.arange(size(problem.prompt) - 1, len(whole) - 1)
    stands = size(problem.prompt[: problem.notes[0][1] - len(problem.answer)])
    return Wanted(whole[:-1], asked, stands + np.arange(len(asked)))


class Evaluation:
    """A model under test."""

    def __init__(self, run: Run, arguments: Arguments):
        """Makes the generator."""
        options = Options(batch_size=arguments.batch_size, exact=arguments.exact)
        self._generator = Generator(
            run.config,
            run.params,
            run.tokenizer,
            token_map=run.token_map,
            kernels=run.kernels,
            options=options,
        )
        self._selection = Selection(run) if arguments.selection else None
        self._run, self._arguments = run, arguments

    def answers(self, problems: Sequence[Problem]) -> np.ndarray:
        """bool [n], which answers are right."""
        room = max(len(self._generator.tokenizer.encode(problem.answer)) for problem in problems)
        prompts = [problem.prompt for problem in problems]
        results = self._generator.generate(prompts, max_tokens=room, temperature=0.0)
        pairs = zip(problems, results, strict=True)
        return np.array([long_context.right(problem, result.text) for problem, result in pairs])

    def task(self, task: str, lengths: Sequence[int]) -> dict[str, Any]:
        """All cells of a task."""
        accuracy: dict[str, dict[str, float]] = {}
        recall: dict[str, dict[str, float]] = {}
        for length in lengths:
            cells, looked_at = {}, []
            for depth in self._arguments.depths:
                numbers = range(self._arguments.count)
                problems = [long_context.problem(task, length, depth, n) for n in numbers]
                cells[f"{depth:g}"] = float(self.answers(problems).mean())
                chosen = problems[: self._arguments.selection]
                looked_at += [wanted(self._generator, problem) for problem in chosen]
            accuracy[str(length)] = {ALL: float(np.mean(list(cells.values()))), **cells}
            shown = " ".join(f"{name}: {share:.2f}" for name, share in cells.items())
            print(f"{task} {length}: {accuracy[str(length)][ALL]:.3f} by depth {shown}", flush=True)
            if self._selection is not None:
                recall[str(length)] = self._recall(looked_at)
                shown = " ".join(f"{k} {v:.3f}" for k, v in recall[str(length)].items())
                print(f"{task} {length}: recall {shown}", flush=True)
        return {"accuracy": accuracy} | ({"recall": recall} if recall else {})

    def _recall(self, looked_at: Sequence[Wanted]) -> dict[str, float]:
        found = self._selection.recall(looked_at)
        queries = np.concatenate([one.queries for one in looked_at])
        shares = {f"layer_{layer}": float(hits.mean()) for layer, hits in found.items()}
        ratios = [self._run.config.layers[layer].ratio for layer in found]
        blind = max(chance(self._run.config, queries, ratio) for ratio in ratios)
        return shares | {"chance": blind}


def plot(task: str, numbers: dict[str, Any], folder: Path) -> None:
    """Draws task.png: accuracy by length and depth, and recall by length."""
    accuracy, recall = numbers["accuracy"], numbers.get("recall")
    lengths = list(accuracy)
    depths = [name for name in accuracy[lengths[0]] if name != ALL]
    width = 1.2 * len(lengths) + 4
    figure, axes = plt.subplots(
        1, 2 if recall else 1, figsize=(2 * width if recall else width, 4), layout="constrained"
    )
    axes = np.atleast_1d(axes)
    grid = np.array([[accuracy[length][depth] for length in lengths] for depth in depths])
    image = axes[0].imshow(grid, vmin=0, vmax=1, cmap="RdYlGn", aspect="auto")
    for (row, column), share in np.ndenumerate(grid):
        axes[0].text(column, row, f"{share:.2f}", ha="center", va="center")
    axes[0].set_xticks(range(len(lengths)), lengths)
    axes[0].set_yticks(range(len(depths)), depths)
    axes[0].set(xlabel="length", ylabel="depth", title=f"{task}: right answers")
    figure.colorbar(image, ax=axes[0])
    if recall:
        for name in recall[lengths[0]]:
            look = dict(color="gray", linestyle="--") if name == "chance" else dict(marker="o")
            shares = [recall[length][name] for length in lengths]
            axes[1].plot([int(length) for length in lengths], shares, label=name, **look)
        axes[1].set(xscale="log", ylim=(0, 1.05), xlabel="length", ylabel="recall")
        axes[1].set_xticks([int(length) for length in lengths], lengths)
        axes[1].minorticks_off()
        axes[1].set_title(f"{task}: answer's entries selected")
        axes[1].legend()
        axes[1].grid(alpha=0.3)
    folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(folder / f"{task}.png", dpi=120)
    plt.close(figure)


@command_line.program(__doc__)
def main(arguments: Sequence[str]) -> int:
    """Runs the command line; returns the exit status."""
    chosen = parse(arguments)
    run = Run.load(chosen.workdir)
    positions = run.config.max_position_embeddings
    lengths = chosen.lengths or default_lengths(chosen.workdir, positions)
    if max(lengths) > positions:
        raise InputError(f"--lengths: {max(lengths)} exceeds the {positions} positions")
    evaluation = Evaluation(run, chosen)
    numbers = {task: evaluation.task(task, lengths) for task in chosen.tasks}
    for task, found in numbers.items():
        plot(task, found, chosen.out)
    print(f"plots: {chosen.out}")
    if chosen.json:
        chosen.json.write_text(json.dumps(numbers, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
