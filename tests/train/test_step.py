"""One update: accumulation, the layout over devices, what the state looks like after it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.train import micro
from train import optimizer as optimizer_lib
from train import settings as settings_lib
from train import step as step_lib
from train.data import pipeline
from v41flash import sharding
from v41flash.nn import ced


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """(config, settings, batch) of a batch whose rows have different numbers of targets."""
    config = micro.config(tmp_path_factory.mktemp("corpus"))
    settings = settings_lib.resolve(config)
    data = pipeline.from_config(settings.data, settings.model)
    batch, _ = pipeline.split_host_fields(next(data.train_iterator()))
    batch["loss_mask"][1, 5:] = 0
    batch["segment_ids"][2, 16:] = 0
    batch["loss_mask"][2, 15:] = 0
    batch["positions"][2, 16:] = 0
    return config, batch


def _update(config, batch, **train):
    config = config.copy_and_resolve_references()
    config.train.update(train)
    settings = settings_lib.resolve(config)
    mesh = sharding.make_mesh({}, jax.devices()[:1])
    model = ced.CED(settings.model, settings.kernels, indexer_loss=True)
    optimizer = optimizer_lib.build(settings.optimizer)
    abstract = step_lib.abstract_state(model, optimizer, mesh)
    with jax.set_mesh(mesh):
        state = step_lib.init_state(model, optimizer, abstract, settings.train.seed)
        start = jax.device_get(state.params)
        device_batch = step_lib.to_device(batch, mesh)
        update = step_lib.make_train_step(model, optimizer, settings)
        compiled = step_lib.compile_train_step(update, abstract, device_batch, mesh)
        state, values = compiled(state, device_batch)
    return start, jax.device_get(state), jax.device_get(values)


@pytest.fixture(scope="module")
def whole(run):
    return _update(*run)


def test_microbatches_add_up_to_the_whole_batch(run, whole):
    _, want_state, want = whole
    _, state, values = _update(*run, accumulation=2)
    for name in want:
        # Which queries see an entry differs between index sources by the first of each document.
        tolerance = 0.1 if name.startswith("indexer") else 2e-5
        np.testing.assert_allclose(values[name], want[name], rtol=tolerance, err_msg=name)
    kinds = optimizer_lib.kinds(want_state.params)
    moved = jax.tree.map(
        lambda kind, a, b: bool(jnp.all(a == b)) if kind == "router_bias" else True,
        kinds,
        state.params,
        want_state.params,
    )
    assert all(jax.tree.leaves(moved))


def test_the_state_after_a_step(whole):
    start, state, values = whole
    assert state.step == 1
    kinds = optimizer_lib.kinds(start)
    for (path, kind), before, after in zip(
        jax.tree_util.tree_leaves_with_path(kinds),
        jax.tree.leaves(start),
        jax.tree.leaves(state.params),
        strict=True,
    ):
        change = np.abs(after - before)
        assert change.max() > 0, path
        if kind == "router_bias":
            # The load rule moves each bias by its speed or not at all.
            np.testing.assert_allclose(change[change > 0], 1e-3, rtol=1e-4)
    assert values["tokens"] == 4 * 32 - 16
    np.testing.assert_allclose(values["padding"], 16 / 128)
    np.testing.assert_allclose(values["ce"], np.log(260), rtol=0.02)


def test_the_optimizer_state_lies_as_its_parameters():
    mesh = sharding.make_mesh({}, jax.devices()[:1])
    model = ced.CED(micro.model())
    optimizer = optimizer_lib.build(settings_lib.OptimizerSettings())
    abstract = step_lib.abstract_state(model, optimizer, mesh)
    leaves = jax.tree.leaves(abstract)
    assert all(leaf.sharding.mesh == mesh for leaf in leaves)
    count = len(jax.tree.leaves(abstract.params))
    # Parameters, two moments each, the step and AdamW's counts.
    assert 3 * count + 2 <= len(leaves) <= 3 * count + 3
