"""Parameter kinds and AdamW's groups, against formulas written out in NumPy."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.train import micro
from train import optimizer as optimizer_lib
from train import step as step_lib
from train.settings import OptimizerSettings
from v41flash import sharding
from v41flash.nn import ced


@pytest.fixture(scope="module")
def params():
    """Random values in the shapes of a real parameter tree."""
    model = ced.CED(micro.model())
    abstract = step_lib.abstract_params(model, sharding.make_mesh({}, jax.devices()[:1]))
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda leaf: jnp.asarray(rng.normal(size=leaf.shape), jnp.float32), abstract
    )


def _by_path(tree):
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {"/".join(optimizer_lib.path_names(path)): leaf for path, leaf in leaves}


def test_every_parameter_of_the_model_has_the_right_kind(params):
    kinds = collections.defaultdict(set)
    for path, kind in _by_path(optimizer_lib.kinds(params)).items():
        kinds[kind].add(path.rpartition("/")[2])
    assert dict(kinds) == {
        "table": {"embed", "head", "table"},
        "norm": {"norm", "q_norm", "kv_norm", "k_norm", "q_weight", "k_weight"},
        "vector": {"base", "scale", "sink"},
        "router_bias": {"bias"},
        "matrix": {
            "fn", "wq_a", "wq_b", "wkv", "wgate", "wo_a", "wo_b", "weights_proj", "wk",
            "w13", "w2", "shared_w13", "shared_w2", "weight",
        },
    }  # fmt: skip


def test_one_step_is_adamw_by_groups(params):
    """First step from zero moments: the direction is sign(g), decay only where it belongs."""
    settings = OptimizerSettings(
        learning_rate=0.5, warmup_steps=0, clip_norm=0.0, weight_decay=0.1, eps=1e-30
    )
    transform = optimizer_lib.build(settings)
    gradients = jax.tree.map(jnp.sin, params)
    updates, _ = jax.jit(transform.update)(gradients, transform.init(params), params)
    kinds = _by_path(optimizer_lib.kinds(params))
    before, grads = _by_path(params), _by_path(gradients)
    for path, update in _by_path(updates).items():
        decay = 0.1 if kinds[path] in ("matrix", "norm") else 0.0
        want = -0.5 * (np.sign(grads[path]) + decay * before[path])
        np.testing.assert_allclose(update, want, rtol=1e-4, atol=1e-5, err_msg=path)


def test_router_biases_without_gradient_stay(params):
    transform = optimizer_lib.build(OptimizerSettings(learning_rate=0.5, warmup_steps=0))
    gradients = jax.tree.map(
        lambda kind, leaf: jnp.zeros_like(leaf) if kind == "router_bias" else leaf,
        optimizer_lib.kinds(params),
        params,
    )
    updates, _ = jax.jit(transform.update)(gradients, transform.init(params), params)
    kinds = _by_path(optimizer_lib.kinds(params))
    for path, update in _by_path(updates).items():
        assert bool(jnp.any(update != 0)) == (kinds[path] != "router_bias"), path


def test_the_clip_neither_counts_nor_touches_the_indexers(params):
    clip = optax.masked(optax.clip_by_global_norm(1.0), optimizer_lib.clipped)
    gradients = jax.tree.map(lambda leaf: 100.0 * jnp.ones_like(leaf), params)
    clipped, _ = jax.jit(clip.update)(gradients, clip.init(params), params)
    inside = []
    for path, leaf in _by_path(clipped).items():
        if "indexer" in path:
            assert bool(jnp.all(leaf == 100.0)), path
        else:
            inside.append(leaf)
    np.testing.assert_allclose(optax.tree.norm(inside), 1.0, rtol=1e-5)
    assert len(inside) < len(_by_path(clipped))


def test_the_schedule_ignores_how_long_the_run_is():
    settings = OptimizerSettings(
        learning_rate=1.0, warmup_steps=2, decay_from=4, decay_until=8, final_learning_rate=0.5
    )
    rates = [float(optimizer_lib.schedule(settings)(step)) for step in (0, 1, 3, 6, 8, 100)]
    np.testing.assert_allclose(rates, [0.5, 1.0, 1.0, 0.75, 0.5, 0.5], rtol=1e-6)
