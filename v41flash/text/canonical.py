"""Canonical token ids: Engram hashes what a token says, not how it is written.

" The", "the" and "THÉ" hash alike. Every id is decoded alone and normalised: NFKC, NFD, accents
stripped, lower case, runs of space, tab, CR and LF (these four only) made one space, other white
space stripped at both ends except where nothing but one space is left. Ids whose normalised text is
equal share a canonical id, numbered in the order of first appearance (V4.1 report, Engram section).
Two exceptions: text that normalises to nothing stays as it was, and a token that is no whole UTF-8
sequence stands for itself.
"""

from __future__ import annotations

import functools
import hashlib
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from v41flash.errors import InputError
from v41flash.text.tokenizer import Tokenizer

# Part of the cache key: raise it with every change of the rules.
_RULES = 1
_DIGEST_BYTES = 16
# A private-use character that keeps a lone space alive through the strip.
_LONE_SPACE = "\ue000"
_REPLACEMENT = "\ufffd"


@functools.cache
def _normalizer() -> Callable[[str], str]:
    from tokenizers import Regex, normalizers

    return normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.NFD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
            normalizers.Replace(Regex(r"^ $"), _LONE_SPACE),
            normalizers.Strip(),
            normalizers.Replace(_LONE_SPACE, " "),
        ]
    ).normalize_str


def canonical_key(text: str, raw_token: str) -> str:
    """The key that decides which canonical id a token gets.

    Args:
        text: what the id decodes to alone.
        raw_token: the token as the vocabulary spells it, used where `text` is not whole UTF-8.

    Returns:
        The key; equal keys share an id.
    """
    if _REPLACEMENT in text:
        return raw_token
    return _normalizer()(text) or text


def canonical_ids(texts: Sequence[str], raw_tokens: Sequence[str]) -> np.ndarray:
    """Canonical id of every token, i32[V], numbered from 0 in the order of first appearance."""
    seen: dict[str, int] = {}
    return np.array(
        [
            seen.setdefault(canonical_key(text, raw), len(seen))
            for text, raw in zip(texts, raw_tokens, strict=True)
        ],
        np.int32,
    )


def canonical_map(tokenizer: Tokenizer, cache_dir: str | Path | None = None) -> np.ndarray:
    """The tokenizer's map from token id to canonical id.

    Args:
        tokenizer: any tokenizer.
        cache_dir: where the map of a large vocabulary is kept between runs (it takes seconds);
            keyed by the tokenizer's content. None computes it anew.

    Returns:
        i32[vocab_size]; `map.max() + 1` is the compressed vocabulary size.

    Raises:
        InputError: the kept map is damaged.
    """
    if cache_dir is None:
        return canonical_ids(*tokenizer.token_texts())
    key = hashlib.blake2b(f"{_RULES} {tokenizer.fingerprint}".encode(), digest_size=12).hexdigest()
    # The ids, little-endian, and a digest of them.
    path = Path(cache_dir) / f"canonical-{key}.ids"
    if path.is_file():
        data = path.read_bytes()
        ids, checksum = data[:-_DIGEST_BYTES], data[-_DIGEST_BYTES:]
        if len(ids) != 4 * tokenizer.vocab_size or _digest(ids) != checksum:
            raise InputError(
                f"{path}: damaged: not the {tokenizer.vocab_size} canonical ids that were written;"
                " delete it, and it is made anew"
            )
        return np.frombuffer(ids, "<i4").astype(np.int32)
    result = canonical_ids(*tokenizer.token_texts())
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".tmp", delete=False) as file:
        ids = result.astype("<i4").tobytes()
        file.write(ids + _digest(ids))
    os.replace(file.name, path)
    return result


def _digest(ids: bytes) -> bytes:
    return hashlib.blake2b(ids, digest_size=_DIGEST_BYTES).digest()
