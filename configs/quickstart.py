"""A small V4.1-Flash on the built-in text corpus, byte by byte, on two CPU cores.

    python -m train.main --config=configs/quickstart.py --workdir=/tmp/quickstart

Every mechanism of the full model is at work: sliding windows, two caches (m = 2 and m = 1),
indexers with top-k well below the visible entries, a candidate pool below those of long documents,
Engram, mixture of experts, four residual streams, all three quantisers.
"""

from configs import _defaults
from v41flash import presets
from v41flash.text.engram_hash import table_primes

_ORDERS, _HASH_HEADS, _SITES = 3, 2, 2


def get_config():
    """The configuration."""
    primes = table_primes(4096, _ORDERS + 1, _HASH_HEADS, _SITES)
    model = presets.tiny(
        # Bytes, three specials, and one id for the images that this run does not have.
        vocab_size=260,
        image_token_id=259,
        hidden_size=128,
        num_hidden_layers=6,
        compress_ratios=(0, 2, 2, 1, 1, 1),
        kv_source_layer_ids=(1, 3),
        index_source_layer_ids=(1, 3, 5),
        candidate_source_layer_id=3,
        engram_layer_ids=(1, 3),
        num_attention_heads=4,
        head_dim=64,
        qk_rope_head_dim=16,
        q_lora_rank=64,
        o_lora_rank=32,
        sliding_window=32,
        index_n_heads=4,
        index_head_dim=32,
        index_topk=32,
        candidate_topk_blocks=8,
        candidate_block_size=8,
        n_routed_experts=8,
        moe_intermediate_size=64,
        max_position_embeddings=4096,
        rope_original_max_position_embeddings=512,
        engram_vocab_size=4096,
        engram_num_embeddings=tuple(sum(sum(order) for order in site) for site in primes),
        engram_compressed_vocab_size=230,
    )
    config = _defaults.get_config(model)

    config.data.sequence_length = 512
    config.data.batch_size = 8

    config.optimizer.learning_rate = 3e-3
    config.optimizer.warmup_steps = 15
    config.optimizer.decay_from = 70
    config.optimizer.decay_until = 140

    config.train.steps = 140
    config.train.indexer_warmup_steps = 15
    config.train.log_every = 10
    config.train.checkpoint_every = 70
    config.eval.every = 70
    config.eval.batches = 16
    return config
