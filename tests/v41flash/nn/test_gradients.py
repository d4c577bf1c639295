"""What each loss reaches: every parameter by some, the indexers by their own alone."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.v41flash.nn import samples
from v41flash.nn import ced

T = 40
# Longer than window and top-k; one token; shorter than a window.
LENGTHS = (19, 1, 4)


def batch(config, documents):
    """Model inputs and targets of one packed row; Engram rows are those of its tokens."""
    tokens, positions, segment_ids = samples.packed(documents, T)
    rows = samples.hasher(config).rows(tokens, positions)
    return tokens, positions, segment_ids, rows


def documents():
    rng = np.random.default_rng(0)
    return [rng.integers(3, 250, n) for n in LENGTHS]


def compiled(config):
    """jitted (params, weights [3], inputs) -> ((loss, (losses, router load)), gradients)."""
    model = ced.CED(config, indexer_loss=True)

    def loss(params, weights, inputs):
        outputs, state = model.apply({"params": params}, *inputs, mutable=["router_load"])
        logits = ced.logits(params, outputs.hidden)
        tokens, _, segment_ids, _ = inputs
        nats = -jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[..., None] // 2, -1)[..., 0]
        ce = jnp.sum(nats * (segment_ids > 0)) / jnp.maximum(jnp.sum(segment_ids > 0), 1)
        losses = jnp.stack([ce, outputs.balance_loss, outputs.indexer_kl])
        return weights @ losses, (losses, state["router_load"])

    gradient = jax.value_and_grad(loss, has_aux=True)
    return jax.jit(gradient, compiler_options=samples.QUICK_COMPILE)


@pytest.fixture(scope="module")
def float32_run():
    config = samples.five_layers()
    params = samples.params_of(config, samples.random_weights(config, seed=9))
    inputs = batch(config, documents())
    return config, functools.partial(compiled(config), params), inputs


def paths(tree):
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree.leaves_with_path(tree)}


def reached(gradients):
    """Names of parameters with a non-zero gradient; all must be finite."""
    named = paths(gradients)
    assert all(np.isfinite(leaf).all() for leaf in named.values())
    return {name for name, leaf in named.items() if np.asarray(leaf).any()}


def test_all_losses_together_reach_everything_but_the_router_biases(float32_run):
    _, gradient, inputs = float32_run
    (_, (losses, _)), gradients = gradient(jnp.ones(3), inputs)
    assert (np.asarray(losses) > 0).all()
    every = set(paths(gradients))
    biases = {name for name in every if name.endswith("['router']['bias']")}
    assert len(biases) == 5
    assert reached(gradients) == every - biases
    for leaf in jax.tree.leaves(gradients["group_1"]["reuse"]["attn"]):
        assert np.asarray(leaf).any()


def test_the_indexer_learns_from_its_own_loss_alone(float32_run):
    _, gradient, inputs = float32_run
    without = reached(gradient(jnp.array([1.0, 1.0, 0.0]), inputs)[1])
    alone = reached(gradient(jnp.array([0.0, 0.0, 1.0]), inputs)[1])
    indexers = {name for name in paths(gradient(jnp.ones(3), inputs)[1]) if "'indexer'" in name}
    # wq_b and weights_proj of three sources, wk and k_norm of the two Full layers.
    assert len(indexers) == 3 * 2 + 2 * 2
    assert alone == indexers
    assert not without & indexers


def test_a_row_of_padding_gives_finite_gradients(float32_run):
    config, gradient, _ = float32_run
    (loss, _), gradients = gradient(jnp.ones(3), batch(config, []))
    assert np.isfinite(loss)
    reached(gradients)


def test_router_loads_lie_at_the_biases_and_count_every_token(float32_run):
    _, gradient, inputs = float32_run
    (_, (_, load)), gradients = gradient(jnp.ones(3), inputs)
    biases = {name: leaf for name, leaf in paths(gradients).items() if "['bias']" in name}
    loads = paths(load)
    assert loads.keys() == biases.keys()
    for name, leaf in loads.items():
        assert leaf.shape == biases[name].shape
        np.testing.assert_array_equal(np.asarray(leaf).sum(-1), 2 * sum(LENGTHS))


def test_bfloat16_gradients_point_where_float32_ones_do():
    """Without rounding and at this seed, both make the same selections."""
    config = samples.two_layers(**samples.NO_ROUNDING)
    params = samples.params_of(config, samples.random_weights(config, seed=10))
    inputs = batch(config, documents())
    half = dataclasses.replace(config, dtype="bfloat16")
    expected, ours = (compiled(c)(params, jnp.ones(3), inputs)[1] for c in (config, half))
    assert {leaf.dtype for leaf in jax.tree.leaves(ours)} == {np.dtype("float32")}
    assert reached(expected) == reached(ours)
    for name in reached(expected):
        a, b = (np.asarray(paths(tree)[name], np.float64).ravel() for tree in (expected, ours))
        cosine = a @ b / np.sqrt((a @ a) * (b @ b))
        # Engram's gate has an infinite slope at a score of 0.
        assert cosine > (0.95 if "engram" in name or "embed" in name else 0.99), f"{name}: {cosine}"
