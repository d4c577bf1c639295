"""Head-wise Muon against NumPy, one matrix after the other."""

import importlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.v41flash.optim import numpy_optimizers
from v41flash.optim import MatrixSpec, head_muon, scale_by_head_muon
from v41flash.optim.axes import Matrices

rng = np.random.default_rng(0)


def run(specs, grads, steps=2, **keywords):
    """(updates of the last step, state) after some steps with varying gradients."""
    tx = scale_by_head_muon(specs, **keywords)
    state = tx.init(grads)
    for step in range(steps):
        updates, state = jax.jit(tx.update)(optax.tree.scale(1 + step, grads), state)
    return updates, state


def numpy_run(grad, steps=2):
    momentum = np.zeros_like(grad)
    for step in range(steps):
        update, momentum = numpy_optimizers.muon(grad * (1 + step), momentum)
    return update, momentum


def test_equals_numpy_per_head_in_float64():
    """Queries [in, heads, dim], experts [E, d, 2, f], a stack of both kinds, groups joined."""
    grads = {
        "wq_b": rng.normal(size=(10, 3, 4)),
        "w13": rng.normal(size=(2, 10, 2, 4)),
        "stacked": rng.normal(size=(2, 10, 3, 4)),
        "wo_b": rng.normal(size=(2, 3, 5)),
        "fn": rng.normal(size=(6, 8)),
    }
    specs = {
        "wq_b": MatrixSpec(0, 2, batch=1),
        "w13": MatrixSpec(1, 3, batch=(0, 2)),
        "stacked": MatrixSpec(-3, -1, batch=...),
        "wo_b": MatrixSpec((0, 1), 2),
        "fn": MatrixSpec(reduction=-1, output=-2),
    }
    with jax.enable_x64(True):
        got, state = run(specs, jax.tree.map(jnp.asarray, grads), compute_dtype=None)
    expected = {name: np.empty_like(grad) for name, grad in grads.items()}
    momenta = {name: np.empty_like(grad) for name, grad in grads.items()}
    for head in range(3):
        at = np.s_[:, head]
        expected["wq_b"][at], momenta["wq_b"][at] = numpy_run(grads["wq_b"][at])
        for layer in range(2):
            at = np.s_[layer, :, head]
            expected["stacked"][at], momenta["stacked"][at] = numpy_run(grads["stacked"][at])
    for expert in range(2):
        for half in range(2):
            at = np.s_[expert, :, half]
            expected["w13"][at], momenta["w13"][at] = numpy_run(grads["w13"][at])
    update, momentum = numpy_run(grads["wo_b"].reshape(6, 5))
    expected["wo_b"], momenta["wo_b"] = update.reshape(2, 3, 5), momentum.reshape(2, 3, 5)
    expected["fn"], momenta["fn"] = numpy_run(grads["fn"])
    for name, update in expected.items():
        np.testing.assert_allclose(got[name], update, rtol=0, atol=1e-10, err_msg=name)
        np.testing.assert_allclose(state.momentum[name], momenta[name], rtol=1e-12)


def test_fused_split_equals_unfused():
    whole = jnp.asarray(rng.normal(size=(6, 12)), jnp.float32)
    for split, edges in ((3, (4, 8)), ((2, 4, 6), (2, 6))):
        fused, _ = run(MatrixSpec(0, 1, split=split), whole)
        parts, _ = run(MatrixSpec(0, 1), tuple(jnp.split(whole, edges, axis=1)))
        np.testing.assert_allclose(fused, jnp.concatenate(parts, axis=1), atol=1e-6)


def test_stacked_equals_unstacked():
    layers = [jnp.asarray(rng.normal(size=(6, 3, 5)), jnp.float32) for _ in range(3)]
    spec = MatrixSpec(-3, -1, batch=...)
    stacked, _ = run(spec, jnp.stack(layers))
    single, _ = run(spec, layers)
    np.testing.assert_allclose(stacked, jnp.stack(single), atol=1e-6)


@pytest.mark.parametrize("dtype, low, high", [("bfloat16", 0.95, 1.05), ("float32", 0.997, 1.003)])
def test_singular_values_and_rms(dtype, low, high):
    grads = {"wide": jnp.asarray(rng.normal(size=(3, 20, 64)), jnp.float32)}
    grads["tall"] = jnp.asarray(rng.normal(size=(40, 24)), jnp.float32)
    specs = {"wide": MatrixSpec(1, 2, batch=0), "tall": MatrixSpec(0, 1)}
    got, _ = run(specs, grads, compute_dtype=dtype)
    for update in got.values():
        values = np.linalg.svd(update, compute_uv=False) / (0.18 * max(update.shape[-2:]) ** 0.5)
        assert low < values.min() and values.max() < high
        np.testing.assert_allclose(np.sqrt(np.mean(np.square(update))), 0.18, rtol=0.03)


def test_equal_shapes_are_joined(monkeypatch):
    calls = []
    module = importlib.import_module("v41flash.optim.head_muon")
    original = module.newton_schulz

    def spy(x, *arguments, **keywords):
        calls.append(x.shape)
        return original(x, *arguments, **keywords)

    monkeypatch.setattr(module, "newton_schulz", spy)
    grads = {"a": jnp.ones((4, 3, 6)), "b": jnp.ones((4, 6)), "c": jnp.ones((6, 4))}
    specs = {"a": MatrixSpec(0, 2, batch=1), "b": MatrixSpec(), "c": MatrixSpec()}
    tx = scale_by_head_muon(specs)
    tx.update(grads, tx.init(grads))
    assert sorted(calls) == [(1, 6, 4), (4, 4, 6)]


def test_weight_decay_is_decoupled():
    params = {"w": jnp.asarray(rng.normal(size=(4, 6)), jnp.float32), "v": jnp.ones((2, 2))}
    grads = jax.tree.map(jnp.ones_like, params)
    rate = 0.1
    plain = head_muon(rate, weight_decay=0.0)
    decayed = head_muon(rate, weight_decay=0.5, weight_decay_mask={"w": True, "v": False})
    base, _ = plain.update(grads, plain.init(params), params)
    got, _ = decayed.update(grads, decayed.init(params), params)
    np.testing.assert_allclose(got["w"], base["w"] - rate * 0.5 * params["w"], atol=1e-6)
    np.testing.assert_allclose(got["v"], base["v"], atol=1e-7)


def test_momentum_dtype_and_plain_momentum():
    grads = jnp.asarray(rng.normal(size=(4, 6)), jnp.bfloat16)
    got, state = run(MatrixSpec(), grads)
    assert got.dtype == jnp.bfloat16 and state.momentum.dtype == jnp.float32
    got, state = run(MatrixSpec(), grads, momentum_dtype="bfloat16", nesterov=False)
    assert got.dtype == jnp.bfloat16 and state.momentum.dtype == jnp.bfloat16


def test_close_to_optax_after_many_steps():
    """The bias-corrected mean that optax keeps and the sum point in the same direction by then."""
    grads = jnp.asarray(rng.normal(size=(60, 6, 10)), jnp.float32)
    mine = scale_by_head_muon(compute_dtype="float32")
    theirs = optax.contrib.scale_by_muon(
        ns_coeffs=numpy_optimizers.HYBRID,
        ns_steps=10,
        eps=1e-20,
        weight_dimension_numbers=optax.contrib.MuonDimensionNumbers(),
    )

    def last(tx):
        def step(state, grad):
            update, state = tx.update(grad, state)
            return state, update

        return jax.jit(lambda: jax.lax.scan(step, tx.init(grads[0]), grads))()[1][-1]

    np.testing.assert_allclose(last(mine) / (0.18 * 10**0.5), last(theirs), atol=0.05)


@pytest.mark.parametrize(
    "spec, message",
    [
        (MatrixSpec(0, 1), "undeclared: .2."),
        (MatrixSpec(0, 1, batch=3), "no axis 3"),
        (MatrixSpec(0, 0, batch=...), "declared twice"),
        (MatrixSpec(0, 2, batch=1, split=5), "do not split into 5"),
        (MatrixSpec(0, 2, batch=1, split=(1, 1)), "add up to 4"),
        (MatrixSpec((), 2, batch=...), "undeclared"),
    ],
)
def test_specs_are_checked(spec, message):
    with pytest.raises(ValueError, match=f"(?s)layer/w.*{message}"):
        scale_by_head_muon({"layer": {"w": spec}}).init({"layer": {"w": jnp.ones((2, 3, 4))}})


def test_missing_spec_names_the_parameter():
    with pytest.raises(ValueError, match="layer/w.*MatrixSpec"):
        scale_by_head_muon({"layer": None}).init({"layer": {"w": jnp.ones((2, 3))}})


def test_take_and_put_are_inverse():
    x = jnp.arange(2 * 3 * 4 * 6.0).reshape(2, 3, 4, 6)
    for spec in (MatrixSpec((3, 0), 2, batch=1), MatrixSpec(1, (0, 3), batch=..., split=4)):
        plan = Matrices.of(spec, x.shape, "x")
        np.testing.assert_array_equal(plan.put(plan.take(x)), x)
