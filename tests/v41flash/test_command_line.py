"""Help, wrong flags in one line, and exit statuses, of a program with a flag of each kind."""

from unittest import mock

import pytest
from absl import flags

from v41flash import command_line


@command_line.program("what it does", interrupted="stopped")
def main(arguments):
    values = flags.FlagValues()
    flags.DEFINE_string("text", None, "Its text.", values)
    flags.DEFINE_boolean("fast", True, "In a hurry.", values)
    flags.DEFINE_list("sizes", ["1"], "Whole numbers.", values)
    flags.DEFINE_list("shares", None, "Numbers.", values)
    lists = command_line.read(values, arguments, ("text",), shares=float, sizes=int)
    if values.text == "interrupt":
        raise KeyboardInterrupt
    print(values.text, values.fast, *lists)
    return 3


@pytest.mark.parametrize(
    ("arguments", "status", "out", "err"),
    [
        (["--nothing", "-help"], 0, "what it does", ""),
        (["--text=a", "--nofast"], 3, "a False None (1,)", ""),
        (["--text", "a", "--sizes=", "--shares=1,.5"], 3, "a True (1.0, 0.5) ()", ""),
        (["--text=interrupt"], 130, "", "stopped"),
        ([], 2, "", "error: --text is missing"),
        (["--text=", "a\nb"], 2, "", "error: 'a\\nb' is no flag: write --name=value"),
        (["--nothing\n=1"], 2, "", "error: Unknown command line flag 'nothing '"),
        (["b", "--sizes=2,x"], 2, "", "error: invalid literal for int() with base 10: 'x'"),
        (["--nofast=3"], 2, "", "error: --nofast=3 does not take an argument"),
    ],
)
def test_a_command_line(capsys, arguments, status, out, err):
    assert main(arguments) == status
    assert tuple(capsys.readouterr()) == tuple(text + "\n" if text else "" for text in (out, err))


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_what_is_not_about_the_flags_passes_through(error):
    with pytest.raises(error):
        command_line.program(None)(mock.Mock(side_effect=error))([])
