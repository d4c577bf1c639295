"""Verdicts against SciPy's own tests and against what the numbers say."""

import math

import numpy as np
import pytest
from scipy import stats

from eval import statistics
from eval.statistics import Difference, Noise, Sample


def test_gains_give_students_interval():
    rng = np.random.default_rng(0)
    first, second = rng.normal(1.0, 0.1, 5), rng.normal(1.2, 0.1, 5)
    gains = Sample.of(second - first)
    found = statistics.difference(gains, Noise.pooled([gains]))
    interval = stats.ttest_rel(second, first).confidence_interval(0.95)
    assert found.mean - found.half_width == pytest.approx(interval.low)
    assert found.mean + found.half_width == pytest.approx(interval.high)


def test_noise_is_pooled_by_degrees_of_freedom():
    rng = np.random.default_rng(1)
    groups = [rng.normal(k, 1, n) for k, n in enumerate((2, 2, 3, 1))]
    noise = Noise.pooled([Sample.of(group) for group in groups])
    squares = sum(((group - group.mean()) ** 2).sum() for group in groups)
    assert noise.freedom == 4 and noise.deviation == pytest.approx(math.sqrt(squares / 4))


def test_diverged_runs_are_counted_apart():
    sample = Sample.of([1.0, math.nan, 3.0, math.inf])
    assert sample == Sample((1.0, 3.0), 2) and sample.mean == 2.0


@pytest.mark.parametrize(
    ("mean", "half", "kind", "margin", "verdict"),
    [
        (0.2, 0.1, "better", 0, statistics.HOLDS),
        (0.2, 0.3, "better", 0, statistics.OPEN),
        (-0.2, 0.1, "better", 0, statistics.AGAINST),
        (-0.02, 0.01, "no worse", 0.05, statistics.HOLDS),
        (-0.02, 0.04, "no worse", 0.05, statistics.OPEN),
        (-0.2, 0.04, "no worse", 0.05, statistics.AGAINST),
        (0.2, math.nan, "better", 0, statistics.OPEN),
        (math.nan, math.nan, "better", 0, statistics.MISSING),
    ],
)
def test_verdicts(mean, half, kind, margin, verdict):
    assert statistics.verdict(Difference(mean, half), kind, margin) == verdict


def test_too_few_numbers_decide_nothing():
    one, none = Sample((1.0,)), Sample(())
    assert math.isnan(Noise.pooled([one, none]).deviation)
    found = statistics.difference(one, Noise.pooled([one]))
    assert found.mean == 1 and math.isnan(found.half_width)
    assert math.isnan(statistics.difference(none, Noise(0.1, 3)).mean)
