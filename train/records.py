"""What is kept of the runs of a comparison, and how learning rates are judged by it."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

HELDOUT = "heldout_bits_per_byte"
# One run: "family" (optimizer, and what else is not as configured), "learning_rate", "seed",
# "commit", HELDOUT and "ce" (nats per token in training): {step: number or None}.
Record = dict[str, Any]


def of_comparison(
    runs: Iterable[tuple[str, float, int]], rows: Sequence[dict[str, Any]], commit: str | None
) -> list[Record]:
    """The runs of one comparison.

    Args:
        runs: (family, learning rate, seed) of each.
        rows: the objects of its curves.jsonl: numbers of a step, lists with an entry a run.
        commit: of the code.
    """
    return [
        {"family": family, "learning_rate": rate, "seed": seed, "commit": commit}
        | {
            key: {str(row["step"]): row[key][lane] for row in rows if key in row}
            for key in (HELDOUT, "ce")
        }
        for lane, (family, rate, seed) in enumerate(runs)
    ]


def final(record: Record) -> float:
    """Held-out bits per byte at the end; inf where they are not finite, or were never taken."""
    numbers = record[HELDOUT]
    last = numbers[max(numbers, key=int)] if numbers else None
    return math.inf if last is None else last


def by_rate(found: Iterable[Record]) -> dict[str, dict[float, list[Record]]]:
    """{family: {learning rate, ascending: its runs}}."""
    grouped: dict[str, dict[float, list[Record]]] = defaultdict(lambda: defaultdict(list))
    for record in sorted(found, key=lambda record: record["learning_rate"]):
        grouped[record["family"]][record["learning_rate"]].append(record)
    return {family: dict(rates) for family, rates in grouped.items()}


def mean(numbers: Sequence[float]) -> float:
    """The mean; inf where a number is not finite."""
    return statistics.fmean(numbers) if all(map(math.isfinite, numbers)) else math.inf


def spread(numbers: Sequence[float]) -> float:
    """The standard deviation; 0 of a single number or of what is not finite."""
    if len(numbers) < 2 or not all(map(math.isfinite, numbers)):
        return 0.0
    return statistics.stdev(numbers)


def best(rates: dict[float, list[Record]]) -> float:
    """The learning rate of the lowest mean, among those with the most seeds."""
    most = max(len({record["seed"] for record in runs}) for runs in rates.values())
    full = [rate for rate in rates if len({r["seed"] for r in rates[rate]}) == most]
    return min(full, key=lambda rate: mean([final(record) for record in rates[rate]]))
