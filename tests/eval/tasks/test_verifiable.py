"""Tasks: problems by number, scores of right, wrong and odd answers, what cannot be opened."""

import json
import types

import numpy as np
import pytest

from eval.tasks import modular_walk
from eval.tasks.asking import Asking
from eval.tasks.verifiable import open_task
from v41flash.errors import InputError
from v41flash.text.tokenizer import ByteTokenizer


@pytest.fixture
def rows(tmp_path):
    path = tmp_path / "rows.jsonl"
    lines = [{"prompt": f"{i} + {i}?", "answer": 2 * i, "level": i % 2} for i in range(60)]
    lines += [{"prompt": f"Say {i}", "answer": f"yes {i}", "level": "word"} for i in range(60)]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    return path


def test_rows_are_split_and_scored(rows):
    task = open_task(f"jsonl:{rows}")
    assert task.levels == ("0", "1", "word")
    splits = {
        split: {task.problem(split, number) for number in range(200)}
        for split in ("train", "heldout")
    }
    assert not splits["train"] & splits["heldout"] and len(set.union(*splits.values())) == 120
    assert 1 <= len(splits["heldout"]) < 40
    number = next(p for p in splits["train"] if p.truth == 1.0 * 2 * 17 or p.level != "word")
    right = number.truth
    for answer in (f"{right}", f"So it is {right:.0f}.", f"1 then {right + 1e-9}", f"{right:,}"):
        assert task.score(number, answer) == 1
    for answer in ("", "none", f"{right} or {right + 1}", f"-{right + 1}"):
        assert task.score(number, answer) == 0
    word = next(p for p in splits["train"] if p.level == "word")
    assert task.score(word, f" {word.truth.upper()}\n") == 1 and task.score(word, "yes") == 0


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "rows.jsonl:1: not JSON"),
        ("[1]", 'must be an object with a text "prompt"'),
        ('{"prompt": "a", "answer": true}', '"answer" = True: must be a text or a number'),
        ('{"prompt": "a", "answer": 1}', "no row falls into the split"),
    ],
)
def test_rows_that_are_none(line, message, tmp_path):
    (tmp_path / "rows.jsonl").write_text(line)
    with pytest.raises(InputError, match=message):
        open_task(f"jsonl:{tmp_path / 'rows.jsonl'}")


def test_unknown_tasks(tmp_path):
    for name in ("walk", "jsonl", "modular_walk:3", "reasoning_gym"):
        with pytest.raises(InputError, match="must be modular_walk, jsonl:FILE"):
            open_task(name)
    with pytest.raises(InputError, match="No such file"):
        open_task(f"jsonl:{tmp_path / 'absent'}")


def test_a_walk_is_right_where_powers_say_so():
    task = open_task("modular_walk")
    for number in range(30):
        problem = task.problem("train", number)
        assert problem == task.problem("train", number) != task.problem("heldout", number)
        assert problem.level == task.levels[number % 3]
        start, multiplier, depths = problem.truth
        thought, answer = modular_walk.reasoning(problem, 19)
        assert len(thought) == 19 * modular_walk.STEP_TEXT
        for step, text in enumerate(thought.split(), 1):
            assert text == f"{step:02d}:{start * multiplier**step % 97:02d}"
        assert task.score(problem, answer) == np.mean(np.array(depths) <= 19)
        wrong = f"19:{(int(answer[3:]) + 1) % 97:02d}"
        for other in (wrong, "", "19", answer + " ", f"x{answer}"):
            assert task.score(problem, other) == (task.score(problem, answer) if
                                                  other.strip() == answer else 0)  # fmt: skip
    # Every multiplier is a primitive root: 96 different values before a walk repeats.
    for multiplier in modular_walk.MULTIPLIERS:
        assert len({pow(multiplier, n, 97) for n in range(96)}) == 96


def test_scores_of_walks_have_the_stated_mean():
    task = open_task("modular_walk")
    problems = [task.problem("train", number) for number in range(3000)]
    for level, scale in modular_walk.SCALES.items():
        own = [problem for problem in problems if problem.level == level]
        for steps in (1, 5, 20):
            scores = [task.score(p, modular_walk.reasoning(p, steps)[1]) for p in own]
            expected = 1 - np.exp(-steps / scale)
            np.testing.assert_allclose(np.mean(scores), expected, atol=0.015)
            np.testing.assert_allclose(modular_walk.expected_score(level, steps), expected)


def test_demonstrations_are_what_is_asked_and_right(tmp_path):
    assert modular_walk.main([f"--out={tmp_path / 'walk.jsonl'}", "--count=200"]) == 0
    tokenizer, task = ByteTokenizer(), open_task("modular_walk")
    asking = Asking(tokenizer)
    lines = (tmp_path / "walk.jsonl").read_text().splitlines()
    efforts, steps = [], []
    for number, row in enumerate(map(json.loads, lines)):
        problem = task.problem("train", number)
        efforts.append(int(row["prompt"].split("Reasoning Effort: ")[1].split()[0]))
        asked = asking.prompt(problem, efforts[-1])
        np.testing.assert_array_equal(asked, [tokenizer.bos_id, *tokenizer.encode(row["prompt"])])
        reply = asking.read([*tokenizer.encode(row["completion"]), tokenizer.eos_id])
        assert task.score(problem, reply.answer) > 0 or min(problem.truth[2]) > len(
            reply.reasoning.split()
        )
        steps.append(len(reply.reasoning.split()))
    assert len(lines) == 200 and {1, 40} >= {min(steps), max(steps)} or max(steps) > 35
    assert abs(np.corrcoef(efforts, steps)[0, 1]) < 0.25
    assert modular_walk.main([]) == 2


def test_replies_without_an_end_have_no_answer():
    tokenizer = ByteTokenizer()
    asking = Asking(tokenizer)
    assert asking.read(tokenizer.encode("17:42")) == ("17:42", "", ())
    cut = asking.interrupted("01:05 ")
    assert asking.read([*cut, *tokenizer.encode("01:05")])[:2] == ("01:05 ", "01:05")


def test_a_dataset_of_reasoning_gym(monkeypatch):
    pytest.importorskip("reasoning_gym")
    task = open_task("reasoning_gym:basic_arithmetic")
    problem = task.problem("train", 3)
    assert problem == task.problem("train", 3)
    assert problem.prompt != task.problem("heldout", 3).prompt
    assert task.score(problem, f" {problem.truth['answer']} ") == 1
    assert task.score(problem, "never") < 1
    with pytest.raises(InputError, match="reasoning_gym:nothing"):
        open_task("reasoning_gym:nothing")


def test_reasoning_gym_may_be_missing(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(InputError, match="needs the package reasoning-gym"):
        open_task("reasoning_gym:basic_arithmetic")
    stand_in = types.SimpleNamespace(
        create_dataset=lambda name, size, seed: Stand(seed), __name__="reasoning_gym"
    )
    monkeypatch.setitem(sys.modules, "reasoning_gym", stand_in)
    task = open_task("reasoning_gym:x")
    problem = task.problem("heldout", 2)
    assert (problem.prompt, problem.level) == ("q1-2", "x")
    assert task.score(problem, " a ") == 0.5


class Stand(dict):
    """A dataset that scores every answer with a half, if it comes stripped and with its entry."""

    def __missing__(self, number):
        return {"question": f"q{self.seed}-{number}", "answer": "a"}

    def __init__(self, seed):
        self.seed = seed

    def score_answer(self, answer, entry):
        return 0.5 if answer == "a" and entry["question"].startswith("q") else 0.0
