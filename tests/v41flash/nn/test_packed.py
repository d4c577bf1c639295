"""Packed weights: the same modules, the same results; inputs rounded as the published engine does.

That whole sublayers then equal the published engine's is part of `tests/test_golden.py`.
"""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels import fp4
from tests.golden_storage import packed_params
from tests.v41flash.checkpoints.folders import RECORDED
from tests.v41flash.nn import samples
from v41flash import layout
from v41flash.checkpoints import names
from v41flash.checkpoints.published import Published
from v41flash.config import ConfigError
from v41flash.kernels import Kernels
from v41flash.nn import ced, linear
from v41flash.nn.context import make_context
from v41flash.nn.engram import Engram
from v41flash.nn.moe import MoE


@pytest.fixture(scope="module")
def published():
    return Published.open(RECORDED)


@pytest.fixture(scope="module")
def both(published):
    """{weight form: (config, parameters)} in float32."""
    config = dataclasses.replace(published.config, dtype="float32", vision=None)

    def read(name):
        return published.values(name).astype(np.float32)

    expanded = jax.tree.map(jnp.asarray, names.to_params(config, read))
    packed = dataclasses.replace(config, weight_form="packed")
    return {"expanded": (config, expanded), "packed": (packed, packed_params(published))}


def of_layer(config, params, layer, name):
    keys, index = names.place(config, layer)
    return jax.tree.map(lambda leaf: leaf[index], params[keys[0]][keys[1]][name])


@pytest.mark.parametrize("layer", [0, 2])
def test_experts_and_engram_give_what_expanded_ones_give(both, layer):
    rng = np.random.default_rng(0)
    results = []
    for config, params in both.values():
        x = jnp.asarray(rng.normal(size=(2, 8, config.hidden_size)), jnp.float32)
        rng = np.random.default_rng(0)
        x = jnp.asarray(rng.normal(size=x.shape), jnp.float32)
        row = jnp.broadcast_to(jnp.arange(8), (2, 8))
        rows = jnp.asarray(rng.integers(0, 280, (2, 8, 2, config.engram_rows_per_token)))
        context = make_context(config, row, jnp.ones_like(row), rows)
        if layer == 0:
            module, name = Engram(config, 0, Kernels()), "engram"
            streams = jnp.stack([x, 2 * x, -x, x * x], axis=2)
            given = (streams, context)
        else:
            module, name, given = MoE(config, Kernels()), "ffn", (x, context)
        own = {"params": of_layer(config, params, layer, name)}
        out = jax.jit(module.apply, compiler_options=samples.QUICK_COMPILE)(own, *given)
        results.append(out if layer == 0 else out[0])
    np.testing.assert_allclose(results[0], results[1], rtol=1e-6, atol=1e-6)
    assert np.abs(results[0]).max() > 0.1


def test_a_packed_model_declares_what_files_hold(published, both):
    """Names, shapes and dtypes of every parameter: nothing else has to know of the two forms."""
    config, _ = both["packed"]
    row = jnp.zeros((1, 8), jnp.int32)
    rows = jnp.zeros((1, 8, config.num_engram_sites, config.engram_rows_per_token), jnp.int32)
    declared = jax.eval_shape(ced.CED(config).init, jax.random.key(0), row, row, row, rows)
    declared = jax.tree.map(lambda leaf: leaf.shape, nn.unbox(declared["params"]))
    held = jax.tree.map(jnp.shape, packed_params(published))
    held.pop("images")
    for group in held.values():
        if isinstance(group, dict):
            for layer in group.values():
                layer["ffn"]["router"].pop("bias_vl")
    assert declared == held


SPECS = {
    "btd,dr->btr": layout.linear(64, 96),
    "btr,rhk->bthk": layout.heads(2, 32, 96),
    "btgk,gkr->btgr": layout.groups_in(4, 8, 64),
    "btgr,grd->btd": layout.groups_out(4, 16, 40),
    "nd,djf->njf": layout.pair(48, 64),
}


def pack(how, rng, fmt="fp8"):
    """A random `Packed` of a layout, with scales of blocks of 32 rows."""
    out, inner = how.published
    block = 32 if fmt == "fp8" else 1
    scales = rng.integers(120, 132, (*how.stack, -(-out // block), inner // 32))
    # 0x7F and 0xFF are NaN.
    elements = rng.integers(0, 0x7F, (*how.stack, out, inner))
    elements += 128 * rng.integers(0, 2, elements.shape)
    arrays = (jnp.asarray(a, jnp.uint8) for a in (elements, scales))
    return linear.Packed(*arrays, how, fmt, block, "none")


@pytest.mark.parametrize("spec", SPECS)
def test_contract_equals_numpy_on_every_layout(spec):
    """Values by ml_dtypes, layouts by hand: [out, in] rows reshaped to what the spec says."""
    how, rng = SPECS[spec], np.random.default_rng(1)
    weight = pack(how, rng)
    values = np.asarray(weight.elements).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    scales = 2.0 ** (np.asarray(weight.scales, np.float64) - 127)
    out, inner = how.published
    scales = scales.repeat(32, axis=-2)[..., :out, :].repeat(32, axis=-1)[..., :inner]
    dense = (values * scales).reshape(how.axes).transpose(how.order)
    assert dense.shape == how.shape
    ours = spec.split(",")[0]
    sizes = dict(zip(spec.split(",")[1].split("->")[0], how.shape, strict=True))
    x = rng.normal(size=[sizes.get(axis, 3) for axis in ours])
    expected = np.einsum(spec, x, dense)
    got = jax.jit(linear.contract, static_argnums=0)(spec, jnp.asarray(x, jnp.float32), weight)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())


def test_inputs_are_rounded_over_all_contracted_axes():
    how, rng = layout.groups_out(4, 16, 40), np.random.default_rng(2)
    weight = dataclasses.replace(pack(how, rng), activation_format="fp8")
    x = jnp.asarray(rng.normal(size=(2, 3, 4, 16)), jnp.float32)
    plain = dataclasses.replace(weight, activation_format="none")
    contract = jax.jit(lambda x, weight: linear.contract("btgr,grd->btd", x, weight))
    flat = jax.jit(lambda x: fp4.fake_quantize(x.reshape(2, 3, 64), "fp8").reshape(x.shape))
    expected = contract(flat(x), plain)
    np.testing.assert_array_equal(contract(x, weight), expected)
    assert np.abs(expected - contract(x, plain)).max() > 0


@pytest.mark.parametrize(
    "change, message",
    [
        ({"quantization_config": None}, "weight_form = 'packed': needs a quantization_config"),
        ({"moe_intermediate_size": 40}, "moe_intermediate_size = 40: must be a multiple of 32"),
        ({"weight_form": "int8"}, "weight_form = 'int8': must be 'expanded' or 'packed'"),
        (
            {"weight_form": "expanded", "activation_format": "fp8"},
            "activation_format = 'fp8': needs weight_form 'packed'",
        ),
    ],
)
def test_what_cannot_be_packed_is_refused(both, change, message):
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(both["packed"][0], **change)
