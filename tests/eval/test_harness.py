"""Benchmarks end to end on a checkpoint: scores equal to a direct computation."""

import itertools
import json
import math
import types

import jax
import numpy as np
import pytest

from configs import _defaults
from eval import harness, sampled
from eval.scoring import Scored
from eval.tasks.questions import Question
from tests.v41flash.nn import samples
from tests.v41flash.serving.served import CONFIG, Served
from train.settings import to_json
from v41flash.checkpoints.orbax import Checkpoints
from v41flash.errors import InputError
from v41flash.serving.generator import Piece
from v41flash.text import canonical
from v41flash.text.engram_hash import EngramHasher
from v41flash.text.tokenizer import ByteTokenizer

TOKENIZER = ByteTokenizer()
# One length for all: one shape of the training form.
LENGTH = 48
QUESTIONS = (
    ("The sky is", ("blue", "green", "a stone")),
    ("Two and two", ("make four", "make five")),
    ("x", ("y", "zz", "w w")),
)
TEXTS = ("once upon a time", "def main(): pass", "ä ö ü")
_CHOICE = """
task: local_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {path}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
metric_list: [{{metric: acc}}]
"""
_ROLLING = """
task: local_text
dataset_path: json
dataset_kwargs: {{data_files: {{test: {path}}}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list: [{{metric: bits_per_byte}}]
"""
_WRITTEN = """
task: local_written
dataset_path: json
dataset_kwargs: {{data_files: {{test: {path}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{greedy}}}}"
generation_kwargs: {{until: ["\\n\\n\\n"], max_gen_toks: 4}}
metric_list: [{{metric: exact_match}}]
"""


@pytest.fixture(scope="module")
def served():
    return Served.create(CONFIG)


@pytest.fixture(scope="module")
def workdir(tmp_path_factory, served):
    """A run folder."""
    folder = tmp_path_factory.mktemp("run")
    config = _defaults.get_config(CONFIG)
    (folder / "config.json").write_text(json.dumps(to_json(config)))
    with Checkpoints(folder / "checkpoints") as checkpoints:
        checkpoints.save(3, params=served.params, opt_state={"x": np.zeros(1)}, meta={})
    return folder


@pytest.fixture(scope="module")
def generator(workdir):
    """The run's, whose programs all tests share."""
    return harness.Generator.from_workdir(workdir, options=harness.Options(batch_size=2))


@pytest.fixture
def one_generator(generator, monkeypatch):
    """What is asked of the run folder."""
    asked = []

    def from_workdir(workdir, **keywords):
        asked.append(keywords)
        return generator

    monkeypatch.setattr(harness.Generator, "from_workdir", from_workdir)
    return asked


def direct(served, texts):
    """Of texts, log-probabilities of every byte given all before it: the training form."""
    rows = [np.concatenate([[TOKENIZER.bos_id], TOKENIZER.encode(text)]) for text in texts]
    tokens, positions, segments, _ = samples.batch_inputs(CONFIG, rows, LENGTH)
    # Runs hash canonical ids.
    ids = canonical.canonical_map(TOKENIZER)
    hasher = EngramHasher.from_config(CONFIG, int(ids[CONFIG.engram_pad_token_id]))
    inputs = tokens, positions, segments, hasher.rows(ids[tokens], positions)
    logprobs = np.asarray(jax.nn.log_softmax(served._forward(served.params, *inputs)[1]))
    return [logprobs[b, np.arange(len(row) - 1), row[1:]] for b, row in enumerate(rows)]


def write_tasks(folder, served):
    """YAML tasks with their data; returns what their metrics must be."""
    folder.mkdir()
    pairs = [(q, choice) for q, choices in QUESTIONS for choice in choices]
    found = direct(served, [f"{q} {choice}" for q, choice in pairs])
    scores = {pair: row[-len(pair[1]) - 1 :].sum() for pair, row in zip(pairs, found, strict=True)}
    likeliest = [int(np.argmax([scores[q, c] for c in choices])) for q, choices in QUESTIONS]
    # Two right ones and a wrong one.
    answers = [likeliest[0], likeliest[1], (likeliest[2] + 1) % 3]
    choice = [
        {"question": q, "choices": list(choices), "answer": answer}
        for (q, choices), answer in zip(QUESTIONS, answers, strict=True)
    ]
    text = [{"text": text} for text in TEXTS]
    bits = -sum(row.sum() for row in direct(served, TEXTS)) / math.log(2)
    bits /= sum(len(text.encode()) for text in TEXTS)
    for name, rows, yaml in (("choice", choice, _CHOICE), ("text", text, _ROLLING)):
        data = folder / f"{name}.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        (folder / f"{name}.yaml").write_text(yaml.format(path=data))
    return {"acc": 2 / 3, "bits_per_byte": bits}


@pytest.mark.slow
def test_tasks_of_the_harness(
    workdir, generator, one_generator, served, tmp_path, monkeypatch, capsys
):
    pytest.importorskip("lm_eval")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    expected = write_tasks(tmp_path / "tasks", served)
    # What the model writes greedily, as Generator does.
    prompt = "Why is it"
    (written,) = generator.generate([prompt], max_tokens=4, temperature=0.0)
    rows = [{"question": prompt, "greedy": written.text}, {"question": prompt, "greedy": "no"}]
    data = tmp_path / "tasks" / "written.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "tasks" / "written.yaml").write_text(_WRITTEN.format(path=data))
    names = "local_choice,local_text,local_written"
    flags = [f"--workdir={workdir}", f"--tasks={names}", f"--include={tmp_path / 'tasks'}"]
    assert harness.main([*flags, f"--out={tmp_path / 'out'}"]) == 0, capsys.readouterr().err
    found = json.loads((tmp_path / "out" / "results.json").read_text())
    assert found["local_choice"]["acc"] == pytest.approx(expected["acc"])
    # A cached value on a rounding boundary may go either way.
    assert found["local_text"]["bits_per_byte"] == pytest.approx(
        expected["bits_per_byte"], abs=2e-3
    )
    assert found["local_written"]["exact_match"] == 0.5
    assert one_generator == [{"step": None, "options": harness.Options(batch_size=8)}]


def test_what_is_no_run_folder_is_refused(tmp_path, capsys):
    path = tmp_path / "a.jsonl"
    path.write_text('{"problem": "1 + 1?", "answer": 2}\n')
    assert harness.main(["--workdir=/nowhere", f"--tasks=answers:{path}"]) == 2
    assert "/nowhere: must be the folder of a training run" in capsys.readouterr().err


@pytest.mark.slow
def test_a_task_that_the_harness_lacks(capsys):
    pytest.importorskip("lm_eval")
    assert harness.main(["--workdir=/nowhere", "--tasks=no_such_task"]) == 2
    assert "task 'no_such_task': none of lm-evaluation-harness" in capsys.readouterr().err


class _Table:
    """Scores as a function of token and place; every even token is the likeliest."""

    by_place = 0.01

    def score(self, rows):
        self.rows = [np.asarray(row) for row in rows]
        return [
            Scored(-(row[1:] + self.by_place * np.arange(1, len(row))), row[1:] % 2 == 0)
            for row in self.rows
        ]


def _model(positions=64):
    lm_eval_model = pytest.importorskip("eval.lm_eval_model")
    stub = types.SimpleNamespace(
        tokenizer=TOKENIZER,
        config=types.SimpleNamespace(max_position_embeddings=positions),
        programs=types.SimpleNamespace(model=None),
    )
    model = lm_eval_model.CheckpointLM(stub)
    model._scorer = _Table()
    return model


def _requests(*pairs):
    return [types.SimpleNamespace(args=pair) for pair in pairs]


def test_what_is_scored_of_a_pair():
    model = _model()
    found = model.loglikelihood(_requests(("ab", "cd"), ("", "bd"), ("a ", "b")))
    bos = TOKENIZER.bos_id
    ab, cd, bd, a, space_b = (list(TOKENIZER.encode(t)) for t in ("ab", "cd", "bd", "a", " b"))
    rows = [[bos, *ab, *cd], [bos, *bd], [bos, *a, *space_b]]
    assert [row.tolist() for row in model._scorer.rows] == rows
    expected = [-(cd[0] + cd[1] + 0.07), -(bd[0] + bd[1] + 0.03), -(sum(space_b) + 0.05)]
    np.testing.assert_allclose([score for score, _ in found], expected)
    even = [all(t % 2 == 0 for t in tokens) for tokens in (cd, bd, space_b)]
    assert [sure for _, sure in found] == even
    # What is too long loses its beginning.
    model = _model(positions=4)
    model.loglikelihood(_requests(("abcdefgh", "xy")))
    assert model._scorer.rows[0].tolist() == list(TOKENIZER.encode("ghxy"))


def test_rolling_scores_every_token_once():
    for text in ("a", "abcdefgh", "abcdefghijk", "x" * 40):
        model = _model(positions=5)
        model._scorer.by_place = 0.0
        (total,) = model.loglikelihood_rolling(_requests((text,)))
        assert total == -sum(TOKENIZER.encode(text))
        assert model._scorer.rows[0][0] == TOKENIZER.bos_id
        assert max(map(len, model._scorer.rows)) <= 5


def test_generation_settings():
    lm_eval_model = pytest.importorskip("eval.lm_eval_model")
    settings = lm_eval_model._settings({"until": ["\n", ""], "max_gen_toks": 7})
    assert settings == {
        "max_tokens": 7, "temperature": 0.0, "top_p": 1.0, "top_k": 0, "stop": ("\n",)
    }  # fmt: skip
    sampled_settings = lm_eval_model._settings({"until": "x", "temperature": 0.5})
    assert sampled_settings["temperature"] == 0.5 and sampled_settings["stop"] == ("x",)
    assert lm_eval_model._settings({"temperature": 0.5, "do_sample": False})["temperature"] == 0.0
    with pytest.raises(InputError, match="generation_kwargs: 'beams'"):
        lm_eval_model._settings({"beams": 3})


@pytest.mark.slow
def test_sampled_tasks(workdir, one_generator, tmp_path, capsys):
    """Files of every kind, through sampling, at two efforts and at none."""
    choices = tmp_path / "c.jsonl"
    choices.write_text('{"question": "Which?", "choices": ["a", "b"], "answer": 0, "rating": 9}\n')
    programs = tmp_path / "p.jsonl"
    row = {"prompt": "Print 1.", "tests": [{"input": "", "output": "1"}]}
    programs.write_text(json.dumps(row) + "\n")
    tasks = f"choices:{choices},code:{programs}"
    flags = [f"--workdir={workdir}", f"--tasks={tasks}", "--samples=2", "--max_tokens=3"]
    out, numbers = tmp_path / "out", tmp_path / "n.json"
    assert harness.main([*flags, "--efforts=50,max", f"--out={out}", f"--json={numbers}"]) == 0
    found = json.loads(numbers.read_text())
    assert set(found[f"choices:{choices}"]) == {"effort_50", "effort_100"}
    figures = found[f"choices:{choices}"]["effort_50"]
    # Three tokens are too few to end reasoning: no answer, nothing solved.
    assert figures["score"] == 0 and figures["pass@2"] == 0 and figures["rating"] == -math.inf
    assert found[f"code:{programs}"]["effort_100"]["isolation"] in ("namespaces", "limits alone")
    rows = [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]
    assert len(rows) == 8 and {row["effort"] for row in rows} == {50, 100}
    assert harness.main([*flags, f"--out={out}"]) == 0
    assert json.loads((out / "results.json").read_text())[f"code:{programs}"]["samples"] == 2


def test_answers_are_put_together_from_their_pieces():
    told = []

    def stream(prompts, **settings):
        # Two at a time, the second of them done first.
        for first in range(0, len(prompts), 2):
            for number in (first + 1, first):
                yield Piece(number, prompts[number][0], np.array([1, 2]), np.zeros(2), None)
                yield Piece(number, prompts[number][1], np.array([3]), np.zeros(1), "stop")

    model = types.SimpleNamespace(stream=stream, tokenizer=TOKENIZER)
    task = types.SimpleNamespace(stop=(), score=lambda question, answer: float(answer == "xb"))
    questions = [Question(name, name, None) for name in ("xa", "xb", "xc")]
    how = sampled.Manner(2, 8, 1.0, 1.0, 7, chat=False)
    rows = sampled.ask(model, task, questions, None, how, lambda *numbers: told.append(numbers))
    assert told == [(done, 6) for done in range(1, 7)]
    assert {(row["tokens"], row["finished"]) for row in rows} == {(3, True)}
    assert [(row["id"], row["sample"], row["score"]) for row in rows] == [
        (name, number, float(name == "xb")) for name in ("xa", "xb", "xc") for number in (0, 1)
    ]


def test_figures():
    asked = [Question("a", "?", "x", 1000.0), Question("b", "?", "y", 2000.0)]
    scores = [1, 0, 1, 0, 0, 0, 0, 0]
    rows = [{"score": float(s), "tokens": 2 + s, "finished": s == 1} for s in scores]
    found = sampled.summary(asked, rows, 4)
    assert found["score"] == 0.25 and found["pass@1"] == 0.25 and found["pass@4"] == 0.5
    # Of two of four answers, neither is right with chance 1/6.
    assert found["pass@2"] == pytest.approx((1 - 1 / 6) / 2)
    assert found["standard_error"] == pytest.approx(0.25)
    assert found["tokens"] == 2.25 and found["finished"] == 0.25
    assert 900 < found["rating"] < 1700


def test_pass_at_k_is_unbiased():
    """Against the chance of drawing a right answer, counted over all subsets."""
    for n, c in ((5, 0), (5, 2), (6, 6)):
        right = [True] * c + [False] * (n - c)
        for k in range(1, n + 1):
            subsets = list(itertools.combinations(right, k))
            assert sampled.pass_at(k, n, c) == pytest.approx(np.mean([any(s) for s in subsets]))
    with pytest.raises(ValueError):
        sampled.pass_at(3, 2, 1)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "--workdir is missing"),
        (["--workdir=x"], "--tasks is missing"),
        (["--workdir=x", "--tasks=nothing:x"], "task 'nothing:x': must be humaneval or choices:"),
        (["--workdir=x", "--tasks=choices:/nowhere.csv"], "/nowhere.csv: "),
        (["--workdir=x", "--tasks=arc:x"], "arc:x: must be arc:train or arc:eval"),
        (["--workdir=x", "--tasks=humaneval", "--efforts=101"], "101"),
        (["--workdir=x", "--tasks=humaneval", "--samples=0"], "samples"),
        (["--workdir=x", "--tasks=x", "y"], "'y' is no flag"),
    ],
)
def test_wrong_flags_end_in_one_line(flags, message, capsys):
    assert harness.main(flags) == 2
    error = capsys.readouterr().err
    assert message in error and len(error.splitlines()) == 1
