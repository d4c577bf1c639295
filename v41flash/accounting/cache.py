"""Bytes that a sequence holds while it is served, and what is kept of it between requests.

Packed rows hold D/2 bytes of E2M1 and an E4M3 scale per 16 channels ("fp4", main entries), D/2 and
a power of two per 32 ("mxfp4", index keys), or D bytes of E4M3 and a power of two per 32 ("fp8",
window entries). The published model comes to 288, 68 and 528 bytes.
"""

from __future__ import annotations

from v41flash.config import LayerSpec, ModelConfig

_ACTIVATION_BYTES = {"bfloat16": 2, "float32": 4}
# Bits of an element, channels per one-byte scale.
_PACKED = {"fp4": (4, 16), "mxfp4": (4, 32), "fp8": (8, 32)}
_PARTIAL_GROUP_BYTES = 4  # the compressor pools in float32
_ID_BYTES = 4


def row_bytes(row_format: str, width: int, dtype: str) -> int:
    """Bytes of one cached row.

    Args:
        row_format: "fp4", "mxfp4", "fp8", or "none" for a row in `dtype`.
        width: channels.
        dtype: "bfloat16" or "float32".
    """
    if row_format == "none":
        return width * _ACTIVATION_BYTES[dtype]
    bits, block = _PACKED[row_format]
    return width * bits // 8 + width // block


def entry_bytes(config: ModelConfig) -> int:
    """Bytes of an entry of the main cache."""
    return row_bytes(config.main_kv_format, config.head_dim, config.dtype)


def index_key_bytes(config: ModelConfig) -> int:
    """Bytes of the index key beside it."""
    return row_bytes(config.index_format, config.index_head_dim, config.dtype)


def window_row_bytes(config: ModelConfig) -> int:
    """Bytes of a sliding-window entry of one layer."""
    return row_bytes(config.window_kv_format, config.head_dim, config.dtype)


def cache_owners(config: ModelConfig) -> tuple[LayerSpec, ...]:
    """The layers that own a global cache."""
    return tuple(spec for spec in config.layers if spec.mode == "full")


def entries_per_token(config: ModelConfig) -> float:
    """Entries that one token adds to the global caches."""
    return sum(1 / spec.ratio for spec in cache_owners(config))


def entries(config: ModelConfig, tokens: int) -> int:
    """Entries of a sequence of `tokens` tokens: complete groups only."""
    return sum(tokens // spec.ratio for spec in cache_owners(config))


def global_bytes_per_token(config: ModelConfig) -> float:
    """Main entries and index keys of all caches: what grows with the context."""
    return entries_per_token(config) * (entry_bytes(config) + index_key_bytes(config))


def global_bytes(config: ModelConfig, tokens: int) -> int:
    """Global cache of one sequence of `tokens` tokens."""
    return entries(config, tokens) * (entry_bytes(config) + index_key_bytes(config))


def unshared_bytes_per_token(config: ModelConfig) -> float:
    """The global cache if every layer that reads one had its own."""
    each = entry_bytes(config) + index_key_bytes(config)
    return sum(each / spec.ratio for spec in config.layers if spec.ratio)


def window_bytes(config: ModelConfig) -> int:
    """Sliding-window entries of all layers of one sequence: constant in its length."""
    return config.num_hidden_layers * config.sliding_window * window_row_bytes(config)


def partial_group_bytes(config: ModelConfig) -> int:
    """Keys and gates that wait for their group to fill, at most m - 1 tokens for every cache."""
    waiting = sum(spec.ratio - 1 for spec in cache_owners(config))
    return waiting * 2 * config.head_dim * _PARTIAL_GROUP_BYTES


def lookback_bytes(config: ModelConfig) -> int:
    """Canonical ids that the next token's n-grams reach back to."""
    return max(config.engram_max_ngram_size - 1, 0) * _ID_BYTES


def persistent_bytes_per_token(config: ModelConfig) -> float:
    """What is stored between requests: the global cache alone.

    Window entries are recomputed by a bounded replay, so none of them is ever stored.
    """
    return global_bytes_per_token(config)
