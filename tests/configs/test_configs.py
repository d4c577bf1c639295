"""Every file of configs/ can be run; quickstart keeps what its docstring promises."""

import importlib
import pkgutil

import jax
import numpy as np
import pytest

import configs
from eval.tasks import modular_walk
from train import closing, main, optimizer, stages, step
from train.data import pipeline
from train.rl import settings as rl
from train.settings import SettingsError
from v41flash import sharding
from v41flash.nn import ced

MODULES = pkgutil.iter_modules(configs.__path__)
NAMES = [module.name for module in MODULES if not module.ispkg]
NAMES = [name for name in NAMES if not name.startswith("_")]


def load(name):
    return importlib.import_module(f"configs.{name}").get_config()


@pytest.mark.parametrize("name", NAMES)
def test_it_resolves_and_its_model_and_optimizer_can_be_built(name):
    """As shapes and shardings: nothing of the size of the model is allocated."""
    config = load(name)
    if "rl" in config:
        made = [rl.resolve(config)[0]]
    else:
        made = [stage.settings for stage in stages.resolve_stages(config)]
    for settings in made:
        pipeline.check_config(settings.data)
    settings = made[0]
    model = ced.CED(settings.model, settings.kernels, indexer_loss=True)
    params = step.abstract_params(model, sharding.make_mesh({}, jax.devices()[:1]))
    embed = (settings.model.vocab_size, settings.model.hidden_size)
    assert params["embed"].shape == embed
    state = jax.eval_shape(optimizer.build(settings.optimizer).init, params)
    assert sum(leaf.size for leaf in jax.tree.leaves(state)) > params["embed"].size


def test_every_file_names_its_command():
    for name in NAMES:
        text = importlib.import_module(f"configs.{name}").__doc__
        assert f"--config=configs/{name}.py" in text, name


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory):
    """Settings of the quickstart's last stage."""
    config = load("quickstart")
    config.data.cache_dir = str(tmp_path_factory.mktemp("cache"))
    return stages.resolve_stages(config)[-1].settings


@pytest.fixture(scope="module")
def data(quickstart):
    return pipeline.from_config(quickstart.data, quickstart.model)


def test_selections_and_the_pool_leave_something_out(quickstart, data):
    """On a real batch: what every indexer and every pool sees, and how much of it they keep."""
    model = quickstart.model
    batch = next(data.train_iterator())
    positions = batch["positions"][batch["segment_ids"] > 0]
    assert positions.size > 0.8 * batch["tokens"].size
    ratios = {layer.ratio for layer in model.layers if layer.mode in ("full", "reindex")}
    assert ratios == {1, 2}
    for ratio in ratios:
        visible = (positions + 1) // ratio
        assert np.mean(visible > model.index_topk) > 0.5, ratio
    roles = [layer.pool for layer in model.layers]
    assert "make" in roles and "use" in roles
    (pooled,) = {layer.ratio for layer in model.layers if layer.pool}
    held = model.candidate_topk_blocks * model.candidate_block_size
    assert held > model.index_topk
    assert np.mean((positions + 1) // pooled > held) > 0.05


def test_every_mechanism_is_on(quickstart):
    model = quickstart.model
    assert {layer.mode for layer in model.layers} == {"window", "full", "reindex", "reuse"}
    assert {layer.part for layer in model.layers} == {"encoder", "decoder"}
    formats = (model.main_kv_format, model.window_kv_format, model.index_format)
    assert formats == ("fp4", "fp8", "mxfp4")
    assert model.sliding_window < quickstart.data.sequence_length
    assert model.use_candidate_pool and not model.dense_selection
    assert model.num_engram_sites == 2 and model.hc_mult == 4
    assert model.num_experts_per_tok < model.n_routed_experts


def test_the_comparison_is_a_strong_one(quickstart, data):
    """What counting reaches on the bytes that a run is measured on: no straw man."""
    assert 2.3 < closing.ngram_bits_per_byte(data, quickstart.eval.batches) < 3.0


def test_effort_learns_the_model_that_it_starts_with():
    """And its price is one under which the best lengths are within what it may write."""
    start, config = load("effort"), load("effort_rl")
    assert config.model.to_dict() == start.model.to_dict()
    flags = ["--config=configs/effort_rl.py", "--config.kernels.mhc=xla", "--config.rl.samples=4"]
    changed, _ = main.parse([*flags, "--config.rl.effort_values=(5,50)", "--workdir=x"])
    assert rl.resolve(changed)[1].effort_values == (5, 50)
    price = rl.resolve(config)[1].length_price()
    efforts = np.arange(5, 101, 5)
    for level, scale in modular_walk.SCALES.items():
        tokens = modular_walk.STEP_TEXT * scale
        best = price.optimum(efforts, gain=1 / tokens, scale=tokens)
        assert best.min() > modular_walk.STEP_TEXT, level
        assert best.max() < modular_walk.STEP_TEXT * modular_walk.MAX_STEPS * 0.8
    # The cap touches no trajectory.
    assert price.reward(5, config.rl.max_tokens) > -price.c_max


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("train.indexer_warmup_steps", 5, "train.stages, train.indexer_warmup_steps"),
        ("train.accumulation", 2, "train.accumulation = 2: must be 1"),
        ("mesh.fsdp", 2, "mesh.fsdp = 2: must be 1"),
        ("rl.task", "", "rl.task is empty"),
        ("train.max_rewinds", 1, "train.max_rewinds = 1: must be 0 with reinforcement learning"),
        ("train.on_save_error", "continue", "'continue': must be 'stop' with reinforcement"),
    ],
)
def test_what_reinforcement_learning_has_not_got_is_refused(key, value, message):
    config = load("effort_rl")
    config.update_from_flattened_dict({key: value})
    with pytest.raises(SettingsError, match=message):
        rl.resolve(config)
