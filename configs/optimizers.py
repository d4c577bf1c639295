"""A model on which optimizers are compared: many learning rates and seeds at once, on one GPU.

    python -m train.compare --config=configs/optimizers.py --workdir=/tmp/optimizers \
        --runs="name=adamw learning_rate=1e-3,2e-3,4e-3" \
        --runs="name=v41 learning_rate=1e-3,2e-3,4e-3"

Every mechanism of the full model is at work, as in quickstart, at twice its width and in bfloat16.
It is as small as that because what is compared needs many runs of the same length. What came out
is in docs/results/optimizers.md. `python -m train.main --config=configs/optimizers.py` trains it
once, with AdamW.
"""

from configs import _defaults
from v41flash import presets
from v41flash.text.engram_hash import table_primes

_ORDERS, _HASH_HEADS, _HASH_START, _SITES = 3, 2, 8192, 2


def get_config():
    """The configuration."""
    primes = table_primes(_HASH_START, _ORDERS + 1, _HASH_HEADS, _SITES)
    model = presets.tiny(
        # Bytes, three specials, and one id for the images that this run does not have.
        vocab_size=260,
        image_token_id=259,
        dtype="bfloat16",
        hidden_size=256,
        num_hidden_layers=6,
        compress_ratios=(0, 2, 2, 1, 1, 1),
        kv_source_layer_ids=(1, 3),
        index_source_layer_ids=(1, 3, 5),
        candidate_source_layer_id=3,
        engram_layer_ids=(1, 3),
        num_attention_heads=8,
        head_dim=64,
        qk_rope_head_dim=16,
        q_lora_rank=128,
        o_lora_rank=64,
        sliding_window=32,
        index_n_heads=4,
        index_head_dim=32,
        index_topk=32,
        candidate_topk_blocks=8,
        candidate_block_size=8,
        n_routed_experts=8,
        moe_intermediate_size=256,
        max_position_embeddings=4096,
        rope_original_max_position_embeddings=512,
        engram_vocab_size=_HASH_START,
        engram_num_embeddings=tuple(sum(sum(order) for order in site) for site in primes),
        engram_compressed_vocab_size=230,
    )
    config = _defaults.get_config(model)

    config.data.sequence_length = 512
    config.data.batch_size = 4

    config.optimizer.learning_rate = 2e-3
    config.optimizer.warmup_steps = 100
    config.optimizer.decay_from = 750
    config.optimizer.decay_until = 1500

    config.train.steps = 1500
    config.train.log_every = 10
    config.train.checkpoint_every = 500
    config.eval.every = 250
    config.eval.batches = 64
    return config
