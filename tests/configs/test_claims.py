"""The claims sweep: every point can be run, and what is said to be equal is."""

import importlib

import pytest

from configs.sweeps import claims
from eval import report
from eval import sweep as sweep_lib
from train import stages
from train.data import pipeline
from v41flash.accounting import parameters

SWEEP = claims.get_sweep()
SIZES = report.sizes(SWEEP)
# What a few percent are: experts come in whole numbers.
_TOLERANCE = 0.025


def test_the_sweep_can_be_run():
    sweep_lib.check(SWEEP)
    for variant in SWEEP.variants:
        for overrides in ({}, *variant.training.also.values()):
            name = variant.training.config.removesuffix(".py").replace("/", ".")
            config = importlib.import_module(name).get_config()
            config.update_from_flattened_dict({**variant.training.overrides, **overrides})
            (stage,) = stages.resolve_stages(config)
            pipeline.check_config(stage.settings.data)
            assert stage.settings.train.steps % stage.settings.train.log_every == 0


def test_every_variant_serves_a_claim_and_differs_from_all_others():
    used = {name for claim in SWEEP.claims for name in (claim.variant, claim.alternative)}
    assert used | {"pool_128"} == {variant.name for variant in SWEEP.variants}
    definitions = [str(variant.definition()) for variant in SWEEP.variants]
    assert len(set(definitions)) == len(definitions)


@pytest.mark.parametrize("claim", [c for c in SWEEP.claims if c.equal], ids=lambda c: c.alternative)
def test_what_is_said_to_be_equal_is(claim):
    variant, other = SIZES[claim.variant], SIZES[claim.alternative]
    for what in claim.equal:
        field = {"parameters": "total", "activated": "activated"}[what]
        ratio = getattr(other, field) / getattr(variant, field)
        assert abs(ratio - 1) < _TOLERANCE, (what, ratio)


def test_models_are_small():
    assert max(size.total for size in SIZES.values()) < 5.5e6


def test_numbers_that_claims_compare_will_be_there():
    """A number under other settings is one that its variant is asked for."""
    for claim in SWEEP.claims:
        for name, metric in (
            (claim.variant, claim.metric),
            (claim.alternative, claim.other_metric or claim.metric),
        ):
            metric = metric or SWEEP.metric
            known = ["heldout_loss", "heldout_bits_per_byte"]
            known += [f"{k}_under_{n}" for n in SWEEP.variant(name).training.also for k in known]
            assert metric in known, (name, metric)


def test_the_base_has_every_mechanism():
    (base,) = (variant for variant in SWEEP.variants if variant.name == "base")
    model = sweep_lib.model(base.training, sweep_lib.flat_config(base.training.config))
    assert {layer.mode for layer in model.layers} == {"window", "full", "reindex", "reuse"}
    assert {layer.pool for layer in model.layers} == {None, "make", "use"}
    assert (model.main_kv_format, model.index_format) == ("fp4", "mxfp4")
    assert model.num_engram_sites == 2 and model.hc_mult == 4 and model.hc_single_pass
    # A row holds more than windows, selections and pool take.
    held = model.candidate_topk_blocks * model.candidate_block_size
    assert model.index_topk < held < 512 and model.sliding_window < 512


def test_other_settings_keep_the_parameters():
    """What held-out numbers are taken under has the layers, and the units, of what was trained."""

    def layout(training):
        model = sweep_lib.model(training, sweep_lib.flat_config(training.config))
        units = [(g.name, g.start, g.reuse, g.repeats, g.first.mode) for g in model.groups]
        return units, parameters.total(model)

    seen = 0
    for variant in SWEEP.variants:
        for overrides in variant.training.also.values():
            assert layout(variant.training.but(overrides)) == layout(variant.training)
            seen += 1
    assert seen == 9
