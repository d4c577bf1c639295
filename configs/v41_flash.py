"""DeepSeek-V4.1-Flash as published: 552B parameters and 196B of Engram tables.

    python -m eval.accounting --config=configs/v41_flash.py
    python -m train.aot --config=configs/v41_flash.py --topology=v5p:8x8x8

The recipe of the V4.1 report, sections 2.5 and 4.2.2, as far as it is public: 100.6M tokens a step
from the first step on, warm-up over 2,000 steps to 2.6e-4, constant to 28T tokens, cosine to a
tenth at 40T, constant to 45T; sequences of 64K, of 1M from 34T on, with sparse attention from
scratch. Not public, and so left at the defaults: the indexers' loss, clipping, the data mixture.

Laid out for 512 chips of TPU v5p (docs/results/full_scale.md): a step of 64K sequences is 48
microbatches of 32, each sequence over 16 chips; the experts are split 32 ways, and what each chip
then shares with 15 others is split again. More chips become copies (`mesh.data`).
"""

from configs import _defaults
from v41flash import presets

_SEQUENCE, _LONG_SEQUENCE = 65_536, 1_048_576
# 1,536 sequences of 64K, or 96 of 1M: the published 100.6M.
_TOKENS = 1_536 * _SEQUENCE
# Devices that share the rows of a batch, and the tokens of a row.
_ROWS, _CONTEXT = 32, 16


def _step(trillions: int) -> int:
    return trillions * 10**12 // _TOKENS


def get_config():
    """The configuration."""
    config = _defaults.get_config(presets.v41_flash(engram_row_multiple=_ROWS * _CONTEXT))

    config.data.tokenizer = "published"
    config.data.sequence_length = _SEQUENCE
    config.data.batch_size = _TOKENS // _SEQUENCE

    config.optimizer.name = "v41"
    config.optimizer.learning_rate = 2.6e-4
    config.optimizer.final_learning_rate = 2.6e-5
    config.optimizer.warmup_steps = 2_000
    config.optimizer.decay_from = _step(28)
    config.optimizer.decay_until = _step(40)

    # The encoder learns once the rate decays, at a smaller rate; how much smaller is not public.
    config.optimizer.vision_lr_factor = 0.1
    config.train.freeze_vision = True

    config.mesh.expert = _ROWS
    config.mesh.context = _CONTEXT

    config.train.steps = _step(45)
    config.train.accumulation = _TOKENS // _SEQUENCE // _ROWS
    config.train.stages = (
        (_step(28), {"train.freeze_vision": False}),
        (
            _step(34),
            {
                "data.sequence_length": _LONG_SEQUENCE,
                "data.batch_size": _TOKENS // _LONG_SEQUENCE,
                "train.accumulation": _TOKENS // _LONG_SEQUENCE // _ROWS,
            },
        ),
    )
    return config
