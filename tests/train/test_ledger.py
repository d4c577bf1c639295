"""Losses are judged a step late at most, and never after a save."""

import math

import numpy as np
import pytest

from tests.train import micro
from train import origin
from train.ledger import Dispatched, Ledger, TrainingDiverged
from v41flash import presets

_MODEL = micro.model()


def _nonfinite():
    """Of a step of the two layers of `_MODEL` in which all is finite."""
    layers = {f"group_{i}": {"first": {"attention": 0, "experts": 0}} for i in range(2)}
    return {"layers": layers, "gradients": dict.fromkeys(("embed", *layers, "norm", "head"), 0)}


def _step(step, loss=2.0, **values):
    metrics = {
        "loss": loss,
        "ce": loss,
        "grad_norm": 1.0,
        "indexer_grad_norm": 1.0,
        "tokens": 10.0,
        **values,
    }
    metrics = {name: np.float32(value) for name, value in metrics.items()}
    metrics["nonfinite"] = _nonfinite()
    return Dispatched(step, step - 1, metrics, np.array([[7, 8, -1], [9, -1, -1]]), flops=1e6)


def test_it_reads_all_but_the_newest_steps():
    ledger = Ledger(_MODEL, 3.0)
    ledger.add(_step(1, 5.0))
    assert ledger.settle(keep=1) is None
    ledger.add(_step(2, 4.0))
    assert ledger.settle(keep=1) == 1
    assert ledger.values["loss"] == 5.0
    assert ledger.settle() == 2
    assert list(ledger.recent) == [5.0, 4.0]
    rates = ledger.rates(ceiling=1e9)
    assert set(rates) == {"tokens_per_second", "step_seconds", "mfu"}
    assert math.isclose(rates["tokens_per_second"] * rates["step_seconds"], 10.0)
    assert math.isclose(rates["mfu"] * 1e9 * rates["step_seconds"], 1e6)
    assert "mfu" not in ledger.rates(None)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("loss", math.nan),
        ("loss", math.inf),
        ("grad_norm", math.nan),
        ("indexer_grad_norm", math.inf),
    ],
)
def test_numbers_that_are_not_finite_stop_the_run(name, value):
    ledger = Ledger(_MODEL, 0.0)
    ledger.add(_step(1))
    ledger.add(_step(2, **{name: value}))
    with pytest.raises(TrainingDiverged, match=f"step 2: {name} is .*7, 8, 9$") as caught:
        ledger.settle()
    assert "\n" not in str(caught.value)
    assert (caught.value.step, caught.value.batch) == (2, 1)


def test_a_jump_of_the_loss_stops_the_run_once_there_is_a_history():
    ledger = Ledger(_MODEL, 3.0)
    ledger.add(_step(1, 50.0))
    for step in range(2, 10):
        ledger.add(_step(step, 2.0))
    ledger.add(_step(10, 4.9))
    assert ledger.settle() == 10
    ledger.add(_step(11, 5.1))
    with pytest.raises(TrainingDiverged, match="step 11: ce 5.1 is more than .* above .* 2"):
        ledger.settle()


def test_the_history_can_be_carried_over():
    first = Ledger(_MODEL, 3.0)
    for step in range(40):
        first.add(_step(step, 2.0))
    first.settle()
    second = Ledger(_MODEL, 3.0, list(first.recent))
    second.add(_step(41, 9.0))
    with pytest.raises(TrainingDiverged):
        second.settle()


def test_only_the_cross_entropy_of_this_stage_is_compared():
    ledger = Ledger(_MODEL, 3.0)
    for step in range(1, 11):
        ledger.add(_step(step, 2.0))
    ledger.add(_step(11, 50.0, ce=2.0))
    ledger.settle()
    ledger.forget()
    ledger.add(_step(12, 9.0))
    assert ledger.settle() == 12
    assert list(ledger.recent) == [9.0]


def test_many_documents_are_counted():
    ledger = Ledger(_MODEL, 3.0)
    bad = _step(1, math.nan)
    ledger.add(Dispatched(1, 0, bad.metrics, np.arange(100)[None], 0.0))
    with pytest.raises(TrainingDiverged, match="62, 63 and 36 more$"):
        ledger.settle()


def test_where_it_begins():
    found = _nonfinite()
    assert origin.describe(_MODEL, found) == "all outputs of layers and all gradients are finite"
    # Backward: the loss back to what is not finite any more.
    found["gradients"] |= {"embed": 1, "group_0": 7}
    assert origin.describe(_MODEL, found).endswith("not in group_0, embed (from the loss back)")
    found["layers"]["group_1"]["first"]["experts"] = np.int32(3)
    text = "the first outputs that are not finite are those of group_1, experts (layer 1)"
    assert origin.describe(_MODEL, found) == text


def test_layers_of_scanned_groups_are_counted():
    """Every single layer of a model with units and Reuse layers is named when it is the first."""
    model = presets.tiny()
    for wrong in range(model.num_hidden_layers):
        layers = {}
        for group in model.groups:
            size = 1 + group.reuse
            bad = np.arange(group.start, group.start + group.num_layers) >= wrong
            bad = bad.reshape(group.repeats, size).astype(np.int32)
            place = slice(None) if group.repeats > 1 else 0
            layers[group.name] = {
                "first": {"attention": bad[place, 0], "experts": bad[place, 0]},
                "reuse": {"attention": bad[place, 1:], "experts": bad[place, 1:]},
            }
        text = origin.describe(model, {"layers": layers, "gradients": {}})
        assert text.endswith(f", attention (layer {wrong})")
