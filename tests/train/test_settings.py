"""Checked configurations: what is refused, with which words, and what may change on resume."""

import json
import re

import pytest

from pallas_kernels import mhc, sparse_attention
from tests.train import micro
from train import settings
from train.settings import SettingsError


@pytest.fixture
def config(tmp_path):
    return micro.config(tmp_path).unlock()


def test_defaults_resolve(config):
    resolved = settings.resolve(config)
    assert resolved.train.steps == 8
    assert resolved.model == micro.model()
    assert set(settings.to_json(config)) == set(settings.SECTIONS)


@pytest.mark.parametrize(
    ("key", "value", "names"),
    [
        ("train.steps", 0, "train.steps = 0"),
        ("train.accumulation", 0, "train.accumulation = 0"),
        ("train.steps", True, "train.steps = True"),
        ("train.steps", 2.5, "train.steps = 2.5: must be a whole number"),
        ("train.steps", "many", "train.steps = 'many': must be a number"),
        ("train.max_loss_spike", -1.0, "train.max_loss_spike = -1.0"),
        ("optimizer.name", "sgd", "optimizer.name = 'sgd': must be one of adamw, v41"),
        ("optimizer.beta2", 1.0, "optimizer.beta2 = 1.0"),
        ("optimizer.eps", 0.0, "optimizer.eps = 0.0"),
        ("optimizer.decay_from", "late", "optimizer.decay_from = 'late'"),
        ("optimizer.warmup_steps", -1, "optimizer.warmup_steps = -1"),
        ("optimizer.muon_momentum", 1.5, "optimizer.muon_momentum = 1.5"),
        ("optimizer.final_learning_rate", -1.0, "optimizer.final_learning_rate = -1.0"),
        ("optimizer.decay_from", 4, "decay_until = (4, None): must be both given"),
        ("eval.batches", 0, "eval.batches = 0"),
        ("kernels.indexer", "none_such", "must be a name of mosaic_gpu, mosaic_tpu, xla"),
        (
            "kernels.fp4",
            "xla,none_such",
            "kernels.fp4 = ('xla', 'none_such'): must be",
        ),
        ("kernels.mhc", 3, "kernels.mhc = 3"),
        ("mesh.distributed", 1, "mesh.distributed = 1"),
        ("model.index_topk", -3, "model.index_topk = -3"),
    ],
)
def test_impossible_values_are_named(config, key, value, names):
    section, name = key.split(".")
    values = config[section].to_dict() | {name: value}
    config[section] = values
    with pytest.raises(ValueError, match=re.escape(names)) as caught:
        settings.resolve(config)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("section", settings.SECTIONS)
def test_a_missing_or_strange_section_is_named(config, section):
    values = config[section]
    del config[section]
    with pytest.raises(SettingsError, match=f"config.{section} is missing"):
        settings.resolve(config)
    config[section] = values
    config["more"] = {}
    with pytest.raises(SettingsError, match="config.more: no such section"):
        settings.resolve(config)


def test_unknown_and_missing_keys_are_named(config):
    config.train.stepps = 3
    with pytest.raises(SettingsError, match="config.train.stepps: no such key; did you mean steps"):
        settings.resolve(config)
    del config.train["stepps"]
    del config.train["steps"]
    with pytest.raises(SettingsError, match="config.train.steps is missing"):
        settings.resolve(config)


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("model.index_topkk", "; did you mean model.index_topk?"),
        ("train.index_topk", "; did you mean model.index_topk?"),
        ("data.seed_", "; did you mean data.seed?"),
        ("model.no_such_key", ""),
    ],
)
def test_hints(config, key, hint):
    assert settings.closest(key, settings.flatten(config.to_dict())) == hint


def test_kernels_are_one_name_or_several(config, monkeypatch):
    # Another op's: what a sequence names need not exist for all.
    monkeypatch.setitem(mhc.READ_IMPLEMENTATIONS, "mosaic_gpu", None)
    config.kernels.indexer = "xla"
    config.kernels.sparse_attention = "mosaic_gpu, xla"
    kernels = settings.resolve(config).kernels
    assert kernels.indexer == "xla"
    assert kernels.sparse_attention == ("mosaic_gpu", "xla")
    assert kernels.mhc is None


def test_an_implementation_must_exist_for_every_function_of_its_op(config, monkeypatch):
    monkeypatch.setitem(sparse_attention.ATTENTION_IMPLEMENTATIONS, "fast", None)
    config.kernels.sparse_attention = "fast, xla"
    assert settings.resolve(config).kernels.sparse_attention == ("fast", "xla")
    config.kernels.sparse_attention = "fast"
    with pytest.raises(
        SettingsError, match="sparse_attention = 'fast': must be a name of mosaic_gpu"
    ):
        settings.resolve(config)


def test_steps_of_the_schedule_must_be_ordered(config):
    config.optimizer.update(warmup_steps=9, decay_from=3, decay_until=12)
    with pytest.raises(SettingsError, match=r"\(9, 3, 12\): must be ordered"):
        settings.resolve(config)


def test_resume_refuses_what_makes_another_run(config):
    stored = settings.to_json(config)
    for key, value in (
        ("model.index_topk", 3),
        ("data.seed", 1),
        ("optimizer.learning_rate", 1.0),
        ("train.accumulation", 2),
        ("train.stages", ((3, {"data.batch_size": 2}),)),
    ):
        section, name = key.split(".")
        changed = settings.to_json(config)
        changed[section][name] = json.loads(json.dumps(value))
        with pytest.raises(SettingsError, match=re.escape(f"config.{key} is")) as caught:
            settings.check_resume(stored, changed)
        assert "\n" not in str(caught.value)
    lacking = settings.to_json(config)
    del lacking["train"]["seed"]
    with pytest.raises(SettingsError, match="config.train.seed is 0, but .* has absent"):
        settings.check_resume(lacking, stored)


def test_resume_allows_length_logging_evaluation_mesh_and_kernels(config):
    stored = settings.to_json(config)
    config.train.steps = 99
    config.train.log_every = 5
    config.train.checkpoint_every = 7
    config.train.profile_steps = 1
    config.train.max_loss_spike = 9.0
    config.train.time_optimizer = True
    config.eval.batches = 3
    config.mesh.fsdp = 2
    config.kernels.mhc = "xla"
    settings.check_resume(stored, settings.to_json(config))
