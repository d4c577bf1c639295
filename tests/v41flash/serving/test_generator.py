"""Generator: results against the training form, stops, settings, and run folders."""

import json

import jax
import numpy as np
import pytest

from configs import _defaults
from tests.v41flash.serving.served import CONFIG, PREFIXES, Served
from train.settings import to_json
from v41flash.checkpoints.orbax import Checkpoints
from v41flash.errors import InputError
from v41flash.serving import Generator, Options
from v41flash.serving.run import Run
from v41flash.text.tokenizer import ByteTokenizer

TOKENIZER = ByteTokenizer()
NEW = 8
# Stops of the shapes that are compiled already, of texts that do not come.
NO_STOP = dict(stop=("\x01\x01", "\x02\x02\x02"), stop_tokens=(0,))


@pytest.fixture(scope="module")
def served():
    return Served.create(CONFIG)


@pytest.fixture(scope="module")
def generator(served):
    options = Options(batch_size=PREFIXES, chunk=3, steps=NEW, exact=True)
    token_map = np.arange(TOKENIZER.vocab_size)
    generator = Generator(CONFIG, served.params, TOKENIZER, token_map=token_map, options=options)
    generator.programs = served.programs
    return generator


def prompts():
    return ["x" * n for n in range(PREFIXES)]


def test_results(generator, served):
    results = generator.generate(prompts(), max_tokens=NEW, temperature=0.8, seed=5, **NO_STOP)
    documents = [
        np.concatenate([generator.encode(prompt), result.tokens])
        for prompt, result in zip(prompts(), results, strict=True)
    ]
    truth = served.truth(documents, PREFIXES + NEW)
    allowed = (np.arange(260) < 259) & ~np.isin(np.arange(260), [0, 2])
    np.testing.assert_array_equal(generator.allowed, allowed)
    for b, result in enumerate(results):
        assert result.prompt_tokens == b + 1
        ended = result.tokens[-1] == TOKENIZER.eos_id
        assert result.finish == ("stop" if ended else "length")
        assert ended or len(result.tokens) == NEW
        assert result.text == TOKENIZER.decode(result.tokens)
        logits = np.where(allowed, truth[b, b : b + len(result.tokens)], -np.inf)
        own = np.asarray(jax.nn.log_softmax(logits))[np.arange(len(result.tokens)), result.tokens]
        # A cached value on a rounding boundary may go either way, and moves logits by so much.
        np.testing.assert_allclose(result.logprobs, own, atol=1e-2)
    statistics = generator.statistics
    assert statistics.prompt_tokens >= sum(r.prompt_tokens for r in results)
    assert statistics.cache_bytes == PREFIXES * 128 * statistics.cache_bytes_per_token


def test_pieces_and_stop_texts(generator):
    whole = generator.generate(prompts(), max_tokens=NEW, temperature=1, seed=5, **NO_STOP)
    pairs = (r.tokens[2:4] for r in whole if len(r.tokens) > 4)
    stop = TOKENIZER.decode(next(p for p in pairs if 3 <= p.min() and p.max() < 3 + 128))
    settings = dict(max_tokens=NEW, temperature=1, seed=5, stop=(stop, "\x02\x02\x02"))
    results = generator.generate(prompts(), stop_tokens=(0,), **settings)
    stopped = 0
    for before, after in zip(whole, results, strict=True):
        if stop in before.text:
            stopped += 1
            assert after.text == before.text[: before.text.index(stop)]
            assert after.finish == "stop"
            assert TOKENIZER.decode(after.tokens).endswith(stop)
        else:
            assert after.text == before.text and after.finish == before.finish
        np.testing.assert_array_equal(after.tokens, before.tokens[: len(after.tokens)])
        assert len(after.tokens) == len(after.logprobs)
    assert stopped


@pytest.mark.slow
def test_results_do_not_depend_on_how_the_work_is_cut(served):
    token_map = np.arange(TOKENIZER.vocab_size)
    texts = ["", "def f(x):\n", "a" * 140, "import os", "é"]
    expected = None
    for options in (Options(), Options(batch_size=2, chunk=7, steps=5), Options(batch_size=1)):
        generator = Generator(
            CONFIG, served.params, TOKENIZER, token_map=token_map, options=options
        )
        results = generator.generate(texts, max_tokens=20, seed=9, top_p=0.9, stop=["ab"])
        found = [(r.text, r.tokens.tolist(), r.finish) for r in results]
        expected = expected or found
        assert found == expected


@pytest.mark.parametrize(
    ("prompts", "settings", "message"),
    [
        (["a"], dict(max_tokens=0), "max_tokens = 0"),
        (["a"], dict(temperature=-1), "temperature = -1"),
        (["a"], dict(stop=["", "b"]), "stop: an empty text"),
        ([[]], {}, "prompt 0: must be at least one token"),
        (["a", [5, 260]], {}, r"prompt 1: token ids 5..260 leave the vocabulary of 260"),
        ("a text", dict(), "a text alone is no list"),
        (["a" * 200], dict(max_tokens=80), "prompt 0: 201 tokens and max_tokens = 80 exceed the"),
    ],
)
def test_refuses(generator, prompts, settings, message):
    with pytest.raises(InputError, match=message):
        generator.generate(prompts, **settings)


def test_options_refuse():
    with pytest.raises(InputError, match="steps = 0: must be at least 1"):
        Options(steps=0)


@pytest.fixture(scope="module")
def workdir(tmp_path_factory, served):
    """A run folder with checkpoints of steps 3 and 8, random weights in it."""
    folder = tmp_path_factory.mktemp("run")
    config = _defaults.get_config(CONFIG)
    config.train.indexer_warmup_steps = 4
    config.train.stages = ((6, {"model.use_candidate_pool": False, "data.batch_size": 2}),)
    (folder / "config.json").write_text(json.dumps(to_json(config)))
    with Checkpoints(folder / "checkpoints") as checkpoints:
        for step in (3, 8):
            checkpoints.save(step, params=served.params, opt_state={"x": np.zeros(1)}, meta={})
    return folder


def test_a_run_folder_is_read(workdir, served):
    run = Run.load(workdir)
    assert run.step == 8 and not run.config.use_candidate_pool and not run.config.dense_selection
    assert run.tokenizer.name == "byte" and run.token_map.shape == (259,)
    jax.tree.map(np.testing.assert_array_equal, run.params, served.params)
    first = Run.load(workdir, 3)
    assert first.config.use_candidate_pool and first.config.dense_selection


def test_another_tokenizer_than_the_checkpoints_is_refused(workdir, served, tmp_path):
    (tmp_path / "config.json").write_bytes((workdir / "config.json").read_bytes())
    with Checkpoints(tmp_path / "checkpoints") as checkpoints:
        for step, name in ((7, TOKENIZER.fingerprint), (8, "another")):
            meta = {"tokenizer": name}
            checkpoints.save(step, params=served.params, opt_state={"x": np.zeros(1)}, meta=meta)
    assert Run.load(tmp_path, 7).step == 7
    with pytest.raises(InputError, match="tokenizer 'byte': not the one that checkpoint 8 of .*"):
        Run.load(tmp_path)


def test_what_is_no_run_folder_is_refused(workdir, tmp_path):
    with pytest.raises(InputError, match="must be the folder of a training run"):
        Run.load(tmp_path)
    with pytest.raises(InputError, match=r"checkpoint 5: .* has 3, 8"):
        Run.load(workdir, 5)
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(InputError, match="config.json: not JSON"):
        Run.load(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(InputError, match="holds no checkpoint yet"):
        Run.load(tmp_path)
