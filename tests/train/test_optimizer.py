"""Parameter kinds and AdamW's groups, against formulas written out in NumPy."""

import collections
import dataclasses
import os
import pathlib
import subprocess
import sys

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.train import micro
from tests.v41flash.nn.samples import QUICK_COMPILE, VISION
from train import losses as losses_lib
from train import optimizer as optimizer_lib
from train import settings as settings_lib
from train import step as step_lib
from train.settings import OptimizerSettings
from v41flash import sharding
from v41flash.nn import ced
from v41flash.optim import Rule
from v41flash.optim.axes import Matrices, leaf_names
from v41flash.optim.partition import match


def _abstract(config):
    return step_lib.abstract_params(ced.CED(config), sharding.make_mesh({}, jax.devices()[:1]))


@pytest.fixture(scope="module")
def params():
    """Random values in the shapes of a real parameter tree."""
    abstract = _abstract(_model())
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda leaf: jnp.asarray(rng.normal(size=leaf.shape), jnp.float32), abstract
    )


def _model(**overrides):
    """One layer has every kind of parameter of the text model."""
    return dataclasses.replace(
        micro.model(),
        num_hidden_layers=1,
        compress_ratios=(2,),
        kv_source_layer_ids=(0,),
        index_source_layer_ids=(0,),
        **overrides,
    )


def _by_path(tree):
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {"/".join(optimizer_lib.path_names(path)): leaf for path, leaf in leaves}


def test_every_parameter_of_the_model_has_the_right_kind():
    params = _abstract(_model(vision=VISION))
    kinds = collections.defaultdict(set)
    for path, kind in _by_path(optimizer_lib.kinds(params)).items():
        kinds[kind].add(path.rpartition("/")[2])
    assert dict(kinds) == {
        "table": {"embed", "head"},
        "engram_table": {"table"},
        "norm": {
            "norm", "q_norm", "kv_norm", "k_norm", "q_weight", "k_weight", "attn_norm", "mlp_norm",
        },
        "vector": {
            "base", "scale", "sink", "start", "newline", "end", "patch_embed_bias", "wqkv_bias",
            "wo_bias", "w1_bias", "w2_bias",
        },
        "router_bias": {"bias", "bias_vl"},
        "matrix": {
            "fn", "wq_a", "wq_b", "wkv", "wgate", "wo_a", "wo_b", "weights_proj", "wk",
            "w13", "w2", "shared_w13", "shared_w2", "weight", "patch_embed", "wqkv", "wo", "w1",
        },
    }  # fmt: skip


def test_one_step_is_adamw_by_groups(params):
    """First step from zero moments: the direction is sign(g), decay only where it belongs.

    Router biases have no gradient, and stay.
    """
    settings = OptimizerSettings(
        learning_rate=0.5, warmup_steps=0, clip_norm=0.0, weight_decay=0.1, eps=1e-30
    )
    transform = optimizer_lib.build(settings)
    gradients = jax.tree.map(
        lambda kind, leaf: jnp.sin(leaf) * (kind != "router_bias"),
        optimizer_lib.kinds(params),
        params,
    )
    update = jax.jit(transform.update, compiler_options=QUICK_COMPILE)
    updates, _ = update(gradients, transform.init(params), params)
    kinds = _by_path(optimizer_lib.kinds(params))
    before, grads = _by_path(params), _by_path(gradients)
    for path, update in _by_path(updates).items():
        decay = 0.1 if kinds[path] in ("matrix", "norm") else 0.0
        want = -0.5 * (np.sign(grads[path]) + decay * before[path])
        np.testing.assert_allclose(update, want, rtol=1e-4, atol=1e-5, err_msg=path)


def test_the_clip_neither_counts_nor_touches_the_indexers(params):
    clip = optax.masked(optax.clip_by_global_norm(1.0), optimizer_lib.clipped)
    some = {"group_0": {"first": {"attn": params["group_0"]["first"]["attn"]}}}
    gradients = jax.tree.map(lambda leaf: 100.0 * jnp.ones_like(leaf), some)
    clipped, _ = clip.update(gradients, clip.init(some), some)
    inside = []
    for path, leaf in _by_path(clipped).items():
        if "indexer" in path:
            assert bool(jnp.all(leaf == 100.0)), path
        else:
            inside.append(leaf)
    np.testing.assert_allclose(optax.tree.norm(inside), 1.0, rtol=1e-5)
    assert 0 < len(inside) < len(_by_path(clipped))


@pytest.mark.parametrize(
    ("name", "label", "batch"),
    [("v41", "table", 2), ("head_muon", "vector", 2), ("muon", "vector", 1)],
)
def test_the_rules_of_each_name(params, name, label, batch):
    """Tables balanced or AdamW; the heads of the queries as matrices of their own or as one."""
    names = leaf_names(params)
    matched = jax.tree.leaves(
        match(optimizer_lib.rules(name), params), is_leaf=lambda node: isinstance(node, Rule)
    )
    rules = dict(zip(names, matched, strict=True))
    assert rules["embed"].label == rules["head"].label == label
    (engram,) = (rule.label for path, rule in rules.items() if path.endswith("engram/table"))
    assert engram == ("engram_table" if name == "v41" else "vector")
    leaves = dict(zip(names, jax.tree.leaves(params), strict=True))
    queries = [path for path in names if path.endswith("wq_b")]
    assert len(queries) == 2  # the attention's and the indexer's
    for path in queries:
        assert leaves[path].shape[1] == 2
        assert Matrices.of(rules[path].spec, leaves[path].shape, path).batch == batch, path


def test_the_table_settings_reach_the_recipe(params):
    """As they show: no row is above a huge mask; the touched-rows form keeps a number a row."""
    tables = {"embed": params["embed"], "head": params["head"]}
    settings = OptimizerSettings(name="v41", warmup_steps=0, clip_norm=0.0)

    def update(**changes):
        transform = optimizer_lib.build(dataclasses.replace(settings, **changes))
        return transform.update(tables, transform.init(tables), tables)[0]

    assert all(bool(jnp.any(leaf)) for leaf in jax.tree.leaves(update()))
    assert not any(bool(jnp.any(leaf)) for leaf in jax.tree.leaves(update(sinkhorn_tau=1e6)))

    def columns(capacity):
        transform = optimizer_lib.build(dataclasses.replace(settings, engram_capacity=capacity))
        state = jax.eval_shape(transform.init, params)
        rows = sum(_model().engram_num_embeddings)
        return [leaf.dtype for leaf in jax.tree.leaves(state) if leaf.shape == (rows, 1)]

    assert columns(0) == []
    assert columns(8) == [jnp.float32, jnp.int32]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name == "v41" else pytest.mark.slow)
        for name in settings_lib.OPTIMIZERS
    ],
)
def test_every_optimizer_trains(model_gradient, name):
    """Three steps on one batch."""
    loss_and_gradient, params = model_gradient
    transform = optimizer_lib.build(
        OptimizerSettings(name=name, learning_rate=1e-2, warmup_steps=0)
    )

    def update(gradients, state, params):
        updates, state = transform.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    update = jax.jit(update, compiler_options=QUICK_COMPILE)
    state = jax.jit(transform.init)(params)
    losses = []
    for _ in range(3):
        loss, gradients = loss_and_gradient(params)
        losses.append(float(loss))
        params, state = update(gradients, state, params)
    assert np.isfinite(losses).all() and losses[2] < losses[1] < losses[0]


@pytest.fixture(scope="module")
def model_gradient():
    """(params -> (loss, gradients) on one batch of the micro model, initial parameters)."""
    config = _model()
    rng = np.random.default_rng(0)
    tokens = jnp.asarray(rng.integers(3, 100, (2, 32)), jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(32, dtype=jnp.int32), (2, 32))
    rows = jnp.zeros((2, 32, config.num_engram_sites, config.engram_rows_per_token), jnp.int32)
    model = ced.CED(config, indexer_loss=True)
    inputs = (tokens, positions, jnp.ones_like(tokens), rows)

    def loss(params):
        outputs = model.apply({"params": params}, *inputs)
        logits = ced.logits(params, outputs.hidden[:, :-1])
        return losses_lib.token_nats(logits, tokens[:, 1:]).mean() + outputs.indexer_kl

    init = jax.jit(model.init, compiler_options=QUICK_COMPILE)
    params = nn.unbox(init(jax.random.key(0), *inputs))["params"]
    return jax.jit(jax.value_and_grad(loss), compiler_options=QUICK_COMPILE), params


def test_state_on_a_mesh():
    """In a process of its own: the number of devices is fixed before JAX starts."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4"
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": flags,
    }
    done = subprocess.run(
        [sys.executable, "-m", "tests.train.mesh_run"],
        cwd=pathlib.Path(__file__).parents[2],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines() == [f"{name} kept" for name in settings_lib.OPTIMIZERS]


def test_the_schedule_ignores_how_long_the_run_is():
    settings = OptimizerSettings(
        learning_rate=1.0, warmup_steps=2, decay_from=4, decay_until=8, final_learning_rate=0.5
    )
    rates = [float(optimizer_lib.schedule(settings)(step)) for step in (0, 1, 3, 6, 8, 100)]
    np.testing.assert_allclose(rates, [0.5, 1.0, 1.0, 0.75, 0.5, 0.5], rtol=1e-6)
