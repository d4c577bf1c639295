"""Puts comparisons together: one line a run, a table of means and spreads over seeds, a plot.

    python -m train.study --output=FILE.jsonl [DIR ...]

DIR are folders of `train.compare`; their runs are added to those that FILE.jsonl has already, and
FILE.png is drawn beside it. Without DIR the file is read and drawn again. A learning rate is
judged by the mean over its seeds. Prints the table in Markdown. Exit status: 0, or 2 for wrong
flags, a folder without a finished comparison, or a run that is there already.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from train import plots, records, runinfo
from v41flash.errors import InputError


def of_folder(folder: Path) -> list[records.Record]:
    """The runs of a folder of `train.compare`.

    Raises:
        InputError: it does not hold a finished comparison.
    """
    try:
        summary = json.loads((folder / "summary.json").read_text())
        lines = (folder / "curves.jsonl").read_text().splitlines()
        commit = json.loads((folder / "versions.json").read_text()).get("commit")
        rows = [json.loads(line) for line in lines]
        named = [
            (run["family"], run["optimizer"]["learning_rate"], run["seed"])
            for run in summary["runs"]
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{folder}: no finished comparison: {_said(error)}") from error
    return records.of_comparison(named, rows, commit)


def read(path: Path) -> list[records.Record]:
    """The runs of a file of this program.

    Raises:
        InputError: it is another kind of file.
    """
    try:
        found = [json.loads(line) for line in path.read_text().splitlines()]
        for record in found:
            _key(record), record[records.HELDOUT].items()
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{path}: not a file of runs: {_said(error)}") from error
    return found


def _said(error: Exception) -> str:
    """An error in one line; that of a file names it."""
    return str(error) if isinstance(error, OSError) else repr(error)


def _key(record: records.Record) -> tuple[str, float, int]:
    return record["family"], record["learning_rate"], record["seed"]


def table(found: Iterable[records.Record]) -> str:
    """Final held-out numbers by rate and family, in Markdown."""
    families = records.by_rate(found)
    rates = sorted({rate for members in families.values() for rate in members})
    lines = ["| peak rate | " + " | ".join(families) + " |", "|---" * (len(families) + 1) + "|"]
    for rate in rates:
        cells = []
        for members in families.values():
            numbers = [records.final(record) for record in members.get(rate, [])]
            text = f"{records.mean(numbers):.4f}" if numbers else ""
            if len(numbers) > 1:
                text += f" +- {records.spread(numbers):.4f} ({len(numbers)})"
            cells.append(f"**{text}**" if rate == records.best(members) else text)
        lines.append(f"| {rate:g} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> int:
    """Runs the command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m train.study",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("folders", type=Path, nargs="*", metavar="DIR")
    flags = parser.parse_args(arguments)
    try:
        if flags.output.suffix != ".jsonl":
            raise InputError(f"--output={flags.output}: must end in .jsonl")
        found = read(flags.output) if flags.output.exists() or not flags.folders else []
        known = {_key(record): flags.output for record in found}
        for folder in flags.folders:
            for record in of_folder(folder):
                if _key(record) in known:
                    raise InputError(f"{folder}: {_key(record)} is in {known[_key(record)]} too")
                known[_key(record)] = folder
                found.append(record)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if flags.folders:
        text = "".join(json.dumps(record) + "\n" for record in found)
        runinfo.write_text(flags.output, text)
    plots.comparison_plot(found, flags.output.with_suffix(".png"))
    print(table(found))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
