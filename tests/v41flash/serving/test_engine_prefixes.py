"""The engine with a prefix store: shared pages on the device, pages from the disk."""

import numpy as np
import pytest

from tests.v41flash.serving import test_engine
from tests.v41flash.serving.served import CONFIG, Served
from tests.v41flash.serving.test_engine import Listener
from v41flash.cache import PAGE_TOKENS
from v41flash.serving import Generator, Options, PrefixStore
from v41flash.serving.engine import Engine, Request
from v41flash.serving.prefixes import Prefixes

pytestmark = pytest.mark.slow
W = CONFIG.sliding_window
COMMON = np.concatenate([[0], 3 + np.arange(139) * 7 % 256]).astype(np.int32)


def new_generator(folder, exact=True):
    """With nothing but the folder, and the compiled programs, in common with others."""
    served = Served.create(CONFIG)
    options = Options(batch_size=3, chunk=8, steps=4, exact=exact)
    generator = Generator(
        CONFIG, served.params, test_engine.TOKENIZER, token_map=np.arange(259), options=options
    )
    generator.programs = served.programs
    if folder is not None:
        generator.prefixes = Prefixes(
            served.programs, served.weights, PrefixStore.open(folder), served.params,
            np.arange(259), exact=exact,
        )  # fmt: skip
    return generator


def requests():
    """Three that begin alike, and one that does not."""
    ends = [np.full(3 + n, 40 + n) for n in range(3)]
    prompts = [np.concatenate([COMMON, end]).astype(np.int32) for end in ends]
    prompts.append(prompts[0][::-1].copy())
    return [
        Request(prompt=prompt, max_tokens=20, seed=n, temperature=0.7)
        for n, prompt in enumerate(prompts)
    ]


def serve(engine, asked):
    listeners = [Listener() for _ in asked]
    for one, listener in zip(asked, listeners, strict=True):
        engine.submit(one, listener)
    return [
        (test_engine.tokens_of(news), np.concatenate([p.logprobs for p in news]))
        for news in (listener.all() for listener in listeners)
    ]


def test_each_gets_what_it_gets_alone_for_less(tmp_path):
    alone = [
        new_generator(None).generate(
            [one.prompt], max_tokens=one.max_tokens, seed=one.seed, temperature=one.temperature
        )[0]
        for one in requests()
    ]

    def check(results):
        for (tokens, logprobs), expected in zip(results, alone, strict=True):
            np.testing.assert_array_equal(tokens, expected.tokens)
            np.testing.assert_allclose(logprobs, expected.logprobs, atol=1e-2)

    replay = CONFIG.num_hidden_layers * W
    total = sum(len(one.prompt) for one in requests())
    with Engine(new_generator(tmp_path), context=200) as engine:
        check(serve(engine, requests()))
        counts, disk = engine.counts, engine._prefixes.store.disk.counts
        # The first one made the page, the two others found it on the device.
        assert (counts.cached_tokens, counts.replayed_tokens) == (2 * PAGE_TOKENS, 2 * replay)
        assert counts.prompt_tokens == total - 2 * (PAGE_TOKENS - replay)
        assert (disk.written, disk.hits) == (2, 0)
        check(serve(engine, requests()))
        assert counts.cached_tokens == 6 * PAGE_TOKENS and disk.hits == 0
        # Nothing runs any more: all pages can be had.
        assert engine._pages.available == engine._state.cache.num_pages
    # Another process.
    with Engine(new_generator(tmp_path), context=200) as engine:
        check(serve(engine, requests()))
        assert engine.counts.cached_tokens == 4 * PAGE_TOKENS
        disk = engine._prefixes.store.disk.counts
        assert (disk.written, disk.hits) == (0, 2)


def test_window_rows_from_the_host(tmp_path):
    """Without the exact mode: what was said a moment ago is not gone over again."""
    first, other = requests()[:2]
    with Engine(new_generator(tmp_path, exact=False), context=250) as engine:
        ((tokens, _),) = serve(engine, [first])
        more = np.concatenate([first.prompt, tokens, np.full(5, 77)]).astype(np.int32)
        again = Request(prompt=more, max_tokens=8, temperature=0.0)
        before = engine.counts.prompt_tokens
        ((found, _),) = serve(engine, [again])
        assert engine.counts.prompt_tokens - before == 5 + 1
        assert engine.counts.replayed_tokens == 0
    (alone,) = new_generator(None, exact=False).generate([more], max_tokens=8, temperature=0.0)
    np.testing.assert_array_equal(found, alone.tokens)


def test_cancelled_and_failed_requests_give_their_pages_back(tmp_path, monkeypatch):
    from v41flash.serving import engine as module

    first, other = requests()[:2]
    with Engine(new_generator(tmp_path), context=200) as engine:
        longer = first._replace(max_tokens=50)
        ticket = engine.submit(longer, lambda progress: engine.cancel(ticket))
        serve(engine, [other])
        assert engine._pages.available == engine._state.cache.num_pages
        whole = module.prefill

        def broken(*arguments, **keywords):
            monkeypatch.setattr(module, "prefill", whole)
            raise RuntimeError("device lost")

        monkeypatch.setattr(module, "prefill", broken)
        listener = Listener()
        engine.submit(first, listener)
        assert "device lost" in str(listener.all()[-1].error)
        found = serve(engine, [first])
        assert engine._pages.available == engine._state.cache.num_pages
    (alone,) = new_generator(None).generate(
        [first.prompt], max_tokens=first.max_tokens, seed=first.seed, temperature=0.7
    )
    np.testing.assert_array_equal(found[0][0], alone.tokens)


def test_what_is_not_to_be_shared_leaves_nothing(tmp_path):
    one = requests()[0]
    with Engine(new_generator(tmp_path), context=200) as engine:
        serve(engine, [one._replace(share=False)] * 2)
        disk = engine._prefixes.store.disk.counts
        assert (engine.counts.cached_tokens, disk.written, disk.hits) == (0, 0, 0)
