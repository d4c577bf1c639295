"""What the command lines of programs have in common: help, and wrong flags in one line."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

from absl import flags

from v41flash.errors import InputError

Main = Callable[[Sequence[str]], int]


def program(usage: str | None, interrupted: str | None = None) -> Callable[[Main], Main]:
    """Decorates what runs a command line (without the program) and returns the exit status.

    With -h, -help or --help it prints `usage` and returns 0; an InputError is one line on the
    standard error, and 2.

    Args:
        usage: the program's description.
        interrupted: what Ctrl-C prints to return 130; None: it is not caught.
    """

    def decorate(main: Main) -> Main:
        @functools.wraps(main)
        def run(arguments: Sequence[str]) -> int:
            if any(argument in ("-h", "--help", "-help") for argument in arguments):
                print(usage)
                return 0
            try:
                return main(arguments)
            except InputError as error:
                print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
                return 2
            except KeyboardInterrupt:
                if interrupted is None:
                    raise
                print(interrupted, file=sys.stderr)
                return 130

        return run

    return decorate


def read(
    values: flags.FlagValues,
    arguments: Sequence[str],
    required: Sequence[str] = (),
    **numbers: Callable[[str], Any],
) -> list[tuple[Any, ...] | None]:
    """Sets a program's flags from its command line (without the program).

    Args:
        values: the flags that there are.
        arguments: the command line.
        required: names of those that must be given.
        numbers: by the name of a list, what makes a number of an entry (lengths=int).

    Returns:
        These lists; None for one without a value.

    Raises:
        InputError: a flag that does not exist or is missing, or a wrong value; one line.
    """
    try:
        rest = values(["", *arguments])
        entries = [(values[name].value, number) for name, number in numbers.items()]
        lists = [None if given is None else tuple(map(number, given)) for given, number in entries]
    except (flags.Error, ValueError) as error:
        raise InputError(" ".join(str(error).split())) from error
    if len(rest) > 1:
        raise InputError(f"{rest[1]!r} is no flag: write --name=value")
    for name in required:
        if not values[name].value:
            raise InputError(f"--{name} is missing")
    return lists
