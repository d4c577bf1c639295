"""Tasks whose answer lies somewhere in a long text: generators with exact answers.

| task | the text holds | the question and its answer |
|---|---|---|
| needle | one note `[kd=37]` | `[kd=` `37]` |
| multi_key | eight notes of different keys | as above, of one of them |
| variables | a chain, `[kd=37]`, `[pm=kd]`, `[zt=pm]`, and another | `[zt->` `37]` |
| copy | a note `[copy:nhqwxkdt]` | `[copy:` `nhqwxkdt]` |

Around the notes stand words in random order. A question repeats the beginning of a note, so that a
model that was never told about tasks can be asked; an answer is right where every character is.
Length is in characters, bos and answer included: in tokens, for a model that reads bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from v41flash.errors import InputError

# Part of a stored corpus's key: raise it with every change of what a text looks like.
VERSION = 1
SPLITS = ("train", "heldout")
_LETTERS = "bcdfghjklmnpqrstvwxz"
_WORDS = (
    "time year people way day man thing woman life child world school state family student group "
    "country problem hand part place case week company system program question work government "
    "number night point home water room mother area money story fact month lot right study book"
).split()
_KEYS, _HOPS, _COPIED = 8, 2, 12
# Questions of a training text. It has as many notes or fewer: where there is one alone, what is
# learnt first is to copy; with more of them, which one.
_TRAINING_QUESTIONS = 6
_TRAINING_TEXTS = 20_000
SHORTEST = 128


class Problem(NamedTuple):
    """One problem.

    Attributes:
        prompt: text and question.
        answer: what has to follow.
        notes: (first, last + 1) character of every note in the prompt that the answer needs.
    """

    prompt: str
    answer: str
    notes: tuple[tuple[int, int], ...]


class _Parts(NamedTuple):
    """Notes in the order of the text; `needed` of them by number; the question and its answer."""

    notes: list[str]
    needed: tuple[int, ...]
    question: str
    answer: str


def _keys(rng: np.random.Generator, count: int) -> list[str]:
    """Different pairs of letters."""
    size = len(_LETTERS)
    return [_LETTERS[n // size] + _LETTERS[n % size] for n in rng.permutation(size**2)[:count]]


def _value(rng: np.random.Generator) -> str:
    return f"{rng.integers(10, 100)}"


def _needle(rng: np.random.Generator) -> _Parts:
    (key,), value = _keys(rng, 1), _value(rng)
    return _Parts([f"[{key}={value}]"], (0,), f"[{key}=", f"{value}]")


def _multi_key(rng: np.random.Generator) -> _Parts:
    keys, values = _keys(rng, _KEYS), [_value(rng) for _ in range(_KEYS)]
    notes = [f"[{key}={value}]" for key, value in zip(keys, values, strict=True)]
    asked = int(rng.integers(_KEYS))
    return _Parts(notes, (asked,), f"[{keys[asked]}=", f"{values[asked]}]")


def _variables(rng: np.random.Generator) -> _Parts:
    keys, notes, values = _keys(rng, 2 * (_HOPS + 1)), [[], []], []
    for chain in range(2):
        own = keys[chain::2]
        values.append(_value(rng))
        notes[chain] = [f"[{own[0]}={values[chain]}]"]
        notes[chain] += [f"[{b}={a}]" for a, b in zip(own, own[1:], strict=False)]
    order = rng.permutation([0] * (_HOPS + 1) + [1] * (_HOPS + 1))
    mixed = [notes[chain].pop(0) for chain in order]
    needed = tuple(np.flatnonzero(order == 0).tolist())
    return _Parts(mixed, needed, f"[{keys[2 * _HOPS]}->", f"{values[0]}]")


def _copy(rng: np.random.Generator) -> _Parts:
    text = "".join(_LETTERS[n] for n in rng.integers(len(_LETTERS), size=_COPIED))
    return _Parts([f"[copy:{text}]"], (0,), "[copy:", f"{text}]")


_TASKS: dict[str, Callable[[np.random.Generator], _Parts]] = {
    "needle": _needle,
    "multi_key": _multi_key,
    "variables": _variables,
    "copy": _copy,
}
TASKS = tuple(_TASKS)


def check_task(name: str) -> None:
    """Raises InputError where there is no such task."""
    if name not in _TASKS:
        raise InputError(f"task {name!r}: must be one of {', '.join(TASKS)}")


def problem(task: str, length: int, depth: float, number: int, split: str = "heldout") -> Problem:
    """A problem: always the same one for the same arguments.

    Args:
        task: one of `TASKS`.
        length: characters of prompt and answer, and one for bos; at least `SHORTEST`.
        depth: where the notes that are needed begin, 0 (the start of the text) .. 1 (its end). A
            chain's follow each other from there on, to the end.
        number: which.
        split: "train" or "heldout": problems of the one are none of the other's.

    Raises:
        InputError: no such task, or an impossible length or depth.
    """
    check_task(task)
    if length < SHORTEST or not 0 <= depth <= 1:
        raise InputError(
            f"length = {length}, depth = {depth}: must be at least {SHORTEST}, and in 0 .. 1"
        )
    seed = [SPLITS.index(split), TASKS.index(task), length, round(1000 * depth), number]
    rng = np.random.default_rng(seed)
    parts = _TASKS[task](rng)
    room = length - 2 - len(parts.question) - len(parts.answer)
    room -= sum(len(note) + 1 for note in parts.notes)
    places = np.sort(rng.random(len(parts.notes)))
    if len(parts.needed) == 1:
        # Only the order decides which note lies where: the needed one goes to its depth.
        (needed,) = parts.needed
        places = rng.random(len(parts.notes))
        places[needed] = depth
    else:
        places = depth + (1 - depth) * places
    text, starts = _spread(rng, parts.notes, places, room)
    notes = tuple((starts[i], starts[i] + len(parts.notes[i])) for i in parts.needed)
    return Problem(f"{text} {parts.question}", parts.answer, notes)


def _spread(
    rng: np.random.Generator, notes: list[str], places: np.ndarray, room: int
) -> tuple[str, list[int]]:
    """(text with `room` characters of words around notes, where each note begins)."""
    words = _filler(rng, room)
    order = np.argsort(places, kind="stable")
    cuts = [_space_near(words, int(places[i] * room)) for i in order]
    text, starts, taken = [], [0] * len(notes), 0
    size = 0
    for i, cut in zip(order, cuts, strict=True):
        cut = max(cut, taken)
        piece = words[taken:cut]
        starts[i] = size + len(piece)
        text += [piece, notes[i], " "]
        size += len(piece) + len(notes[i]) + 1
        taken = cut
    text.append(words[taken:])
    return "".join(text), starts


def _filler(rng: np.random.Generator, room: int) -> str:
    """Exactly `room` characters of words; each is followed by a space, the last may be cut."""
    count = room // 4 + 1
    return "".join(f"{_WORDS[n]} " for n in rng.integers(len(_WORDS), size=count))[:room]


def _space_near(words: str, place: int) -> int:
    """The beginning of a word at or before a place."""
    return words.rfind(" ", 0, place) + 1


def right(found: Problem, answer: str) -> bool:
    """Whether an answer begins with the right one."""
    return answer.startswith(found.answer)


class TrainingText(NamedTuple):
    """A text with several notes, and every question about them with its answer."""

    prompt: str
    completion: str


def training_texts(tasks: tuple[str, ...], length: int) -> Iterator[TrainingText]:
    """Texts to learn the tasks from, of `length` characters (bos and eos included) each.

    A text has one to six notes, and the completion asks for all of them in random order; with few
    notes, for some again.

    Raises:
        InputError: no such task, or a length without room for the notes.
    """
    for task in tasks:
        check_task(task)
    if length < SHORTEST:
        raise InputError(f"length = {length}: must be at least {SHORTEST}")
    for number in range(_TRAINING_TEXTS):
        rng = np.random.default_rng([SPLITS.index("train"), len(TASKS), length, number])
        yield _training_text(rng, tasks[number % len(tasks)], length)


def _training_text(rng: np.random.Generator, task: str, length: int) -> TrainingText:
    if task in ("needle", "multi_key"):
        keys = _keys(rng, int(rng.integers(1, _TRAINING_QUESTIONS + 1)))
        notes = [f"[{key}={_value(rng)}]" for key in keys]
        questions = [notes[i % len(notes)] for i in range(_TRAINING_QUESTIONS)]
    else:
        parts = _TASKS[task](rng)
        notes, questions = parts.notes, [f"{parts.question}{parts.answer}"]
    asked = " ".join(questions[i] for i in rng.permutation(len(questions)))
    room = length - 3 - len(asked) - sum(len(note) + 1 for note in notes)
    places = rng.random(len(notes))
    if task == "variables":
        places = np.sort(places)
    text, _ = _spread(rng, notes, places, room)
    return TrainingText(f"{text} ", asked)
