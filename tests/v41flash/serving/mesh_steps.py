"""Prefill and decode on four devices against one; test_spread starts it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from tests.v41flash.nn import samples
from v41flash import sharding
from v41flash.serving import spread
from v41flash.serving.forward import Model, Tail
from v41flash.serving.state import State
from v41flash.serving.weights import Weights

DEVICES, B, CHUNK, PAGES = 4, 4, 24, 1


def start(config, weights, per_device):
    """State and tail of B sequences; page numbers count within a device's pool."""
    table = np.arange(B, dtype=np.int32)[:, None] % per_device
    state = State.create(config, weights, B * PAGES, table)
    return state, Tail.create(config, B, config.sliding_window)


def run(config, weights, tokens, mesh, per_device):
    """Tokens that follow a prompt, with the encoder's caches of it."""
    model = Model(config)
    state, tail = start(config, weights, per_device)
    arguments = (weights, state, tail, tokens)
    fill = spread.on_mesh(spread.prefill_step, model, mesh, *arguments)
    state, tail = fill(*arguments)
    newest = tokens[:, -1]
    step = spread.on_mesh(spread.decode_step, model, mesh, weights, state, newest)
    drawn = []
    for _ in range(3):
        state, newest = step(weights, state, newest)
        drawn.append(np.asarray(newest))
    return np.stack(drawn), np.asarray(tail.x), [np.asarray(rows) for rows in state.cache.main]


def main():
    config = dataclasses.replace(samples.three_layers(**samples.NO_ROUNDING), n_routed_experts=8)
    params = samples.params_of(config, samples.random_weights(config, seed=5))
    weights = Weights.create(config, params, np.arange(config.vocab_size))
    rng = np.random.default_rng(6)
    tokens = jnp.asarray(rng.integers(3, 250, (B, CHUNK)), jnp.int32)
    results = []
    for count in (1, DEVICES):
        mesh = sharding.make_mesh({"expert": count}, jax.devices()[:count])
        with jax.set_mesh(mesh):
            placed = jax.device_put(weights, spread.place(mesh, spread.weight_specs(weights)))
            results.append(run(config, placed, tokens, mesh, B // count))
    alone, several = results
    np.testing.assert_array_equal(alone[0], several[0])
    np.testing.assert_allclose(alone[1], several[1], atol=2e-5)
    for one, other in zip(alone[2], several[2], strict=True):
        np.testing.assert_allclose(one, other, atol=2e-5)
    print("equal")


if __name__ == "__main__":
    main()
