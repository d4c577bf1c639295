"""The tokenised store: what goes in comes out, damage is found, racing builders agree."""

import json
import logging
import multiprocessing
import os
import pathlib
import shutil

import numpy as np
import pytest

from train.data import sources, store
from v41flash.text.tokenizer import ByteTokenizer

TEXTS = {f"{i:02d}.txt": f"document {i} é\n" * (i + 1) for i in range(20)}


@pytest.fixture
def corpus(tmp_path):
    folder = tmp_path / "corpus"
    folder.mkdir()
    for name, text in TEXTS.items():
        (folder / name).write_text(text)
    return folder


def build(corpus, cache):
    return store.open_or_build(sources.open_source("text", str(corpus)), ByteTokenizer(), cache)


def test_round_trip(corpus, tmp_path):
    opened = build(corpus, tmp_path / "cache")
    byte = ByteTokenizer()
    assert isinstance(opened.tokens, np.memmap) and opened.tokens.dtype == np.uint16
    assert len(opened.document_ids) == len(TEXTS)
    for index, text in enumerate(TEXTS.values()):
        tokens = opened.document_tokens(index)
        assert tokens[0] == byte.bos_id and tokens[-1] == byte.eos_id
        assert byte.decode(tokens) == text
        assert opened.document_bytes[index] == len(text.encode())
        assert opened.lengths[index] == len(tokens)
        assert opened.document_ids[index] == sources.document_id(text.encode())


def test_large_vocabulary_takes_32_bits(corpus, tmp_path):
    class Large(ByteTokenizer):
        vocab_size = 70_000
        fingerprint = "large"

    source = sources.open_source("text", str(corpus))
    opened = store.open_or_build(source, Large(), tmp_path / "cache")
    assert opened.tokens.dtype == np.uint32


def test_built_once_and_again_only_when_something_changed(corpus, tmp_path, monkeypatch):
    cache = tmp_path / "cache"
    first = build(corpus, cache)
    monkeypatch.setattr(store, "_build", lambda *_: pytest.fail("built again"))
    assert build(corpus, cache).folder == first.folder
    monkeypatch.undo()
    (corpus / "new.txt").write_text("new")
    second = build(corpus, cache)
    assert second.folder != first.folder and second.fingerprint != first.fingerprint
    assert sorted(p.name for p in cache.iterdir()) == sorted(
        [first.folder.name, second.folder.name]
    )


def test_touching_a_file_keeps_the_fingerprint(corpus, tmp_path):
    first = build(corpus, tmp_path / "cache")
    os.utime(corpus / "00.txt", (1, 1))
    second = build(corpus, tmp_path / "cache")
    assert second.folder != first.folder and second.fingerprint == first.fingerprint


def test_repeated_and_unreadable_documents(corpus, tmp_path, caplog):
    (corpus / "zz.txt").write_text(TEXTS["03.txt"])
    (corpus / "latin.txt").write_bytes(b"\xff\xff")
    with caplog.at_level(logging.WARNING):
        opened = build(corpus, tmp_path / "cache")
    assert len(opened.document_ids) == len(TEXTS) == len(set(opened.document_ids.tolist()))
    assert opened.meta["repeated_documents"] == 1
    assert "latin.txt" in opened.skipped
    warnings = [r for r in caplog.records if r.name == store.__name__]
    assert len(warnings) == 1 and "1 not UTF-8" in warnings[0].getMessage()


def test_split(corpus, tmp_path):
    opened = build(corpus, tmp_path / "cache")
    train, held_out = opened.split("train", 0.4), opened.split("heldout", 0.4)
    assert sorted([*train, *held_out]) == list(range(len(TEXTS))) and len(train) and len(held_out)
    assert set(opened.split("heldout", 0.2)) <= set(held_out)
    assert len(opened.split("heldout", 0.0)) == 0
    for name in list(TEXTS)[::2]:
        (corpus / name).unlink()
    fewer = build(corpus, tmp_path / "cache")
    held_out_ids = set(opened.document_ids[held_out])
    assert set(fewer.document_ids[fewer.split("heldout", 0.4)]) <= held_out_ids
    assert not set(fewer.document_ids[fewer.split("train", 0.4)]) & held_out_ids
    with pytest.raises(ValueError, match="held_out_fraction=1"):
        opened.split("train", 1.0)
    with pytest.raises(ValueError, match="'test'"):
        opened.split("test", 0.1)


@pytest.mark.parametrize("name", ["tokens", *store._SMALL_ARRAYS, "meta"])
@pytest.mark.parametrize("damage", ["missing", "short", "changed"])
def test_damage_is_found(corpus, tmp_path, name, damage):
    opened = build(corpus, tmp_path / "cache")
    path = opened.folder / (f"{name}.npy" if name != "meta" else "meta.json")
    if damage == "missing":
        path.unlink()
    elif damage == "short":
        os.truncate(path, path.stat().st_size - 3)
    elif name == "meta":
        path.write_text(json.dumps({"files": {}}))
    else:
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    with pytest.raises(store.StoreError, match=f"{opened.folder.name}.*{name}.*delete the folder"):
        build(corpus, tmp_path / "cache")


def test_a_changed_byte_anywhere_is_found(corpus, tmp_path):
    """A byte of each file's beginning, middle and end, and every byte of meta.json."""
    folder = build(corpus, tmp_path / "cache").folder
    for path in sorted(folder.iterdir()):
        whole = path.read_bytes()
        places = range(len(whole)) if path.name == "meta.json" else (0, 7, len(whole) // 2, -1)
        for place in places:
            data = bytearray(whole)
            data[place] ^= 1 << place % 7
            path.write_bytes(data)
            try:
                opened = store.open_store(folder)
            except store.StoreError as error:
                assert str(folder) in str(error) and len(str(error).splitlines()) == 1
            else:  # White space between values.
                assert path.name == "meta.json" and json.loads(data) == json.loads(whole)
                assert opened.meta["tokens"] == len(opened.tokens)
        path.write_bytes(whole)


def test_large_files_are_checked_as_they_are_read(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(store, "_CHECKSUM_LIMIT", 0)
    monkeypatch.setattr(store, "_BLOCK_BYTES", 64)
    folder = build(corpus, tmp_path / "cache").folder
    path = folder / "tokens.npy"
    whole = path.read_bytes()
    begin = len(whole) - np.load(path).nbytes
    size = np.load(path).itemsize
    offsets = np.load(folder / "offsets.npy") * size
    for place in (begin, begin + 1000, len(whole) - 1):
        data = bytearray(whole)
        data[place] ^= 16
        path.write_bytes(data)
        opened = store.open_store(folder)
        block = (place - begin) // 64 * 64
        for index in range(len(opened.document_ids)):
            hit = offsets[index] < block + 64 and offsets[index + 1] > block
            for _ in range(2):
                if hit:
                    with pytest.raises(store.StoreError, match=f"tokens.npy .* {block // 64};"):
                        opened.document_tokens(index)
                else:
                    first, last = begin + offsets[index : index + 2]
                    assert opened.document_tokens(index).tobytes() == whole[first:last]


def test_no_document_at_all(tmp_path):
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "a.jsonl").write_text('{"body": "x"}\n')
    source = sources.open_source("jsonl", str(tmp_path / "corpus"))
    with pytest.raises(sources.SourceError, match="without a text 'text'"):
        store.open_or_build(source, ByteTokenizer(), tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_builder_that_comes_second_uses_the_first(corpus, tmp_path, monkeypatch):
    cache = tmp_path / "cache"
    real_build, inner = store._build, []

    def slow(source, tokenizer, folder):
        real_build(source, tokenizer, folder)
        monkeypatch.setattr(store, "_build", real_build)
        inner.append(build(corpus, cache))  # another builder finishes meanwhile

    monkeypatch.setattr(store, "_build", slow)
    outer = build(corpus, cache)
    assert outer.folder == inner[0].folder
    assert [p.name for p in cache.iterdir()] == [outer.folder.name]


def _build_in_process(corpus, cache, barrier, results):
    barrier.wait()
    results.put(build(pathlib.Path(corpus), cache).fingerprint)


def test_processes_race(corpus, tmp_path):
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(2), context.Queue()
    arguments = (str(corpus), str(tmp_path / "cache"), barrier, results)
    processes = [context.Process(target=_build_in_process, args=arguments) for _ in range(2)]
    for process in processes:
        process.start()
    fingerprints = [results.get(timeout=60) for _ in processes]
    for process in processes:
        process.join()
        assert process.exitcode == 0
    assert fingerprints[0] == fingerprints[1]
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_moved_store_opens(corpus, tmp_path):
    opened = build(corpus, tmp_path / "cache")
    shutil.move(opened.folder, tmp_path / "elsewhere")
    moved = store.open_store(tmp_path / "elsewhere")
    np.testing.assert_array_equal(moved.tokens, opened.tokens)
