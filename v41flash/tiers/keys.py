"""Names of pages: what a page is called follows from the model and from every token before it.

    k_0 = H(model)        k_i = H(k_{i-1}, tokens of page i)

so equal keys mean equal prefixes of the same model, page boundaries included.
"""

from __future__ import annotations

import hashlib

import numpy as np

from v41flash.errors import InputError

KEY_BYTES = 32
_DIGITS = frozenset("0123456789abcdef")


class PageNameError(InputError):
    """A page name that no key has: nothing is opened, written or removed under it."""


def digest(*parts: bytes) -> bytes:
    """A key of bytes; where one part ends is part of what is hashed."""
    state = hashlib.blake2b(digest_size=KEY_BYTES, person=b"v41flash page")
    for part in parts:
        state.update(len(part).to_bytes(8, "little"))
        state.update(part)
    return state.digest()


class KeyChain:
    """Keys of one sequence, page by page as its tokens come.

    Attributes:
        tokens: int32 [n], all of them.
        keys: of the full pages.
        root: k_0.
    """

    def __init__(self, model: bytes, page_tokens: int):
        """An empty sequence of the model whose identity is `model`."""
        self.root = digest(model)
        self.keys: list[bytes] = []
        self.tokens = np.zeros(0, np.int32)
        self._page_tokens = page_tokens

    def extend(self, tokens: np.ndarray) -> None:
        """Takes int [n] more tokens."""
        self.tokens = np.concatenate([self.tokens, np.asarray(tokens, np.int32)])
        for page in range(len(self.keys), len(self.tokens) // self._page_tokens):
            self.keys.append(digest(self.anchor(page), self._bytes(page, self._page_tokens)))

    def anchor(self, pages: int) -> bytes:
        """The key of the prefix that is so many full pages."""
        return self.keys[pages - 1] if pages else self.root

    def place(self, length: int) -> tuple[bytes, bytes]:
        """(key of the full pages of the first `length` tokens, the tokens behind those)."""
        pages, rest = divmod(length, self._page_tokens)
        return self.anchor(pages), self._bytes(pages, rest)

    def _bytes(self, page: int, count: int) -> bytes:
        """The first `count` tokens of a page."""
        first = page * self._page_tokens
        return self.tokens[first : first + count].astype("<i4").tobytes()


def page_name(key: bytes) -> str:
    """The name of a page's file, which is its key in hexadecimal digits.

    Raises:
        PageNameError: not a key.
    """
    if not isinstance(key, bytes) or len(key) != KEY_BYTES:
        raise PageNameError(f"page key {key!r}: must be {KEY_BYTES} bytes")
    return key.hex()


def page_key(name: str) -> bytes:
    """The key that a page's file is named after.

    Raises:
        PageNameError: any name but the lower-case hexadecimal digits of a key: a path, say.
    """
    if len(name) != 2 * KEY_BYTES or not _DIGITS.issuperset(name):
        raise PageNameError(
            f"page name {name!r}: must be {2 * KEY_BYTES} lower-case hexadecimal digits"
        )
    return bytes.fromhex(name)
