"""Tokenizers, canonical token ids and Engram hashing, all on the host."""
