"""Where TPU kernels accept, and what their accounts come to."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from pallas_kernels import chunking
from pallas_kernels.tpu import (
    GENERATIONS,
    LEAST_VMEM_BYTES,
    Account,
    accounts_of,
    require,
    stated,
)


def tpus(count):
    """A mesh of so many TPUs that are not there."""
    device = AbstractDevice(device_kind="TPU v5p", num_cores=2, platform="tpu")
    auto = (jax.sharding.AxisType.Auto,)
    return AbstractMesh((count,), ("device",), auto, abstract_device=device)


def test_declines_off_tpu():
    with pytest.raises(NotImplementedError, match="my op: needs a TPU, the platform is cpu"):
        require("my op")
    require("my op", interpret=object())


def test_accepts_one_tpu_of_a_topology():
    with jax.sharding.use_abstract_mesh(tpus(1)):
        assert chunking.platform() == "tpu"
        require("my op")
    assert chunking.platform() == "cpu"


def test_several_tpus_need_shard_map():
    mesh = tpus(4)
    with jax.sharding.use_abstract_mesh(mesh):
        with pytest.raises(NotImplementedError, match="mesh of 4 devices needs jax.shard_map"):
            require("my op")
        spec = jax.P("device")

        def inside(x):
            require("my op")
            return x

        x = jax.ShapeDtypeStruct((8,), jnp.float32)
        jax.eval_shape(jax.shard_map(inside, in_specs=spec, out_specs=spec), x)


@pytest.mark.parametrize(
    ("generation", "seconds"),
    # Published: 819 GB/s and 197 TFLOP/s; 2765 and 459; 1640 and 918; half of 7380 and 2307.
    [("v5e", 1 / 819), ("v5p", 1 / 2765), ("v6e", 1 / 1640), ("tpu7x", 2 / 7380)],
)
def test_time_is_that_of_memory(generation, seconds):
    account = Account(vmem_bytes=0, hbm_bytes=10**9, flops=10**9)
    assert account.seconds(generation) == pytest.approx(seconds, rel=0.15)


@pytest.mark.parametrize(
    ("generation", "seconds"),
    [("v5e", 1 / 197), ("v5p", 1 / 459), ("v6e", 1 / 918), ("tpu7x", 2 / 2307)],
)
def test_time_is_that_of_the_matrix_unit(generation, seconds):
    account = Account(vmem_bytes=0, hbm_bytes=10**3, flops=10**12)
    assert account.seconds(generation) == pytest.approx(seconds, rel=0.02)


def test_accounts_are_what_xla_is_told():
    account = Account(vmem_bytes=1, hbm_bytes=2, flops=3, transcendentals=4, copies=5)

    def kernel(x):
        cost = stated("my kernel", account)
        assert (cost.flops, cost.bytes_accessed, cost.transcendentals) == (3, 2, 4)
        return x

    assert accounts_of(kernel, jnp.zeros(1)) == [("my kernel", account)]
    assert accounts_of(jnp.sin, jnp.zeros(1)) == []
    assert LEAST_VMEM_BYTES == 64 * 2**20 and len(GENERATIONS) == 4
