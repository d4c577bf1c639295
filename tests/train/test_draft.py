"""Training of a draft head: places, losses by their definition, the command line."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.v41flash.nn import samples
from train import draft
from v41flash.errors import InputError
from v41flash.nn.dspark import Draft, DSpark

SLOTS = 3


def batch(length=12, documents=(7, 4)):
    """One row of two documents, as the pipeline packs them."""
    rng = np.random.default_rng(0)
    tokens, positions, segments = samples.packed(
        [rng.integers(3, 200, n) for n in documents], length
    )
    same = np.append(segments[:, 1:] == segments[:, :-1], [[False]], axis=1) & (segments > 0)
    targets = np.where(same, np.roll(tokens, -1, 1), 0)
    mask = same.astype(np.float32)
    return dict(tokens=tokens, positions=positions, targets=targets, loss_mask=mask)


def test_drafts_end_with_their_document():
    rows = batch()
    at = draft.anchors(rows, jax.random.key(0), 200, SLOTS)
    assert set(np.asarray(at.rows).ravel()) == set(range(12))
    for row, truth, valid in zip(at.rows[0], at.truth[0], at.valid[0], strict=True):
        left = np.cumprod(rows["loss_mask"][0, int(row) : int(row) + SLOTS])
        np.testing.assert_array_equal(valid, np.append(left, [0] * (SLOTS - len(left))) > 0)
        for slot in np.flatnonzero(valid):
            assert truth[slot] == rows["tokens"][0, int(row) + slot + 1]


def test_losses_are_those_of_the_definition(monkeypatch):
    """The head's answer given, the sum is done by hand."""
    config = dataclasses.replace(
        samples.five_layers(), dspark_block_size=SLOTS, num_nextn_predict_layers=0
    )
    rng = np.random.default_rng(1)
    rows = {name: jnp.asarray(x) for name, x in batch().items()}
    places, size = jnp.array([[0, 4, 9]]), config.vocab_size
    at = draft.Anchors(
        places,
        jnp.asarray(rng.integers(3, 200, (1, 3, SLOTS))),
        jnp.asarray([[[1, 1, 1], [1, 1, 0], [0, 0, 0]]], bool),
    )
    logits = rng.normal(size=(3, SLOTS, size)).astype(np.float32)
    confidence = rng.normal(size=(3, SLOTS)).astype(np.float32)
    asked = []

    def apply(self, variables, *arguments, method=None):
        if method == "context_rows":
            return (jnp.zeros((1, 12, config.head_dim)),)
        asked.append(arguments)
        return Draft(None, logits, confidence)

    monkeypatch.setattr(DSpark, "apply", apply)
    hidden = rng.normal(size=(1, 12, config.hidden_size)).astype(np.float32)
    params = {"head": rng.normal(size=(config.hidden_size, size)).astype(np.float32) / 8}
    params["embed"] = None
    loss, rate = draft.losses(DSpark(config), {}, params, rows, (hidden, None), at)

    total = weights = 0.0
    chances = np.zeros((3, SLOTS))
    for place in range(3):
        for slot in range(SLOTS):
            row = min(int(places[0, place]) + slot, 11)
            p = np.asarray(jax.nn.softmax(hidden[0, row] @ params["head"]), np.float64)
            q = np.asarray(jax.nn.softmax(logits[place, slot]), np.float64)
            distance = np.abs(p - q).sum()
            chances[place, slot] = 1 - distance / 2
            sure = 1 / (1 + np.exp(-float(confidence[place, slot])))
            chance = chances[place, slot]
            each = -0.1 * np.log(q[int(at.truth[0, place, slot])]) + 0.9 * distance
            each -= chance * np.log(sure) + (1 - chance) * np.log(1 - sure)
            if at.valid[0, place, slot]:
                total += each * np.exp(-slot / 4)
                weights += np.exp(-slot / 4)
    np.testing.assert_allclose(loss, total / weights, rtol=1e-4)
    np.testing.assert_allclose(rate, [chances[:2, 0].mean(), chances[:2, 1].mean(), chances[0, 2]],
                               rtol=1e-4)  # fmt: skip
    token, position, past, count = asked[0][:4]
    np.testing.assert_array_equal(token, rows["tokens"][0, places[0]])
    np.testing.assert_array_equal(position, rows["positions"][0, places[0]])
    np.testing.assert_array_equal(count, np.minimum(position, config.sliding_window))
    assert past[0].shape == (3, config.sliding_window, config.head_dim)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "--workdir is missing"),
        (["--workdir=x", "y"], "'y' is no flag"),
        (["--workdir=x", "--layers=a"], "invalid literal"),
        (["--workdir=x", "--blocks=0"], "blocks"),
    ],
)
def test_flags_are_checked(flags, message):
    with pytest.raises(InputError, match=message):
        draft.parse(flags)
