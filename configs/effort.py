"""A small model that walks step by step, before it learns how far: where effort_rl starts.

    python -m eval.tasks.modular_walk --out=/tmp/walk.jsonl --count=40000
    python -m train.main --config=configs/effort.py --workdir=/tmp/effort_sft \
        --config.data.path=/tmp/walk.jsonl

The model of quickstart, which learns completions alone: the steps of `eval.tasks.modular_walk`,
written out, and their answer, under efforts that say nothing yet. `configs/effort_rl.py` goes on
from here; docs/results/effort.md has all commands.
"""

from configs import quickstart


def get_config():
    """The configuration."""
    config = quickstart.get_config()
    # Selections leave something out, but seldom the task: it stands some 200 tokens back.
    config.model.index_topk = 128
    config.model.candidate_topk_blocks = 24

    config.data.kind = "jsonl"
    config.data.prompt_field = "prompt"
    config.data.text_field = "completion"
    config.data.sequence_length = 1024
    config.data.batch_size = 32
    config.data.held_out_fraction = 0.02

    config.optimizer.learning_rate = 2e-3
    config.optimizer.warmup_steps = 50
    config.optimizer.decay_from = 300
    config.optimizer.decay_until = 600

    config.train.steps = 600
    config.train.indexer_warmup_steps = 50
    config.train.log_every = 20
    config.train.checkpoint_every = 100
    config.eval.every = 200
    config.eval.batches = 4
    config.eval.byte_ngram = False
    config.eval.sample_tokens = 0
    return config
