"""The model on which claims are tested: small, with every mechanism at work.

    python -m train.main --config=configs/claims.py --workdir=/tmp/claims
    python -m eval.main --sweep=configs/sweeps/claims.py --workdir=/tmp/sweep --slots=8

Eight layers: window | Full (m = 2), two Reuse | Full (m = 1), Reuse | Reindex, Reuse. Of the 512
bytes of a row a query sees 32 in its window and selects 32 entries; Reindex layers choose among 64.
400 steps of 4,096 bytes of the built-in corpus; the recipe is the published one, scaled down.
"""

from configs import quickstart

_LAYERS = (0, 2, 2, 2, 1, 1, 1, 1)


def get_config():
    """The configuration."""
    config = quickstart.get_config()
    model = config.model
    model.dtype = "bfloat16"
    model.num_hidden_layers = len(_LAYERS)
    model.compress_ratios = _LAYERS
    model.kv_source_layer_ids = (1, 4)
    model.index_source_layer_ids = (1, 4, 6)
    model.candidate_source_layer_id = 4
    model.engram_layer_ids = (1, 4)

    config.optimizer.name = "v41"
    config.optimizer.learning_rate = 2e-3
    config.optimizer.warmup_steps = 40
    config.optimizer.decay_from = 200
    config.optimizer.decay_until = 400

    config.train.steps = 400
    config.train.indexer_warmup_steps = 0
    config.train.log_every = 20
    config.train.checkpoint_every = 400
    config.eval.every = 0
    config.eval.batches = 32
    config.eval.byte_ngram = False
    config.eval.sample_tokens = 0
    return config
