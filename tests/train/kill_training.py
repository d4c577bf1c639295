"""Kills training at random moments and looks at what it goes on with.

    python -m tests.train.kill_training DIR [--kills=50] [--inside=15] [--processes=1]

A run of a very small model saves every other step. It is killed (SIGKILL, all of its processes)
after a random time, again and again, until it is done; a folder of a checkpoint that was being
written shows that a kill was inside a save. Every number that it ever logs must be, to the
last bit, that of a run nobody disturbed (so no batch came twice or never), it must have gone on
from the newest complete checkpoint, and every complete checkpoint must be what was saved.

Processes are forked from one that has imported everything, and load the executables that the first
of them has left (all others would trace and compile the same), so that a life of a run is short.
What is forked is `train.main.main`, as on the command line.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import pathlib
import pickle
import random
import signal
import socket
import sys
import time
import traceback
from typing import Any, NamedTuple

import jax
from jax.experimental import serialize_executable
from ml_collections import ConfigDict

from tests.train import micro
from train import main as main_lib
from train import metrics
from train import step as step_lib
from v41flash.checkpoints import checksums
from v41flash.checkpoints.orbax import Checkpoints

CONFIG = """
import pathlib
from tests.train import kill_training

def get_config():
    return kill_training.config(pathlib.Path(__file__).parent)
"""
# Numbers of the clock, and those that only a step has which ended a stage or a run.
_TIMES = {"tokens_per_second", "step_seconds", "peak_memory_bytes"}
_LONGEST = 600.0


class Outcome(NamedTuple):
    """What happened.

    Attributes:
        kills: times that the run was killed.
        inside: of them, those inside a save.
        resumed: lives that went on from a checkpoint.
        rows: logged numbers that were compared.
        checked: complete checkpoints that were read and found right.
    """

    kills: int
    inside: int
    resumed: int
    rows: int
    checked: int


def config(folder: pathlib.Path) -> ConfigDict:
    """A run of short steps and many checkpoints."""
    written = (folder / "text").exists()
    result = micro.config(folder, write=not written).unlock()
    result.data.prefetch = 2
    result.train.keep_checkpoints = 3
    result.train.steps = 1000
    result.eval.batches = 1
    return result.lock()


def _life(
    folder: pathlib.Path, workdir: pathlib.Path, steps: int, processes: int, every: int = 2
) -> list[int]:
    """Starts the processes of a run; their ids."""
    flags = [f"--config={folder / 'config.py'}", f"--workdir={workdir}"]
    flags += [f"--config.train.steps={steps}", f"--config.train.checkpoint_every={every}"]
    if processes > 1:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        flags += [f"--coordinator=127.0.0.1:{port}", f"--processes={processes}"]
    sys.stdout.flush()
    sys.stderr.flush()
    started = []
    for process in range(processes):
        child = os.fork()
        if not child:
            with open(folder / f"log.{process}", "a") as log:
                os.dup2(log.fileno(), 1)
                os.dup2(log.fileno(), 2)
            own = [f"--process={process}"] if processes > 1 else []
            status = -1
            try:
                _keep_executables(folder, f"{process}.{processes}")
                status = main_lib.main([*flags, *own])
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                os._exit(status)
        started.append(child)
    return started


def _keep_executables(folder: pathlib.Path, name: str) -> None:
    """Lets this process load the larger programs that one like it has compiled."""
    if not (folder / f"step.{name}").exists():
        # What comes from JAX's own cache cannot be serialised again.
        jax.config.update("jax_enable_compilation_cache", False)
    compile_step, program = step_lib.compile_train_step, checksums._program

    def kept(file: str, make: Any) -> Any:
        path = folder / f"{file}.{name}"
        if path.exists():
            return serialize_executable.deserialize_and_load(*pickle.loads(path.read_bytes()))
        made = make()
        partial = path.with_suffix(".partial")
        partial.write_bytes(pickle.dumps(serialize_executable.serialize(made)))
        partial.rename(path)
        return made

    def sums(backend: str) -> Any:
        def run(arrays: list) -> Any:
            forms = repr([(x.shape, str(x.dtype)) for x in arrays])
            file = f"sums_{hashlib.sha256(forms.encode()).hexdigest()[:16]}"
            if file not in loaded:
                loaded[file] = kept(file, lambda: program(backend).lower(arrays).compile())
            return loaded[file](arrays)

        return run

    loaded = {}
    checksums._program = sums
    step_lib.compile_train_step = lambda *a: kept("step", lambda: compile_step(*a))


def _ended(child: int) -> int | None:
    """The exit status of a process; None while it runs."""
    found, status = os.waitpid(child, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if found else None


def _kill(children: list[int]) -> None:
    for child in children:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
    for child in children:
        os.waitpid(child, 0)


def _saving(workdir: pathlib.Path) -> set[str]:
    """Names of checkpoints that are being written, or were when their writer was killed."""
    return {path.name for path in _steps(workdir) if "orbax-checkpoint-tmp" in path.name}


def _marks(workdir: pathlib.Path) -> set[tuple[str, int, int]]:
    """As `_saving`, and what tells one such folder from another of the same name."""
    found = set()
    for name in _saving(workdir):
        with contextlib.suppress(FileNotFoundError):
            status = (workdir / "checkpoints" / name).stat()
            found.add((name, status.st_ino, status.st_ctime_ns))
    return found


def _steps(workdir: pathlib.Path) -> list[pathlib.Path]:
    folder = workdir / "checkpoints"
    return list(folder.iterdir()) if folder.is_dir() else []


def _numbers(row: dict) -> dict:
    return {key: value for key, value in row.items() if key not in _TIMES and "held" not in key}


class _Found(NamedTuple):
    """What a run has left: its newest complete checkpoint, and what was compared."""

    step: int | None
    rows: int
    checked: int


def _look(workdir: pathlib.Path, expected: dict[int, dict]) -> _Found:
    """Compares what a run leaves that is not running with what it should be."""
    rows = metrics.read(workdir)
    for row in rows:
        assert _numbers(row) == expected[row["step"]], f"step {row['step']} differs"
    complete = sorted(int(path.name) for path in _steps(workdir) if path.name.isdigit())
    if not complete:
        return _Found(None, len(rows), 0)
    with Checkpoints(workdir / "checkpoints") as stored:
        assert stored.steps() == complete
        for step in complete:
            note = stored.meta(step)
            assert _numbers(note["row"]) == expected[step]
            assert note["data"]["step"] == step
    return _Found(complete[-1], len(rows), len(complete))


def _look_apart(workdir: pathlib.Path, expected: dict[int, dict]) -> _Found:
    """`_look` in a process of its own: one that has started JAX must not be forked again."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            answer = json.dumps(_look(workdir, expected))
        except BaseException:
            answer = json.dumps(traceback.format_exc())
        os.write(writer, answer.encode())
        os._exit(0)
    os.close(writer)
    with open(reader) as answers:
        answer = json.loads(answers.read())
    os.waitpid(child, 0)
    assert not isinstance(answer, str), answer
    return _Found(*answer)


def undisturbed(folder: pathlib.Path, steps: int, processes: int) -> dict[int, dict]:
    """Step -> numbers of a run that nobody kills."""
    workdir = folder / "undisturbed"
    for child in _life(folder, workdir, steps, processes, every=steps):
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, _tail(folder)
    rows = {row["step"]: _numbers(row) for row in metrics.read(workdir)}
    assert sorted(rows) == list(range(1, steps + 1))
    return rows


def _tail(folder: pathlib.Path) -> str:
    return "\n".join(path.read_text()[-2000:] for path in sorted(folder.glob("log.*")))


def run(
    folder: pathlib.Path,
    *,
    kills: int,
    inside: int,
    processes: int = 1,
    steps: int = 80,
    seed: int = 0,
) -> Outcome:
    """Goes on until so many were killed, and so many of them inside a save.

    The run is then left to complete; one that completes before is followed by another one.
    """
    rng = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.py").write_text(CONFIG)
    micro.write_corpus(folder / "text")
    numbers = undisturbed(folder, steps, processes)
    killed = hit = resumed = rows = checked = number = 0
    while killed < kills or hit < inside:
        number += 1
        workdir, expected = folder / f"run_{number}", None
        while True:
            print(f"{killed} kills, {hit} inside a save; from step {expected}", flush=True)
            assert killed < 5 * kills, f"only {hit} of {killed} kills met a save"
            known, left = _length(folder), _marks(workdir)
            children = _life(folder, workdir, steps, processes)
            more = killed < kills or hit < inside
            done = _until(folder, workdir, children, known, rng if more else None)
            said = _said(folder, known)
            assert said in (None, expected), f"went on from {said}, not from {expected}"
            resumed += said is not None
            found = _look_apart(workdir, numbers)
            expected, rows, checked = found.step, rows + found.rows, checked + found.checked
            if done:
                break
            killed += 1
            hit += bool(_marks(workdir) - left)
        assert [row["step"] for row in metrics.read(workdir)] == list(range(1, steps + 1))
        assert not _saving(workdir)
    return Outcome(killed, hit, resumed, rows, checked)


def _length(folder: pathlib.Path) -> int:
    log = folder / "log.0"
    return log.stat().st_size if log.exists() else 0


def _said(folder: pathlib.Path, known: int) -> int | None:
    """The step that this life says it goes on from; None where it began anew or not at all."""
    text = (folder / "log.0").read_bytes()[known:].decode()
    _, found, rest = text.partition("going on from step ")
    return int(rest.split()[0]) if found else None


def _until(
    folder: pathlib.Path,
    workdir: pathlib.Path,
    children: list[int],
    known: int,
    rng: random.Random | None,
) -> bool:
    """Kills the processes after a while (None: never); whether they were done before.

    One in five lives ends anywhere; one in two of the others a while after the run is under way,
    the rest in one of the next few saves.
    """
    began = time.monotonic()
    if rng is None:
        statuses = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        assert statuses == [0] * len(children), f"{statuses}\n{_tail(folder)}"
        return True
    under_way = "compiled in" if rng.random() > 0.2 else "parameters ("
    wait, saves = rng.uniform(0, 6.0), rng.choice([0, 0, 0, 0, 1, 2, 3, 4])
    since, seen = None, set()
    while True:
        statuses = [_ended(child) for child in children]
        if all(status is not None for status in statuses):
            assert statuses == [0] * len(children), f"{statuses}\n{_tail(folder)}"
            return True
        assert statuses == [None] * len(children), f"{statuses}\n{_tail(folder)}"
        now = time.monotonic()
        assert now - began < _LONGEST, "a life without end"
        if since is None:
            if under_way in (folder / "log.0").read_bytes()[known:].decode():
                since = now
                seen |= _saving(workdir)
        elif (len(seen | _saving(workdir)) >= saves) if saves else (now - since > wait):
            time.sleep(rng.uniform(0, 0.1))
            _kill(children)
            return False
        seen |= _saving(workdir)
        time.sleep(0.002)


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--inside", type=int, default=15)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--seed", type=int, default=0)
    chosen = vars(parser.parse_args())
    print(json.dumps(run(chosen.pop("folder"), **chosen)._asdict()))


if __name__ == "__main__":
    main()
