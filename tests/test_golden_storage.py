"""The recorded folder in the published storage: its weights, its draft head, the engine's run.

What needs the whole model runs in `test_golden.py`, marked slow.
"""

import numpy as np
import pytest

from tests import golden_check, golden_storage
from tests.conftest import GOLDEN
from v41flash.checkpoints.published import Published

FOLDER = GOLDEN / "storage_i"


@pytest.fixture(scope="module")
def published():
    return Published.open(FOLDER)


@pytest.fixture(scope="module")
def arrays():
    return dict(np.load(FOLDER / "C_storage.npz"))


def test_every_weight_is_dequantised_as_recorded(published, arrays):
    recorded = FOLDER / "dequant_check.json"
    count, _, ratio, where = golden_storage.check_weights(published, recorded)
    assert (count, ratio) == (406, 0), where
    whole = {key: x for key, x in arrays.items() if key.startswith("dequantised.")}
    assert len(whole) == 4
    for key, values in whole.items():
        np.testing.assert_array_equal(published.values(key.removeprefix("dequantised.")), values)


def test_the_draft_head_drafts_what_was_recorded(published, arrays):
    prefix = "spec.fp32_noquant."
    spec = {key.removeprefix(prefix): x for key, x in arrays.items() if key.startswith(prefix)}
    value = golden_storage.draft_values(published, arrays["tokens"], spec.pop("main_hidden"))
    assert len(spec) == 12
    for family in golden_check.check_arrays(FOLDER, spec, value):
        assert family.worst <= 1, family


@pytest.mark.slow
def test_packed_sublayers_give_what_the_engine_gave(published, arrays):
    prefix = "official_bf16."
    engine = {key.removeprefix(prefix): x for key, x in arrays.items() if key.startswith(prefix)}
    results = list(golden_storage.check_engine(published, engine, len(arrays["tokens"])))
    assert {family for family, *_ in results} == {
        *("attn.out", "ffn.out", "idx.topk_mask", "ffn.topk_idx")
    }
    for result in results:
        assert result[3] <= 1, result
