"""Runs side by side: each is what it would be alone; wrong flags end with status 2 and one line."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.train import micro
from tests.v41flash.nn.samples import QUICK_COMPILE
from train import compare as compare_lib
from train import optimizer as optimizer_lib
from train import records, study
from train import settings as settings_lib
from train import stages as stages_lib
from train import step as step_lib
from train.data import pipeline
from train.settings import OptimizerSettings
from v41flash import sharding
from v41flash.nn import ced

_RUNS = ("learning_rate=1e-2,3e-3", "weight_decay=0.5 learning_rate=3e-3 seed=1")
_STEPS = 4
_ALSO = ("same: model.main_kv_format=fp4", "rough: model.sliding_window=1")


def _config(folder):
    """One layer has every kind of parameter."""
    config = micro.config(folder).copy_and_resolve_references()
    config.model.num_hidden_layers = 1
    config.model.compress_ratios = (2,)
    config.model.kv_source_layer_ids = (0,)
    config.model.index_source_layer_ids = (0,)
    config.train.steps = _STEPS
    config.train.log_every = 2
    config.eval.every = 2
    return config


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """(configuration, summary, rows of the curves, folder) of three runs."""
    folder = tmp_path_factory.mktemp("compare")
    config = _config(folder)
    summary = compare_lib.compare(config, _RUNS, folder / "run", QUICK_COMPILE, _ALSO)
    lines = (folder / "run" / compare_lib.CURVES).read_text().splitlines()
    return config, summary, [json.loads(line) for line in lines], folder / "run"


@pytest.mark.slow
def test_a_run_beside_others_is_what_it_is_alone(compared):
    """Its losses, by the step that `train.main` runs, on the batches that `train.main` takes."""
    config, summary, rows, _ = compared
    config = config.copy_and_resolve_references()
    lane = 2
    run = summary["runs"][lane]
    config.optimizer.update(run["optimizer"])
    settings = stages_lib.resolve_stages(config)[0].settings
    mesh = sharding.make_mesh({}, jax.devices()[:1])
    model = ced.CED(settings.model, settings.kernels, indexer_loss=True)
    optimizer = optimizer_lib.build(settings.optimizer)
    abstract = step_lib.abstract_state(step_lib.abstract_params(model, mesh), optimizer)
    state = step_lib.init_state(model, optimizer, abstract, run["seed"])
    update = jax.jit(
        step_lib.make_train_step(model, optimizer, settings), compiler_options=QUICK_COMPILE
    )
    iterator = pipeline.from_config(settings.data, settings.model).train_iterator()
    alone = []
    for _ in range(_STEPS):
        batch, _ = pipeline.split_host_fields(next(iterator))
        state, metrics = update(state, batch)
        del metrics["nonfinite"]
        alone.append({name: float(value) for name, value in metrics.items()})
    assert alone[0]["ce"] - alone[-1]["ce"] > 0.02
    for row, first in zip(rows, range(0, _STEPS, 2), strict=True):
        for name in alone[0]:
            want = np.mean([step[name] for step in alone[first : first + 2]])
            tolerance = dict(rtol=1e-2, atol=1e-6)
            np.testing.assert_allclose(row[name][lane], want, err_msg=name, **tolerance)
    np.testing.assert_allclose(
        rows[-1]["learning_rate"][lane], run["optimizer"]["learning_rate"], rtol=1e-6
    )


@pytest.mark.slow
def test_a_study_reads_the_folder(compared):
    _, summary, rows, folder = compared
    found = study.of_folder(folder)
    assert [run["family"] for run in found] == ["adamw", "adamw", "adamw weight_decay=0.5"]
    assert [records.final(run) for run in found] == rows[-1]["heldout_bits_per_byte"]
    assert [run["ce"]["2"] for run in found] == rows[0]["ce"]


@pytest.mark.slow
def test_what_the_folder_holds(compared):
    _, summary, rows, folder = compared
    names = {path.name for path in folder.iterdir()}
    kept = {"config.json", "versions.json", "runs.json", "curves.jsonl", "summary.json"}
    assert names == kept | {"curves.png"}
    assert json.loads((folder / "summary.json").read_text()) == summary
    assert [row["step"] for row in rows] == [2, 4]
    assert all(len(row["heldout_loss"]) == 3 for row in rows)
    assert [run["run"] for run in summary["runs"]] == [
        "adamw 0.01 seed 0",
        "adamw 0.003 seed 0",
        "adamw weight_decay=0.5 0.003 seed 1",
    ]
    last = [run["heldout_loss"] for run in summary["runs"]]
    assert last == rows[-1]["heldout_loss"] and len(set(last)) == 3


@pytest.mark.slow
def test_the_same_parameters_under_other_models(compared):
    _, summary, rows, _ = compared
    for run in summary["runs"]:
        assert run["heldout_loss_under_same"] == run["heldout_loss"]
        assert abs(run["heldout_loss_under_rough"] - run["heldout_loss"]) > 1e-4
    assert "heldout_loss_under_same" not in rows[0]


@pytest.mark.parametrize("name", settings_lib.OPTIMIZERS)
def test_updates_are_proportional_to_the_rate(name):
    """What lets runs of any rate share a transform; over two steps, the second in the decay."""
    rng = np.random.default_rng(0)
    shapes = {"embed": (6, 4), "head": (4, 6), "norm": (4,)}
    params = {
        key: jnp.asarray(rng.normal(size=shape), jnp.float32) for key, shape in shapes.items()
    }
    params["layer"] = {"attn": {"wq_b": jnp.asarray(rng.normal(size=(4, 2, 3)), jnp.float32)}}
    base = OptimizerSettings(name=name, warmup_steps=0, decay_from=1, decay_until=3)

    def updates(rate):
        transform = optimizer_lib.build(dataclasses.replace(base, learning_rate=rate))

        def two(params):
            first, state = transform.update(params, transform.init(params), params)
            return first, transform.update(params, state, params)[0]

        return jax.jit(two, compiler_options=QUICK_COMPILE)(params)

    jax.tree.map(
        lambda one, some: np.testing.assert_allclose(some, 0.03 * one, rtol=1e-5),
        updates(1.0),
        updates(0.03),
    )


@pytest.mark.slow
def test_the_state_that_is_counted(compared):
    """AdamW: two buffers for every parameter, beside step counters."""
    config, summary, _, _ = compared
    settings = stages_lib.resolve_stages(config)[0].settings
    params = step_lib.abstract_params(
        ced.CED(settings.model), sharding.make_mesh({}, jax.devices()[:1])
    )
    total = sum(4 * leaf.size for leaf in jax.tree.leaves(params))
    assert [group["runs"] for group in summary["groups"]] == [2, 1]
    for group in summary["groups"]:
        assert 0 <= group["state_bytes"] - 2 * total < 64


_FILE = """
import pathlib
from tests.train import micro

def get_config():
    return micro.config(pathlib.Path({folder!r}))
"""


@pytest.mark.parametrize(
    ("flags", "names"),
    [
        ([], "--runs is missing"),
        (["--runs=name=v41 rate=1"], "'rate=1' must be KEY=VALUE"),
        (["--runs=learning_rates=1"], "did you mean learning_rate?"),
        (["--runs=v41"], "'v41' must be KEY=VALUE"),
        (["--runs=name=sgd"], "optimizer.name = 'sgd'"),
        (["--runs=learning_rate=fast"], "learning_rate"),
        (["--runs=learning_rate=-1"], "optimizer.learning_rate = -1"),
        (["--runs=seed=0,1", "--runs=seed=1"], "adamw 0.01 seed 1 is there more than once"),
        (
            ["--runs=seed=0", "--config.optimizer.final_learning_rate=0.1"],
            "optimizer.final_learning_rate = 0.1: must be None",
        ),
        (["--runs=seed=0", "--config.train.indexer_warmup_steps=2"], "one stage, not 2"),
        (["--runs=seed=0", "--config.train.init_from=other"], "train.init_from = 'other'"),
        (["--runs=seed=0", "--config.train.log_every=3"], "train.steps = 8: must be a multiple"),
        (["--runs=seed=0", "--config.train.no_such_key=3"], "config.train.no_such_key"),
        (["--runs=seed=0 seed=1"], "seed is there twice"),
        (["--runs=seed=0", "--workdir={folder}/old"], "holds a run already"),
        (["--runs=seed=0", "--workdir={folder}/trained"], "holds a run already"),
        (["--runs=seed=0", "--also=model.index_topk=1"], "must be a name of its own, a colon"),
        (["--runs=seed=0", "--also=x: model.index_top=1"], "did you mean model.index_topk?"),
        (["--runs=seed=0", "--also=x: train.steps=1"], "the key one of the model's"),
        (["--runs=seed=0", "--also=x: model.main_kv_format=fp5"], "main_kv_format = 'fp5'"),
        (["--runs=seed=0", "--also=x: model.hidden_size=64"], "with other parameters"),
    ],
)
def test_wrong_usage_ends_in_one_line(tmp_path, capsys, flags, names):
    (tmp_path / "config.py").write_text(_FILE.format(folder=str(tmp_path)))
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / compare_lib.CURVES).touch()
    (tmp_path / "trained").mkdir()
    (tmp_path / "trained" / "config.json").touch()
    flags = [flag.format(folder=tmp_path) for flag in flags]
    arguments = [f"--config={tmp_path / 'config.py'}", f"--workdir={tmp_path / 'run'}", *flags]
    assert compare_lib.main(arguments) == 2
    shown = capsys.readouterr().err
    assert names in shown and shown.count("\n") == 1 and shown.startswith("error: ")
    assert not (tmp_path / "run").exists()
