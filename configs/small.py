"""About 300M activated parameters at the published attention widths, for one 140 GB GPU.

    python -m train.main --config=configs/small.py --workdir=/tmp/small

head_dim 512, index head_dim 128, window 128, top-k 512, sequences of 8,192 tokens: the widths that
decide what attention costs. 12 layers: two window layers (Engram in front of the second), an
encoder group Full + 3 Reuse at m = 2, then the decoder, Full + 2 Reuse and Reindex + 2 Reuse at m =
1. Byte-level tokens of the built-in corpus; the vocabulary leaves room for a 32k tokenizer
(`--config.data.tokenizer=FILE`, with `--config.model.engram_compressed_vocab_size` to match). What
it reaches, and how fast, is in docs/results/small.md.
"""

from configs import _defaults
from v41flash import presets
from v41flash.text.engram_hash import table_primes

_ORDERS, _HASH_HEADS, _HASH_START = 3, 8, 16384


def get_config():
    """The configuration."""
    primes = table_primes(_HASH_START, _ORDERS + 1, _HASH_HEADS, 2)
    model = presets.v41_flash(
        # What differs from the published model; its widths of a head stay.
        vocab_size=32768,
        image_token_id=259,
        hidden_size=1024,
        num_hidden_layers=12,
        num_attention_heads=16,
        q_lora_rank=512,
        o_lora_rank=512,
        o_groups=4,
        compress_ratios=(0, 0, 2, 2, 2, 2, 1, 1, 1, 1, 1, 1),
        kv_source_layer_ids=(2, 6),
        index_source_layer_ids=(2, 6, 9),
        candidate_source_layer_id=6,
        candidate_topk_blocks=256,
        n_routed_experts=32,
        num_experts_per_tok=4,
        moe_intermediate_size=512,
        engram_layer_ids=(1, 6),
        engram_num_embeddings=tuple(sum(map(sum, site)) for site in primes),
        engram_max_ngram_size=_ORDERS + 1,
        engram_n_heads=_HASH_HEADS,
        engram_head_dim=128,
        engram_vocab_size=_HASH_START,
        engram_compressed_vocab_size=230,
        # Text only, no draft head, nothing stored in FP8.
        num_nextn_predict_layers=0,
        dspark_block_size=0,
        dspark_noise_token_id=0,
        dspark_target_layer_ids=(),
        dspark_markov_rank=0,
        dspark_n_routed_experts=0,
        dspark_num_experts_per_tok=0,
        vision=None,
        quantization_config=None,
    )
    config = _defaults.get_config(model)

    config.data.sequence_length = 8192
    config.data.batch_size = 2

    config.optimizer.learning_rate = 6e-4
    config.optimizer.warmup_steps = 50
    config.optimizer.decay_from = 150
    config.optimizer.decay_until = 300

    # Costs 0.27 GB a layer for the two sequences, which one GPU has room for, and saves a run of
    # attention in each.
    config.kernels.keep_attention = True

    config.train.steps = 300
    config.train.indexer_warmup_steps = 20
    config.train.log_every = 5
    config.train.checkpoint_every = 150
    config.eval.every = 100
    config.eval.batches = 4
    return config
