"""Path rules, and the recipe on the parameter tree of the model."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.v41flash.optim import numpy_optimizers
from v41flash import presets
from v41flash.nn import ced
from v41flash.optim import (
    V41_RULES,
    PartitionError,
    Rule,
    partition,
    v41_optimizer,
    warmup_constant_cosine,
)
from v41flash.optim.axes import Matrices, leaf_names
from v41flash.optim.partition import match


@functools.cache
def model_params():
    """Shapes of a small model's parameters."""
    import flax.linen as nn

    config = presets.tiny()
    row = jnp.zeros((1, 8), jnp.int32)
    engram = jnp.zeros((1, 8, config.num_engram_sites, config.engram_rows_per_token), jnp.int32)
    shapes = jax.eval_shape(ced.CED(config).init, jax.random.key(0), row, row, row, engram)
    return config, nn.unbox(shapes)["params"]


def test_faults_are_listed():
    rules = [Rule("a/.*", "x"), Rule(".*/b", "y")]
    with pytest.raises(PartitionError) as error:
        match(rules, {"a": {"b": 1, "c": 2}, "d": [3, {"e": 4}], "z": {"b": 5}})
    assert str(error.value).splitlines()[1:] == [
        "  a/b: 'a/.*' (x), '.*/b' (y)",
        "  d/0: none",
        "  d/1/e: none",
    ]


def test_faults_are_found_at_init():
    tx = partition({"x": optax.sgd(1.0)}, [Rule("a", "x")])
    with pytest.raises(PartitionError, match="b: none"):
        tx.init({"a": jnp.ones(2), "b": jnp.ones(2)})
    with pytest.raises(ValueError, match="no transform for label 'y'"):
        partition({"x": optax.sgd(1.0)}, [Rule("a", "y")])


def test_patterns_match_whole_paths():
    rules = [Rule("w", "x"), Rule("layer/w", "y")]
    assert match(rules, {"layer": {"w": 1}, "w": 2})["layer"]["w"].label == "y"


def test_every_parameter_of_the_model_has_one_rule():
    _, params = model_params()
    matched = match(V41_RULES, params)
    by_label = {}
    is_rule = lambda node: isinstance(node, Rule)  # noqa: E731
    for name, rule in zip(
        leaf_names(params), jax.tree.leaves(matched, is_leaf=is_rule), strict=True
    ):
        by_label.setdefault(rule.label, set()).add(name.split("/")[-1])
    assert by_label["table"] == {"embed", "head"}
    assert by_label["engram_table"] == {"table"}
    assert by_label["router_bias"] == {"bias"}
    assert by_label["vector"] == {"base", "scale", "sink"}
    assert by_label["norm"] == {
        *("norm", "q_norm", "kv_norm", "k_norm"),
        *("q_weight", "k_weight"),
    }
    assert by_label["matrix"] == {
        *("wq_a", "wq_b", "wkv", "wo_a", "wo_b", "wgate", "weights_proj", "wk"),
        *("weight", "w13", "w2", "shared_w13", "shared_w2", "fn"),
    }


def test_matrices_of_the_model():
    """Fan-in, fan-out and number of the matrices that the rules make of each weight."""
    config, params = model_params()
    d, heads, dim = config.hidden_size, config.num_attention_heads, config.head_dim
    rank, streams = config.q_lora_rank, config.hc_mult
    experts, hidden = config.n_routed_experts, config.moe_intermediate_size
    groups, o_rank = config.o_groups, config.o_lora_rank
    expected = {
        "attn/wq_b": (heads, rank, dim),
        "attn/wkv": (1, d, dim),
        "attn/wo_a": (groups, heads * dim // groups, o_rank),
        "attn/wo_b": (1, groups * o_rank, d),
        "indexer/wq_b": (config.index_n_heads, rank, config.index_head_dim),
        "ffn/w13": (experts * 2, d, hidden),
        "ffn/w2": (experts, hidden, d),
        "ffn/shared_w13": (2, d, config.n_shared_experts * hidden),
        "router/weight": (1, d, experts),
        "hc_attn/fn": (1, streams * d, (2 + streams) * streams),
        "engram/wkv": (
            1,
            config.engram_rows_per_token * config.engram_head_dim,
            (streams + 1) * d,
        ),
    }
    matched = jax.tree.leaves(match(V41_RULES, params), is_leaf=lambda node: isinstance(node, Rule))
    seen = set()
    for name, leaf, rule in zip(leaf_names(params), jax.tree.leaves(params), matched, strict=True):
        if rule.spec is None:
            continue
        plan = Matrices.of(rule.spec, leaf.shape, name)
        end = "/".join(name.split("/")[-2:])
        if end in expected:
            seen.add(end)
            count, fan_in, fan_out = expected[end]
            assert (plan.rows, plan.columns) == (fan_in, (fan_out,)), name
            # Layers that are stacked in front multiply the number of matrices.
            assert plan.batch % count == 0, name
            if "/first/" in name and leaf.ndim <= 4 and not name.startswith("group_1/"):
                assert plan.batch in (count, count * leaf.shape[0]), name
    assert seen == set(expected)


def small_tree():
    rng = np.random.default_rng(0)
    shapes = {
        "embed": (12, 4),
        "head": (4, 12),
        "norm": (4,),
        "group_0/first/attn/wq_b": (5, 2, 3),
        "group_0/first/attn/sink": (2,),
        "group_0/first/ffn/router/bias": (3,),
        "group_0/first/engram/table": (30, 4),
    }
    params, grads = ({}, {})
    for path, shape in shapes.items():
        for tree in (params, grads):
            *folders, last = path.split("/")
            for folder in folders:
                tree = tree.setdefault(folder, {})
            tree[last] = jnp.asarray(rng.normal(size=shape), jnp.float32)
    return params, grads


def test_recipe_equals_its_parts():
    """Every group against its definition, with the schedule at its first two steps."""
    params, grads = small_tree()
    keywords = dict(warmup_steps=4, decay_from=6, decay_until=8)
    tx = v41_optimizer(1e-2, compute_dtype="float32", engram_capacity=8, **keywords)
    state = tx.init(params)
    update = jax.jit(tx.update)
    _, state = update(grads, state, params)
    updates, _ = update(grads, state, params)
    rate = warmup_constant_cosine(1e-2, **keywords)(1)
    assert np.isclose(rate, 5e-3)

    def tables(grad):
        _, momentum = numpy_optimizers.sinkhorn_update(grad, np.zeros_like(grad))
        return -0.18 * rate * numpy_optimizers.sinkhorn_update(grad, momentum)[0]

    as_float64 = jax.tree.map(lambda x: np.asarray(x, np.float64), grads)
    np.testing.assert_allclose(updates["embed"], tables(as_float64["embed"]), atol=1e-7)
    np.testing.assert_allclose(updates["head"], tables(as_float64["head"].T).T, atol=1e-7)
    layer, grad, param = (tree["group_0"]["first"] for tree in (updates, as_float64, params))
    np.testing.assert_allclose(
        layer["engram"]["table"], 5 * tables(grad["engram"]["table"]), atol=1e-6
    )
    for head in range(2):
        each = grad["attn"]["wq_b"][:, head]
        _, momentum = numpy_optimizers.muon(each, np.zeros_like(each))
        direction, _ = numpy_optimizers.muon(each, momentum)
        wanted = -rate * (direction + 0.1 * param["attn"]["wq_b"][:, head])
        np.testing.assert_allclose(layer["attn"]["wq_b"][:, head], wanted, atol=1e-6)
    # Adam with the same gradient twice: its sign.
    np.testing.assert_allclose(
        updates["norm"], -rate * (np.sign(grads["norm"]) + 0.1 * params["norm"]), atol=1e-6
    )
    np.testing.assert_allclose(
        layer["attn"]["sink"], -rate * np.sign(grad["attn"]["sink"]), atol=1e-6
    )
    assert not np.asarray(layer["ffn"]["router"]["bias"]).any()


def test_learning_rate_may_be_a_schedule():
    params, grads = small_tree()
    constant = v41_optimizer(1e-2)
    scheduled = v41_optimizer(optax.constant_schedule(1e-2))
    got, _ = scheduled.update(grads, scheduled.init(params), params)
    want, _ = constant.update(grads, constant.init(params), params)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), got, want)
    with pytest.raises(ValueError, match="leave out"):
        v41_optimizer(optax.constant_schedule(1e-2), warmup_steps=3)
    with pytest.raises(ValueError, match="ordered"):
        v41_optimizer(1e-2, warmup_steps=5, decay_from=3, decay_until=9)


def test_unknown_parameter_is_an_error():
    params, _ = small_tree()
    params["group_0"]["first"]["attn"]["wq_c"] = jnp.ones((2, 2))
    with pytest.raises(PartitionError, match="group_0/first/attn/wq_c: none"):
        v41_optimizer(1e-2).init(params)


def test_memory_of_the_whole_model(capsys):
    """From arrays that exist: one buffer per parameter of the two, where Adam has two."""
    _, shapes = model_params()
    params = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)

    def size(tree):
        return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))

    state, adam = v41_optimizer(1e-2).init(params), optax.adamw(1e-2).init(params)
    with capsys.disabled():
        print(f"\n  parameters {size(params)} B, v41 {size(state)} B, AdamW {size(adam)} B", end="")
    assert size(state) < 1.02 * size(params) < 0.52 * size(adam)
