"""Continuous batching: every request gets what it gets alone."""

import queue
import threading

import numpy as np
import pytest

from tests.v41flash.serving.served import CONFIG, Served
from v41flash.errors import InputError
from v41flash.serving import Generator, Options
from v41flash.serving.engine import MAX_TOP, Busy, Engine, Request, Stopped
from v41flash.text.tokenizer import ByteTokenizer

TOKENIZER = ByteTokenizer()
CONTEXT, SLOTS, STEPS = 96, 3, 4


@pytest.fixture(scope="module")
def generator():
    served = Served.create(CONFIG)
    options = Options(batch_size=SLOTS, chunk=8, steps=STEPS, exact=True)
    token_map = np.arange(TOKENIZER.vocab_size)
    generator = Generator(CONFIG, served.params, TOKENIZER, token_map=token_map, options=options)
    generator.programs = served.programs
    return generator


@pytest.fixture
def engine(generator):
    with Engine(generator, context=CONTEXT, waiting=32) as engine:
        yield engine


class Listener:
    """Collects what is told of one request."""

    def __init__(self):
        self.news = queue.Queue()

    def __call__(self, progress):
        self.news.put(progress)

    def all(self):
        """Everything up to the last news."""
        got = [self.news.get(timeout=300)]
        while got[-1].finish is None and got[-1].error is None:
            got.append(self.news.get(timeout=300))
        assert self.news.empty()
        return got


def request(generator, number, **settings):
    prompt = generator.encode("ab" * (number % 7) + "c" * number)
    settings = {"max_tokens": 3 + number % 9, "seed": number, "temperature": 0.9} | settings
    return Request(prompt=prompt, **settings)


def text_of(news):
    return "".join(progress.text for progress in news)


def tokens_of(news):
    return np.concatenate([progress.tokens for progress in news])


def test_each_gets_what_it_gets_alone(generator, engine):
    requests = [request(generator, number) for number in range(11)]
    listeners = [Listener() for _ in requests]
    for one, listener in zip(requests, listeners, strict=True):
        engine.submit(one, listener)
    for one, listener in zip(requests, listeners, strict=True):
        news = listener.all()
        (alone,) = generator.generate(
            [one.prompt], max_tokens=one.max_tokens, seed=one.seed, temperature=one.temperature
        )
        np.testing.assert_array_equal(tokens_of(news), alone.tokens)
        logprobs = np.concatenate([progress.logprobs for progress in news])
        np.testing.assert_allclose(logprobs, alone.logprobs, atol=1e-2)
        assert text_of(news) == alone.text
        assert news[-1].finish == alone.finish
    counts = engine.counts
    assert (counts.admitted, counts.finished, counts.peak) == (11, 11, SLOTS)
    assert engine.load == (0, 0)


@pytest.mark.slow
def test_likeliest_tokens(generator, engine):
    listener = Listener()
    engine.submit(request(generator, 4, top=5, temperature=0.0), listener)
    for progress in listener.all():
        assert progress.top_tokens.shape == (len(progress.tokens), 5)
        # Greedy: the token itself is the likeliest.
        np.testing.assert_array_equal(progress.top_tokens[:, 0], progress.tokens)
        np.testing.assert_allclose(progress.top_logprobs[:, 0], progress.logprobs, rtol=1e-5)
        assert np.all(np.diff(progress.top_logprobs, axis=1) <= 0)


def test_stop_texts(generator, engine):
    plain = Listener()
    engine.submit(request(generator, 5, max_tokens=12), plain)
    whole = text_of(plain.all())
    stop = whole[3:5]
    listener = Listener()
    engine.submit(request(generator, 5, max_tokens=12, stop=(stop,)), listener)
    news = listener.all()
    assert text_of(news) == whole[: whole.index(stop)]
    assert news[-1].finish == "stop"


def test_cancelling_frees_the_slot(generator, engine):
    started, release = threading.Event(), threading.Event()

    def blocking(progress):
        started.set()
        release.wait(300)

    running = engine.submit(request(generator, 1, max_tokens=80), blocking)
    started.wait(300)
    waiting = Listener()
    ticket = engine.submit(request(generator, 2), waiting)
    engine.cancel(running)
    engine.cancel(ticket)
    release.set()
    after = Listener()
    engine.submit(request(generator, 3), after)
    after.all()
    assert waiting.news.empty()
    assert engine.counts.cancelled == 2
    assert engine.counts.finished == 1


def test_too_many_wait(generator):
    with Engine(generator, context=CONTEXT, waiting=1) as engine:
        started, release = threading.Event(), threading.Event()

        def blocking(progress):
            started.set()
            release.wait(300)

        engine.submit(request(generator, 1), blocking)
        started.wait(300)
        engine.submit(request(generator, 1), Listener())
        with pytest.raises(Busy, match="1 of at most 1 requests"):
            engine.submit(request(generator, 1), Listener())
        release.set()


def test_closing_tells_those_under_way(generator):
    engine = Engine(generator, context=CONTEXT)
    listener = Listener()
    engine.submit(request(generator, 1, max_tokens=90), listener)
    listener.news.get(timeout=300)
    engine.close()
    news = listener.all()
    assert isinstance(news[-1].error, Stopped)
    with pytest.raises(Stopped):
        engine.submit(request(generator, 1), Listener())


def test_faults(generator, engine, monkeypatch):
    """A fault is told, the next request is served; an engine that only fails stops."""
    from v41flash.serving import engine as module

    def broken(*arguments, **keywords):
        raise RuntimeError("device lost")

    with monkeypatch.context() as patch:
        patch.setattr(module, "prefill", broken)
        listener = Listener()
        engine.submit(request(generator, 1), listener)
        assert "device lost" in str(listener.all()[-1].error)
    listener = Listener()
    engine.submit(request(generator, 1), listener)
    assert listener.all()[-1].finish is not None

    monkeypatch.setattr(module, "prefill", broken)
    for _ in range(module.MAX_FAULTS):
        listener = Listener()
        engine.submit(request(generator, 1), listener)
        listener.all()
    engine.close()
    assert engine.stopped and engine.failed
    with pytest.raises(Stopped):
        engine.submit(request(generator, 1), Listener())


def test_listeners_that_fail_are_given_up(generator, engine):
    def broken(progress):
        raise RuntimeError("no ears")

    engine.submit(request(generator, 1, max_tokens=40), broken)
    listener = Listener()
    engine.submit(request(generator, 2), listener)
    assert listener.all()[-1].finish is not None
    assert not engine.failed


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(max_tokens=0), "max_tokens = 0"),
        (dict(max_tokens=CONTEXT), "exceed the context of 96"),
        (dict(temperature=-1.0), "temperature = -1.0"),
        (dict(temperature=float("nan")), "temperature = nan"),
        (dict(top_p=0.0), "top_p = 0.0"),
        (dict(seed=-1), "seed = -1"),
        (dict(stop=("",)), "empty text"),
        (dict(top=MAX_TOP + 1), "top = 21"),
    ],
)
def test_refused(generator, engine, settings, message):
    with pytest.raises(InputError, match=message):
        engine.submit(request(generator, 1, **settings), Listener())


def test_refused_prompts(generator, engine):
    for prompt in (np.zeros(0, np.int32), np.array([CONFIG.vocab_size], np.int32)):
        with pytest.raises(InputError, match="prompt"):
            engine.submit(Request(prompt=prompt, max_tokens=1), Listener())


@pytest.mark.parametrize("settings", [dict(context=1), dict(context=10**9), dict(waiting=0)])
def test_refused_engines(generator, settings):
    with pytest.raises(InputError):
        Engine(generator, **settings)
