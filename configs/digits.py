"""A small model that reads handwritten digits off a page, on two CPU cores.

    python -m train.main --config=configs/digits.py --workdir=/tmp/digits
    python -m eval.digits --workdir=/tmp/digits

Pages of one to four digits (`eval.tasks.digit_pages`; needs scikit-learn, `pip install -e
'.[digits]'`), each at its own size; the model sees a page and writes its digits down. Encoder,
projector and text model are trained together from scratch: a window layer, Full at m = 2, Full at m
= 1, with Engram, experts and all four streams. What it reaches is in docs/results/digits.md.
"""

from configs import _defaults
from v41flash import presets
from v41flash.config import VisionConfig
from v41flash.text.engram_hash import table_primes

_ORDERS, _HASH_HEADS, _SITES = 2, 1, 1


def get_config():
    """The configuration."""
    primes = table_primes(512, _ORDERS + 1, _HASH_HEADS, _SITES)
    model = presets.tiny(
        # Bytes, three specials, the image token.
        vocab_size=260,
        image_token_id=259,
        hidden_size=64,
        num_hidden_layers=3,
        compress_ratios=(0, 2, 1),
        kv_source_layer_ids=(1, 2),
        index_source_layer_ids=(1, 2),
        candidate_source_layer_id=None,
        engram_layer_ids=(1,),
        head_dim=32,
        qk_rope_head_dim=16,
        sliding_window=16,
        index_topk=8,
        n_routed_experts=4,
        moe_intermediate_size=48,
        hc_sinkhorn_iters=2,
        # 1 / sqrt(hidden_size), roughly: at the published 0.02 a model this narrow lets too little
        # of an image through its layers to begin with.
        initializer_range=0.1,
        engram_max_ngram_size=_ORDERS + 1,
        engram_n_heads=_HASH_HEADS,
        engram_vocab_size=512,
        engram_num_embeddings=tuple(sum(map(sum, site)) for site in primes),
        engram_compressed_vocab_size=230,
        # A digit is one image token of 2 x 2 patches.
        vision=VisionConfig(
            num_hidden_layers=2,
            hidden_size=64,
            num_attention_heads=4,
            intermediate_size=128,
            patch_size=8,
            rope_theta=10_000.0,
            downsample_ratio=2,
            max_image_tokens=8,
            min_pixels=1,
        ),
    )
    config = _defaults.get_config(model)

    config.data.kind = "digits"
    config.data.image_field = "image"
    config.data.sequence_length = 64
    config.data.batch_size = 16
    config.data.image_slots = 2
    config.data.image_slot_tokens = 8
    config.data.held_out_fraction = 0.02

    config.optimizer.learning_rate = 2e-3
    config.optimizer.warmup_steps = 30
    config.optimizer.decay_from = 500
    config.optimizer.decay_until = 1200

    config.train.steps = 1200
    config.train.log_every = 20
    config.train.checkpoint_every = 100
    config.eval.every = 400
    config.eval.batches = 2
    config.eval.byte_ngram = False
    # Text alone does not say what is on a page.
    config.eval.sample_tokens = 0
    return config
