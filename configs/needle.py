"""A small model that finds a note in a text, however long the text is, on two CPU cores.

    python -m train.main --config=configs/needle.py --workdir=/tmp/needle
    python -m eval.long_context --workdir=/tmp/needle --tasks=needle --lengths=128,512,2048

Texts of 128 bytes with one to six notes, all asked for at the end (`eval.tasks.long_context`);
answers and questions are learnt, the text is only read. A window layer, Full and Reuse at m = 1:
what lies beyond 16 bytes is seen through a selection of 16 entries, at any length. For the first
steps every entry is attended to, while the indexer learns from all of them what to select.
"""

from configs import _defaults
from v41flash import presets
from v41flash.text.engram_hash import table_primes

_ORDERS, _HASH_HEADS, _SITES = 2, 2, 1
_LENGTH = 128
# Longest text that is asked about, over the length that is trained on.
_STRETCH = 64


def get_config():
    """The configuration."""
    primes = table_primes(2048, _ORDERS + 1, _HASH_HEADS, _SITES)
    model = presets.tiny(
        vocab_size=260,
        image_token_id=259,
        hidden_size=64,
        num_hidden_layers=3,
        compress_ratios=(0, 1, 1),
        kv_source_layer_ids=(1,),
        index_source_layer_ids=(1,),
        candidate_source_layer_id=None,
        # A window layer can hand on to the next token what n-gram it follows.
        engram_layer_ids=(0,),
        num_attention_heads=2,
        head_dim=64,
        qk_rope_head_dim=8,
        q_lora_rank=64,
        o_lora_rank=64,
        o_groups=1,
        sliding_window=16,
        index_n_heads=4,
        index_head_dim=64,
        index_topk=16,
        n_routed_experts=2,
        num_experts_per_tok=1,
        moe_intermediate_size=64,
        hc_mult=2,
        hc_sinkhorn_iters=2,
        hc_base_init="identity",
        initializer_range=0.1,
        max_position_embeddings=_STRETCH * _LENGTH,
        rope_original_max_position_embeddings=_LENGTH,
        rope_factor=1.0,
        engram_max_ngram_size=_ORDERS + 1,
        engram_n_heads=_HASH_HEADS,
        engram_vocab_size=2048,
        engram_num_embeddings=tuple(sum(map(sum, site)) for site in primes),
        engram_compressed_vocab_size=230,
    )
    config = _defaults.get_config(model)

    config.data.kind = "long_context"
    config.data.path = f"needle:{_LENGTH}"
    config.data.sequence_length = _LENGTH
    config.data.batch_size = 16
    config.data.held_out_fraction = 0.01

    config.optimizer.name = "v41"
    config.optimizer.learning_rate = 4e-3
    config.optimizer.warmup_steps = 30
    config.optimizer.decay_from = 500
    config.optimizer.decay_until = 800

    config.train.steps = 800
    config.train.indexer_warmup_steps = 500
    config.train.log_every = 50
    config.train.checkpoint_every = 50
    config.eval.every = 100
    config.eval.batches = 4
    config.eval.tasks = (f"needle:{_LENGTH}", f"needle:{4 * _LENGTH}")
    config.eval.byte_ngram = False
    config.eval.sample_tokens = 0
    return config
