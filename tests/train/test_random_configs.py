"""Any configuration is a model or one clear line; any command line a run or one clear line."""

import collections

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.train import micro, random_configs
from train import main as main_lib
from train import optimizer as optimizer_lib
from train import settings as settings_lib
from train import step as step_lib
from train.data import pipeline
from v41flash import sharding
from v41flash.config import ConfigError, ModelConfig
from v41flash.errors import InputError
from v41flash.kernels import Kernels
from v41flash.nn.ced import CED

_CHECKS = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture, HealthCheck.data_too_large]


def _options(**more):
    fixed = dict(deadline=None, suppress_health_check=_CHECKS, database=None, derandomize=True)
    return settings(**fixed | more)


def _model(values):
    """A ModelConfig, or None where one clear line says why not."""
    try:
        return ModelConfig.from_dict(values)
    except ConfigError as error:
        assert "\n" not in str(error) and len(str(error)) < 1000
        return None


def _abstract(config):
    """Shapes of the outputs, and the parameters, of a model; nothing is computed."""
    rows = (2, 16, config.num_engram_sites, config.engram_rows_per_token)
    inputs = {name: jnp.zeros((2, 16), jnp.int32) for name in ("tokens", "positions")}
    inputs |= {"segment_ids": jnp.ones((2, 16), jnp.int32), "engram_rows": jnp.zeros(rows, int)}
    model = CED(config, indexer_loss=True)
    return jax.eval_shape(
        lambda key: model.init_with_output(key, **inputs, mutable=["params"]), jax.random.key(0)
    )


def _looked_at(counts, values):
    config = _model(values)
    counts["models" if config else "refused"] += 1
    if config is None:
        return
    assert ModelConfig.from_dict(config.to_dict()) == config
    outputs, variables = _abstract(config)
    assert outputs.hidden.shape == (2, 16, config.hidden_size)
    assert outputs.hidden.dtype == config.dtype
    assert variables["params"]["head"].value.shape == (config.hidden_size, config.vocab_size)


def _hold(strategy, check, examples):
    """Runs a check on so many examples of a strategy; counts what came of them."""
    counts = collections.Counter()

    @_options(max_examples=examples)
    @given(strategy)
    def run(values):
        check(counts, values)

    run()
    return counts


def test_a_few_configurations_are_models_or_refused():
    counts = _hold(random_configs.models(), _looked_at, 12)
    assert counts["models"] and counts["refused"]


@pytest.mark.slow
def test_configurations_are_models_or_refused():
    counts = _hold(random_configs.models(), _looked_at, 2000)
    print(dict(counts))
    assert counts["models"] > 300 and counts["refused"] > 300


def _train(strategy, folder, count, seed):
    """So many different models do a step: loss and gradients are finite, the embedding moves."""
    config = micro.config(folder).unlock()
    mesh = sharding.make_mesh({"data": -1, "fsdp": 1, "expert": 1, "context": 1, "tensor": 1})
    seen = set()

    def check(values):
        model_config = _model(values)
        if model_config is None or model_config in seen or len(seen) == count:
            return
        seen.add(model_config)
        config.model = model_config.to_dict()
        resolved = settings_lib.resolve(config)
        data = pipeline.from_config(resolved.data, model_config)
        iterator = data.train_iterator()
        batch = step_lib.to_device(pipeline.split_host_fields(next(iterator))[0], mesh)
        iterator.close()
        model = CED(model_config, Kernels(), indexer_loss=True)
        params = step_lib.abstract_params(model, mesh)
        optimizer = optimizer_lib.build(resolved.optimizer, params)
        with jax.set_mesh(mesh):
            abstract = step_lib.abstract_state(params, optimizer)
            state = step_lib.init_state(model, optimizer, abstract, 0)
            before = jax.device_get(state.params["embed"])
            update = step_lib.make_train_step(model, optimizer, resolved)
            update = step_lib.compile_train_step(update, abstract, batch, mesh)
            state, metrics = update(state, batch)
        assert np.isfinite(metrics["loss"]) and np.isfinite(metrics["grad_norm"])
        assert (np.asarray(state.params["embed"]) != before).any()

    options = _options(max_examples=6 * count, derandomize=False)
    hypothesis.seed(seed)(options(given(strategy)(check)))()
    assert len(seen) == count


def test_models_of_one_layer_train_a_step(tmp_path):
    strategy = random_configs.models(odd=0, schedule=random_configs.ONE_LAYER)
    _train(strategy, tmp_path, count=2, seed=0)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(6))
def test_models_train_a_step(part, tmp_path):
    _train(random_configs.models(odd=0), tmp_path, count=10, seed=part)


_SECTIONS = ("optimizer", "train", "eval", "mesh", "kernels")


def _section(counts, section, name, value):
    config = _BASE.copy_and_resolve_references().unlock()
    keys = sorted(config[section])
    config[section] = config[section].to_dict() | {keys[name % len(keys)]: value}
    try:
        resolved = settings_lib.resolve(config)
    except InputError as error:
        assert "\n" not in str(error)
        counts["refused"] += 1
    else:
        assert isinstance(resolved, settings_lib.Settings)
        counts["settings"] += 1


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    global _BASE
    _BASE = micro.config(tmp_path_factory.mktemp("base"))
    return _BASE


@pytest.mark.parametrize("examples", [150, pytest.param(4000, marks=pytest.mark.slow)])
def test_sections_are_settings_or_refused(base, examples):
    counts = collections.Counter()

    @_options(max_examples=examples)
    @given(st.sampled_from(_SECTIONS), st.integers(0, 40), random_configs.ODD_VALUES)
    def check(section, name, value):
        _section(counts, section, name, value)

    check()
    print(dict(counts))
    assert counts["settings"] and counts["refused"]


_CONFIG = """
import pathlib
from tests.train import micro

def get_config():
    return micro.config(pathlib.Path(__file__).parent, write=False)
"""


@pytest.mark.parametrize("examples", [40, pytest.param(1500, marks=pytest.mark.slow)])
def test_command_lines_are_runs_or_one_line(base, tmp_path, examples):
    file = tmp_path / "config.py"
    file.write_text(_CONFIG)
    keys = sorted(settings_lib.flatten(base.to_dict()))
    values = st.one_of(
        random_configs.ODD_VALUES.map(str),
        st.text(max_size=6),
        st.sampled_from(["", "(1,", "[", "((3, {'a': 1}),)", "\n", "../..", "1e400", "0x10"]),
    )
    flags = st.one_of(
        st.tuples(st.sampled_from(keys), values).map(lambda pair: "--config.{}={}".format(*pair)),
        st.sampled_from([f"--config={file}", "--workdir=x", "--processes=2", "--process=-1"]),
        st.text(max_size=8),
        st.text(max_size=8).map("--config.{}".format),
        st.text(max_size=8).map("--{}".format),
    )
    counts = collections.Counter()

    @_options(max_examples=examples)
    @hypothesis.example(["--config.\n"])
    @given(st.lists(flags, max_size=3))
    def check(arguments):
        try:
            config, workdir = main_lib.parse([f"--config={file}", "--workdir=x", *arguments])
        except InputError as error:
            assert "\n" not in str(error)
            counts["refused"] += 1
        else:
            assert set(config) == set(settings_lib.SECTIONS) and workdir.is_absolute()
            counts["runs"] += 1

    check()
    print(dict(counts))
    assert counts["runs"] and counts["refused"]
