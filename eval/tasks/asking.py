"""Problems as prompts under an effort, and what a model writes as reasoning and answer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from eval.tasks.verifiable import Problem
from v41flash.text.prompt import END_THINK, PromptEncoder, render
from v41flash.text.prompt_messages import Piece, text_piece
from v41flash.text.prompt_reply import Reply, parse_reply
from v41flash.text.tokenizer import Tokenizer


class Asking:
    """Asks in the chat encoding, thinking mode."""

    def __init__(self, tokenizer: Tokenizer):
        """Takes the tokenizer of the model that is asked."""
        self._tokenizer = tokenizer
        self._encoder = PromptEncoder(tokenizer)

    def prompt(self, problem: Problem, effort: int | str) -> np.ndarray:
        """int32 [n], ids up to where the model begins to reason.

        Raises:
            PromptError: no effort, or a message without an encoding.
        """
        pieces = render([{"role": "user", "content": problem.prompt}], effort=effort)
        return self._encoder.encode(pieces).tokens

    def read(self, tokens: Sequence[int] | np.ndarray) -> Reply:
        """Takes apart what was written after `prompt`; who did not finish thinking has no answer.

        Args:
            tokens: generated ids, with or without the end.
        """
        tokens = np.asarray(tokens)
        text = self._encoder.decode(tokens[tokens != self._tokenizer.eos_id])
        if END_THINK not in text:
            return Reply(text, "", ())
        return parse_reply(text, thinking=True)

    def interrupted(self, reasoning: str) -> np.ndarray:
        """int32 [n], ids of some reasoning and its end: what follows is the answer."""
        pieces = (text_piece(reasoning), Piece("control", END_THINK))
        return self._encoder.encode(pieces).tokens
