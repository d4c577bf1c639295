"""Updates on batches with images: what is trained, what a frozen encoder keeps, what it costs."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import _defaults
from tests.train import micro
from tests.train.data.test_images import png, url, write_rows
from tests.v41flash.nn.samples import QUICK_COMPILE, VISION
from train import flops, plan, settings, stages
from train import optimizer as optimizer_lib
from train import step as step_lib
from train.data import pipeline

MODEL = dataclasses.replace(micro.model(), vision=VISION)


def config(folder):
    rows = [
        {"text": f"picture {i}: <image>, that was it", "images": url(png(i))} for i in range(30)
    ]
    made = _defaults.get_config(MODEL)
    made.data.update(
        kind="jsonl", path=str(write_rows(folder / "rows", rows)), cache_dir=str(folder / "cache"),
        image_field="images", sequence_length=64, batch_size=2, image_slot_tokens=8, prefetch=0,
        held_out_fraction=0.3,
    )  # fmt: skip
    made.optimizer.warmup_steps = 0
    made.train.stages = ((0, {"train.freeze_vision": True}), (3, {"train.freeze_vision": False}))
    return made


@pytest.fixture(scope="module")
def updated(tmp_path_factory):
    """(parameters before, after the first frozen update, after the first free one), by path."""
    folder = tmp_path_factory.mktemp("run")
    made = stages.resolve_stages(config(folder))
    prepared = plan.prepare(made, folder / "work", None)
    batch, _ = pipeline.split_host_fields(next(prepared.data[0].train_iterator()))
    assert (batch["image_source"] > 0).any()
    results = []
    with jax.set_mesh(prepared.mesh):
        state = step_lib.init_state(prepared.models[0], prepared.optimizer, prepared.abstract, 0)
        results.append(jax.device_get(state.params))
        placed = step_lib.to_device(batch, prepared.mesh)
        for stage, model in zip(prepared.stages, prepared.models, strict=True):
            update = step_lib.make_train_step(model, prepared.optimizer, stage.settings)
            compiled = step_lib.compile_train_step(
                update, prepared.abstract, placed, prepared.mesh, QUICK_COMPILE
            )
            state, metrics = compiled(state, placed)
            assert np.isfinite(metrics["loss"])
            results.append(jax.device_get(state.params))
    return [_by_path(params) for params in results]


def _by_path(tree):
    leaves = jax.tree.leaves_with_path(tree)
    return {"/".join(optimizer_lib.path_names(path)): leaf for path, leaf in leaves}


def moved(before, after):
    return {path for path in before if np.any(before[path] != after[path])}


def test_what_is_frozen_has_neither_gradient_nor_update():
    params = {
        "images": {"vision": {"blocks": {"w2": jnp.ones(2)}, "norm": jnp.ones(2)}, "start": 1.0},
        "group_0": {"first": {"vision": jnp.ones(2)}},
    }

    def loss(params):
        return sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(params))

    gradients = _by_path(jax.grad(lambda p: loss(optimizer_lib.with_frozen_vision(p)))(params))
    updates = _by_path(optimizer_lib.without_vision(params))
    for path in gradients:
        expected = 0.0 if path == "images/vision/blocks/w2" else 1.0
        np.testing.assert_array_equal(gradients[path], 2 * expected * np.ones_like(gradients[path]))
        np.testing.assert_array_equal(updates[path], expected * np.ones_like(updates[path]))


@pytest.mark.slow
def test_a_frozen_encoder_keeps_all_but_its_last_norm(updated):
    before, frozen, free = updated
    encoder = {path for path in before if path.startswith("images/vision/")}
    norm = {"images/vision/norm"}
    assert len(encoder) > 8
    assert moved(before, frozen) & encoder == norm
    rest = {path for path in before if path.startswith("images/")} - encoder
    assert moved(before, frozen) >= rest | {"embed", "head"}
    assert moved(frozen, free) >= encoder | rest


@pytest.mark.slow
def test_image_tokens_move_a_bias_of_their_own(updated):
    before, after, _ = updated
    paths = [path for path in before if path.endswith("router/bias_vl")]
    assert paths
    for path in paths:
        np.testing.assert_allclose(np.abs(after[path] - before[path]), 1e-3, rtol=1e-5)


def test_the_encoder_has_a_rate_of_its_own():
    params = {
        "images": {"vision": {"patch_embed": jnp.ones((4, 2)), "norm": jnp.ones(2)}},
        "head": jnp.ones((2, 3)),
    }
    updates = []
    for factor in (1.0, 0.25):
        made = settings.OptimizerSettings(vision_lr_factor=factor, warmup_steps=0, clip_norm=0.0)
        transform = optimizer_lib.build(made)
        updates.append(transform.update(params, transform.init(params), params)[0])
    for path in (("images", "vision", "norm"), ("head",), ("images", "vision", "patch_embed")):
        full, slow = updates
        for key in path:
            full, slow = full[key], slow[key]
        factor = 0.25 if path[-1] == "patch_embed" else 1.0
        np.testing.assert_allclose(slow, factor * full, rtol=1e-6)


def test_flops_of_images(tmp_path):
    made = pipeline.from_config(config(tmp_path).data, MODEL)
    batch = next(made.train_iterator())
    patches = (batch["image_places"][..., 0] >= 0).sum(-1)
    width, layers, hidden = 16, 1, 16
    expected = 0.0
    for row in range(2):
        for image in range(1, batch["image_segments"][row].max() + 1):
            mine = batch["image_segments"][row] == image
            count, tokens = patches[row][mine].sum(), mine.sum()
            per_patch = 588 * width + layers * (4 * width**2 + 3 * width * hidden)
            expected += 2 * count * per_patch + 4 * layers * width * count**2
            expected += 2 * tokens * (9 * width * 32 + 32**2)
    np.testing.assert_allclose(flops.image_flops(MODEL, batch), expected)
    assert flops.image_flops(MODEL, {}) == 0


def test_slots_must_divide_over_the_context_axis(tmp_path):
    made = config(tmp_path)
    made.train.stages = ()
    settled = settings.resolve(made)
    mesh = jax.sharding.AbstractMesh(
        (1, 1, 1, 2, 1), ("data", "fsdp", "expert", "context", "tensor")
    )
    with pytest.raises(settings.SettingsError, match="data.image_slots = 1: must be a multiple"):
        plan.check_layout(settled, mesh)
