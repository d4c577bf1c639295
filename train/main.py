"""Trains a model from a configuration file and flags.

    python -m train.main --config=configs/quickstart.py --workdir=DIR [--config.train.steps=20 ...]

Every value of the configuration can be set by a flag --config.<section>.<key>=<value>. A run whose
workdir holds a checkpoint goes on from it; a finished one says so. On several hosts each runs the
same command: with --config.mesh.distributed=True where JAX finds out about the cluster by itself
(TPU pods, Slurm, Open MPI), elsewhere with --coordinator=HOST:PORT --processes=N --process=I.

SIGTERM saves and ends the run; a second signal ends it at once, as Ctrl-C does.

Exit status: 0 complete, 1 the run failed (the loss diverged, a checkpoint cannot be written), 2 the
flags, the configuration or files are wrong, 75 stopped by SIGTERM with nothing lost, 130
interrupted.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
from absl import flags
from ml_collections import ConfigDict, config_flags

from pallas_kernels.checks import KernelMismatch
from pallas_kernels.dispatch import Declined
from train import loop
from train.ledger import TrainingDiverged
from train.metrics import ReportError
from train.settings import closest, flatten
from train.stopping import STATUS, Stop, Stopped
from v41flash.checkpoints.orbax import SaveError
from v41flash.errors import InputError

_OVERRIDE = re.compile(r"--?(?:no)?config\.([^=]+)")
_CONFIG = re.compile(r"--?config(?:=(.*))?$")


class _UsageError(InputError):
    """Wrong flags."""

    def __init__(self, text: str):
        """`text` becomes one line: it names what was given, which may hold line breaks."""
        super().__init__(" ".join(text.split()))


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


def _config_path(arguments: Sequence[str]) -> str:
    for index, argument in enumerate(arguments):
        match = _CONFIG.match(argument)
        if match and match[1] is not None:
            return match[1]
        if match and index + 1 < len(arguments):
            return arguments[index + 1]
    raise _UsageError("--config is missing: give a file such as --config=configs/quickstart.py")


def _load(path: str) -> ConfigDict:
    """Runs a configuration file, without flags: its own mistakes show with file and line."""
    name, colon, argument = path.partition(":")
    if not Path(name).is_file():
        raise _UsageError(f"--config={path}: there is no such file")
    loader = importlib.machinery.SourceFileLoader("config_file", name)
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(loader.name, loader))
    try:
        loader.exec_module(module)
        config = module.get_config(argument) if colon else module.get_config()
        config.to_dict()
    except Exception as error:  # whatever the file's own code raises is a mistake in it
        raise _UsageError(f"--config={path}: {_where(error, name)}{error}") from error
    return config


def _where(error: BaseException, file: str) -> str:
    """'line 12: NameError: ': the line of the configuration file that an error comes from."""
    kind = f"{type(error).__name__}: "
    if isinstance(error, SyntaxError):
        return f"{error.filename}, line {error.lineno}: {kind}"
    frames = traceback.extract_tb(error.__traceback__)
    inside = [frame for frame in frames if Path(frame.filename).resolve() == Path(file).resolve()]
    return f"line {inside[-1].lineno}: {kind}" if inside else kind


def parse(
    arguments: Sequence[str], values: flags.FlagValues | None = None
) -> tuple[ConfigDict, Path]:
    """Command line (without the program) -> (configuration with its overrides, workdir).

    Args:
        arguments: the command line.
        values: holds the flags that a program has besides; they are parsed too.

    Raises:
        InputError: a flag or key that does not exist, or a value of the wrong type; one line.
    """
    chosen, workdir, _ = _parse_run(arguments, flags.FlagValues() if values is None else values)
    return chosen, workdir


class _Cluster(NamedTuple):
    """What tells one of several processes about the others; all None: JAX asks the cluster."""

    coordinator: str | None
    processes: int | None
    process: int | None


def _parse_run(
    arguments: Sequence[str], values: flags.FlagValues
) -> tuple[ConfigDict, Path, _Cluster]:
    workdir = flags.DEFINE_string("workdir", None, "Folder of the run.", flag_values=values)
    coordinator = flags.DEFINE_string(
        "coordinator", None, "HOST:PORT of process 0.", flag_values=values
    )
    processes = flags.DEFINE_integer("processes", None, "How many.", flag_values=values)
    process = flags.DEFINE_integer("process", None, "Which of them.", flag_values=values)
    chosen = parse_config(arguments, values)
    if not workdir.value:
        raise _UsageError("--workdir is missing: give the folder of the run")
    given = _Cluster(coordinator.value, processes.value, process.value)
    if any(value is not None for value in given):
        if None in given or not 0 <= given.process < given.processes:
            raise _UsageError(
                f"--coordinator={given.coordinator} --processes={given.processes} "
                f"--process={given.process}: give all three, the last one below the number of "
                "processes"
            )
    return chosen, Path(workdir.value).absolute(), given


def parse_config(arguments: Sequence[str], values: flags.FlagValues) -> ConfigDict:
    """Command line (without the program) -> configuration with its overrides.

    Args:
        arguments: the command line.
        values: holds the flags that a program has besides; they are parsed too.

    Raises:
        InputError: a flag or key that does not exist, or a value of the wrong type; one line.
    """
    arguments = list(arguments)
    path = _config_path(arguments)
    known = flatten(_load(path).to_dict())
    sections = {key.rpartition(".")[0] for key in known} - {""}
    for argument in arguments:
        match = _OVERRIDE.match(argument)
        if match and match[1] not in known:
            what = "is a section, set its keys" if match[1] in sections else "no such key"
            raise _UsageError(f"--config.{match[1]}: {what}{closest(match[1], known)}")
    argv = ["train.main", *arguments]
    config = config_flags.DEFINE_config_file(
        "config", flag_values=values, lock_config=True, sys_argv=argv
    )
    try:
        rest = values(argv)
        chosen = config.value
    except (flags.Error, TypeError, ValueError) as error:
        raise _UsageError(str(error)) from error
    if len(rest) > 1:
        raise _UsageError(f"{rest[1]!r} is no flag: write --name=value")
    return chosen


def _join_processes(cluster: _Cluster) -> None:
    try:
        jax.distributed.initialize(*cluster)
    except (RuntimeError, ValueError) as error:  # no cluster, or its coordinator does not answer
        name = "mesh.distributed=True" if None in cluster else f"--coordinator={cluster[0]}"
        raise _UsageError(f"{name}: {error}") from error


def main(
    arguments: Sequence[str],
    run: Callable[[ConfigDict, Path, Stop], None] | None = None,
    usage: str | None = __doc__,
) -> int:
    """Runs the command line; returns the exit status.

    Args:
        arguments: the command line.
        run: what is done with a configuration and a folder, until it is asked to stop; training
            (`loop.run`) when None.
        usage: what --help prints.
    """
    if any(argument in ("-h", "--help", "-help") for argument in arguments):
        print(usage)
        return 0
    try:
        config, workdir, cluster = _parse_run(arguments, flags.FlagValues())
        # grain's workers ask absl whether flags have been parsed.
        flags.FLAGS.mark_as_parsed()
        if config.mesh.distributed or None not in cluster:
            _join_processes(cluster)
        stop = Stop()
        with stop.listening():
            (run or loop.run)(config, workdir, stop)
    except Stopped as error:
        print(_one_line(error), file=sys.stderr)
        return STATUS
    except (KernelMismatch, TrainingDiverged, ReportError, SaveError) as error:
        print(f"training failed: {_one_line(error)}", file=sys.stderr)
        return 1
    except (InputError, Declined) as error:
        print(f"error: {_one_line(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from the newest checkpoint", file=sys.stderr)
        return 130
    return 0


def bound_cpu_memory() -> None:
    """Sets the default of one XLA flag, before anything starts the backend.

    On the CPU, XLA's own default scheduler runs ahead where it can and so keeps many layers'
    temporaries at once: at 32,768 tokens the quickstart model then takes 9.7 GB instead of 4.7, at
    the same speed. Only a process that does nothing but train may decide this for itself.
    """
    flag = "--xla_cpu_enable_concurrency_optimized_scheduler"
    given = os.environ.get("XLA_FLAGS", "")
    if flag not in given:
        os.environ["XLA_FLAGS"] = f"{given} {flag}=false".strip()


if __name__ == "__main__":
    bound_cpu_memory()
    sys.exit(main(sys.argv[1:]))
