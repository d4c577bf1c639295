"""Forward and backward at 32,768 tokens fit in 8 GiB, and memory grows with the row, no faster:
with selected entries and, in the indexer's warm-up, with all of them.
"""

import dataclasses
import functools
import math
import os
import re
import resource
import subprocess
import sys

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import quickstart
from tests.v41flash.nn import samples
from train import losses
from v41flash.config import ModelConfig
from v41flash.nn import ced

LONG = 32_768
DENSE = TRACED = 8_192
LIMIT = 8 * 2**30
# The CPU's default order of operations starts as many as it can at once and keeps the inputs of
# all: three times the memory. This flag is read from the environment alone.
DEPTH_FIRST = "--xla_cpu_enable_concurrency_optimized_scheduler=false"


def quickstart_model(**changes):
    config = ModelConfig.from_dict(quickstart.get_config().model.to_dict())
    return dataclasses.replace(config, **changes)


def step(config, length):
    """(function to loss and gradients, its abstract arguments) for one row of `length`."""
    model = ced.CED(config, indexer_loss=True)
    row = jax.ShapeDtypeStruct((1, length), jnp.int32)
    rows = (*row.shape, config.num_engram_sites, config.engram_rows_per_token)
    inputs = row, row, row, jax.ShapeDtypeStruct(rows, jnp.int32)
    params = nn.unbox(jax.eval_shape(model.init, jax.random.key(0), *inputs)["params"])

    def loss(params, inputs):
        outputs = model.apply({"params": params}, *inputs)
        head = functools.partial(ced.logits, params)
        mask = jnp.ones(inputs[0].shape)
        entropy = losses.cross_entropy(head, outputs.hidden, inputs[0], mask)
        return entropy.nats / entropy.tokens + outputs.balance_loss + outputs.indexer_kl

    return jax.jit(jax.value_and_grad(loss)), (params, inputs)


@pytest.mark.parametrize("dense", [False, True], ids=["selected", "dense"])
def test_no_array_is_as_large_as_queries_times_entries(dense):
    """In the traced step: the largest is far below the T x T/2 of the coarser cache."""
    config = samples.two_layers(dense_selection=dense)
    function, arguments = step(config, TRACED)
    shapes = re.findall(r"\[([\d,]+)\]", str(function.trace(*arguments).jaxpr))
    largest = max(math.prod(map(int, shape.strip(",").split(","))) for shape in set(shapes))
    assert TRACED * config.hc_mult * config.hidden_size <= largest < TRACED * TRACED / 8


@pytest.mark.slow
def test_memory_is_linear_in_the_row_and_below_the_limit():
    """In a process of its own, whose peak is that of one step, compilation included."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} {DEPTH_FIRST}"
    env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    command = [sys.executable, "-m", "tests.v41flash.nn.test_memory"]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    half, whole, everything, peak, dense_half, dense_whole = map(int, done.stdout.split())
    assert whole < 2.2 * half
    assert everything < LIMIT
    assert peak < LIMIT
    assert dense_whole < 2.2 * dense_half


def temporaries(length, **changes):
    function, arguments = step(quickstart_model(**changes), length)
    return function.lower(*arguments).compile().memory_analysis().temp_size_in_bytes


def main():
    half = temporaries(LONG // 2)
    function, (params, inputs) = step(quickstart_model(), LONG)
    run = function.lower(params, inputs).compile()
    size = run.memory_analysis()
    whole = size.temp_size_in_bytes
    everything = whole + size.argument_size_in_bytes + size.output_size_in_bytes
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda x: rng.normal(0, 0.02, x.shape).astype(x.dtype), params)
    tokens = rng.integers(0, 256, inputs[0].shape, np.int32)
    position = np.arange(LONG, dtype=np.int32)[None]
    rows = rng.integers(0, 4096, inputs[3].shape, np.int32)
    value, _ = jax.block_until_ready(run(params, (tokens, position, position * 0 + 1, rows)))
    assert np.isfinite(value)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    dense = [temporaries(length, dense_selection=True) for length in (DENSE // 2, DENSE)]
    print(half, whole, everything, peak, *dense)


if __name__ == "__main__":
    main()
