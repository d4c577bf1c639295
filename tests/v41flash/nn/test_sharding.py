"""The model on several meshes of eight virtual devices gives what one device gives, and gathers no
parameter that the rules leave where it is."""

import os
import subprocess
import sys

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from tests import mesh_gathers
from tests.v41flash.nn import samples
from v41flash import sharding
from v41flash.errors import InputError
from v41flash.nn import ced

# The first alone is cheap enough for every run of the tests.
MESHES = (
    {"expert": 2, "context": 2, "tensor": 2},
    {"data": 8},
    {"data": 2, "fsdp": 2, "expert": 2},
    {"data": 2, "context": 4},
    {"fsdp": 4, "tensor": 2},
)
B, T = 8, 24


def test_a_table_that_does_not_divide_names_the_remedy():
    mesh = AbstractMesh((1, 2, 2, 1, 1), ("data", "fsdp", "expert", "context", "tensor"))
    table = nn.LogicallyPartitioned(jnp.zeros((10, 8)), ("table_rows", None))
    with pytest.raises(InputError, match="table.*; model.engram_row_multiple=4 fills"):
        sharding.param_shardings({"table": table}, mesh)
    with pytest.raises(InputError, match="experts.*'tensor': 1}$"):
        experts = nn.LogicallyPartitioned(jnp.zeros((3, 8)), ("experts", None))
        sharding.param_shardings({"experts": experts}, mesh)


@pytest.mark.parametrize(
    "count", [1, pytest.param(len(MESHES), marks=pytest.mark.slow)], ids=["one", "all"]
)
def test_meshes_agree_with_one_device(count):
    """In a process of its own: the number of devices is fixed before JAX starts."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    command = [sys.executable, "-m", "tests.v41flash.nn.test_sharding", str(count)]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"{mesh} equal" for mesh in MESHES[:count]]


def test_a_gather_that_nobody_asks_for_is_found():
    text = """
ENTRY %main (x: f32[38,32]) -> f32[304,32] {
  %x = f32[38,32]{1,0} parameter(0)
  %a = f32[6,64,2,24]{3,2,1,0} all-gather(%w), replica_groups={{0,2},{1,3}}, dimensions={1}
  ROOT %g = f32[304,32]{1,0} all-gather(%x), replica_groups={{0,1},{2,3}}, dimensions={0}
}
"""
    mesh = AbstractMesh((1, 2, 2, 1, 1), sharding.MESH_AXES)

    def param(shape, *spec):
        where = NamedSharding(mesh, PartitionSpec(*spec))
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=where)

    params = {"w13": param((6, 64, 2, 24), "expert", "fsdp")}
    assert mesh_gathers.unasked(text, params, mesh) == []
    params["table"] = param((304, 32), ("fsdp", "expert"))
    (found,) = mesh_gathers.unasked(text, params, mesh)
    assert "['table'] [304, 32] along ['expert']" in found


def check_that_gathers_are_found(params, mesh):
    """A program that makes every parameter whole is found out, by each axis that no rule gathers.

    Args:
        params: abstract, with shardings.
        mesh: of them.
    """
    everywhere = NamedSharding(mesh, PartitionSpec())
    with jax.set_mesh(mesh):
        whole = jax.jit(lambda tree: jax.tree.map(jnp.negative, tree), out_shardings=everywhere)
        text = whole.lower(params).compile().as_text()
    lines = mesh_gathers.unasked(text, params, mesh)
    for name, axis in (("w13", "expert"), ("wq_b", "tensor")):
        found = any(f"['{name}']" in line and f"along ['{axis}']" in line for line in lines)
        assert found == (mesh.shape[axis] > 1), (name, axis, lines)


def main(count):
    # Sums in another order would round a few entries the other way.
    config = samples.two_layers(**samples.NO_ROUNDING)
    params = samples.params_of(config, samples.random_weights(config, seed=11))
    rng = np.random.default_rng(12)
    documents = [rng.integers(3, 250, T - b) for b in range(B)]
    inputs = samples.batch_inputs(config, documents, T)
    model = ced.CED(config, indexer_loss=True)

    def loss(params, inputs):
        outputs = model.apply({"params": params}, *inputs)
        logits = ced.logits(params, outputs.hidden)
        valid = inputs[2] > 0
        nats = -jax.nn.log_softmax(logits)[..., 5]
        ce = jnp.sum(nats * valid) / jnp.sum(valid)
        return ce + outputs.balance_loss + outputs.indexer_kl

    def gradient(**shardings):
        quick = samples.QUICK_COMPILE
        return jax.jit(jax.value_and_grad(loss), compiler_options=quick, **shardings)

    expected = jax.device_get(gradient()(params, inputs))
    abstract = jax.eval_shape(model.init, jax.random.key(0), *inputs)["params"]
    for sizes in MESHES[:count]:
        mesh = sharding.make_mesh(sizes)
        where = sharding.param_shardings(abstract, mesh), sharding.batch_sharding(mesh)
        out = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()), where[0]
        with jax.set_mesh(mesh):
            run = gradient(in_shardings=where, out_shardings=out)
            given = jax.device_put(params, where[0]), jax.device_put(inputs, where[1])
            compiled = run.lower(*given).compile()
            value, grads = compiled(*given)
        held = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), given[0]
        )
        # Under `tensor` the compiler gathers wq_a, which is split over `context` alone, for the
        # gradient of its input by another way: parts change places, then `tensor` gathers them.
        gathered = [
            line
            for line in mesh_gathers.unasked(compiled.as_text(), held, mesh)
            if "tensor" not in sizes or "attn.query/btd,dr->btr" not in line
        ]
        spread = {len(leaf.sharding.device_set) for leaf in jax.tree.leaves(grads)}
        assert spread == {8}
        np.testing.assert_allclose(value, expected[0], rtol=1e-5)
        for (path, ours), theirs in zip(
            jax.tree.leaves_with_path(grads), jax.tree.leaves(expected[1]), strict=True
        ):
            scale = np.abs(theirs).max()
            error = np.abs(np.asarray(ours) - theirs).max()
            name = jax.tree_util.keystr(path)
            # Engram's gate has an infinite slope at a score of 0, behind which its own parameters
            # and the embedding lie.
            tolerance = 1e-3 if "engram" in name or "embed" in name else 3e-5
            assert error <= tolerance * scale, f"{sizes} {name}: {error} of {scale}"
        assert not gathered, "\n".join(gathered)
        check_that_gathers_are_found(held, mesh)
        print(f"{sizes} equal", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
