"""The effort sweep: a dial that is known, lines through points, the command line."""

import json
import types

import numpy as np
import pytest

from eval import effort
from eval.tasks import modular_walk
from eval.tasks.verifiable import Problem, open_task
from v41flash.errors import InputError
from v41flash.text.prompt import END_THINK
from v41flash.text.tokenizer import ByteTokenizer


class Walker:
    """Stands in for a generator: walks effort / 5 steps, or answers what it was cut off at."""

    tokenizer = ByteTokenizer()

    def generate(self, prompts, *, max_tokens, seed):
        return [self._answer(self.tokenizer.decode(prompt)) for prompt in prompts]

    def _answer(self, text):
        asked, _, thought = text.partition("<think>")
        steps = int(asked.split("Effort: ")[1].split()[0]) // 5
        words = asked.split("<｜User｜>")[1].split("<｜Assistant｜>")[0].split()
        problem = Problem("", "", (int(words[1]), int(words[3]), ()))
        if thought:
            said = thought.removesuffix(END_THINK).split()[-1]
        else:
            said = END_THINK.join(modular_walk.reasoning(problem, steps))
        tokens = np.append(self.tokenizer.encode(said), self.tokenizer.eos_id)
        return types.SimpleNamespace(tokens=tokens, finish="stop")


@pytest.fixture
def arguments():
    return effort.parse(["--workdir=x", "--efforts=20,100,60,20", "--problems=120"])


def test_a_sweep_measures_the_dial(arguments, tmp_path):
    rows = effort.sweep(Walker(), open_task("modular_walk"), arguments)
    assert [(row["level"], row["effort"]) for row in rows] == [
        (level, b) for level in ("easy", "medium", "hard") for b in (20, 60, 100)
    ]
    for row in rows:
        steps = row["effort"] // 5
        # Steps, their end, the answer, eos.
        assert row["tokens"] == 6 * steps + len(END_THINK) + 5 + 1 and row["finished"] == 1
        for name, walked in (("score", steps), ("halved_score", steps // 2)):
            expected = modular_walk.expected_score(row["level"], walked)
            np.testing.assert_allclose(row[name], expected, atol=0.06)
    for line in effort.fits(rows).values():
        np.testing.assert_allclose(line, (1.2, 14, 1), rtol=1e-9)
    effort.plot({"a": rows, "b": rows}, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 10_000


def test_lines():
    x = np.array([5, 30, 60, 100])
    noise = np.array([1.0, -2.0, 2.5, -1.0])
    line = effort.fit(x, 3 + 2 * x + noise)
    np.testing.assert_allclose(line.r2, np.corrcoef(x, 3 + 2 * x + noise)[0, 1] ** 2)
    assert effort.fit(x, [4, 4, 4, 4]).r2 == 0


def test_first_half():
    assert effort.first_half("01:02 03:04 05:06 07:08 ") == "01:02 03:04 "
    assert effort.first_half("01:02 03:04 05:06 ") == "01:02 "
    assert effort.first_half("abcd") == "ab"


def test_rare_levels_are_refused():
    task = types.SimpleNamespace(
        levels=("a", "b"), problem=lambda split, number: Problem("", "a", None)
    )
    with pytest.raises(InputError, match="level 'b' are too rare"):
        effort.heldout(task, 2)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "--workdir is missing"),
        (["--workdir=x", "--efforts=5,10"], "must be three or more"),
        (["--workdir=x", "--efforts=5,a,9"], "invalid literal"),
        (["--workdir=x", "--efforts=0,5,9"], "must be three or more, 1..100"),
        (["--workdir=x", "y"], "'y' is no flag"),
    ],
)
def test_flags_are_checked(flags, message):
    with pytest.raises(InputError, match=message):
        effort.parse(flags)


def test_the_command_writes_curves_and_fits(monkeypatch, tmp_path, capsys):
    walker = classmethod(lambda cls, workdir, *, options: Walker())
    monkeypatch.setattr(effort.Generator, "from_workdir", walker)
    flags = [f"--workdir={tmp_path}", "--efforts=10,50,90", "--problems=2"]
    assert effort.main(flags) == 0
    assert f"{tmp_path} easy: 1.200 tokens a point, R2 1.0000" in capsys.readouterr().out
    rows = [json.loads(r) for r in (tmp_path / "effort/effort.jsonl").read_text().splitlines()]
    assert len(rows) == 9 and {row["run"] for row in rows} == {str(tmp_path)}
    lines = json.loads((tmp_path / "effort" / "fits.json").read_text())
    np.testing.assert_allclose(lines[str(tmp_path)]["hard"]["slope"], 1.2)
    assert (tmp_path / "effort" / "effort.png").exists()
    assert effort.main([f"--workdir={tmp_path}", "--task=none"]) == 2
