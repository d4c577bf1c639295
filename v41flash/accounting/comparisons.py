"""Earlier models of the family to compare with: V4-Flash and V4-Pro, V3.2, V1-67B.

`ModelConfig` does not describe them. The records hold what their configurations publish, and the
sums are those of their architecture: V4 has compressed layers of two kinds, CSA (m = 4, two
overlapping series, an indexer with a compressor of its own) and HCA (m = 128, every entry visible).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

CSA_RATIO = 4
# V4 entries: 448 channels FP8 with a scale per 64, 64 rotary channels bfloat16, one byte padding.
_ROTARY = 64
_V4_SCALE_BLOCK = 64
_V4_PADDING = 1
# Keys of V4's indexer: E2M1 with a scale per 32 channels.
_INDEX_BLOCK = 32
# Of the bytes that V4 stores between requests, its report puts half down to sliding-window entries;
# a statement about its deployment that no configuration yields.
V4_PERSISTENT_GLOBAL_SHARE = 0.5


@dataclasses.dataclass(frozen=True, kw_only=True)
class V4:
    """A DeepSeek-V4 model: field names and values of its published config.json.

    `compress_ratios` are those of the layers; the MTP block's, the last of the file, is left out.
    The first `num_hash_layers` choose experts by a fixed table and have no router bias.
    """

    name: str
    hidden_size: int
    num_attention_heads: int
    head_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    vocab_size: int
    hc_mult: int
    index_n_heads: int
    index_head_dim: int
    compress_ratios: tuple[int, ...]
    num_hash_layers: int
    num_nextn_predict_layers: int

    @property
    def num_hidden_layers(self) -> int:
        """Layers of the backbone."""
        return len(self.compress_ratios)

    @property
    def csa_layers(self) -> int:
        """Layers with a selection."""
        return self.compress_ratios.count(CSA_RATIO)

    @property
    def hca_layers(self) -> int:
        """Layers that see every entry of a strongly compressed cache."""
        return sum(ratio > CSA_RATIO for ratio in self.compress_ratios)

    @property
    def hca_ratio(self) -> int:
        """Tokens per entry of those."""
        return max(self.compress_ratios)


V4_FLASH = V4(
    name="V4-Flash",
    hidden_size=4096,
    num_attention_heads=64,
    head_dim=512,
    q_lora_rank=1024,
    o_groups=8,
    o_lora_rank=1024,
    n_routed_experts=256,
    n_shared_experts=1,
    num_experts_per_tok=6,
    moe_intermediate_size=2048,
    vocab_size=129280,
    hc_mult=4,
    index_n_heads=64,
    index_head_dim=128,
    compress_ratios=(0, 0) + (4, 128) * 20 + (4,),
    num_hash_layers=3,
    num_nextn_predict_layers=1,
)
V4_PRO = V4(
    name="V4-Pro",
    hidden_size=7168,
    num_attention_heads=128,
    head_dim=512,
    q_lora_rank=1536,
    o_groups=16,
    o_lora_rank=1024,
    n_routed_experts=384,
    n_shared_experts=1,
    num_experts_per_tok=6,
    moe_intermediate_size=3072,
    vocab_size=129280,
    hc_mult=4,
    index_n_heads=64,
    index_head_dim=128,
    compress_ratios=(128, 128) + (4, 128) * 29 + (4,),
    num_hash_layers=3,
    num_nextn_predict_layers=1,
)


def _expert(m: V4) -> int:
    return 3 * m.hidden_size * m.moe_intermediate_size


def attention_per_layer(m: V4) -> int:
    """Projections, two norms and sinks of one layer."""
    heads_dim = m.num_attention_heads * m.head_dim
    queries = m.q_lora_rank * (m.hidden_size + heads_dim)
    output = m.o_lora_rank * (heads_dim + m.o_groups * m.hidden_size)
    small = m.q_lora_rank + m.head_dim + m.num_attention_heads
    return queries + m.hidden_size * m.head_dim + output + small


def _overlapping_compressor(m: V4, width: int, series: int, ratio: int) -> int:
    """Values and gates of `series` series, a learned place per token of a group, the norm."""
    return 2 * m.hidden_size * series * width + ratio * series * width + width


def _selections(m: V4) -> Iterator[int]:
    """Compressor and indexer parameters of each layer that has one."""
    for ratio in m.compress_ratios:
        if ratio == CSA_RATIO:
            yield _overlapping_compressor(m, m.head_dim, 2, ratio)
            yield m.q_lora_rank * m.index_n_heads * m.index_head_dim
            yield m.hidden_size * m.index_n_heads
            yield _overlapping_compressor(m, m.index_head_dim, 2, ratio)
        elif ratio:
            yield _overlapping_compressor(m, m.head_dim, 1, ratio)


def _layer_rest(m: V4) -> int:
    """Shared expert, router and bias, two mHC sublayers, two norms."""
    n, d = m.hc_mult, m.hidden_size
    coefficients = (2 + n) * n
    mhc = coefficients * n * d + coefficients + 3
    router = m.n_routed_experts * (d + 1)
    return m.n_shared_experts * _expert(m) + router + 2 * mhc + 2 * d


def parameters(m: V4) -> dict[str, int]:
    """Parameters by component; "mtp" is not part of the published totals."""
    n, d, layers = m.hc_mult, m.hidden_size, m.num_hidden_layers
    attention, rest = attention_per_layer(m), _layer_rest(m)
    routed = m.n_routed_experts * _expert(m)
    return {
        "routed_experts": layers * routed,
        "attention": layers * attention,
        "compressors_and_indexers": sum(_selections(m)),
        "rest_of_layers": layers * rest - m.num_hash_layers * m.n_routed_experts,
        "embedding": m.vocab_size * d,
        "head": m.vocab_size * d,
        # The streams are read out for the head by coefficients of their own; then a norm.
        "read_out": n * n * d + n + 1 + d,
        "mtp": m.num_nextn_predict_layers * (attention + rest + routed + 2 * d * d),
    }


def total(m: V4) -> int:
    """Parameters without the MTP block: the published total."""
    return sum(count for name, count in parameters(m).items() if name != "mtp")


def activated_layers(m: V4) -> int:
    """Parameters of the layers that one token is multiplied with."""
    counted = parameters(m)
    chosen = m.num_hidden_layers * m.num_experts_per_tok * _expert(m)
    fixed = ("attention", "compressors_and_indexers", "rest_of_layers")
    return chosen + sum(counted[name] for name in fixed)


def entry_bytes(m: V4) -> int:
    """Bytes of a V4 cache entry."""
    rest = m.head_dim - _ROTARY
    return rest + rest // _V4_SCALE_BLOCK + 2 * _ROTARY + _V4_PADDING


def csa_bytes_per_token(m: V4) -> float:
    """Entries and index keys of the CSA layers."""
    key = m.index_head_dim // 2 + m.index_head_dim // _INDEX_BLOCK
    return m.csa_layers * (entry_bytes(m) + key) / CSA_RATIO


def hca_bytes_per_token(m: V4) -> float:
    """Entries of the HCA layers."""
    return m.hca_layers * entry_bytes(m) / m.hca_ratio


def global_bytes_per_token(m: V4) -> float:
    """Entries of all compressed layers, and index keys of the CSA layers."""
    return csa_bytes_per_token(m) + hca_bytes_per_token(m)


def persistent_bytes_per_token(m: V4) -> float:
    """What V4 stores between requests, window entries included."""
    return global_bytes_per_token(m) / V4_PERSISTENT_GLOBAL_SHARE


def v3_2_bytes_per_token() -> int:
    """DeepSeek-V3.2: 61 layers with a latent and an index key each.

    The latent: 512 channels FP8 with four float32 scales, 64 rotary channels in bfloat16; the key:
    128 channels FP8 with a float32 scale.
    """
    latent = 512 + 4 * 4 + 2 * _ROTARY
    return 61 * (latent + 128 + 4)


def v1_67b_bytes_per_token() -> int:
    """DeepSeek 67B (V1): keys and values of 95 layers, 8 heads of 128 channels in bfloat16."""
    return 95 * 2 * 8 * 128 * 2
