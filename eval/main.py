"""Runs a sweep.

    python -m eval.main --sweep=configs/sweeps/claims.py --workdir=DIR [--slots=8 --gpus=1]

Points (variants times seeds) that are not finished are run, --slots at a time. A point that fails
is recorded with its error, and does not stop the others; the next call tries it again. DIR holds
results.jsonl (a line a point, only ever appended to), points/ (logs, run folders), report.md and
its plots. Other choices:

    --list              one line a job: id, state and command, separated by tabs
    --point=ID          runs this job (or point, or variant) alone and writes no report: for a
                        scheduler, which gives every job of --list to a machine (docs/evaluation.md)
    --report            writes the report of what is there
    --only=GLOB         variants whose names match; may be given several times
    --seeds=0,1,2       in place of the sweep's own; finished ones are not run again
    --set=KEY=VALUE     an override of every training, such as train.steps=20

Exit status: 0 every point asked for is finished, 1 some are not, 2 the flags or the sweep are
wrong, 130 interrupted.
"""

from __future__ import annotations

import fnmatch
import shlex
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from absl import flags

from eval import report, results, sweep_jobs
from eval import sweep as sweep_lib
from eval.sweep import Point, Sweep, SweepError
from v41flash import command_line


class Arguments(NamedTuple):
    """The command line.

    Attributes:
        sweep: checked, with what --seeds and --set change.
        path: its file.
        workdir: folder of the results.
        points: that are asked for.
        slots: jobs at a time.
        gpus: to share among the slots; 0: every slot sees all.
        action: "run", "point", "list" or "report".
    """

    sweep: Sweep
    path: str
    workdir: Path
    points: tuple[Point, ...]
    slots: int
    gpus: int
    action: str


def parse(arguments: Sequence[str]) -> Arguments:
    """Reads the command line (without the program).

    Raises:
        InputError: a flag that cannot be used, or a sweep that cannot be run; one line.
    """
    values = flags.FlagValues()
    here = dict(flag_values=values)
    flags.DEFINE_string("sweep", None, "Sweep file.", **here)
    flags.DEFINE_string("workdir", None, "Folder of the results.", **here)
    flags.DEFINE_integer("slots", 1, "Jobs at a time.", lower_bound=1, **here)
    flags.DEFINE_integer("gpus", 0, "GPUs that slots share.", lower_bound=0, **here)
    flags.DEFINE_boolean("list", False, "List the jobs.", **here)
    flags.DEFINE_boolean("report", False, "Write the report.", **here)
    flags.DEFINE_string("point", None, "Run one job.", **here)
    flags.DEFINE_multi_string("only", [], "Names of variants.", **here)
    flags.DEFINE_list("seeds", None, "Seeds.", **here)
    flags.DEFINE_multi_string("set", [], "KEY=VALUE of every training.", **here)
    (seeds,) = command_line.read(values, arguments, ("sweep", "workdir"), seeds=int)
    actions = [name for name in ("list", "report", "point") if values[name].value]
    if len(actions) > 1:
        raise SweepError(f"--{actions[0]} and --{actions[1]} exclude each other")
    sweep = sweep_lib.changed(sweep_lib.load(values.sweep), values["set"].value, seeds)
    sweep_lib.check(sweep)
    points = _chosen(sweep, values.only, values.point)
    action = actions[0] if actions else "run"
    workdir = Path(values.workdir).absolute()
    results.check(results.read(workdir), points, workdir)
    return Arguments(sweep, values.sweep, workdir, points, values.slots, values.gpus, action)


def _chosen(sweep: Sweep, only: Sequence[str], asked: str | None) -> tuple[Point, ...]:
    points, names = sweep_lib.points(sweep), [variant.name for variant in sweep.variants]
    for pattern in only:
        if not fnmatch.filter(names, pattern):
            raise SweepError(f"--only={pattern}: no variant has such a name")
    if only:
        points = tuple(
            point
            for point in points
            if any(fnmatch.fnmatchcase(point.variant.name, pattern) for pattern in only)
        )
    if asked is None:
        return points
    name, _, seeds = asked.partition("@")
    wanted = seeds.split("+") if seeds else [str(seed) for seed in sweep.seeds]
    chosen = tuple(
        point for point in points if point.variant.name == name and str(point.seed) in wanted
    )
    if len(chosen) < len(wanted):
        raise SweepError(f"--point={asked}: there is no such job; --list shows all")
    return chosen


def run(arguments: Arguments) -> int:
    """Does what the command line asks for; returns the exit status."""
    done = results.read(arguments.workdir)

    def finished(point: Point) -> bool:
        return done.get(point.id, {}).get("status") == results.DONE

    if arguments.action == "list":
        for job in sweep_jobs.jobs(arguments.points, arguments.workdir):
            states = {done.get(point.id, {}).get("status", "waiting") for point in job.points()}
            state = states.pop() if len(states) == 1 else "partly done"
            print(f"{job.id}\t{state}\t{' && '.join(map(shlex.join, job.commands()))}")
        return 0
    status = 0
    if arguments.action != "report":
        status = _run_points(arguments, [p for p in arguments.points if not finished(p)])
    if arguments.action != "point":
        path = report.write(arguments.sweep, arguments.path, arguments.workdir)
        print(f"report: {path}")
    return status


def _run_points(arguments: Arguments, unfinished: Sequence[Point]) -> int:
    print(f"{len(arguments.points)} points, {len(unfinished)} to be run", flush=True)
    try:
        arguments.workdir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SweepError(f"--workdir={arguments.workdir}: cannot be written: {error}") from error
    runner = sweep_jobs.Runner(arguments.workdir, arguments.slots, arguments.gpus)
    runner.run(sweep_jobs.jobs(unfinished, arguments.workdir))
    if runner.failed:
        print(f"{runner.failed} points failed; their logs are in {arguments.workdir / 'points'}")
    return int(bool(runner.failed or runner.elsewhere))


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


@command_line.program(
    __doc__, interrupted="interrupted; the same command goes on with what is not finished"
)
def main(arguments: Sequence[str]) -> int:
    """Runs the command line; returns the exit status."""
    chosen = parse(arguments)
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        return run(chosen)
    finally:
        signal.signal(signal.SIGTERM, before)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
