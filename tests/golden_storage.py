"""Recorded values of a folder in the published storage: what its weights are."""

from __future__ import annotations

import json
import pathlib

import numpy as np

from v41flash.checkpoints.published import Published

# Of the recorded sums, relative to the sum of magnitudes: float64 in another order.
_SUM_TOLERANCE = 1e-12


def statistics(values: np.ndarray) -> np.ndarray:
    """Recorded of each weight: sum, sum of magnitudes, a weighted sum, first and last three."""
    x = values.astype(np.float64).reshape(-1)
    weighted = np.sum(x * (np.arange(x.size) % 11 - 5))
    return np.array([x.sum(), np.abs(x).sum(), weighted, *x[:3], *x[-3:]])


def check_weights(published: Published, recorded: pathlib.Path) -> tuple[int, float, float, str]:
    """Compares every weight, dequantised, with the statistics in `dequant_check.json`.

    Returns:
        (weights compared, worst error, its ratio to the tolerance, name of that weight).

    Raises:
        ValueError: a weight is recorded that the folder does not have.
    """
    worst = (0.0, 0.0, "")
    expected = json.loads(recorded.read_text())
    for name, facts in expected.items():
        if name not in published:
            raise ValueError(f"{recorded}: holds {name!r}, which the folder does not have")
        values = published.values(name)
        ours, theirs = statistics(values), np.asarray(facts["stats"])
        allowed = _SUM_TOLERANCE * np.array([1, 1, 5, 0, 0, 0, 0, 0, 0]) * theirs[1]
        error = np.abs(ours - theirs)
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = np.where(error == 0, 0, error / allowed).max()
        if list(values.shape) != facts["shape"] or np.isnan(ratio):
            ratio = np.inf
        if ratio >= worst[1]:
            worst = (float(error.max()), float(ratio), name)
    return len(expected), *worst
