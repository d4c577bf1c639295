"""A rematerialised layer that keeps what attention gave does not attend again."""

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import pytest
from jax.interpreters import partial_eval

from pallas_kernels.sparse_attention import RESULT, mosaic_gpu

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
