"""What a few seeds say: means, their spread, and whether a claim holds."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence

import numpy as np
from scipy import stats

_CONFIDENCE = 0.95
HOLDS, AGAINST, OPEN, MISSING = "holds", "contradicted", "not shown", "no numbers"


@dataclasses.dataclass(frozen=True)
class Sample:
    """The numbers of a variant.

    Attributes:
        values: one a seed, those that are finite.
        lost: how many are not.
    """

    values: tuple[float, ...]
    lost: int = 0

    @classmethod
    def of(cls, values: Iterable[float]) -> Sample:
        """Sorts out what is no number: a run that has diverged."""
        values = list(values)
        finite = tuple(value for value in values if math.isfinite(value))
        return cls(finite, len(values) - len(finite))

    @property
    def mean(self) -> float:
        """NaN where there are none."""
        return float(np.mean(self.values)) if self.values else math.nan

    @property
    def deviation(self) -> float:
        """Standard deviation over seeds; NaN below two."""
        return float(np.std(self.values, ddof=1)) if len(self.values) > 1 else math.nan


@dataclasses.dataclass(frozen=True)
class Noise:
    """The spread of a value, pooled over samples: two seeds alone say little of it.

    Attributes:
        deviation: of a single value; NaN without any sample of two.
        freedom: degrees of freedom.
    """

    deviation: float
    freedom: int

    @classmethod
    def pooled(cls, samples: Iterable[Sample]) -> Noise:
        """Root mean square of the deviations, by their degrees of freedom."""
        samples = [sample for sample in samples if len(sample.values) > 1]
        freedom = sum(len(sample.values) - 1 for sample in samples)
        if not freedom:
            return cls(math.nan, 0)
        squares = sum(sample.deviation**2 * (len(sample.values) - 1) for sample in samples)
        return cls(math.sqrt(squares / freedom), freedom)


@dataclasses.dataclass(frozen=True)
class Difference:
    """By how much a variant is better than its alternative: mean, and half its interval.

    Attributes:
        mean: positive where the variant is better.
        half_width: of the 95 % interval, from Student's t.
    """

    mean: float
    half_width: float


def difference(gains: Sample, noise: Noise) -> Difference:
    """What the gains of some seeds say of the gain.

    Args:
        gains: one a seed, positive where the variant is better.
        noise: the spread of such a gain.

    Returns:
        See `Difference`; NaN where there are too few numbers.
    """
    if not gains.values or not noise.freedom:
        return Difference(gains.mean, math.nan)
    quantile = stats.t.ppf((1 + _CONFIDENCE) / 2, noise.freedom)
    return Difference(gains.mean, float(quantile) * noise.deviation / math.sqrt(len(gains.values)))


def verdict(found: Difference, kind: str, margin: float) -> str:
    """Whether a claim holds: the whole interval on its side; or contradicted: on the other.

    Args:
        found: variant against alternative.
        kind: "better", or "no worse" by more than `margin`.
        margin: as above.
    """
    if math.isnan(found.mean):
        return MISSING
    if math.isnan(found.half_width):
        return OPEN
    least = -margin if kind == "no worse" else 0.0
    if found.mean - found.half_width > least:
        return HOLDS
    if found.mean + found.half_width < least:
        return AGAINST
    return OPEN


def standard_error(values: Sequence[float]) -> float:
    """Of the mean of some values; NaN below two."""
    return Sample.of(values).deviation / math.sqrt(len(values)) if len(values) > 1 else math.nan
