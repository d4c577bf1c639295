"""One update: accumulation, the layout over devices, what the state looks like after it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.train import micro
from tests.v41flash.nn.samples import QUICK_COMPILE
from train import optimizer as optimizer_lib
from train import origin
from train import settings as settings_lib
from train import step as step_lib
from train.data import pipeline
from v41flash import sharding
from v41flash.nn import ced


class _Run:
    """One model and batch; its first update under different settings.

    The batch's rows have different numbers of targets.
    """

    def __init__(self, folder):
        self.config = micro.config(folder)
        settings = settings_lib.resolve(self.config)
        data = pipeline.from_config(settings.data, settings.model)
        batch, _ = pipeline.split_host_fields(next(data.train_iterator()))
        batch["loss_mask"][1, 5:] = 0
        batch["segment_ids"][2, 16:] = 0
        batch["loss_mask"][2, 15:] = 0
        batch["positions"][2, 16:] = 0
        self.mesh = sharding.make_mesh({}, jax.devices()[:1])
        self.model = ced.CED(settings.model, settings.kernels, indexer_loss=True)
        self.optimizer = optimizer_lib.build(settings.optimizer)
        params = step_lib.abstract_params(self.model, self.mesh)
        self.abstract = step_lib.abstract_state(params, self.optimizer)
        self.batch = step_lib.to_device(batch, self.mesh)
        self.start = jax.device_get(
            step_lib.init_state(self.model, self.optimizer, self.abstract, settings.train.seed)
        )

    @functools.cached_property
    def whole(self):
        """The compiled step of a batch in one part."""
        return self.compiled()

    def compiled(self, **train):
        config = self.config.copy_and_resolve_references()
        config.train.update(train)
        settings = settings_lib.resolve(config)
        with jax.set_mesh(self.mesh):
            update = step_lib.make_train_step(self.model, self.optimizer, settings)
            return step_lib.compile_train_step(
                update, self.abstract, self.batch, self.mesh, QUICK_COMPILE
            )

    def update(self, compiled, params=None):
        """(state, scalars, where numbers are not finite) after the step from some parameters."""
        start = self.start if params is None else self.start._replace(params=params)
        shardings = jax.tree.map(lambda leaf: leaf.sharding, self.abstract)
        state, values = jax.device_get(compiled(jax.device_put(start, shardings), self.batch))
        nonfinite = values.pop("nonfinite")
        return state, values, nonfinite


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return _Run(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def whole(run):
    return run.update(run.whole)


def test_microbatches_add_up_to_the_whole_batch(run, whole):
    want_state, want, _ = whole
    state, values, _ = run.update(run.compiled(accumulation=2))
    for name in want:
        np.testing.assert_allclose(values[name], want[name], rtol=2e-5, err_msg=name)
    kinds = optimizer_lib.kinds(want_state.params)
    moved = jax.tree.map(
        lambda kind, a, b: bool(jnp.all(a == b)) if kind == "router_bias" else True,
        kinds,
        state.params,
        want_state.params,
    )
    assert all(jax.tree.leaves(moved))


def test_the_state_after_a_step(run, whole):
    start, (state, values, _) = run.start.params, whole
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


@pytest.mark.parametrize(
    ("path", "where"),
    [
        (("embed",), "of group_0, attention (layer 0)"),
        (("group_0", "first", "ffn", "w2"), "of group_0, experts (layer 0)"),
        (("group_1", "first", "attn", "wo_b"), "of group_1, attention (layer 1)"),
        (("group_1", "first", "ffn", "w2"), "of group_1, experts (layer 1)"),
        (("head",), "not in head, norm, group_1, group_0, embed (from the loss back)"),
    ],
)
def test_where_numbers_are_none(run, path, where):
    def poison(at, leaf):
        keys = tuple(key.key for key in at)
        return np.full_like(leaf, np.nan) if keys == path else leaf

    params = jax.tree_util.tree_map_with_path(poison, run.start.params)
    _, values, nonfinite = run.update(run.whole, params)
    assert np.isnan(values["loss"])
    assert origin.describe(run.model.config, nonfinite).endswith(where)


def test_all_is_finite(run, whole):
    text = "all outputs of layers and all gradients are finite"
    assert origin.describe(run.model.config, whole[2]) == text


def test_the_optimizer_can_be_timed_alone():
    """On a state of two small matrices, which stays as it is."""
    params = {"w": jnp.ones((4, 4))}
    transform = optax.adam(1.0)
    state = step_lib.TrainState(jnp.zeros((), jnp.int32), params, transform.init(params))
    assert 0 < step_lib.optimizer_milliseconds(transform, state) < 1e4
    np.testing.assert_array_equal(state.params["w"], 1)


def test_the_optimizer_state_lies_as_its_parameters():
    mesh = sharding.make_mesh({}, jax.devices()[:1])
    model = ced.CED(micro.model())
    optimizer = optimizer_lib.build(settings_lib.OptimizerSettings())
    abstract = step_lib.abstract_state(step_lib.abstract_params(model, mesh), optimizer)
    leaves = jax.tree.leaves(abstract)
    assert all(leaf.sharding.mesh == mesh for leaf in leaves)
    count = len(jax.tree.leaves(abstract.params))
    # Parameters, two moments each, the step and AdamW's counts.
    assert 3 * count + 2 <= len(leaves) <= 3 * count + 3
