"""A task of set difficulty whose steps can be written out: x, m x, m m x, .. modulo 97.

    python -m eval.tasks.modular_walk --out=walk.jsonl [--count=20000 --seed=0]

A problem gives x and m. Whoever solves it walks as far as it likes and reports the number of steps
and the value there, "17:42". A problem has hidden tests, each with a depth; an answer passes those
that are no deeper than its steps, if its value is right. At the level of scale s, depths are
exponential, so that an answer of n right steps has, in the mean over problems, the score

    p(n) = 1 - exp(-n / s):

what another step gains falls off by 1/e every s steps, and the level says how soon. m is a
primitive root, so that no walk repeats within 96 steps.

The program writes demonstrations for supervised fine-tuning, "prompt" and "completion", in which
effort and the number of steps have nothing to do with each other.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from absl import flags

from eval.tasks.verifiable import SPLITS, Problem
from v41flash.effort import HIGHEST, LOWEST
from v41flash.errors import InputError
from v41flash.text.prompt import BOS, END_THINK, render, to_text

MODULUS = 97
MULTIPLIERS = (5, 7, 10, 13, 14, 15, 17, 21)
# Level -> s, steps.
SCALES = {"easy": 2.0, "medium": 4.0, "hard": 8.0}
MAX_STEPS = 40
# Characters of a written step, and so bytes: "17:42 ".
STEP_TEXT = 6
_TESTS = 16
_ANSWER = re.compile(r"(\d\d):(\d\d)")


class ModularWalk:
    """See the module; implements `eval.tasks.verifiable.Task`."""

    levels = tuple(SCALES)

    def problem(self, split: str, number: int) -> Problem:
        """See `Task.problem`; endless. The truth is (x, m, depths of the tests)."""
        level = self.levels[number % len(self.levels)]
        rng = np.random.default_rng([SPLITS.index(split), number])
        start, multiplier = int(rng.integers(1, MODULUS)), int(rng.choice(MULTIPLIERS))
        depths = rng.exponential(SCALES[level], _TESTS)
        prompt = f"{level}: {start:02d} times {multiplier:02d}"
        return Problem(prompt, level, (start, multiplier, tuple(depths.tolist())))

    def score(self, problem: Problem, answer: str) -> float:
        """The share of the hidden tests that an answer "steps:value" passes."""
        start, multiplier, depths = problem.truth
        match = _ANSWER.fullmatch(answer.strip())
        if match is None:
            return 0.0
        steps, value = map(int, match.groups())
        if value != start * pow(multiplier, steps, MODULUS) % MODULUS:
            return 0.0
        return sum(depth <= steps for depth in depths) / len(depths)


def expected_score(level: str, steps: float) -> float:
    """p(n), the mean score of right answers after n steps."""
    return -math.expm1(-steps / SCALES[level])


def reasoning(problem: Problem, steps: int) -> tuple[str, str]:
    """(the steps written out, the answer they lead to); steps >= 1."""
    value, multiplier, _ = problem.truth
    written = []
    for step in range(1, steps + 1):
        value = value * multiplier % MODULUS
        written.append(f"{step:02d}:{value:02d} ")
    return "".join(written), written[-1].strip()


def demonstrations(count: int, seed: int) -> Iterator[dict[str, str]]:
    """Rows for supervised fine-tuning: any effort, and 1 .. MAX_STEPS steps alike.

    Prompts are those of reinforcement learning, without bos, which the data pipeline adds.
    """
    task, rng = ModularWalk(), np.random.default_rng(seed)
    for number in range(count):
        problem = task.problem("train", number)
        effort = int(rng.integers(LOWEST, HIGHEST + 1))
        thought, answer = reasoning(problem, int(rng.integers(1, MAX_STEPS + 1)))
        pieces = render([{"role": "user", "content": problem.prompt}], effort=effort)
        yield {
            "prompt": to_text(pieces).removeprefix(BOS),
            "completion": thought + END_THINK + answer,
        }


def main(arguments: Sequence[str]) -> int:
    """Runs the command line; returns the exit status."""
    values = flags.FlagValues()
    flags.DEFINE_string("out", None, "File to write.", flag_values=values)
    flags.DEFINE_integer("count", 20_000, "Rows.", lower_bound=1, flag_values=values)
    flags.DEFINE_integer("seed", 0, "Of efforts and lengths.", lower_bound=0, flag_values=values)
    try:
        rest = values(["eval.tasks.modular_walk", *arguments])
        if len(rest) > 1 or not values.out:
            raise InputError(
                f"usage: python -m eval.tasks.modular_walk --out=FILE; got {arguments}"
            )
        rows = demonstrations(values.count, values.seed)
        Path(values.out).write_text("".join(json.dumps(row) + "\n" for row in rows))
    except (flags.Error, InputError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
