"""Training that is killed again and again ends with the numbers of training that is not."""

import pytest

from tests.train import kill_training


@pytest.mark.slow
def test_a_few_kills(tmp_path):
    outcome = kill_training.run(tmp_path / "runs", kills=5, inside=1, steps=24, seed=3)
    assert outcome.kills >= 5 and outcome.inside and outcome.resumed and outcome.checked


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_fifty_kills(tmp_path, processes):
    outcome = kill_training.run(tmp_path / "runs", kills=50, inside=15, processes=processes)
    print(outcome)
    assert outcome.kills >= 50 and outcome.inside >= 15
    assert outcome.resumed > 20 and outcome.checked > 50
