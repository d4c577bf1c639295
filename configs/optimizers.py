"""A model on which optimizers are compared: many learning rates and seeds at once, on one GPU.

    python -m train.compare --config=configs/optimizers.py --workdir=/tmp/optimizers \
        --runs="name=adamw learning_rate=1e-3,2e-3,4e-3" \
        --runs="name=v41 learning_rate=4e-3,8e-3,16e-3"

The model of quickstart, in which every mechanism is at work, at twice its width and in bfloat16. It
is as small as that because what is compared needs many runs of the same length; a step of 23 of
them side by side takes 0.17 s on an H200. docs/results/optimizers.md has the commands of a whole
study, and what has been measured. `python -m train.main --config=configs/optimizers.py` trains it
once, with AdamW.
"""

from configs import quickstart
from v41flash.text.engram_hash import table_primes

_HASH_START = 8192


def get_config():
    """The configuration."""
    config = quickstart.get_config()
    model = config.model
    model.dtype = "bfloat16"
    model.hidden_size = 256
    model.num_attention_heads = 8
    model.q_lora_rank = 128
    model.o_lora_rank = 64
    model.moe_intermediate_size = 256
    primes = table_primes(
        _HASH_START, model.engram_max_ngram_size, model.engram_n_heads, len(model.engram_layer_ids)
    )
    model.engram_vocab_size = _HASH_START
    model.engram_num_embeddings = tuple(sum(map(sum, site)) for site in primes)

    config.data.batch_size = 4

    config.optimizer.learning_rate = 2e-3
    config.optimizer.warmup_steps = 100
    config.optimizer.decay_from = 750
    config.optimizer.decay_until = 1500

    config.train.steps = 1500
    config.train.indexer_warmup_steps = 0
    config.train.checkpoint_every = 500
    config.eval.every = 250
    config.eval.batches = 64
    return config
