"""A run that starts with the parameters of another folder, and the way back to the files."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.train import micro
from tests.v41flash.checkpoints import folders, synthetic
from train import loop
from train.settings import to_json
from v41flash.checkpoints import hf, inventory, names, workdirs
from v41flash.checkpoints.orbax import Checkpoints
from v41flash.checkpoints.published import Published
from v41flash.errors import InputError


def published_model():
    """The micro model, stored as the released one is."""
    return dataclasses.replace(
        micro.model(),
        q_lora_rank=32,
        o_lora_rank=16,
        moe_intermediate_size=32,
        quantization_config=synthetic.QUANTIZATION,
    )


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """(folder in the published layout, run folder that was imported from it)."""
    folder = tmp_path_factory.mktemp("source")
    synthetic.make(folder / "published", published_model())
    arguments = ["import", str(folder / "published"), f"--workdir={folder / 'run'}"]
    assert hf.main([*arguments, "--weights=bfloat16", "--tokenizer=byte"]) == 0
    return folder / "published", folder / "run"


def configuration(folder, start):
    config = micro.config(folder)
    with config.unlocked():
        config.model = published_model().to_dict()
    config.train.init_from = str(start)
    config.train.steps = 1
    return config


def started(start):
    """float32 parameters of a start, as a run takes them."""
    where = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    abstract = {}
    for parameter in names.parameters(published_model()):
        leaf = jax.ShapeDtypeStruct(parameter.shape, np.float32, sharding=where)
        names.insert(abstract, parameter.path, leaf)
    workdirs.check_start(start, abstract)
    return workdirs.start(start, abstract)


def save(workdir, params, start):
    """A run folder with a checkpoint as `train.loop` writes it."""
    config = configuration(workdir.parent, start)
    workdir.mkdir()
    (workdir / "config.json").write_text(json.dumps(to_json(config)))
    with Checkpoints(workdir / "checkpoints") as checkpoints:
        checkpoints.save(1, params=params, opt_state={"count": jnp.zeros(())}, meta={})


def test_a_run_that_changes_nothing_goes_back_bit_for_bit(source, tmp_path):
    """Through float32 parameters and orbax's own files, with the scales of what it started from."""
    published, start = source
    save(tmp_path / "run", started(start), start)
    assert hf.main(["export", f"--workdir={tmp_path / 'run'}", str(tmp_path / "back")]) == 0
    assert folders.tensors(tmp_path / "back") == folders.tensors(published)


def test_what_was_trained_goes_there_and_back_in_value(source, tmp_path):
    """Rounded once by the first export, not again by a second."""
    published, start = source
    rng = np.random.default_rng(0)
    params = jax.tree.map(
        lambda x: x + jnp.asarray(0.01 * rng.standard_normal(x.shape), x.dtype), started(start)
    )
    save(tmp_path / "run", params, start)
    once, twice = tmp_path / "once", tmp_path / "twice"
    assert hf.main(["export", f"--workdir={tmp_path / 'run'}", str(once)]) == 0
    arguments = ["import", str(once), f"--workdir={tmp_path / 'again'}", "--weights=float32"]
    assert hf.main([*arguments, "--tokenizer=byte"]) == 0
    assert hf.main(["export", f"--workdir={tmp_path / 'again'}", str(twice)]) == 0
    assert folders.tensors(once) == folders.tensors(twice)
    read = Published.open(once)
    exact = names.to_params(read.config, lambda name: read.values(name).astype(np.float32))
    for path, ours in jax.tree_util.tree_leaves_with_path(params):
        theirs = exact
        for key in path:
            theirs = theirs[key.key]
        # A quarter of the largest value: FP4 in blocks that span a wide range.
        assert np.abs(theirs - ours).max() <= 0.25 * np.abs(ours).max()
    assert folders.tensors(once) != folders.tensors(published)


@pytest.mark.slow
def test_a_step_without_a_learning_rate_changes_no_value(source, tmp_path):
    published, start = source
    config = configuration(tmp_path, start)
    config.optimizer.learning_rate = 0.0
    config.train.router_bias_speed = 0.0
    loop.run(config, tmp_path / "run")
    assert hf.main(["export", f"--workdir={tmp_path / 'run'}", str(tmp_path / "back")]) == 0
    back, before = Published.open(tmp_path / "back"), Published.open(published)
    for name in inventory.by_name(before.config):
        # Equal as numbers: adding a zero turns a negative zero into a positive one.
        np.testing.assert_array_equal(back.values(name), before.values(name))


def test_a_start_that_does_not_fit_is_one_line(source, tmp_path):
    published, start = source
    abstract = {"embed": jax.ShapeDtypeStruct((260, 32), np.float32)}
    with pytest.raises(InputError, match="the model has no parameter"):
        workdirs.check_start(start, abstract)
    with pytest.raises(InputError, match="not a run folder"):
        workdirs.check_start(tmp_path, abstract)
    config = configuration(tmp_path, start)
    config.model.hidden_size = 64
    with pytest.raises(InputError, match=r"parameter .* is \[.*\]; the model has \[.*\]"):
        loop.run(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_packed_weights_are_no_start(source, tmp_path):
    packed = tmp_path / "packed"
    arguments = ["import", str(source[0]), f"--workdir={packed}", "--tokenizer=byte"]
    assert hf.main(arguments) == 0
    with pytest.raises(InputError, match="holds packed weights; import them with"):
        loop.run(configuration(tmp_path, packed), tmp_path / "run")
    config = configuration(tmp_path, source[1])
    config.model.weight_form = "packed"
    with pytest.raises(InputError, match="packed weights are for serving"):
        loop.run(config, tmp_path / "run")
