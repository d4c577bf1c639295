"""Causality and packing on the recorded model: what may not reach a token does not reach it."""

import numpy as np
import pytest

from pallas_kernels.packed_rows import document_starts
from tests.conftest import GOLDEN
from tests.golden_check import Layer
from tests.v41flash.nn.samples import packed

# Row length of the recorded runs: their compiled forward passes serve here too.
LENGTH = 69
# One token; longer than window (8) and top-k (8); shorter than a window; the rest of the row.
DOCUMENT_LENGTHS = (1, 30, 5, 19)
MODES = pytest.mark.parametrize(
    "fake_quantize",
    [pytest.param(True, id="fakequant"), pytest.param(False, id="noquant", marks=pytest.mark.slow)],
)


@pytest.fixture(scope="module")
def tokens():
    return np.load(GOLDEN / "layout_i" / "A_fakequant.npz")["tokens"]


def run(recorded, fake_quantize, tokens, positions, segment_ids):
    """(intermediates, logits [T, V]) of one packed row."""
    rows = recorded.hasher.rows(recorded.compressed_ids[tokens], positions)
    inputs = tokens, positions, segment_ids, rows
    kept, _, logits = recorded.forward(fake_quantize)(recorded.params, *inputs)
    return kept, np.asarray(logits[0])


def documents(tokens):
    ends = np.cumsum(DOCUMENT_LENGTHS)
    return np.split(tokens[: ends[-1]], ends[:-1])


@MODES
def test_logits_do_not_depend_on_later_tokens(recorded, tokens, fake_quantize):
    """Every prefix, so every residue of its length by m, below and above window and top-k."""
    _, whole = recorded.run(fake_quantize, tokens)
    rng = np.random.default_rng(0)
    for t in range(LENGTH - 1):
        changed = tokens.copy()
        changed[t + 1 :] = (changed[t + 1 :] + rng.integers(1, 256, LENGTH - t - 1)) % 256
        _, logits = recorded.run(fake_quantize, changed)
        np.testing.assert_allclose(logits[: t + 1], whole[: t + 1], atol=1e-5, err_msg=f"t={t}")
        assert np.abs(logits[t + 1] - whole[t + 1]).max() > 1e-2


@MODES
def test_packed_documents_are_as_if_alone(recorded, tokens, fake_quantize):
    pieces = documents(tokens)
    starts = document_starts(DOCUMENT_LENGTHS)
    assert starts[-1] + DOCUMENT_LENGTHS[-1] <= LENGTH and DOCUMENT_LENGTHS[0] < 2
    together, logits = run(recorded, fake_quantize, *packed(pieces, LENGTH))
    for start, piece in zip(starts, pieces, strict=True):
        alone, expected = run(recorded, fake_quantize, *packed([piece], LENGTH))
        here = slice(start, start + len(piece))
        np.testing.assert_allclose(logits[here], expected[: len(piece)], atol=1e-5)
        for spec in recorded.config.layers:
            if spec.mode not in ("full", "reindex"):
                continue
            ours, theirs = (Layer(recorded, kept, spec.index) for kept in (together, alone))
            indices, single = ours["attn/indices"][here], theirs["attn/indices"][: len(piece)]
            shifted = np.where(indices < 0, -1, indices - start // spec.ratio)
            np.testing.assert_array_equal(shifted, single)
            visible = (np.arange(len(piece)) + 1) // spec.ratio
            counts = np.minimum(visible, recorded.config.index_topk)
            np.testing.assert_array_equal((indices >= 0).sum(-1), counts)
            if spec.pool == "make":
                blocks = theirs["attn/pool_blocks"][: len(piece)]
                np.testing.assert_array_equal(ours["attn/pool_blocks"][here], blocks)
                np.testing.assert_array_equal(blocks.max(-1), (visible - 1) // 4)


@MODES
def test_padding_does_not_matter(recorded, tokens, fake_quantize):
    row, positions, segment_ids = packed(documents(tokens), LENGTH)
    _, expected = run(recorded, fake_quantize, row, positions, segment_ids)
    padding = segment_ids[0] == 0
    assert padding.sum() == LENGTH - sum(DOCUMENT_LENGTHS)
    garbage = np.where(padding, np.random.default_rng(1).integers(0, 256, LENGTH), row)
    _, logits = run(recorded, fake_quantize, garbage.astype(np.int32), positions, segment_ids)
    np.testing.assert_allclose(logits[~padding], expected[~padding], atol=1e-5)
    assert np.isfinite(logits).all()


def test_a_row_of_padding_is_finite(recorded):
    empty = np.zeros((1, LENGTH), np.int32)
    _, logits = run(recorded, True, empty, empty, empty)
    assert np.isfinite(logits).all()
