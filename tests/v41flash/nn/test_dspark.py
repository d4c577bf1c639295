"""The draft head; that it drafts what the published one does is part of `tests/test_golden.py`."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.v41flash.checkpoints.folders import RECORDED
from tests.v41flash.nn.samples import QUICK_COMPILE
from v41flash.checkpoints import names
from v41flash.checkpoints.published import Published
from v41flash.nn.dspark import DSpark, target_hidden


class Head:
    """The recorded draft head in float32, with a made-up past of three sequences."""

    def __init__(self):
        published = Published.open(RECORDED)

        def read(name):
            return published.values(name).astype(np.float32)

        self.config = dataclasses.replace(published.config, dtype="float32")
        self.model = DSpark(self.config)
        self.params = {"params": names.to_params(self.config, read, names.DRAFT)}
        self.embed, self.head = read("embed.weight"), read("head.weight").T
        rng = np.random.default_rng(0)
        targets = len(self.config.dspark_target_layer_ids)
        hidden = jnp.asarray(rng.normal(size=(3, 8, targets * self.config.hidden_size)), "float32")
        positions = jnp.broadcast_to(jnp.arange(8), (3, 8))

        def rows(hidden):
            return self.model.apply(self.params, hidden, positions, method="context_rows")

        self.past = jax.jit(rows, compiler_options=QUICK_COMPILE)(hidden)
        self.step = jax.jit(self._step, compiler_options=QUICK_COMPILE)

    def _step(self, past, count, first):
        def choose(logits, slot):
            chosen = jnp.argmax(logits, -1).astype(jnp.int32)
            return jnp.where((slot == 0) & (first >= 0), first, chosen)

        arguments = (jnp.array([5, 6, 7]), jnp.array([8, 8, 8]), past, count)
        return self.model.apply(self.params, *arguments, self.embed, self.head, choose)

    def draft(self, count, past=None, first=-1):
        """Drafts after tokens 5, 6, 7; `first` forces the first drafted token."""
        past = self.past if past is None else past
        return self.step(past, jnp.asarray(count, jnp.int32), first)


@pytest.fixture(scope="module")
def drafting():
    return Head()


def test_rows_before_the_counted_ones_are_not_seen(drafting):
    count = [8, 3, 0]
    seen = np.arange(8) >= 8 - np.array(count)[:, None]
    changed = tuple(jnp.where(seen[..., None], row, row + 1.0) for row in drafting.past)
    before, after = drafting.draft(count), drafting.draft(count, changed)
    jax.tree.map(np.testing.assert_array_equal, before, after)
    # The last counted one is.
    changed = tuple(row.at[:, -1].add(1.0) for row in drafting.past)
    difference = np.abs(drafting.draft(count, changed).logits - before.logits).max((1, 2))
    assert (difference[:2] > 1e-3).all() and difference[2] == 0


def test_each_token_is_biased_by_the_one_before(drafting):
    """Forcing another first token moves the later logits by the Markov bias alone."""
    one, other = (drafting.draft([8, 8, 8], first=first) for first in (11, 12))
    np.testing.assert_array_equal(one.logits[:, 0], other.logits[:, 0])
    tree = drafting.params["params"]
    bias = (tree["markov_embed"][11] - tree["markov_embed"][12]) @ tree["markov_head"]
    difference = np.asarray(one.logits[:, 1] - other.logits[:, 1])
    np.testing.assert_allclose(difference, np.broadcast_to(bias, difference.shape), atol=1e-4)


def test_target_hidden_joins_means_over_streams():
    streams = [jnp.arange(24.0).reshape(1, 2, 4, 3) * scale for scale in (1, 10)]
    hidden = target_hidden(streams)
    assert hidden.shape == (1, 2, 6)
    np.testing.assert_array_equal(hidden[0, 0], [4.5, 5.5, 6.5, 45.0, 55.0, 65.0])


def test_its_parameters_are_those_of_the_files(drafting):
    config, d = drafting.config, drafting.config.hidden_size
    hidden = jnp.zeros((1, 1, len(config.dspark_target_layer_ids) * d))
    row = jnp.zeros((1, 1, config.head_dim))

    def everything(module, hidden, one, row, embed, head):
        module.context_rows(hidden, one[None])
        return module(one, one, (row,) * config.num_nextn_predict_layers, one, embed, head)

    one = jnp.ones(1, jnp.int32)
    declared = jax.eval_shape(
        lambda key: drafting.model.init(
            key, hidden, one, row, drafting.embed, drafting.head, method=everything
        ),
        jax.random.key(0),
    )
    shapes = jax.tree.map(jnp.shape, nn.unbox(declared)["params"])
    assert shapes == jax.tree.map(jnp.shape, drafting.params["params"])
