"""A rematerialised layer that keeps what attention gave does not attend again."""

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import pytest
from jax.interpreters import partial_eval

from pallas_kernels.sparse_attention import RESULT, mosaic_gpu
from train.step import PLATFORM_OPTIONS

pytestmark = pytest.mark.skipif(
    jax.__version_info__ < (0, 11), reason="the kernels are for jax 0.11 and later"
)


def kernels(jaxpr) -> Iterator[str]:
    """Names of the kernels of a program."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "mpmd_map":
            yield eqn.params["name"]
            continue
        for value in jax.tree.leaves(list(eqn.params.values())):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from kernels(inner)


def test_a_loop_of_layers_attends_once(recent_hopper):
    """XLA would fuse the kernel with storing its result, and run it once more for its other use."""
    shape = jax.ShapeDtypeStruct
    q, rows = shape((1, 128, 16, 512), jnp.bfloat16), shape((1, 128, 512), jnp.bfloat16)
    lo, indices = shape((1, 128), jnp.int32), shape((1, 128, 64), jnp.int32)
    sinks = shape((3, 16), jnp.float32)
    policy = jax.checkpoint_policies.save_only_these_names(RESULT)

    def loss(q, rows, lo, indices, sinks):
        @functools.partial(jax.checkpoint, policy=policy, prevent_cse=False)
        def layer(q, sink):
            arguments = 2 * q, rows, lo, lo + 1, rows, indices, sink
            out, _ = mosaic_gpu._attention(*arguments, 128, 0.04)
            return out * jnp.tanh(out), None

        return jnp.sum(jax.lax.scan(layer, q, sinks)[0].astype(jnp.float32))

    step = jax.value_and_grad(loss, argnums=(0, 1, 4))
    program = recent_hopper.compile(
        step, q, rows, lo, indices, sinks, compiler_options=PLATFORM_OPTIONS["gpu"]
    )
    lines = program.as_text().splitlines()
    calls = [line for line in lines if "custom-call(" in line and "/sparse_attention/" in line]
    assert len(calls) == 1


@pytest.mark.parametrize("kept, times", [((), 2), ((RESULT,), 1)])
def test_forward_kernels_of_a_gradient(kept, times):
    shape = jax.ShapeDtypeStruct
    q, sink = shape((1, 128, 16, 512), jnp.bfloat16), shape((16,), jnp.float32)
    window, main = (shape((1, rows, 512), jnp.bfloat16) for rows in (128, 256))
    lo, indices = shape((1, 128), jnp.int32), shape((1, 128, 64), jnp.int32)

    def loss(q, window, main, sink, lo, indices):
        policy = jax.checkpoint_policies.save_only_these_names(*kept)

        @functools.partial(jax.checkpoint, policy=policy)
        def layer(q, window, main, sink):
            arguments = 2 * q, window, lo, lo + 1, main, indices, sink
            out, lse = mosaic_gpu._attention(*arguments, 128, 0.04)
            return jnp.sum(jnp.square(out.astype(jnp.float32))) + jnp.sum(lse)

        return layer(q, window, main, sink)

    step = jax.value_and_grad(loss, argnums=(0, 1, 2, 3))
    program = jax.make_jaxpr(step)(q, window, main, sink, lo, indices).jaxpr
    live, _ = partial_eval.dce_jaxpr(program, [True] * len(program.outvars))
    assert list(kernels(live)).count("sparse_attention") == times
