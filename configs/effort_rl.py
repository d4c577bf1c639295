"""Effort as a dial: reinforcement learning with the exponential length price.

    python -m train.rl.main --config=configs/effort_rl.py --workdir=/tmp/effort \
        --config.train.init_from=/tmp/effort_sft
    python -m eval.effort --workdir=/tmp/effort

Goes on from a run of `configs/effort.py`. In `eval.tasks.modular_walk` a step is 6 tokens, and at
the level of scale s the score of n steps is 1 - exp(-n / s): under the price below the best length
at effort b is a straight line, steeper by 6 s / tau = 0.375, 0.75 and 1.5 tokens a point of effort
at s = 2, 4 and 8, from about 3, 4 and 2 steps at effort 5 to about 9, 15 and 25 at effort 100.
`--config.rl.price=linear` is the contrast, with the same prices at both ends.
"""

from configs import _defaults, effort


def get_config():
    """The configuration."""
    config = _defaults.with_rl(effort.get_config())
    config.train.indexer_warmup_steps = 0

    config.optimizer.learning_rate = 5e-4
    config.optimizer.warmup_steps = 10
    config.optimizer.decay_from = 100
    config.optimizer.decay_until = 200
    config.optimizer.weight_decay = 0.0

    config.train.steps = 200
    config.train.log_every = 5
    config.train.checkpoint_every = 20

    config.rl.task = "modular_walk"
    config.rl.problems = 16
    config.rl.efforts = 2
    config.rl.samples = 8
    # 40 steps, and the answer.
    config.rl.max_tokens = 256
    config.rl.decode_batch = 256
    config.rl.k0 = 2.2
    config.rl.b_min = 5.0
    config.rl.delta_b = 32.0
    config.rl.l_norm = 128.0
    # Above the price of 256 tokens at effort 5, so that every token costs something everywhere.
    config.rl.c_max = 6.0
    return config
