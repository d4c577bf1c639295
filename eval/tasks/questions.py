"""Questions with answers that can be checked, from files that the user gives.

* choices: "question", "choices" (a list) and "answer" (its number or letter); or the columns of
  GPQA, "Question", "Correct Answer", "Incorrect Answer 1" and so on.
* answers: "problem" (or "question", "prompt") and "answer": a number, a formula, a text.

Files are CSV or JSONL. Further fields: "id", and "rating", how hard a problem is.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from v41flash.errors import InputError

_LETTERS = "ABCDEFGHIJ"
_LETTER = re.compile(r"answer(?:\s+is)?\s*[:=]?\s*\**\(?([A-J])\b", re.IGNORECASE)
_ALONE = re.compile(r"\b([A-J])\b")
_NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?(?:/\d+)?")
_QUESTION = ("problem", "question", "prompt", "Question", "Problem")
_SHUFFLE_SEED = 0


class Question(NamedTuple):
    """One question.

    Attributes:
        id: unique in its file.
        prompt: the user's message.
        truth: what answers are compared with.
        rating: how hard it is, on a scale such as that of Codeforces; None: nobody says.
    """

    id: str
    prompt: str
    truth: Any
    rating: float | None = None


class Choices:
    """Multiple choice; an answer counts by the letter that it names last."""

    stop: tuple[str, ...] = ()

    def __init__(self, path: str):
        """Reads a file.

        Raises:
            InputError: it cannot be read, or a row is no question.
        """
        self.questions = [self._question(*row) for row in rows(path)]

    def _question(self, where: str, row: dict[str, Any]) -> Question:
        text = _first(where, row, _QUESTION)
        if "Correct Answer" in row:
            right = str(row["Correct Answer"]).strip()
            wrong = [row[key] for key in sorted(row) if key.startswith("Incorrect Answer")]
            choices = [right, *(str(choice).strip() for choice in wrong if choice)]
            # Where the right one lies is settled by the question alone.
            seed = [_SHUFFLE_SEED, *text.encode()]
            choices = [choices[i] for i in np.random.default_rng(seed).permutation(len(choices))]
            answer = choices.index(right)
        else:
            choices, answer = row.get("choices"), row.get("answer")
            if isinstance(choices, str):
                choices = choices.split("|")
            if not isinstance(choices, list) or not 2 <= len(choices) <= len(_LETTERS):
                raise InputError(f'{where}: "choices" must be a list of 2 .. {len(_LETTERS)}')
            answer = _index(where, answer, len(choices))
        if len(choices) < 2:
            raise InputError(f"{where}: there must be two choices or more")
        listed = "\n".join(f"{_LETTERS[i]}) {choice}" for i, choice in enumerate(choices))
        prompt = f'{text}\n\n{listed}\n\nEnd with a line "Answer: LETTER".'
        return Question(_id(where, row), prompt, _LETTERS[answer], _rating(where, row))

    def score(self, question: Question, answer: str) -> float:
        """1 where the answer's letter is the right one, else 0."""
        found = _LETTER.findall(answer) or _ALONE.findall(answer)
        return float(bool(found) and found[-1].upper() == question.truth)


class Answers:
    r"""Final answers: the last \boxed{}, else the last number, else the last line."""

    stop: tuple[str, ...] = ()

    def __init__(self, path: str):
        """Reads a file.

        Raises:
            InputError: it cannot be read, or a row is no question.
        """
        self.questions = []
        for where, row in rows(path):
            answer = row.get("answer", row.get("Answer"))
            if answer is None or str(answer).strip() == "":
                raise InputError(f'{where}: "answer" is missing')
            prompt = _first(where, row, _QUESTION)
            prompt = f"{prompt}\n\nPut the final answer into \\boxed{{}}."
            self.questions.append(
                Question(_id(where, row), prompt, str(answer).strip(), _rating(where, row))
            )

    def score(self, question: Question, answer: str) -> float:
        """1 where the final answer is the right one, else 0."""
        return float(same(final(answer), question.truth))


def final(answer: str) -> str:
    """The final answer of a text."""
    start = answer.rfind("\\boxed{")
    if start >= 0:
        depth, begin = 1, start + len("\\boxed{")
        for end in range(begin, len(answer)):
            depth += {"{": 1, "}": -1}.get(answer[end], 0)
            if not depth:
                return answer[begin:end].strip()
    numbers = _NUMBER.findall(answer)
    if numbers:
        return numbers[-1]
    lines = answer.strip().splitlines()
    return lines[-1].strip() if lines else ""


def same(given: str, truth: str) -> bool:
    """Whether two answers are equal: as exact numbers, or as text without spaces and dollars."""
    numbers = _number(given), _number(truth)
    if None not in numbers:
        return numbers[0] == numbers[1]
    return _plain(given) == _plain(truth)


def _number(text: str) -> Fraction | None:
    text = _plain(text).replace(",", "").rstrip(".")
    fraction = re.fullmatch(r"([-+]?)\\[dt]?frac\{(\d+)\}\{(\d+)\}", text)
    if fraction:
        text = f"{fraction[1]}{fraction[2]}/{fraction[3]}"
    try:
        return Fraction(text)
    except (ValueError, ZeroDivisionError):
        return None


def _plain(text: str) -> str:
    return re.sub(r"[\s$]|\\left|\\right|\\[,!;]", "", text).casefold()


def rows(path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """(where it stands, row) of a CSV or JSONL file.

    Raises:
        InputError: it cannot be read.
    """
    found = 0
    try:
        with open(Path(path).expanduser(), newline="", encoding="utf-8") as file:
            if path.endswith(".csv"):
                for number, row in enumerate(csv.DictReader(file), 2):
                    found += 1
                    yield f"{path}:{number}", row
                return
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                row = json.loads(line)
                if not isinstance(row, dict):
                    raise InputError(f"{path}:{number}: must be an object")
                found += 1
                yield f"{path}:{number}", row
    except (OSError, UnicodeError, csv.Error) as error:
        raise InputError(f"{path}: {error}") from error
    except json.JSONDecodeError as error:
        raise InputError(f"{path}: row {found + 1} is not JSON: {error}") from error


def _first(where: str, row: dict[str, Any], names: tuple[str, ...]) -> str:
    for name in names:
        if isinstance(row.get(name), str) and row[name].strip():
            return row[name].strip()
    raise InputError(f"{where}: needs a text under one of {', '.join(names)}")


def _index(where: str, answer: Any, count: int) -> int:
    if isinstance(answer, str) and answer.strip().upper() in tuple(_LETTERS[:count]):
        return _LETTERS.index(answer.strip().upper())
    try:
        index = int(answer)
    except (TypeError, ValueError):
        index = -1
    if not 0 <= index < count:
        raise InputError(
            f'{where}: "answer" = {answer!r} must be a letter up to {_LETTERS[count - 1]}, or a '
            f"number 0 .. {count - 1}"
        )
    return index


def _id(where: str, row: dict[str, Any]) -> str:
    return str(row.get("id", row.get("problem_idx", where.rpartition(":")[2])))


def _rating(where: str, row: dict[str, Any]) -> float | None:
    value = row.get("rating")
    if value in (None, ""):
        return None
    try:
        return float(value)
    except (TypeError, ValueError):
        raise InputError(f'{where}: "rating" = {value!r} must be a number') from None
