"""Serving: prefill, decoding, replay, and `Generator`, which is all that most uses need."""

from v41flash.serving.generator import Generation, Generator, Options, Piece, Statistics
from v41flash.serving.prefixes import PrefixStore

__all__ = ["Generation", "Generator", "Options", "Piece", "PrefixStore", "Statistics"]
