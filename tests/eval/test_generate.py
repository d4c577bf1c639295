"""The command line of generation."""

import io

import numpy as np
import pytest

from eval import generate
from v41flash.serving import Piece, Statistics
from v41flash.text.tokenizer import ByteTokenizer


class Recorder:
    """Stands in for a generator: answers "ok", and keeps what it was asked."""

    def __init__(self):
        self.tokenizer, self.statistics, self.asked = ByteTokenizer(), Statistics(), []

    def stream(self, prompts, **settings):
        self.asked.append((prompts[0], settings))
        for text, finish in (("o", None), ("k", "stop")):
            yield Piece(0, text, np.zeros(1, int), np.zeros(1), finish)


@pytest.fixture
def recorder(monkeypatch):
    recorder = Recorder()
    monkeypatch.setattr(
        generate.Generator, "from_workdir", classmethod(lambda cls, *_, **__: recorder)
    )
    return recorder


def spoken(recorder, prompt):
    return recorder.tokenizer.decode(prompt)


def test_a_prompt_is_continued_as_it_stands(recorder, capsys):
    flags = ["--workdir=x", "--prompt=def f(", "--temperature=0.5", "--seed=3", "--stop=a"]
    assert generate.main(flags) == 0
    captured = capsys.readouterr()
    assert captured.out == "ok\n"
    first, last = captured.err.splitlines()
    assert "compiled" in first and "tokens/s" in last
    prompt, settings = recorder.asked[0]
    assert prompt == "def f("
    expected = dict(max_tokens=256, temperature=0.5, top_p=1.0, top_k=0, seed=3, stop=["a"])
    assert settings == expected


def test_effort_makes_it_a_message(recorder, capsys):
    assert generate.main(["--workdir=x", "--prompt=Why?", "--effort=low"]) == 0
    text = spoken(recorder, recorder.asked[0][0])
    assert "Reasoning Effort: 50" in text and text.endswith("<｜Assistant｜><think>")
    assert generate.main(["--workdir=x", "--prompt=Why?", "--chat"]) == 0
    text = spoken(recorder, recorder.asked[1][0])
    assert "Effort" not in text and text.endswith("Why?<｜Assistant｜></think>")
    capsys.readouterr()


def test_lines_are_a_conversation(recorder):
    out = io.StringIO()
    arguments = generate.parse(["--workdir=x", "--system=Be brief."])
    generate.run(arguments, ["one\n", "\n", "two\n"], out)
    assert out.getvalue() == "ok\nok\n"
    assert len(recorder.asked) == 2
    text = spoken(recorder, recorder.asked[1][0])
    assert "Be brief." in text and text.index("one") < text.index("ok") < text.index("two")


def test_a_prompt_file(recorder, tmp_path, capsys):
    file = tmp_path / "prompt"
    file.write_text("from a file\n")
    assert generate.main(["--workdir=x", f"--prompt_file={file}"]) == 0
    assert recorder.asked[0][0] == "from a file\n"
    assert generate.main(["--workdir=x", f"--prompt_file={tmp_path / 'none'}"]) == 2
    assert "none" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "--workdir is missing"),
        (["--workdir=x", "--promt=a"], "promt"),
        (["--workdir=x", "a"], "'a' is no flag"),
        (["--workdir=x", "--prompt=a", "--prompt_file=b"], "exclude each other"),
        (["--workdir=x", "--prompt=a", "--effort=101"], "reasoning effort 101"),
        (["--workdir=x", "--prompt=a", "--effort=much"], "reasoning effort 'much'"),
        (["--workdir=x", "--prompt=a", "--seed=x"], "seed"),
        (["--workdir=x", "--prompt=a", "--chunk=0"], "chunk = 0"),
        (["--workdir=x", "--store=y", "--store_gb=nan"], "--store_gb=nan: must be a number"),
        (["--workdir=x", "--store=/dev/null/x"], "store /dev/null/x: must be a folder to write to"),
        (["--workdir=x", "--store=y", "--store_gb=0"], "--store_gb=0: a store needs room"),
        (["--workdir=x", "--host_gb=1"], "--host_gb without --store"),
        (["--workdir=/nowhere", "--prompt=a"], "/nowhere: must be the folder of a training run"),
    ],
)
def test_wrong_flags_end_in_one_line(flags, message, capsys):
    assert generate.main(flags) == 2
    error = capsys.readouterr().err
    assert message in error and len(error.splitlines()) == 1
