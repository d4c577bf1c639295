"""Trains a model from a configuration file and flags.

    python -m train.main --config=configs/quickstart.py --workdir=DIR [--config.train.steps=20 ...]

Every value of the configuration can be set by a flag --config.<section>.<key>=<value>. A run whose
workdir holds a checkpoint goes on from it; a finished one says so. Exit status: 0 complete, 1 the
run failed (the loss diverged), 2 the flags or the configuration are wrong, 130 interrupted.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

import jax
from absl import flags
from ml_collections import ConfigDict, config_flags

from train import loop
from train.ledger import TrainingDiverged
from train.settings import SettingsError, closest, flatten

_OVERRIDE = re.compile(r"--?(?:no)?config\.([^=]+)")
_CONFIG = re.compile(r"--?config(?:=(.*))?$")


class _UsageError(ValueError):
    """Wrong flags; the text is one line."""


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
    values = flags.FlagValues()
    holder = config_flags.DEFINE_config_file(
        "config", flag_values=values, lock_config=True, sys_argv=[]
    )
    name = path.partition(":")[0]
    if not Path(name).is_file():
        raise _UsageError(f"--config={path}: there is no such file")
    try:
        values(["main", f"--config={path}"])
        config = holder.value
        config.to_dict()
    except Exception as error:
        raise _UsageError(f"--config={path}: {type(error).__name__}: {_one_line(error)}") from error
    return config


def parse(arguments: Sequence[str]) -> tuple[ConfigDict, Path]:
    """Command line (without the program) -> (configuration with its overrides, workdir).

    Raises:
        ValueError: a flag or key that does not exist, or a value of the wrong type; one line.
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
    values = flags.FlagValues()
    argv = ["train.main", *arguments]
    config = config_flags.DEFINE_config_file(
        "config", flag_values=values, lock_config=True, sys_argv=argv
    )
    workdir = flags.DEFINE_string("workdir", None, "Folder of the run.", flag_values=values)
    try:
        rest = values(argv)
        chosen = config.value
    except (flags.Error, TypeError, ValueError) as error:
        raise _UsageError(_one_line(error)) from error
    if len(rest) > 1:
        raise _UsageError(f"{rest[1]!r} is no flag: write --name=value")
    if not workdir.value:
        raise _UsageError("--workdir is missing: give the folder of the run")
    return chosen, Path(workdir.value).absolute()


def main(arguments: Sequence[str]) -> int:
    """Runs the command line; returns the exit status."""
    if any(argument in ("-h", "--help", "-help") for argument in arguments):
        print(__doc__)
        return 0
    try:
        config, workdir = parse(arguments)
        # grain's workers ask absl whether flags have been parsed.
        flags.FLAGS.mark_as_parsed()
        if config.mesh.distributed:
            jax.distributed.initialize()
        loop.run(config, workdir)
    except TrainingDiverged as error:
        print(f"training failed: {_one_line(error)}", file=sys.stderr)
        return 1
    except (_UsageError, SettingsError) as error:
        print(f"error: {_one_line(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from the newest checkpoint", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
