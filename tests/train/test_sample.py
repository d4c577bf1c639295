"""Samples: only tokens of the tokenizer are drawn, from the right row and position."""

import types

import jax
import jax.numpy as jnp
import numpy as np

from train import sample
from v41flash import sharding
from v41flash.text.tokenizer import ByteTokenizer

TOKENIZER = ByteTokenizer()


class Successor:
    """Stands for a model: the hidden state of a token is the one-hot of the id that follows."""

    def __init__(self, vocab_size):
        self.vocab_size = vocab_size

    def apply(self, variables, tokens, positions, segment_ids, engram_rows):
        assert tokens.shape == positions.shape == segment_ids.shape == engram_rows.shape[:2]
        assert tokens.shape[1] % 8 == 0
        return types.SimpleNamespace(hidden=jax.nn.one_hot(tokens + 1, self.vocab_size))


def _generate(model, head, **arguments):
    return sample.generate(
        model,
        {"head": head},
        sharding.make_mesh({}, jax.devices()[:1]),
        TOKENIZER,
        lambda tokens, positions: np.zeros((*tokens.shape, 0, 0), np.int32),
        **({"count": 4, "temperature": 0.0, "seed": 0} | arguments),
    )


def test_the_likeliest_token_follows():
    assert _generate(Successor(259), jnp.eye(259), prompt="xab") == "xabcdef"


def test_ids_beyond_the_tokenizer_are_never_drawn():
    """A vocabulary with room: nine of ten ids have no text, and all are as likely."""
    text = _generate(
        Successor(2590), jnp.zeros((2590, 2590)), prompt="a", count=30, temperature=1.0
    )
    assert text.startswith("a") and 10 < len(text) <= 31
