"""Reinforcement learning of a model that reasons, on tasks whose answers can be checked.

    python -m train.rl.main --config=configs/effort_rl.py --workdir=DIR \
        --config.train.init_from=SFT_DIR [--config.rl.task=jsonl:FILE ...]

The run starts with the parameters of another one (usually one of supervised fine-tuning) and goes
on from its own newest checkpoint. Every value of the configuration can be set by a flag, as with
`train.main`; those of the section `rl` are described in `train/rl/settings.py`, tasks in
`eval/tasks/verifiable.py`. DIR can be generated from and served like any other run.

SIGTERM saves after the step under way and ends the run; a second signal ends it at once.

Exit status: 0 complete, 1 the run failed, 2 the flags, the configuration or files are wrong, 75
stopped by SIGTERM with nothing lost, 130 interrupted.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from train import main as main_lib
from train.rl import loop


def main(arguments: Sequence[str]) -> int:
    """Runs the command line; returns the exit status."""
    return main_lib.main(arguments, loop.run, __doc__)


if __name__ == "__main__":
    main_lib.bound_cpu_memory()
    sys.exit(main(sys.argv[1:]))
