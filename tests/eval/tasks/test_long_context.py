"""Long-context problems: a solver that reads the text finds every answer, where it should lie."""

import re

import numpy as np
import pytest

from eval.tasks import long_context
from v41flash.errors import InputError

LENGTHS = (128, 129, 200, 1000, 4096)


def solve(prompt):
    """The answer, by looking for it."""
    text, question = prompt.rsplit("[", 1)
    notes = dict(re.findall(r"\[(\w+)[=:](\w+)\]", text))
    assert len(notes) == len(re.findall(r"\[", text)), "a key occurs twice"
    key = re.match(r"\w+", question)[0]
    if question.endswith("->"):
        while key in notes:
            key = notes[key]
        return f"{key}]"
    return f"{notes[key]}]"


@pytest.mark.parametrize("task", long_context.TASKS)
def test_the_text_holds_the_answer(task):
    for length in LENGTHS:
        for number in range(20):
            depth = number / 19
            problem = long_context.problem(task, length, depth, number)
            assert 1 + len(problem.prompt) + len(problem.answer) == length
            assert solve(problem.prompt) == problem.answer
            assert long_context.right(problem, problem.answer + " and so on")
            assert not long_context.right(problem, problem.answer[:-1])
            for first, last in problem.notes:
                note = problem.prompt[first:last]
                assert note[0] == "[" and note[-1] == "]" and note.count("[") == 1
            # The answer ends the first of the notes that are needed.
            assert problem.prompt[: problem.notes[0][1]].endswith(problem.answer)


@pytest.mark.parametrize("task", ["needle", "multi_key", "copy"])
def test_notes_lie_at_their_depth(task):
    length = 4096
    for depth in (0.0, 0.25, 0.5, 1.0):
        for number in range(5):
            ((first, _),) = long_context.problem(task, length, depth, number).notes
            # A word, and the other notes, move it a little.
            assert abs(first - depth * length) < 16 + 8 * 9, (depth, first)


def test_a_chain_begins_at_its_depth_and_keeps_its_order():
    starts = []
    for number in range(50):
        notes = long_context.problem("variables", 4096, 0.5, number).notes
        assert list(notes) == sorted(notes) and len(notes) == 3
        starts.append(notes[0][0] / 4096)
    assert min(starts) > 0.45 and max(starts) > 0.6


def test_problems_are_the_same_every_time_and_all_different():
    made = [
        long_context.problem(task, length, depth, number, split)
        for task in long_context.TASKS
        for length in (128, 256)
        for depth in (0.0, 1.0)
        for number in range(10)
        for split in long_context.SPLITS
    ]
    again = long_context.problem("needle", 128, 0.0, 0, "train")
    assert made[0] == again
    assert len({problem.prompt for problem in made}) == len(made)


@pytest.mark.parametrize("task", long_context.TASKS)
def test_training_texts_ask_for_all_that_they_hold(task):
    texts = long_context.training_texts((task,), 256)
    asked, held = [], []
    for _ in range(60):
        prompt, completion = next(texts)
        assert 2 + len(prompt) + len(completion) == 256
        questions = completion.split(" ")
        asked.append(len(questions))
        held.append(prompt.count("["))
        for question in questions:
            cut = re.search(r"->|[=:]", question).end()
            assert solve(prompt + question[:cut]) == question[cut:]
        if task in ("needle", "multi_key"):
            assert len(set(questions)) == held[-1]
    many = task in ("needle", "multi_key")
    assert set(asked) == ({6} if many else {1})
    assert set(held) == (set(range(1, 7)) if many else {6} if task == "variables" else {1})


def test_tasks_take_turns():
    texts = long_context.training_texts(("needle", "copy"), 200)
    kinds = ["copy" in next(texts).completion for _ in range(6)]
    assert kinds == [False, True] * 3


def test_depths_of_training_notes_cover_the_text():
    texts = long_context.training_texts(("needle",), 512)
    places = [m.start() for _ in range(50) for m in re.finditer(r"\[", next(texts).prompt)]
    counts, _ = np.histogram(places, 4, (0, 460))
    assert counts.min() > 25


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("haystack", 128, 0.5, 0), "task 'haystack': must be one of needle, multi_key"),
        (("needle", 127, 0.5, 0), "length = 127, depth = 0.5: must be at least 128"),
        (("needle", 128, 1.5, 0), "depth = 1.5: must be at least 128, and in 0 .. 1"),
    ],
)
def test_impossible_problems(arguments, message):
    with pytest.raises(InputError, match=re.escape(message)):
        long_context.problem(*arguments)
