"""Overrides that take effect from a step on."""

import re

import jax
import pytest

from tests.train import micro
from train import stages
from train.settings import SettingsError


@pytest.fixture
def config(tmp_path):
    return micro.config(tmp_path).unlock()


def test_one_stage_without_overrides(config):
    (stage,) = stages.resolve_stages(config)
    assert (stage.start, stage.overrides) == (0, {})
    assert stage.settings.model == micro.model()


def test_later_stages_apply_on_top(config):
    config.train.stages = (
        (2, {"model.main_kv_format": "none", "data.sequence_length": 16}),
        (5, {"data.sequence_length": 64, "train.accumulation": 2}),
    )
    made = stages.resolve_stages(config)
    assert [stage.start for stage in made] == [0, 2, 5]
    lengths = [stage.settings.data.sequence_length for stage in made]
    assert lengths == [32, 16, 64]
    assert [stage.settings.model.main_kv_format for stage in made] == ["fp4", "none", "none"]
    assert made[2].settings.train.accumulation == 2
    assert [stages.stage_at(made, step) for step in (0, 1, 2, 4, 5, 99)] == [0, 0, 1, 1, 2, 2]


def test_indexer_warmup_is_a_first_stage(config):
    config.train.indexer_warmup_steps = 4
    config.train.stages = ((2, {"model.replay_segment": 16}), (6, {"model.replay_segment": 0}))
    made = stages.resolve_stages(config)
    dense = [stage.settings.model.dense_selection for stage in made]
    replay = [stage.settings.model.replay_segment for stage in made]
    assert [stage.start for stage in made] == [0, 2, 4, 6]
    assert dense == [True, True, False, False]
    assert replay == [0, 16, 16, 0]


def test_a_stage_at_step_zero_replaces_the_base(config):
    config.train.stages = ((0, {"model.index_topk": 2}),)
    (stage,) = stages.resolve_stages(config)
    assert stage.settings.model.index_topk == 2


@pytest.mark.parametrize(
    ("value", "names"),
    [
        (((3, {"model.index_topkk": 2}),), "model.index_topkk is no key; did you mean"),
        (((3, {"optimizer.learning_rate": 2.0}),), "optimizer.learning_rate cannot change"),
        (((3, {"train.steps": 2}),), "train.steps cannot change"),
        (((3, {}), (3, {})), "from_step 3 follows 3"),
        (((-1, {}),), "from_step -1"),
        ((("3", {}),), "('3', {})"),
        ((3, {}), "3 must be (from_step"),
        (((3, {"model.index_topk": "two"}),), "model.index_topk = 'two'"),
        (((3, {"model.index_topk": -1}),), "from step 3: model.index_topk = -1"),
    ],
)
def test_mistakes_are_named(config, value, names):
    config.train.stages = value
    with pytest.raises(SettingsError, match=re.escape(names)) as caught:
        stages.resolve_stages(config)
    assert "\n" not in str(caught.value)


def test_parameters_must_keep_their_shapes(config):
    config.train.stages = ((3, {"model.moe_intermediate_size": 8}),)
    stage = stages.resolve_stages(config)[1]
    before = {"ffn": {"w2": jax.ShapeDtypeStruct((4, 16, 32), "float32")}}
    after = {"ffn": {"w2": jax.ShapeDtypeStruct((4, 8, 32), "float32")}}
    stages.check_same_parameters(stage, before, before)
    with pytest.raises(SettingsError, match="from step 3: .*moe_intermediate_size.*w2.*16.*8"):
        stages.check_same_parameters(stage, before, after)
    other = {"ffn": {"w2": jax.ShapeDtypeStruct((4, 16, 32), "bfloat16")}}
    with pytest.raises(SettingsError, match="w2.* from float32.* to bfloat16"):
        stages.check_same_parameters(stage, before, other)
    with pytest.raises(SettingsError, match="absent"):
        stages.check_same_parameters(stage, before, {})
