"""A rating from which problems were solved: how strong, on the scale of their ratings.

    python -m eval.rating --outcomes=FILE     # JSONL rows with "rating" and "solved" (0 .. 1)

A player of rating R solves a problem of rating D with chance 1 / (1 + 10^((D - R) / 400)). R is the
one under which what happened is likeliest; its standard error comes from the Fisher information.
Where all or none are solved there is no such R, and the answer is an infinity.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from absl import flags
from scipy import optimize, special

from eval.tasks import questions
from v41flash import command_line
from v41flash.errors import InputError

_SCALE = 400.0 / math.log(10.0)


class Rating(NamedTuple):
    """The rating and its standard error; infinities where all problems end alike."""

    value: float
    error: float


def fit(ratings: Sequence[float], solved: Sequence[float]) -> Rating:
    """The likeliest rating.

    Args:
        ratings: [n], of the problems.
        solved: [n], the share of the attempts at each that solved it, 0 .. 1; every problem counts
            as one attempt.

    Raises:
        InputError: no problems, not one outcome a rating, or an outcome outside 0 .. 1.
    """
    d, s = np.asarray(ratings, float), np.asarray(solved, float)
    if not d.size or d.shape != s.shape or not np.isfinite(d).all():
        raise InputError(f"{d.size} ratings and {s.size} outcomes: must be as many, at least one")
    if not ((0 <= s) & (s <= 1)).all():
        raise InputError("outcomes must be 0 .. 1")
    if s.sum() in (0, s.size):
        return Rating(math.copysign(math.inf, s.sum() - 0.5), math.inf)

    def surplus(rating: float) -> float:
        return float(np.sum(special.expit((rating - d) / _SCALE) - s))

    # At the ends every problem has a chance below, or above, what the mean outcome asks for.
    margin = _SCALE * abs(special.logit(s.mean())) + 1.0
    value = optimize.brentq(surplus, d.min() - margin, d.max() + margin, xtol=1e-9)
    chance = special.expit((value - d) / _SCALE)
    return Rating(float(value), float(_SCALE / np.sqrt(np.sum(chance * (1 - chance)))))


@command_line.program(__doc__)
def main(arguments: Sequence[str]) -> int:
    """Runs the command line; returns the exit status."""
    values = flags.FlagValues()
    flags.DEFINE_string("outcomes", None, "JSONL file.", flag_values=values)
    command_line.read(values, arguments, ("outcomes",))
    rows = list(questions.rows(values.outcomes))
    for where, row in rows:
        for key in ("rating", "solved"):
            if not isinstance(row.get(key), int | float):
                raise InputError(f'{where}: "{key}" = {row.get(key)!r} must be a number')
    rated = [row for _, row in rows]
    found = fit([row["rating"] for row in rated], [row["solved"] for row in rated])
    print(json.dumps({"problems": len(rated), "rating": found.value, "error": found.error}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
