"""The pipeline: batches hold the documents, and depend on seed and step alone."""

import collections
import dataclasses
import json
import types

import chex
import numpy as np
import pytest

from train.data import pipeline, sources
from v41flash.errors import InputError
from v41flash.text.engram_hash import EngramHasher

MODEL = types.SimpleNamespace(
    vocab_size=259,
    bos_token_id=0,
    eos_token_id=1,
    pad_token_id=2,
    engram_pad_token_id=2,
    engram_layer_ids=(1, 5),
    engram_vocab_size=101,
    engram_max_ngram_size=3,
    engram_n_heads=2,
    engram_compressed_vocab_size=230,
    engram_num_embeddings=EngramHasher(
        compressed_vocab_size=230,
        engram_vocab_size=101,
        max_ngram=3,
        heads=2,
        layer_ids=(1, 5),
        pad_compressed_id=2,
    ).num_embeddings,
)


def model(**changes):
    return types.SimpleNamespace(**(vars(MODEL) | changes))


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    root = tmp_path_factory.mktemp("pipeline")
    (root / "corpus").mkdir()
    rng = np.random.default_rng(0)
    for i in range(60):
        words = rng.choice(["alpha", "Beta", "été", "\n"], rng.integers(1, 40))
        (root / "corpus" / f"{i:02d}.txt").write_text(f"{i} " + " ".join(words))
    config = pipeline.default_config()
    config.update(
        kind="text",
        path=str(root / "corpus"),
        cache_dir=str(root / "cache"),
        sequence_length=64,
        batch_size=4,
        held_out_fraction=0.3,
        pack_window=16,
        seed=7,
    )
    return config


@pytest.fixture(scope="module")
def data(config):
    return pipeline.from_config(config, MODEL)


def changed(data, **changes):
    """The same data under a changed section."""
    config = data.config.copy_and_resolve_references()
    config.update(changes)
    return dataclasses.replace(data, config=config)


def take(iterator, count):
    batches = [next(iterator) for _ in range(count)]
    iterator.close()
    return batches


def test_the_batch(data):
    (batch,) = take(data.train_iterator(), 1)
    expected = dict(
        tokens=((4, 64), np.int32),
        targets=((4, 64), np.int32),
        loss_mask=((4, 64), np.float32),
        segment_ids=((4, 64), np.int32),
        positions=((4, 64), np.int32),
        engram_rows=((4, 64, 2, 4), np.int32),
        document_ids=((4, 8), np.int64),
        row_bytes=((4,), np.int64),
    )
    assert {k: (v.shape, v.dtype) for k, v in batch.items()} == expected
    device, host = pipeline.split_host_fields(batch)
    assert set(host) == {"document_ids", "row_bytes"} and set(device) | set(host) == set(batch)


def check_rows(data, batch, predicted):
    """Checks every piece of a batch against the stored documents; counts the predictions."""
    store = data.store
    index_of = {int(d): i for i, d in enumerate(store.document_ids)}
    for b in range(len(batch["tokens"])):
        segments = batch["segment_ids"][b]
        padding = segments == 0
        assert (batch["tokens"][b][padding] == 2).all()
        assert not batch["loss_mask"][b][padding].any() and not batch["positions"][b][padding].any()
        assert batch["loss_mask"][b][~padding].all()
        for segment in range(1, segments.max(initial=0) + 1):
            (at,) = np.nonzero(segments == segment)
            assert at[0] % 8 == 0 and (np.diff(at) == 1).all()
            np.testing.assert_array_equal(batch["positions"][b, at], np.arange(len(at)))
            document = int(batch["document_ids"][b, segment - 1])
            whole = store.document_tokens(index_of[document]).astype(int)
            windows = np.lib.stride_tricks.sliding_window_view(whole, len(at) + 1)
            piece = np.append(batch["tokens"][b, at], batch["targets"][b, at[-1]])
            (starts,) = np.nonzero(
                (windows == piece).all(axis=1) & (np.arange(len(windows)) % 64 == 0)
            )
            assert len(starts) == 1
            np.testing.assert_array_equal(batch["targets"][b, at], piece[1:])
            predicted.update((document, int(starts[0]) + i) for i in range(len(at)))
        assert (batch["document_ids"][b, segments.max(initial=0) :] == -1).all()
        rows = data.hasher.rows(
            data.token_map[batch["tokens"][b : b + 1]], batch["positions"][b : b + 1]
        )
        np.testing.assert_array_equal(batch["engram_rows"][b], rows[0])


def test_an_epoch_predicts_every_token_once(data):
    rows, _ = data.epoch_rows()
    predicted = collections.Counter()
    for batch in take(changed(data, batch_size=1).train_iterator(), rows):
        check_rows(data, batch, predicted)
    train = data.store.split("train", 0.3)
    assert set(predicted.values()) == {1}
    assert len(predicted) == (data.store.lengths[train] - 1).sum()
    assert {d for d, _ in predicted} == set(data.store.document_ids[train].tolist())


def test_held_out_batches_cover_the_split_and_its_bytes(data):
    predicted, size = collections.Counter(), 0
    batches = list(data.heldout_batches())
    for batch in batches:
        check_rows(data, batch, predicted)
        size += batch["row_bytes"].sum()
    held_out = data.store.split("heldout", 0.3)
    assert set(predicted.values()) == {1}
    assert len(predicted) == (data.store.lengths[held_out] - 1).sum()
    assert size == data.store.document_bytes[held_out].sum()
    assert sum(len(text) for _, text in data.heldout_texts()) == size
    chex.assert_trees_all_equal(list(data.heldout_batches()), batches)
    chex.assert_trees_all_equal(list(data.heldout_batches(limit=2)), batches[:2])


@pytest.mark.parametrize("hosts", [1, 2, 4])
def test_host_slices_make_the_global_batch(data, hosts):
    whole = take(data.train_iterator(), 12)
    parts = [take(data.train_iterator(host_index=h, host_count=hosts), 12) for h in range(hosts)]
    joined = [
        {k: np.concatenate([p[k] for p in step]) for k in step[0]}
        for step in zip(*parts, strict=True)
    ]
    chex.assert_trees_all_equal(joined, whole)
    held_out = [list(data.heldout_batches(host_index=h, host_count=hosts)) for h in range(hosts)]
    joined = [
        {k: np.concatenate([p[k] for p in step]) for k in step[0]}
        for step in zip(*held_out, strict=True)
    ]
    chex.assert_trees_all_equal(joined, list(data.heldout_batches()))


def test_a_step_depends_on_seed_and_step_alone(config, data):
    rows, _ = data.epoch_rows()
    steps = 3 * rows // 4
    assert steps * 4 > 2 * rows  # well into the third epoch
    whole = take(data.train_iterator(), steps)
    for start in (0, 1, rows // 4, steps - 1):
        chex.assert_trees_all_equal(take(data.train_iterator(start), 1)[0], whole[start])
    synchronous = config.copy_and_resolve_references()
    synchronous.prefetch = 0
    again = pipeline.from_config(synchronous, MODEL)
    chex.assert_trees_all_equal(take(again.train_iterator(), steps), whole)
    epochs = [whole[0]["document_ids"].tolist(), take(data.train_iterator(rows // 4), 1)]
    assert epochs[0] != epochs[1][0]["document_ids"].tolist()
    synchronous.seed = 8
    other = take(pipeline.from_config(synchronous, MODEL).train_iterator(), 1)[0]
    assert not np.array_equal(other["tokens"], whole[0]["tokens"])


def test_state(data):
    iterator = data.train_iterator()
    for _ in range(3):
        next(iterator)
    state = iterator.state()
    assert state["step"] == 3
    after = [next(iterator) for _ in range(4)]
    iterator.set_state(state)
    chex.assert_trees_all_equal(take(iterator, 4), after)
    fresh = data.train_iterator()
    fresh.set_state(state)
    chex.assert_trees_all_equal(take(fresh, 4), after)
    assert fresh.state() == iterator.state() == state | {"step": 7}
    with pytest.raises(InputError, match="settings changed"):
        changed(data, seed=8).train_iterator().set_state(state)
    with pytest.raises(ValueError, match="step -1"):
        data.train_iterator(-1)


def test_another_length_for_a_stage(data):
    iterator = data.train_iterator(5)
    later = changed(data, sequence_length=128, batch_size=2).train_iterator(5)
    later.set_state(iterator.state())
    (batch,) = take(later, 1)
    assert batch["tokens"].shape == (2, 128) and later.step == 6


def test_no_engram_layers(config):
    bare = model(
        engram_layer_ids=(),
        engram_num_embeddings=(),
        engram_max_ngram_size=0,
        engram_n_heads=0,
        engram_vocab_size=0,
        engram_compressed_vocab_size=0,
        engram_pad_token_id=0,
    )
    (batch,) = take(pipeline.from_config(config, bare).train_iterator(), 1)
    assert batch["engram_rows"].shape == (4, 64, 0, 0)


def test_describe(data):
    text = data.describe()
    assert "60 documents" in text and "canonical ids 230" in text and "padding" in text
    rows, padding = data.epoch_rows()
    assert f"{rows:,} rows of 64" in text and f"{padding:.1%}" in text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(batch_size=0), "data.batch_size=0"),
        (dict(sequence_length=0), "data.sequence_length=0"),
        (dict(sequence_length=100), "data.sequence_length=100: must be a multiple of 8"),
        (dict(held_out_fraction=1.5), "data.held_out_fraction=1.5"),
        (dict(held_out_fraction=0.0), "data.held_out_fraction=0.0"),
        (dict(held_out_fraction=2**-50), "the heldout split has no documents"),
        (dict(held_out_fraction=1 - 2**-50), "the train split has no documents"),
        (dict(pack_window=0), "data.pack_window=0"),
        (dict(seed=-1), "data.seed=-1"),
        (dict(cache_dir="/dev/null/cache"), "data.cache_dir='/dev/null/cache': cannot be made"),
        (dict(prefetch=-1), "data.prefetch=-1"),
        (dict(kind="csv"), "data.kind='csv'"),
        (dict(tokenizer="no/such.json"), "no/such.json"),
    ],
)
def test_bad_settings(config, changes, message):
    bad = config.copy_and_resolve_references()
    bad.update(changes)
    with pytest.raises(InputError, match=message) as caught:
        pipeline.from_config(bad, MODEL)
    assert "\n" not in str(caught.value)


def test_bad_combinations(config, data):
    with pytest.raises(ValueError, match="vocab_size=100"):
        pipeline.from_config(config, model(vocab_size=100))
    with pytest.raises(ValueError, match="compressed_vocab_size=99.*230 canonical ids"):
        pipeline.from_config(config, model(engram_compressed_vocab_size=99))
    with pytest.raises(ValueError, match="engram_num_embeddings"):
        pipeline.from_config(config, model(engram_num_embeddings=(1, 2)))
    with pytest.raises(ValueError, match=r"model\.eos_token_id=5"):
        pipeline.from_config(config, model(eos_token_id=5))
    with pytest.raises(ValueError, match="batch_size=4.*3 hosts"):
        data.train_iterator(host_count=3)
    unknown = config.copy_and_resolve_references()
    with unknown.unlocked():
        unknown.sequence_lenght = 5
    with pytest.raises(ValueError, match="sequence_lenght"):
        pipeline.from_config(unknown, MODEL)


def test_one_document_is_repeated_without_end(config, tmp_path):
    (tmp_path / "corpus").mkdir()
    texts = [f"document number {number}" for number in range(2)]
    for number, text in enumerate(texts):
        (tmp_path / "corpus" / f"{number}.txt").write_text(text)
    between = sum(sources.document_id(text.encode()) for text in texts) / 2 / 2**63
    two = config.copy_and_resolve_references()
    two.update(path=str(tmp_path / "corpus"), held_out_fraction=between)
    data = pipeline.from_config(two, MODEL)
    assert len(data.documents("train")) == len(data.documents("heldout")) == 1
    for batch in take(data.train_iterator(5), 2):  # every row is an epoch of its own
        assert batch["loss_mask"].sum(axis=1).tolist() == [18] * 4


@pytest.mark.parametrize("limit", [1, 3, None])
def test_held_out_texts_are_those_of_the_batches(data, limit):
    """Byte for byte: what a model of bytes is measured on is what the language model is."""
    spelled, sizes = [], 0
    for batch in data.heldout_batches(limit):
        for b, row in enumerate(batch["segment_ids"]):
            for segment in range(1, row.max() + 1):
                at = row == segment
                first = batch["tokens"][b, at][:1]
                spelled.append(
                    tuple(map(data.tokenizer.decode_bytes, (first, batch["targets"][b, at])))
                )
        sizes += batch["row_bytes"].sum()
    texts = data.heldout_texts(limit)
    assert texts == spelled
    assert sum(len(text) for _, text in texts) == sizes
    assert any(before for before, _ in texts) and not all(before for before, _ in texts)


def test_sections_share_what_is_equal(config):
    longer = config.copy_and_resolve_references()
    longer.sequence_length = 128
    first, second = pipeline.from_sections([(config, MODEL), (longer, MODEL)])
    assert first.store is second.store and first.tokenizer is second.tokenizer
    assert (first.config.sequence_length, second.config.sequence_length) == (64, 128)
    assert first.fingerprint == second.fingerprint


@pytest.fixture(scope="module")
def prompted(tmp_path_factory):
    root = tmp_path_factory.mktemp("prompted")
    rows = [{"ask": f"{i}? " * (i % 4), "say": f"é{i}" + "ab" * (i % 30)} for i in range(40)]
    rows += [{"ask": "no completion", "say": ""}, {"say": "no prompt"}]
    (root / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = pipeline.default_config()
    config.update(
        kind="jsonl",
        path=str(root / "rows.jsonl"),
        text_field="say",
        prompt_field="ask",
        cache_dir=str(root / "cache"),
        sequence_length=32,
        batch_size=4,
        held_out_fraction=0.5,
    )
    return pipeline.from_config(config, MODEL), rows[:40]


def test_completions_are_learnt_and_prompts_are_not(prompted):
    data, rows = prompted
    targets, expected = collections.Counter(), collections.Counter()
    for batch in data.heldout_batches():
        on = batch["loss_mask"] > 0
        assert not on[batch["segment_ids"] == 0].any()
        targets.update(batch["targets"][on].tolist())
        # One token a byte and one eos, seen by the row in which the completion ends.
        ends = (batch["targets"] == data.tokenizer.eos_id) & on
        np.testing.assert_array_equal(batch["row_bytes"], (on & ~ends).sum(1))
    held_out = set(data.documents("heldout"))
    assert 0 < len(held_out) < 40 and "empty" in data.store.skipped
    for index in held_out:
        text = data.tokenizer.decode(data.store.document_tokens(index))
        row = next(row for row in rows if row["ask"] + row["say"] == text)
        assert data.store.prompt_length(index) == len(row["ask"].encode())
        expected.update([*data.tokenizer.encode(row["say"]).tolist(), data.tokenizer.eos_id])
    assert targets == expected
    said = sum(len(rows[index]["say"].encode()) for index in held_out)
    assert sum(len(text) for _, text in data.heldout_texts()) == said
    assert "tokens of prompts, not learnt" in data.describe()


def test_the_same_rows_without_prompts_are_another_corpus(prompted):
    data, _ = prompted
    other = pipeline.from_config(changed(data, prompt_field="").config, MODEL)
    assert other.store.folder != data.store.folder and other.store.prompt_tokens is None
    assert other.fingerprint != data.fingerprint


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(kind="text"), "data.prompt_field='ask': must be empty with data.kind='text'"),
        (dict(text_field=""), "data.text_field is empty"),
    ],
)
def test_prompts_need_rows_with_fields(prompted, changes, message):
    data, _ = prompted
    with pytest.raises(InputError, match=message):
        pipeline.from_config(changed(data, **changes).config, MODEL)
