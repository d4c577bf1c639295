"""Runs the points of a sweep: commands in processes of their own, several at a time.

Points that train together are one job, every other point is one. A job's folder is held by a lock
that its processes inherit: whoever finds it held (another call of the sweep, or a process that
outlived one) leaves the job to it.
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
import math
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from eval import results
from eval.sweep import Evaluation, Point, Variant
from v41flash import checkout

LOG, LOCK = "log.txt", "lock"
_POLL_SECONDS = 0.2
# Lines at the end of a log in which the error of a failed command is looked for.
_TAIL = 40


@dataclasses.dataclass(frozen=True)
class Job:
    """Points of one variant that share a process.

    Attributes:
        variant: of all.
        seeds: of the points.
        folder: of its files.
    """

    variant: Variant
    seeds: tuple[int, ...]
    folder: Path

    @property
    def id(self) -> str:
        """"name@seed", or "name@seed+seed"."""
        return f"{self.variant.name}@{'+'.join(map(str, self.seeds))}"

    def points(self) -> list[Point]:
        """One a seed."""
        return [Point(self.variant, seed) for seed in self.seeds]

    @property
    def run_folder(self) -> Path:
        """Run folder of the checkpoint, or of the comparison."""
        if self.variant.training is None:
            return Path(self.variant.workdir.format(seed=self.seeds[0]))
        return self.folder / "run"

    def commands(self) -> list[list[str]]:
        """What runs, in order, from the root of the checkout."""
        commands = []
        if self.variant.training is not None:
            commands.append(self._training())
        for number, evaluation in enumerate(self.variant.evaluations):
            commands.append(self._evaluation(number, evaluation))
        return commands

    def _training(self) -> list[str]:
        training = self.variant.training
        program = "train.compare" if training.together else "train.main"
        command = ["python", "-m", program, f"--config={training.config}"]
        command.append(f"--workdir={self.run_folder}")
        command += [f"--config.{key}={_flag(value)}" for key, value in training.overrides.items()]
        if not training.together:
            return [*command, f"--config.train.seed={self.seeds[0]}"]
        command.append(f"--runs=seed={','.join(map(str, self.seeds))}")
        for name, overrides in training.also.items():
            # Values hold no spaces: those separate them.
            values = " ".join(
                f"{key}={_flag(value).replace(' ', '')}" for key, value in overrides.items()
            )
            command.append(f"--also={name}: {values}")
        return command

    def _evaluation(self, number: int, evaluation: Evaluation) -> list[str]:
        command = ["python", "-m", evaluation.program, f"--workdir={self.run_folder}"]
        command.append(f"--json={self.evaluated(number)}")
        flags = evaluation.flags.items()
        return command + [
            f"--{key}={_flag(value).format(seed=self.seeds[0])}" for key, value in flags
        ]

    def evaluated(self, number: int) -> Path:
        """File that an evaluation writes its numbers to."""
        return self.folder / f"evaluation_{number}.json"

    def metrics(self) -> list[dict[str, Any]]:
        """The numbers of every point, from the files that the commands left.

        Raises:
            OSError, ValueError, LookupError: they are not there, or not what they should be.
        """
        training, found = self.variant.training, [{} for _ in self.seeds]
        if training is not None and training.together:
            summary = json.loads((self.run_folder / "summary.json").read_text())
            by_seed = {run.pop("seed"): run for run in summary["runs"]}
            for run in by_seed.values():
                del run["optimizer"]
            found = [_numbers(by_seed[seed]) for seed in self.seeds]
        elif training is not None:
            lines = (self.run_folder / "metrics.jsonl").read_text().splitlines()
            found = [_numbers(json.loads(lines[-1]))]
        for number, evaluation in enumerate(self.variant.evaluations):
            prefix = evaluation.program.rpartition(".")[2]
            values = _numbers(json.loads(self.evaluated(number).read_text()))
            found[0] |= {f"{prefix}.{name}": value for name, value in values.items()}
        return found


def _flag(value: Any) -> str:
    return str(tuple(value) if isinstance(value, list) else value)


def _numbers(tree: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """{"a.b": number} of nested objects; what is no number is left out."""
    if not isinstance(tree, Mapping):
        raise ValueError(f"must be an object, not {type(tree).__name__}")
    flat: dict[str, float] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            flat |= _numbers(value, f"{prefix}{key}.")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            flat[f"{prefix}{key}"] = value
    return flat


def jobs(points: Sequence[Point], workdir: Path) -> list[Job]:
    """The jobs of some points, in their order."""
    together: dict[str, list[Point]] = {}
    for point in points:
        training = point.variant.training
        key = point.variant.name if training is not None and training.together else point.id
        together.setdefault(key, []).append(point)
    made = []
    for members in together.values():
        job = Job(members[0].variant, tuple(point.seed for point in members), workdir)
        made.append(dataclasses.replace(job, folder=workdir / "points" / job.id))
    return made


@dataclasses.dataclass
class _Running:
    job: Job
    slot: int
    lock: IO[bytes]
    log: IO[bytes]
    started: float
    left: list[list[str]]
    process: subprocess.Popen | None = None


class Runner:
    """Runs jobs, `slots` at a time, and appends what comes of them to results.jsonl.

    Attributes:
        failed: points that have failed.
        elsewhere: ids of jobs that somebody else holds.
    """

    def __init__(self, workdir: Path, slots: int, gpus: int = 0):
        """Takes the folder of the sweep; slot i sees GPU i modulo `gpus` alone, 0: all of them."""
        self._workdir, self._slots, self._gpus = workdir, slots, gpus
        self._checkout = checkout.read()
        self.failed = 0
        self.elsewhere: list[str] = []

    def run(self, waiting: Sequence[Job]) -> None:
        """Returns when all jobs have ended. What stops it stops their processes too."""
        waiting, running = list(waiting), []
        self._total, self._ended, self._started = len(waiting), 0, time.monotonic()
        try:
            while waiting or running:
                free = set(range(self._slots)) - {entry.slot for entry in running}
                while waiting and free:
                    entry = self._start(waiting.pop(0), min(free))
                    if entry is not None:
                        free.discard(entry.slot)
                        running.append(entry)
                running = [entry for entry in running if self._goes_on(entry)]
                if running:
                    time.sleep(_POLL_SECONDS)
        finally:
            for entry in running:
                entry.process.terminate()
            for entry in running:
                entry.process.wait()

    def _start(self, job: Job, slot: int) -> _Running | None:
        job.folder.mkdir(parents=True, exist_ok=True)
        lock = open(job.folder / LOCK, "wb")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.close()
            self.elsewhere.append(job.id)
            self._total -= 1
            print(f"{job.id}: held by another process; left to it", flush=True)
            return None
        # A comparison cannot go on where it was left; a run can.
        if job.variant.training is not None and job.variant.training.together:
            shutil.rmtree(job.run_folder, ignore_errors=True)
        log = open(job.folder / LOG, "wb")
        print(f"{job.id}: started", flush=True)
        entry = _Running(job, slot, lock, log, time.monotonic(), job.commands())
        self._next(entry)
        return entry

    def _next(self, entry: _Running) -> None:
        command = entry.left.pop(0)
        entry.log.write(f"$ {shlex.join(command)}\n".encode())
        entry.log.flush()
        # command is python -m PROGRAM ...
        child = [sys.executable, "-m", "eval.sweep_child", str(os.getpid()), *command[2:]]
        entry.process = subprocess.Popen(
            child,
            stdin=subprocess.DEVNULL,
            stdout=entry.log,
            stderr=subprocess.STDOUT,
            env=self._environment(entry.slot),
            pass_fds=[entry.lock.fileno()],
        )

    def _environment(self, slot: int) -> dict[str, str]:
        environment, gpus = dict(os.environ), self._gpus or 1
        if self._gpus:
            environment["CUDA_VISIBLE_DEVICES"] = str(slot % gpus)
        if self._slots > gpus:
            # By itself JAX takes three quarters of a GPU.
            share = 0.9 / math.ceil(self._slots / gpus)
            environment.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", f"{share:.3f}")
        return environment

    def _goes_on(self, entry: _Running) -> bool:
        status = entry.process.poll()
        if status is None:
            return True
        if status == 0 and entry.left:
            self._next(entry)
            return True
        self._finish(entry, status)
        return False

    def _finish(self, entry: _Running, status: int) -> None:
        job, seconds = entry.job, time.monotonic() - entry.started
        entry.log.close()
        error, found = "", []
        if status == 0:
            try:
                found = job.metrics()
            except (OSError, ValueError, LookupError, TypeError) as problem:
                error = f"no results: {type(problem).__name__}: {' '.join(str(problem).split())}"
        else:
            ended = f"signal {-status}" if status < 0 else f"exit status {status}"
            error = f"{ended}: {_last_error(job.folder / LOG)}"
        common = {
            "status": results.FAILED if error else results.DONE,
            "commands": [shlex.join(command) for command in job.commands()],
            "folder": os.path.relpath(job.folder, self._workdir),
            "seconds": round(seconds, 1),
            "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            **self._checkout._asdict(),
            **_machine(job.run_folder),
        }
        rows = []
        for index, point in enumerate(job.points()):
            row = {"id": point.id, "variant": job.variant.name, "seed": point.seed, **common}
            row |= {"error": error} if error else {"metrics": found[index]}
            rows.append(row | {"definition": job.variant.definition()})
        results.append(self._workdir, rows)
        entry.lock.close()
        self.failed += len(rows) if error else 0
        self._ended += 1
        spent = time.monotonic() - self._started
        eta = spent / self._ended * (self._total - self._ended)
        verdict = f"failed: {error}" if error else "done"
        print(
            f"{job.id}: {verdict} ({seconds:.0f} s; {self._ended}/{self._total}, about "
            f"{eta / 60:.0f} min to go)",
            flush=True,
        )


def _last_error(log: Path) -> str:
    """The line of a log that most likely says what went wrong."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines()[-_TAIL:]]
    lines = [line for line in lines if line] or ["nothing was printed"]
    named = [line for line in lines if line.startswith(("error:", "training failed:"))]
    return (named or lines)[-1]


def _machine(run_folder: Path) -> dict[str, Any]:
    """Device and version of JAX, from what a run folder says about its run."""
    try:
        versions = json.loads((run_folder / "versions.json").read_text())
        return {"device": versions["device_kind"], "jax": versions["packages"]["jax"]}
    except (OSError, ValueError, LookupError):
        return {}
