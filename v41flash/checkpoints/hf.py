"""The published checkpoint layout, both ways.

    python -m v41flash.checkpoints.hf inspect FOLDER
    python -m v41flash.checkpoints.hf import FOLDER --workdir=DIR [--weights=packed]
    python -m v41flash.checkpoints.hf export --workdir=DIR FOLDER [--base=DIR] [--step=N]

inspect lists what of a folder is not as its config.json says: missing, unexpected and truncated,
wrong shapes and dtypes. import writes a run folder of it. export writes a run folder's newest
checkpoint in the published layout; what the run does not have (the draft head, the scales of
weights that it started from) comes from the run folder `--base`, or the one it was started from.

Weights: `packed` stay FP8 and FP4, for serving, and go back byte for byte; `bfloat16` (exact) and
`float32` are for training. Exit status: 0 done, 1 the folder has faults or
a file cannot be written, 2 wrong arguments.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from v41flash.checkpoints import exporting, importing, inventory, workdirs
from v41flash.checkpoints.leaves import FORMS, PACKED
from v41flash.checkpoints.published import FileError, Published, problems, read_config
from v41flash.config import ConfigError
from v41flash.errors import InputError


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:
        self.exit(2, f"error: {message}\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="v41flash.checkpoints.hf", description="See the module's docstring.")
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("inspect", help="compare a folder with its configuration")
    command.add_argument("folder", type=Path)
    command = commands.add_parser("import", help="published folder -> run folder")
    command.add_argument("folder", type=Path)
    command.add_argument("--workdir", type=Path, required=True)
    command.add_argument("--weights", choices=list(FORMS), default=PACKED)
    command.add_argument("--tokenizer", help="default: the folder's tokenizer.json, or published")
    command = commands.add_parser("export", help="run folder -> published folder")
    command.add_argument("folder", type=Path)
    command.add_argument("--workdir", type=Path, required=True)
    command.add_argument("--base", type=Path, help="run folder of what the run started from")
    command.add_argument("--step", type=int, help="the newest by default")
    command.add_argument("--shard-bytes", type=int, default=exporting.SHARD_BYTES)
    return parser


def _inspect(arguments: argparse.Namespace) -> int:
    count = 0
    for problem in problems(arguments.folder):
        count += 1
        print(problem)
    size, tensors = inventory.totals(read_config(arguments.folder))
    if count:
        print(f"{arguments.folder}: {count} problems; {tensors:,} tensors were looked for")
        return 1
    print(f"{arguments.folder}: {tensors:,} tensors, {size:,} bytes, as they should be")
    return 0


def _import(arguments: argparse.Namespace) -> int:
    published = Published.open(arguments.folder)
    tokenizer = importing.to_workdir(
        published, arguments.workdir, arguments.weights, arguments.tokenizer
    )
    weights = f"weights {arguments.weights}, tokenizer {tokenizer}"
    print(f"{arguments.workdir}: checkpoint of step 0, {weights}")
    return 0


def _export(arguments: argparse.Namespace) -> int:
    if arguments.shard_bytes < 1:
        raise InputError(f"--shard-bytes={arguments.shard_bytes}: must be at least 1")
    workdir = arguments.workdir
    values, step = workdirs.read(workdir, arguments.step)
    config = workdirs.model_config(workdir, values)
    steps = [step]
    base = arguments.base or values["train"].get("init_from")
    if base:
        steps.append(_base(Path(base), config.weight_form))
    name = values["data"]["tokenizer"]
    tokenizer = workdirs.tokenizer_file(name, workdir)
    written = exporting.export(config, steps, arguments.folder, arguments.shard_bytes, tokenizer)
    left_out = written.num_nextn_predict_layers != config.num_nextn_predict_layers
    note = "; no draft head: the checkpoint has none" if left_out else ""
    note += f"; no {workdirs.TOKENIZER}: the tokenizer is {name!r}" if tokenizer is None else ""
    size, tensors = inventory.totals(written)
    print(f"{arguments.folder}: {tensors:,} tensors, {size:,} bytes{note}")
    return 0


def _base(workdir: Path, form: str) -> Path:
    """The newest checkpoint of what a run started from; its weights must be of the same form."""
    values, step = workdirs.read(workdir)
    found = workdirs.model_config(workdir, values).weight_form
    if found != form:
        raise InputError(f"{workdir}: model.weight_form is {found!r}; the run's is {form!r}")
    return step


def main(argv: Sequence[str]) -> int:
    """Runs the command line; returns the exit status."""
    arguments = _parser().parse_args(argv)
    # Orbax warns that a checkpoint of one array a folder is not one database.
    logging.getLogger("absl").setLevel(logging.ERROR)
    run = {"inspect": _inspect, "import": _import, "export": _export}[arguments.command]
    try:
        return run(arguments)
    except FileError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except (InputError, ConfigError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except OSError as error:
        place = f"{error.filename}: " if error.filename is not None else ""
        print(f"error: {place}{error.strerror or error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
