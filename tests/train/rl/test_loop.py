"""Whole runs of reinforcement learning with a very small model: the numbers, resuming, stopping."""

import dataclasses

import jax
import numpy as np
import pytest

from configs import _defaults
from eval.tasks import modular_walk
from tests.train import micro
from train import metrics, runinfo
from train import settings as settings_lib
from train import step as step_lib
from train.ledger import TrainingDiverged
from train.rl import loop
from train.stopping import Stop, Stopped
from v41flash import sharding
from v41flash.checkpoints.orbax import Checkpoints
from v41flash.nn import ced
from v41flash.serving.run import Run

# Minutes of compilation.
pytestmark = pytest.mark.slow

_TIMES = {"sample_seconds", "train_seconds"}


def _config(folder):
    # A decoder of two layers: what the first makes of a prompt's end shows where it began.
    model = dataclasses.replace(
        micro.model(),
        max_position_embeddings=512,
        num_hidden_layers=3,
        compress_ratios=(2, 1, 1),
    )
    config = _defaults.with_rl(_defaults.get_config(model))
    config.data.update(sequence_length=448, batch_size=2)
    config.optimizer.learning_rate = 1e-2
    config.optimizer.warmup_steps = 0
    config.train.update(steps=4, log_every=1, checkpoint_every=2, init_from=str(folder / "origin"))
    config.rl.update(task="modular_walk", problems=2, efforts=2, samples=4, max_tokens=48)
    # Whoever ends late pays for it, which is all that an untrained model can learn.
    config.rl.update(decode_batch=16, k0=2.0, l_norm=48.0, c_max=10.0, reference_weight=0.1)
    return config


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run folder to start with: random parameters, whose eos is likely enough to be drawn."""
    root = tmp_path_factory.mktemp("rl")
    config = _config(root)
    base = config.to_dict()
    del base["rl"]
    settings = settings_lib.resolve(type(config)(base))
    mesh = sharding.make_mesh({}, jax.devices()[:1])
    model = ced.CED(settings.model, indexer_loss=True)
    params = jax.jit(step_lib.parameter_init(model, mesh))(jax.random.key(0))
    (root / "origin").mkdir()
    runinfo.write_json(root / "origin" / "config.json", settings_lib.to_json(config))
    with Checkpoints(root / "origin" / "checkpoints") as stored:
        stored.save(1, params=params, opt_state={"none": np.zeros(1)}, meta={})
    return root


@pytest.fixture(scope="module")
def straight(folder, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("runs") / "straight"
    loop.run(_config(folder), workdir)
    return workdir


def _rows(workdir):
    return [{k: v for k, v in row.items() if k not in _TIMES} for row in metrics.read(workdir)]


def test_the_numbers(straight, folder):
    rows = metrics.read(straight)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    for row in rows:
        # float32: what is left is the order of sums, and roundings that it tips over.
        assert row["gap"] < 1e-5
        assert 1 <= row["tokens"] <= 48 and 0 <= row["finished"] <= 1
        assert row["score"] == 0 and row["reward"] < 0
        expected = row["policy_loss"] + 0.1 * row["reference_kl"]
        expected += 1e-4 * row["balance"] + row["indexer_kl"]
        np.testing.assert_allclose(row["loss"], expected, rtol=1e-4, atol=1e-6)
        assert {"grad_norm", "sample_seconds", "train_seconds"} <= set(row)
    levels = {name for row in rows for name in row if "/" in name}
    assert levels == {f"{k}/{level}" for k in ("score", "tokens") for level in modular_walk.SCALES}
    # Only after the first update is the policy another than the reference.
    assert abs(rows[0]["reference_kl"]) < 1e-4 < rows[-1]["reference_kl"]
    before, after = Run.load(folder / "origin").params, Run.load(straight).params
    assert np.abs(before["head"] - after["head"]).max() > 1e-3


def test_an_interrupted_run_goes_on_identically(straight, folder, tmp_path):
    config = _config(folder)
    config.train.steps = 2
    loop.run(config, tmp_path)
    loop.run(_config(folder), tmp_path)
    assert _rows(tmp_path) == _rows(straight)
    ours, theirs = Run.load(tmp_path).params, Run.load(straight).params
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


def test_a_stopped_run_goes_on_from_before_the_damage(straight, folder, tmp_path, monkeypatch):
    """SIGTERM during a step saves it; where that checkpoint rots the one before is used."""
    stop, sample = Stop(), loop.rollout.sample

    def interrupted(*arguments):
        stop.requested = arguments[-1] == 2
        return sample(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(loop.rollout, "sample", interrupted)
        with pytest.raises(Stopped, match="after step 3, which is saved"):
            loop.run(_config(folder), tmp_path, stop)
    assert _rows(tmp_path) == _rows(straight)[:3]
    data = max((tmp_path / "checkpoints" / "3" / "opt_state" / "d").iterdir(), key=_size)
    damaged = bytearray(data.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    data.write_bytes(damaged)
    loop.run(_config(folder), tmp_path)
    assert _rows(tmp_path) == _rows(straight)
    assert [path.name for path in (tmp_path / "damaged").iterdir()] == ["3"]


def _size(path):
    return path.stat().st_size


def test_a_gap_stops_the_run(folder, tmp_path):
    config = _config(folder)
    config.rl.max_gap = 1e-12
    with pytest.raises(TrainingDiverged, match="more than rl.max_gap = 1e-12"):
        loop.run(config, tmp_path)
    with Checkpoints(tmp_path / "checkpoints") as stored:
        assert stored.steps() == []


def test_the_gap_needs_the_replay_start(straight, folder, tmp_path, monkeypatch):
    """A trainer whose decoder sees all of a prompt is not the sampler's model."""
    pack = loop.rollout.pack
    monkeypatch.setattr(loop.rollout, "pack", lambda *a, **k: pack(*a, **(k | {"replay": 10**6})))
    config = _config(folder)
    config.train.steps = 1
    loop.run(config, tmp_path)
    (row,) = metrics.read(tmp_path)
    assert row["gap"] > 30 * metrics.read(straight)[0]["gap"]
