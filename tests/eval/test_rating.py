"""Ratings against a numerical maximum of the likelihood, and its curvature."""

import json
import math

import numpy as np
import pytest
from scipy import optimize

from eval import rating
from v41flash.errors import InputError


def loss(value, ratings, solved):
    """Minus the log-likelihood, spelled out."""
    total = 0.0
    for d, s in zip(ratings, solved, strict=True):
        p = 1 / (1 + 10 ** ((d - value) / 400))
        total -= s * math.log(p) + (1 - s) * math.log(1 - p)
    return total


@pytest.mark.parametrize("seed", range(5))
def test_it_is_the_likeliest(seed):
    rng = np.random.default_rng(seed)
    ratings = rng.uniform(800, 3000, 40)
    solved = (rng.random(40) < 1 / (1 + 10 ** ((ratings - 1700) / 400))).astype(float)
    if seed == 4:
        solved = rng.random(40)  # shares of several attempts
    found = rating.fit(ratings, solved)
    best = optimize.minimize_scalar(
        lambda v: loss(v, ratings, solved), bounds=(0, 4000), method="bounded",
        options={"xatol": 1e-6},
    )  # fmt: skip
    assert found.value == pytest.approx(best.x, abs=0.01)
    h = 1.0
    curvature = (
        loss(best.x + h, ratings, solved)
        - 2 * loss(best.x, ratings, solved)
        + loss(best.x - h, ratings, solved)
    ) / h**2
    assert found.error == pytest.approx(1 / math.sqrt(curvature), rel=1e-3)


def test_its_error_covers_the_truth():
    rng = np.random.default_rng(7)
    ratings = rng.uniform(1000, 2600, 60)
    chance = 1 / (1 + 10 ** ((ratings - 1900) / 400))
    hits = 0
    for _ in range(200):
        found = rating.fit(ratings, (rng.random(60) < chance).astype(float))
        hits += abs(found.value - 1900) < 1.96 * found.error
    assert 0.9 < hits / 200 <= 0.99


def test_all_or_nothing_has_no_rating():
    assert rating.fit([1000, 2000], [1, 1]) == (math.inf, math.inf)
    assert rating.fit([1000, 2000], [0, 0]) == (-math.inf, math.inf)


@pytest.mark.parametrize("arguments", [([], []), ([1.0], [1, 0]), ([1.0], [2]), ([math.nan], [1])])
def test_impossible_outcomes(arguments):
    with pytest.raises(InputError):
        rating.fit(*arguments)


def test_the_program(tmp_path, capsys):
    path = tmp_path / "o.jsonl"
    path.write_text('{"rating": 1500, "solved": 1}\n{"rating": 1500, "solved": 0}\n')
    assert rating.main([f"--outcomes={path}"]) == 0
    found = json.loads(capsys.readouterr().out)
    # Even chances at the rating; information 2 x 1/4 in units of (400 / ln 10)^-2.
    assert found["rating"] == pytest.approx(1500)
    assert found["error"] == pytest.approx(400 / math.log(10) * math.sqrt(2))
    path.write_text('{"rating": 1500}\n')
    assert rating.main([f"--outcomes={path}"]) == 2
    assert '"solved" = None must be a number' in capsys.readouterr().err
    assert rating.main([]) == 2
