"""Tokens to text while they come, and the texts that stop it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

_REPLACEMENT = "\ufffd"
# Tokens that are decoded again with every new one; decoders look at what stands before a token.
_CONTEXT = 8


class TextStream:
    """Text of one sequence of tokens, given out as soon as later tokens cannot change it.

    Attributes:
        stopped: a stop text has come; nothing follows.
        tokens: tokens taken: with `stopped`, up to the one that completed the stop text.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stop: Sequence[str] = ()):
        """Starts a text.

        Args:
            decode: token ids to text, invalid UTF-8 as U+FFFD (`Tokenizer.decode`).
            stop: texts that end it and do not belong to it.
        """
        self._decode, self._stop = decode, tuple(stop)
        # The newest tokens, and how many characters of their text have been taken.
        self._ids: list[int] = []
        self._taken = 0
        self._held = ""
        self.stopped = False
        self.tokens = 0

    def feed(self, tokens: Sequence[int] | np.ndarray) -> str:
        """Takes tokens; returns the text that is certain now."""
        for token in map(int, tokens):
            if self.stopped:
                break
            self._ids.append(token)
            self.tokens += 1
            self._take(last=False)
            self._cut()
        return self._give(self._certain())

    def close(self) -> str:
        """The rest of the text."""
        if not self.stopped:
            self._take(last=True)
            self._cut()
        return self._give(len(self._held))

    def _take(self, *, last: bool) -> None:
        text = self._decode(self._ids)
        # One replacement character at the end may be the beginning of a character.
        certain = len(text) - (text.endswith(_REPLACEMENT) and not last)
        self._held += text[self._taken : certain]
        self._taken = max(certain, self._taken)
        if certain == len(text) and len(self._ids) > 2 * _CONTEXT:
            self._ids = self._ids[-_CONTEXT:]
            self._taken = len(self._decode(self._ids))

    def _cut(self) -> None:
        places = [self._held.find(stop) for stop in self._stop]
        places = [place for place in places if place >= 0]
        if places:
            self._held = self._held[: min(places)]
            self.stopped = True

    def _certain(self) -> int:
        """Characters that cannot be the beginning of a stop text."""
        if self.stopped:
            return len(self._held)
        overlap = 0
        for stop in self._stop:
            for length in range(min(len(stop) - 1, len(self._held)), overlap, -1):
                if self._held.endswith(stop[:length]):
                    overlap = length
                    break
        return len(self._held) - overlap

    def _give(self, count: int) -> str:
        text, self._held = self._held[:count], self._held[count:]
        return text
