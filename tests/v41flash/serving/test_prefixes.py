"""Prefixes from the store: what is restored, what is prefilled, and what comes of it."""

import dataclasses

import jax
import numpy as np
import pytest

from tests.v41flash.nn import samples
from tests.v41flash.serving.served import CONFIG, Served
from v41flash import presets
from v41flash.cache import PAGE_TOKENS, GlobalCache
from v41flash.serving import Generator, Options, PrefixStore
from v41flash.serving.prefixes import Prefixes, model_identity
from v41flash.serving.replay import begin_replay
from v41flash.text.tokenizer import ByteTokenizer
from v41flash.tiers.keys import digest

TOKENIZER = ByteTokenizer()
LONG = dataclasses.replace(CONFIG, max_position_embeddings=512)
W = CONFIG.sliding_window
EXACT_REPLAY = CONFIG.num_hidden_layers * W
# With bos, 240 tokens; with 24 more, 264: two full pages and a bit.
TEXT = "".join(chr(97 + i * i % 23) for i in range(239))
NEW = 24
# Global cache as published: 890 bytes a token.
PUBLISHED_WIDTHS = dataclasses.replace(
    LONG,
    num_hidden_layers=4,
    compress_ratios=(2, 2, 2, 1),
    kv_source_layer_ids=(0, 1, 2, 3),
    index_source_layer_ids=(0, 1, 2, 3),
    candidate_source_layer_id=None,
    head_dim=512,
    qk_rope_head_dim=64,
    index_head_dim=128,
)
TOKEN_MAP = np.arange(TOKENIZER.vocab_size)


def written(served, prompts, length, seed=0):
    """A state whose arrays are noise, with sequences of `length` tokens, as serving would leave
    it; two pages each, in an order of their own."""
    rng = np.random.default_rng(seed)
    state = served.fresh(len(prompts), 2)
    table = rng.permutation(2 * len(prompts)).reshape(-1, 2)

    def noise(leaf):
        if leaf.dtype == np.uint8:
            return rng.integers(0, 256, leaf.shape, np.uint8)
        if leaf.dtype == np.float32:
            return rng.standard_normal(leaf.shape, np.float32)
        return rng.integers(0, 200, leaf.shape).astype(np.int32)

    state = jax.tree.map(noise, state)
    lengths = np.full(len(prompts), length, np.int32)
    cache = dataclasses.replace(state.cache, page_table=table.astype(np.int32), lengths=lengths)
    return dataclasses.replace(state, positions=lengths, cache=cache)


def pages_of(state, slot, pages):
    """Bytes of the first pages of a sequence."""
    table = np.asarray(state.cache.page_table)[slot, :pages]
    return [np.asarray(a)[table].tobytes() for a in (*state.cache.main, *state.cache.keys)]


def prefixes_of(served, folder, **settings):
    store = PrefixStore.open(folder)
    return Prefixes(served.programs, served.weights, store, {}, None, **settings)


@pytest.mark.parametrize(
    "formats", [{}, pytest.param(samples.NO_ROUNDING, marks=pytest.mark.slow)]
)
def test_what_is_kept_is_restored(tmp_path, formats):
    """Through the files alone, and into pages elsewhere on the device."""
    served = Served.create(dataclasses.replace(CONFIG, **formats))
    prompts = [np.arange(150), np.arange(150) + 50, np.arange(200)]
    state = written(served, prompts, 140)
    prefixes = prefixes_of(served, tmp_path)
    for slot in (0, 1):
        trail = prefixes.trail(prompts[slot])
        prefixes.keep(state, slot, trail)
        assert (trail.full, trail.stored) == (1, 1)
        prefixes.keep(state, slot, trail)
    assert prefixes.store.disk.counts.written == 2
    assert prefixes.store.disk.usage == 2 * (state.cache.page_bytes + 80)

    again = prefixes_of(served, tmp_path)
    empty = written(served, prompts, 0, seed=1)
    order = [1, 2, 0]
    trails = [again.trail(np.append(prompts[slot][:130], [7])) for slot in order]
    new, found = again.restore(empty, trails)
    # The third prompt begins like the first.
    np.testing.assert_array_equal(found.cached, PAGE_TOKENS)
    np.testing.assert_array_equal(found.starts, PAGE_TOKENS - W)
    for slot, origin in enumerate((1, 0, 0)):
        assert pages_of(new, slot, 1) == pages_of(state, origin, 1)
    np.testing.assert_array_equal(new.positions, found.starts)
    np.testing.assert_array_equal(new.cache.lengths, found.cached)
    np.testing.assert_array_equal(new.encoder.starts, found.starts)
    np.testing.assert_array_equal(new.decoder.lengths, found.starts)
    # Newest first: what the n-grams of the first replayed token look back to.
    pages = [prompts[slot][: PAGE_TOKENS - W][::-1][:3] for slot in order]
    np.testing.assert_array_equal(new.look_back, pages)
    # In the exact mode nothing of this is used, and a replay is longer.
    exact = prefixes_of(served, tmp_path, exact=True)
    trails = [exact.trail(prompt) for prompt in prompts]
    new, found = exact.restore(new, trails)
    assert not found.cached.any()
    exact.keep(state, 0, trails[0])
    _, found = exact.restore(new, [exact.trail(prompt) for prompt in prompts])
    assert found.cached.tolist() == [PAGE_TOKENS, 0, PAGE_TOKENS]
    assert found.starts.tolist() == [PAGE_TOKENS - EXACT_REPLAY, 0, PAGE_TOKENS - EXACT_REPLAY]


def test_window_rows_are_restored(tmp_path):
    served = Served.create(CONFIG)
    prompts = [np.arange(150), np.arange(150) + 50, np.arange(9)]
    state = written(served, prompts, 141)
    prefixes = prefixes_of(served, tmp_path)
    prefixes.remember(state, 0, prefixes.trail(prompts[0]))
    longer = [np.append(prompts[0][:141], range(W)), *prompts[1:]]
    # Without the first page, rows behind it are of no use.
    _, found = prefixes.restore(served.fresh(3, 2), list(map(prefixes.trail, longer)))
    assert not found.cached.any()
    for slot in (0, 1):
        prefixes.keep(state, slot, prefixes.trail(prompts[slot]))
    new, found = prefixes.restore(served.fresh(3, 2), list(map(prefixes.trail, longer)))
    assert found.starts.tolist() == [141, PAGE_TOKENS - W, 0]
    assert found.cached.tolist() == [141, PAGE_TOKENS, 0]
    assert pages_of(new, 0, 2) == pages_of(state, 0, 2)
    assert pages_of(new, 1, 1) == pages_of(state, 1, 1)
    np.testing.assert_array_equal(new.positions, found.starts)
    np.testing.assert_array_equal(new.cache.lengths, found.cached)
    np.testing.assert_array_equal(new.encoder.lengths, found.starts)
    starts = [state.encoder.starts[0], PAGE_TOKENS - W, 0]
    np.testing.assert_array_equal(new.encoder.starts, starts)
    np.testing.assert_array_equal(new.encoder.rows[:, 0], state.encoder.rows[:, 0])
    np.testing.assert_array_equal(new.look_back[0], state.look_back[0])
    for old, own in zip(state.groups[0], new.groups[0], strict=True):
        np.testing.assert_array_equal(own[0], old[0])
        np.testing.assert_array_equal(own[1:], 0)
    np.testing.assert_array_equal(new.decoder.starts, found.starts)
    # One token less, and the decoder would lack its replay; another token, and they are another's.
    others = [longer[0][:-1], np.append(prompts[0][:140], range(100, 110)), prompts[2]]
    _, found = prefixes.restore(new, list(map(prefixes.trail, others)))
    assert found.starts.tolist() == [PAGE_TOKENS - W] * 2 + [0]
    assert found.cached.tolist() == [PAGE_TOKENS] * 2 + [0]


class Server:
    """A generator that is started anew again and again, over one folder."""

    def __init__(self, folder, config=LONG, **options):
        self.folder = folder
        self.served = Served.create(config)
        options = {"batch_size": 1, "chunk": 8, "steps": 8, "exact": True} | options
        self.generator = Generator(
            config, self.served.params, TOKENIZER, token_map=TOKEN_MAP, options=Options(**options)
        )
        self.generator.programs = self.served.programs
        # So that nothing ends early.
        self.generator.allowed[TOKENIZER.eos_id] = False

    def start(self, **settings):
        """As a new process would: nothing is left but the folder."""
        options = self.generator.options
        store = PrefixStore.open(self.folder, **settings)
        self.generator.prefixes = Prefixes(
            self.served.programs, self.served.weights, store, self.served.params, TOKEN_MAP,
            replay=options.replay, exact=options.exact,
        )  # fmt: skip
        return store.disk

    def ask(self, prompt, new=NEW):
        """(result, tokens prefilled, tokens found, tokens of them replayed)."""
        self.generator.statistics = type(self.generator.statistics)()
        (result,) = self.generator.generate([prompt], max_tokens=new, temperature=0)
        done = self.generator.statistics
        return result, done.prompt_tokens, done.cached_tokens, done.replayed_tokens


def check_equal(found, expected):
    np.testing.assert_array_equal(found.tokens, expected.tokens)
    # A cached value on a rounding boundary may go either way, and moves logits by so much.
    np.testing.assert_allclose(found.logprobs, expected.logprobs, atol=1e-2)


@pytest.mark.slow
@pytest.mark.parametrize("config", [LONG, PUBLISHED_WIDTHS], ids=["narrow", "published"])
def test_a_restart_goes_on_without_prefilling_the_prefix(tmp_path, caplog, config):
    server = Server(tmp_path, config)
    alone, *counts = server.ask(TEXT)
    assert counts == [240, 0, 0]
    first = np.concatenate([server.generator.encode(TEXT), alone.tokens])
    second = np.concatenate([first, TOKENIZER.encode("and so on")])
    expected = server.ask(second)[0]

    disk = server.start()
    result, *counts = server.ask(TEXT)
    assert counts == [240, 0, 0]
    check_equal(result, alone)
    # One page of the prompt, and one that the continuation has filled.
    assert disk.counts.written == 2
    cache = server.served.fresh(1).cache
    assert disk.usage == 2 * (cache.page_bytes + 80)

    disk = server.start()
    result, *counts = server.ask(second)
    replayed = config.num_hidden_layers * W
    assert counts == [len(second) - 2 * PAGE_TOKENS + replayed, 2 * PAGE_TOKENS, replayed]
    check_equal(result, expected)
    assert disk.counts.hits == 2 and disk.counts.written == 0
    print(
        f"{counts[1]} of {len(second)} tokens from disk, {counts[0] - replayed} prefilled,"
        f" {replayed} replayed; {server.generator.statistics.store_bytes_per_token} bytes/token"
    )

    # A page is changed on disk: it is reported, and what lies behind the first one made anew.
    name = server.generator.prefixes.trail(second).chain.keys[1].hex()
    (path,) = tmp_path.glob(f"pages/*/{name}")
    data = bytearray(path.read_bytes())
    data[1000] ^= 4
    path.write_bytes(data)
    disk = server.start()
    result, *counts = server.ask(second)
    assert counts == [len(second) - PAGE_TOKENS + replayed, PAGE_TOKENS, replayed]
    check_equal(result, expected)
    assert name in caplog.text and disk.counts.damaged == 1 and disk.counts.written == 1
    server.start()
    assert server.ask(second)[2] == 2 * PAGE_TOKENS


@pytest.mark.slow
def test_a_prefill_that_does_not_end_leaves_its_pages(tmp_path, monkeypatch):
    server = Server(tmp_path)
    alone = server.ask(TEXT)[0]
    disk = server.start()
    programs, whole = server.served.programs, server.served.programs.exact_chunk

    def dies(weights, state, *arguments):
        if state.positions[0] == PAGE_TOKENS + 8:
            raise KeyboardInterrupt
        return whole(weights, state, *arguments)

    monkeypatch.setattr(programs, "exact_chunk", dies)
    with pytest.raises(KeyboardInterrupt):
        server.ask(TEXT)
    assert disk.counts.written == 1
    monkeypatch.setattr(programs, "exact_chunk", whole)
    server.start()
    result, *counts = server.ask(TEXT)
    assert counts == [240 - PAGE_TOKENS + EXACT_REPLAY, PAGE_TOKENS, EXACT_REPLAY]
    check_equal(result, alone)


@pytest.mark.slow
@pytest.mark.parametrize("formats", [{}, samples.NO_ROUNDING])
def test_replay_and_window_rows_from_the_host(tmp_path, formats):
    server = Server(tmp_path, dataclasses.replace(LONG, **formats), exact=False)
    server.start()
    first, *counts = server.ask(TEXT, new=28)
    assert counts == [240, 0, 0]
    whole = np.concatenate([server.generator.encode(TEXT), first.tokens])
    second = np.concatenate([whole, TOKENIZER.encode("and so on")])
    pages = len(whole) // PAGE_TOKENS * PAGE_TOKENS
    prefixes = server.generator.prefixes
    server.generator.prefixes = None
    alone = server.ask(second)[0]

    # The last emitted token is in no state yet: rows are there up to before it, past the last page.
    server.generator.prefixes = prefixes
    result, *counts = server.ask(second)
    at = len(whole) - 1
    assert at > pages and counts == [len(second) - at, at, 0]
    check_equal(result, alone)

    # Too short a suffix for the decoder's replay from there: the rows at the prompt's end will do.
    short = np.append(whole, 100)
    result, *counts = server.ask(short)
    assert counts == [len(short) - 240, pages, pages - 240]
    server.generator.prefixes = None
    check_equal(result, server.ask(short)[0])

    # Nothing but the disk: as a replay by hand gives it.
    server.start()
    result, *counts = server.ask(second)
    assert counts == [len(second) - pages + W, pages, W]
    served = server.served
    programs, weights = served.programs, served.weights
    _, state = served.prefill([second[:pages]], served.fresh(1, 4), chunk=8)
    state, start = begin_replay(programs, weights, state, [second[:pages]])
    logits, _ = served.prefill([second[start[0] :]], state, chunk=8)
    logits = np.where(server.generator.allowed, logits[0], -np.inf)
    assert result.tokens[0] == logits.argmax()


@pytest.mark.slow
def test_window_rows_at_the_prompts_end(tmp_path):
    """A prompt that comes again with another, longer end."""
    server = Server(tmp_path, exact=False)
    long = server.generator.encode(TEXT)[: PAGE_TOKENS + 10]
    other = np.concatenate([long, TOKENIZER.encode("something else")])
    alone = server.ask(other)[0]
    server.start()
    server.ask(long, new=1)
    result, *counts = server.ask(other)
    assert counts == [len(other) - len(long), len(long), 0]
    check_equal(result, alone)
    # Once they have expired, or where there is no pool at all.
    server.start(host_budget=0)
    assert server.ask(other)[1:] == (len(other) - PAGE_TOKENS + W, PAGE_TOKENS, W)


@pytest.mark.slow
def test_a_batch_of_hits_and_misses(tmp_path):
    server = Server(tmp_path, batch_size=4)
    prompts = [TEXT, "x" * 200, TEXT[:130] + "y" * 20, "z"]
    settings = dict(max_tokens=8, temperature=0.7, seed=3)
    alone = server.generator.generate(prompts, **settings)
    server.start()
    server.generator.generate([TEXT], **settings)
    before = dataclasses.replace(server.generator.statistics)
    found = server.generator.generate(prompts, **settings)
    for one, other in zip(found, alone, strict=True):
        check_equal(one, other)
    cached = server.generator.statistics.cached_tokens - before.cached_tokens
    assert cached == 2 * PAGE_TOKENS


def test_bytes_on_disk_at_the_published_widths(tmp_path):
    page = GlobalCache.create(presets.v41_flash(), 1, [[0]]).page_bytes
    disk = PrefixStore.open(tmp_path).disk
    assert disk.put(digest(b"page"), bytes(page))
    assert page / PAGE_TOKENS == 890
    assert disk.usage / PAGE_TOKENS == 890.625
    files = [path for path in tmp_path.glob("pages/*/*") if path.is_file()]
    assert [path.stat().st_size for path in files] == [disk.usage]


def test_the_identity_of_a_model():
    params = {"a": np.ones((2, 3), np.float32), "b": {"c": np.zeros(2, np.uint8)}}
    changed = {"a": params["a"].copy(), "b": params["b"]}
    changed["a"][1, 2] = np.nextafter(np.float32(1), np.float32(2))
    renamed = {"a": params["a"], "b": {"d": params["b"]["c"]}}
    reshaped = {"a": params["a"].reshape(3, 2), "b": params["b"]}
    other = dataclasses.replace(CONFIG, index_topk=CONFIG.index_topk - 1)
    arguments = [
        (CONFIG, params, None, "exact"),
        (other, params, None, "exact"),
        (CONFIG, changed, None, "exact"),
        (CONFIG, renamed, None, "exact"),
        (CONFIG, reshaped, None, "exact"),
        (CONFIG, params, np.arange(3), "exact"),
        (CONFIG, params, None, "replay 4"),
    ]
    identities = [model_identity(*own) for own in arguments]
    assert len(set(identities)) == len(arguments)
    copied = {"a": params["a"].copy(), "b": params["b"]}
    assert model_identity(CONFIG, copied, None, "exact") == identities[0]
