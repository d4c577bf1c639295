"""The mixture of experts against a loop over tokens, and the router's losses and loads."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import reference_np
from tests.v41flash.nn import samples
from v41flash.kernels import Kernels
from v41flash.nn.context import make_context
from v41flash.nn.moe import MoE, update_router_bias

B, T = 2, 19
# A limit that about a third of the gates and inputs exceed.
CONFIG = samples.two_layers(swiglu_limit=0.7, vision=samples.VISION)
PREFIX = "layers.0.ffn."
EXPERTS, K = CONFIG.n_routed_experts, CONFIG.num_experts_per_tok


@pytest.fixture(scope="module")
def weights():
    return samples.random_weights(CONFIG, seed=3)


@pytest.fixture(scope="module")
def inputs():
    rng = np.random.default_rng(4)
    x = rng.normal(size=(B, T, CONFIG.hidden_size)).astype(np.float32)
    segment_ids = np.ones((B, T), np.int32)
    segment_ids[1, 11:] = 0
    positions = np.arange(T, dtype=np.int32) * segment_ids
    return x, positions, segment_ids, rng.random((B, T)) < 0.4


@functools.partial(jax.jit, static_argnums=0, compiler_options=samples.QUICK_COMPILE)
def apply(config, params, x, positions, segment_ids, is_image):
    context = make_context(config, positions, segment_ids, None, is_image)
    return MoE(config, Kernels()).apply(
        {"params": params}, x, context, mutable=["router_load", "intermediates"]
    )


def run(weights, inputs, config=CONFIG):
    """(out, balance loss, router intermediates, router load), all NumPy."""
    params = samples.params_of(CONFIG, weights)["group_0"]["first"]["ffn"]
    (out, balance), state = jax.device_get(apply(config, params, *inputs))
    kept = {name: value[0] for name, value in state["intermediates"]["router"].items()}
    return out, balance, kept, state["router_load"]["router"]


def reference(weights, inputs):
    x, _, _, is_image = inputs
    wide = {name: value.astype(np.float64) for name, value in weights.items()}
    rows = x.reshape(B * T, -1).astype(np.float64)
    return reference_np.moe(rows, CONFIG, wide, PREFIX, is_image.reshape(-1))


def load(chosen, counted):
    """Tokens per expert of those `counted` [B, T]."""
    return np.bincount(chosen.reshape(B, T, K)[counted].reshape(-1), minlength=EXPERTS)


def test_equals_a_loop_over_tokens(weights, inputs):
    out, _, kept, _ = run(weights, inputs)
    expected = reference(weights, inputs)
    np.testing.assert_allclose(out.reshape(B * T, -1), expected.out, atol=1e-5)
    chosen = kept["topk_idx"].reshape(-1, K)
    order = np.argsort(chosen, -1)
    np.testing.assert_array_equal(np.take_along_axis(chosen, order, -1), expected.chosen)
    weight = np.take_along_axis(kept["topk_w"].reshape(-1, K), order, -1)
    np.testing.assert_allclose(weight, expected.weights, atol=1e-5)
    np.testing.assert_allclose(weight.sum(-1), CONFIG.routed_scaling_factor, rtol=1e-5)


def test_the_limit_clamps_the_gate_from_above_and_the_input_from_both_sides(weights, inputs):
    x = inputs[0].reshape(B * T, -1)
    gate, value = (x @ weights[f"{PREFIX}shared_experts.{w}.weight"].T for w in ("w1", "w3"))
    assert min(np.mean(gate > 0.7), np.mean(gate < -0.7), np.mean(abs(value) > 0.7)) > 0.1


def test_no_token_is_dropped_when_all_choose_one_expert(weights, inputs):
    skewed = dict(weights)
    for name in ("bias", "bias_vl"):
        skewed[f"{PREFIX}gate.{name}"] = np.eye(EXPERTS, dtype=np.float32)[1] * 10
    out, _, kept, _ = run(skewed, inputs)
    assert (kept["topk_idx"] == 1).any(-1).all()
    np.testing.assert_allclose(out.reshape(B * T, -1), reference(skewed, inputs).out, atol=1e-5)


def test_biases_select_but_do_not_weigh(weights, inputs):
    """A constant added to every bias of one kind changes nothing; weights are those of scores."""
    shifted = dict(weights)
    shifted[f"{PREFIX}gate.bias"] = weights[f"{PREFIX}gate.bias"] + 5
    np.testing.assert_allclose(run(shifted, inputs)[0], run(weights, inputs)[0], atol=1e-5)


def test_text_and_image_tokens_follow_biases_of_their_own(weights, inputs):
    changed = dict(weights)
    changed[f"{PREFIX}gate.bias_vl"] = np.eye(EXPERTS, dtype=np.float32)[4] * 10
    before, after = run(weights, inputs)[2], run(changed, inputs)[2]
    image = inputs[3]
    assert (after["topk_idx"][image] == 4).any(-1).all()
    np.testing.assert_array_equal(before["topk_idx"][~image], after["topk_idx"][~image])


def test_loads_count_text_and_image_tokens_apart_and_no_padding(weights, inputs):
    _, _, kept, loads = run(weights, inputs)
    valid, image = inputs[2] > 0, inputs[3]
    np.testing.assert_array_equal(loads["bias"], load(kept["topk_idx"], valid & ~image))
    np.testing.assert_array_equal(loads["bias_vl"], load(kept["topk_idx"], valid & image))
    assert loads["bias"].sum() + loads["bias_vl"].sum() == K * valid.sum()


def test_one_set_of_biases_for_all_tokens(weights, inputs):
    one = dataclasses.replace(CONFIG, router_bias_by_modality=False)
    same = weights | {f"{PREFIX}gate.bias_vl": weights[f"{PREFIX}gate.bias"]}
    expected, kept = run(same, inputs)[0], run(weights, inputs, one)
    np.testing.assert_allclose(kept[0], expected, atol=1e-6)
    np.testing.assert_array_equal(kept[3]["bias"], load(kept[2]["topk_idx"], inputs[2] > 0))
    np.testing.assert_array_equal(kept[3]["bias_vl"], np.zeros(EXPERTS))


def test_balance_loss_is_the_mean_of_f_times_p_over_rows(weights, inputs):
    _, balance, kept, _ = run(weights, inputs)
    expected = []
    for b in range(B):
        valid = inputs[2][b] > 0
        scores = kept["scores"][b, valid]
        count = np.bincount(kept["topk_idx"][b, valid].reshape(-1), minlength=EXPERTS)
        frequency = EXPERTS / (K * valid.sum()) * count
        share = (scores / scores.sum(-1, keepdims=True)).mean(0)
        expected.append(np.sum(frequency * share))
    np.testing.assert_allclose(balance, np.mean(expected), rtol=1e-5)
    padded = (*inputs[:2], inputs[2] * [[1], [0]], inputs[3])
    np.testing.assert_allclose(run(weights, padded)[1], expected[0], rtol=1e-5)


def test_balance_loss_is_one_at_uniform_routing_and_finite_without_tokens(weights, inputs):
    uniform = dict(weights)
    uniform[f"{PREFIX}gate.weight"] = np.zeros_like(weights[f"{PREFIX}gate.weight"])
    np.testing.assert_allclose(run(uniform, inputs)[1], 1.0, rtol=1e-5)
    x, positions, segment_ids, image = inputs
    assert run(weights, (x, positions, segment_ids * 0, image))[1] == 0


@pytest.mark.parametrize("stack", [(), (2,), (2, 3)])
def test_biases_move_against_the_load(stack):
    rng = np.random.default_rng(5)
    loads = {
        "bias": rng.integers(0, 9, (*stack, 4)).astype(np.float32),
        "bias_vl": np.zeros((*stack, 4), np.float32),
    }
    router = {"weight": jnp.ones((3, 4)), **{name: jnp.ones((*stack, 4)) for name in loads}}
    params = {"embed": jnp.ones(2), "group_0": {"first": {"ffn": {"router": router}}}}
    moved = update_router_bias(params, {"group_0": {"first": {"ffn": {"router": loads}}}}, 0.25)
    after = moved["group_0"]["first"]["ffn"]["router"]
    mean = loads["bias"].mean(-1, keepdims=True)
    np.testing.assert_allclose(after["bias"], 1 + 0.25 * np.sign(mean - loads["bias"]))
    # No image tokens, no move; nothing else is touched.
    np.testing.assert_array_equal(after["bias_vl"], router["bias_vl"])
    assert after["weight"] is router["weight"] and moved["embed"] is params["embed"]


def test_a_token_that_no_expert_scores(weights, inputs):
    """Its scores underflow to 0 for all experts: nothing is routed, and nothing becomes NaN."""
    x, *rest = inputs
    params = samples.params_of(CONFIG, weights)["group_0"]["first"]["ffn"]
    away = -1000 * x[0, 3] / np.square(x[0, 3]).sum()
    params["router"]["weight"] = params["router"]["weight"] + away[:, None]
    context = make_context(CONFIG, *rest[:2], None, rest[2])

    @functools.partial(jax.jit, compiler_options=samples.QUICK_COMPILE)
    @functools.partial(jax.value_and_grad, argnums=(0, 1), has_aux=True)
    def loss(params, x):
        (out, balance), state = MoE(CONFIG, Kernels()).apply(
            {"params": params}, x, context, mutable=["intermediates"]
        )
        scores = state["intermediates"]["router"]["scores"][0]
        return jnp.sum(jnp.square(out)) + balance, scores

    (value, scores), gradients = loss(params, jnp.asarray(x))
    assert not np.asarray(scores)[0, 3].any() and np.asarray(scores)[0, 2].all()
    assert np.isfinite(value)
    for path, leaf in jax.tree_util.tree_leaves_with_path(gradients):
        assert np.isfinite(leaf).all(), jax.tree_util.keystr(path)
