"""Long-context evaluation: recall of selections, the program's cells and plots, its flags."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from eval import long_context
from eval.selection import Selection, Wanted, chance
from eval.tasks import long_context as tasks
from tests import reference_np
from tests.v41flash.nn import samples
from v41flash.kernels import Kernels
from v41flash.serving.run import Run
from v41flash.text.tokenizer import ByteTokenizer

CONFIG = samples.three_layers(
    vocab_size=260,
    image_token_id=259,
    engram_compressed_vocab_size=260,
    max_position_embeddings=512,
    index_topk=5,
    **samples.NO_ROUNDING,
)
TOKENIZER = ByteTokenizer()


@pytest.fixture(scope="module")
def weights():
    return samples.random_weights(CONFIG, seed=1)


@pytest.fixture(scope="module")
def run(weights):
    params = samples.params_of(CONFIG, weights)
    return Run(CONFIG, Kernels(), params, TOKENIZER, np.arange(TOKENIZER.vocab_size), step=3)


def test_recall_is_that_of_the_references_selections(run, weights):
    rng = np.random.default_rng(2)
    wide = {name: value.astype(np.float64) for name, value in weights.items()}
    wanted, expected = [], {layer: [] for layer in (0, 1, 2)}
    for length in (26, 31, 32):
        tokens = rng.integers(3, 250, length)
        queries = np.arange(10, length)
        needed = rng.integers(0, queries - 1)
        wanted.append(Wanted(tokens, queries, needed))
        rows = samples.hasher(CONFIG).rows(tokens[None], np.arange(length)[None])[0]
        trace = reference_np.forward(tokens, rows, wide, CONFIG)
        assert trace.margin > 1e-6, "choose another seed: a decision hangs on rounding errors"
        for layer, chosen in trace.selections.items():
            expected[layer].append(chosen[queries, needed // CONFIG.layers[layer].ratio])
    found = Selection(run).recall(wanted)
    assert set(found) == {0, 1, 2}
    for layer, hits in found.items():
        np.testing.assert_array_equal(hits, np.concatenate(expected[layer]))
        assert 0 < hits.mean() < 1


def test_layers_of_scanned_groups_are_told_apart():
    config = samples.scanned(**samples.NO_ROUNDING)
    params = samples.params_of(config, samples.random_weights(config, seed=3))
    run = Run(config, Kernels(), params, TOKENIZER, np.arange(TOKENIZER.vocab_size), step=0)
    row = np.zeros((1, 40), np.int32)
    rows = np.zeros((1, 40, 1, config.engram_rows_per_token), np.int32)
    shapes = jax.eval_shape(Selection(run)._select, params, row, row, row, rows)
    assert list(shapes) == list(config.index_source_layer_ids)
    assert {shape.shape for shape in shapes.values()} == {(1, 40, config.index_topk)}


def test_chance_is_what_a_blind_selection_finds():
    queries = np.array([3, 9, 19])
    assert chance(CONFIG, queries, 1) == pytest.approx((1 + 5 / 10 + 5 / 20) / 3)
    assert chance(CONFIG, queries, 2) == pytest.approx((1 + 1 + 5 / 10) / 3)


class _Generator:
    tokenizer = TOKENIZER

    def encode(self, text):
        return np.concatenate([[TOKENIZER.bos_id], TOKENIZER.encode(text)])


@pytest.mark.parametrize("task", tasks.TASKS)
def test_what_a_query_needs_is_what_it_has_to_write(task):
    problem = tasks.problem(task, 300, 0.4, 7)
    wanted = long_context.wanted(_Generator(), problem)
    whole = _Generator().encode(problem.prompt + problem.answer[:-1])
    np.testing.assert_array_equal(whole[wanted.queries + 1], whole[wanted.needed])
    assert TOKENIZER.decode(whole[wanted.needed]) == problem.answer[:-1]
    np.testing.assert_array_equal(whole[:-1], wanted.tokens)


def test_cells_and_plot(run, tmp_path, monkeypatch, capsys):
    """A model that knows all answers, and the selections of one that knows nothing."""
    flags = ["--workdir=x", "--lengths=128,160", "--depths=0,1", "--count=3", "--selection=1"]
    arguments = long_context.parse([*flags, f"--out={tmp_path}", "--tasks=needle,copy"])
    evaluation = long_context.Evaluation(run, arguments)
    asked = []

    def generate(prompts, max_tokens, temperature):
        asked.extend(prompts)
        assert temperature == 0
        known = {
            problem.prompt: problem.answer
            for length in (128, 160)
            for depth in (0.0, 1.0)
            for task in ("needle", "copy")
            for problem in (tasks.problem(task, length, depth, n) for n in range(3))
        }
        # At depth 1 of the longer ones it is wrong once in three.
        texts = [known[prompt] for prompt in prompts]
        if len(prompts[0]) > 140 and prompts[0][0] != "[":
            texts[0] = "no"
        assert max_tokens >= max(map(len, texts))
        return [dataclasses.make_dataclass("R", ["text"])(text) for text in texts]

    monkeypatch.setattr(evaluation._generator, "generate", generate)
    numbers = evaluation.task("needle", [128, 160])
    assert numbers["accuracy"]["128"] == {"all": 1.0, "0": 1.0, "1": 1.0}
    assert numbers["accuracy"]["160"]["1"] == pytest.approx(2 / 3)
    assert numbers["accuracy"]["160"]["all"] == pytest.approx(5 / 6)
    assert len(asked) == 12
    recall = numbers["recall"]["160"]
    assert set(recall) == {"layer_0", "layer_1", "layer_2", "chance"}
    assert 0 <= recall["layer_1"] <= 1
    long_context.plot("needle", numbers, tmp_path / "plots")
    assert (tmp_path / "plots" / "needle.png").read_bytes()[:4] == b"\x89PNG"
    assert "needle 160: 0.833 by depth 0: 1.00 1: 0.67" in capsys.readouterr().out


def test_default_lengths_stretch_the_training_length(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"data": {"sequence_length": 256}}))
    assert long_context.default_lengths(tmp_path, 2**20) == (256, 1024, 4096, 16384)
    assert long_context.default_lengths(tmp_path, 5000) == (256, 1024, 4096, 5000)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "--workdir is missing"),
        (["--workdir=x", "--tasks=hay"], "task 'hay': must be one of"),
        (["--workdir=x", "--lengths=12"], "length = 12"),
        (["--workdir=x", "--lengths=a"], "invalid literal"),
        (["--workdir=x", "--depths=2"], "depth = 2.0"),
        (["--workdir=x", "--depths="], "--depths is empty"),
        (["--workdir=x", "--count=0"], "count"),
        (["--workdir=x", "y"], "'y' is no flag"),
        (["--workdir=/nowhere"], "/nowhere: must be the folder of a training run"),
    ],
)
def test_wrong_flags_end_in_one_line(flags, message, capsys):
    assert long_context.main(flags) == 2
    error = capsys.readouterr().err
    assert message in error and len(error.splitlines()) == 1
