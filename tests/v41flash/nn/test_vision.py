"""The image encoder beyond the recorded run: slots, chunks, gradients, meshes."""

import dataclasses
import os
import subprocess
import sys

import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from PIL import Image

from pallas_kernels import chunking
from tests.v41flash.nn import samples
from v41flash import sharding
from v41flash.image_files import to_patches
from v41flash.image_rows import RowImage, assemble
from v41flash.nn import vision
from v41flash.nn.vision import ImageBatch, Images

CONFIG = samples.two_layers(
    vision=dataclasses.replace(samples.VISION, num_hidden_layers=2, max_image_tokens=64)
)
SIZES = ((84, 70), (30, 42), (98, 40))
T = 40


def picture(size, seed):
    rng = np.random.default_rng(seed)
    return Image.fromarray(rng.integers(0, 256, (size[1], size[0], 3), np.uint8))


@pytest.fixture(scope="module")
def images():
    patches = [to_patches(CONFIG.vision, picture(size, i)) for i, size in enumerate(SIZES)]
    starts = np.cumsum([1] + [p.plan.span + 1 for p in patches])
    return [RowImage(int(start), p) for start, p in zip(starts, patches, strict=False)]


@pytest.fixture(scope="module")
def params():
    return random_params()


def random_params():
    x = jax.ShapeDtypeStruct((1, T, CONFIG.hidden_size), jnp.float32)
    shapes = jax.eval_shape(lambda x: Images(CONFIG).init(jax.random.key(0), x, None), x)
    rng = np.random.default_rng(1)
    return jax.tree.map(
        lambda leaf: rng.normal(0.2, 0.2, leaf.shape).astype(np.float32),
        nn.unbox(shapes["params"]),
    )


def apply(params, x, batch):
    return Images(CONFIG).apply({"params": params}, x, batch)


def quick(function):
    return jax.jit(function, compiler_options=samples.QUICK_COMPILE)


embed = quick(apply)


def batch_of(rows, slots, slot_tokens):
    return ImageBatch(*assemble(CONFIG.vision, rows, T, slots, slot_tokens))


def test_pixels_are_rounded_to_bfloat16():
    pixels = np.arange(256, dtype=np.uint8)
    exact = ((pixels.astype(np.float32) / np.float32(255)) - np.float32(0.5)) / np.float32(0.5)
    theirs = exact.astype(ml_dtypes.bfloat16).astype(np.float32)
    np.testing.assert_array_equal(jax.jit(vision.normalized)(pixels), theirs)


def test_an_image_is_the_same_in_every_slot_and_beside_any_other(params, images, monkeypatch):
    x = np.random.default_rng(2).normal(size=(1, T, CONFIG.hidden_size)).astype(np.float32)
    together = np.asarray(embed(params, x, batch_of([images], 1, 16)))
    apart = np.asarray(embed(params, x, batch_of([images], 3, 6)))
    np.testing.assert_allclose(together, apart, atol=1e-5)
    rows = [[images[0]], [], images[1:]]
    spread = np.asarray(embed(params, np.concatenate([x] * 3), batch_of(rows, 1, 9)))
    for row, ours in enumerate(rows):
        for image in ours:
            here = slice(image.start, image.start + image.patches.plan.span)
            np.testing.assert_allclose(spread[row, here], apart[0, here], atol=1e-5)
    np.testing.assert_array_equal(spread[1], x[0])
    source = batch_of([images], 1, 16).source[0]
    np.testing.assert_array_equal(together[0, source == 0], x[0, source == 0])
    assert np.abs(together - np.asarray(x))[0, source > 0].max(-1).min() > 0.1
    monkeypatch.setattr(chunking, "CPU_BUDGET_BYTES", 1 << 14)
    monkeypatch.setattr(chunking, "SMALLEST_CHUNK", 8)
    in_chunks = quick(lambda *arguments: apply(*arguments))
    np.testing.assert_allclose(in_chunks(params, x, batch_of([images], 1, 16)), together, atol=1e-5)


def test_the_order_of_patches_matters_and_their_padding_does_not(params, images):
    x = jnp.zeros((1, T, CONFIG.hidden_size))
    batch = batch_of([images[:1]], 1, 6)
    before = np.asarray(embed(params, x, batch))
    nowhere = batch.places[..., 0] < 0
    assert nowhere.any()
    noisy = np.where(nowhere[..., None], 200, batch.patches).astype(np.uint8)
    np.testing.assert_array_equal(embed(params, x, batch._replace(patches=noisy)), before)
    turned = batch._replace(places=batch.places[..., ::-1])
    assert np.abs(np.asarray(embed(params, x, turned)) - before).max() > 1e-2


def test_gradients_reach_every_parameter(params, images):
    x = jnp.zeros((2, T, CONFIG.hidden_size))
    batch = batch_of([images, []], 1, 16)
    gradients = quick(jax.grad(lambda p: jnp.sum(jnp.sin(apply(p, x, batch)))))(params)
    for path, leaf in jax.tree.leaves_with_path(gradients):
        norms = np.linalg.norm(np.asarray(leaf).reshape(leaf.shape[0], -1), axis=-1)
        assert np.isfinite(norms).all() and norms.max() > 0, jax.tree_util.keystr(path)


def test_images_are_encoded_over_all_devices():
    """In a process of its own: the number of devices is fixed before JAX starts."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4"
    env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    command = [sys.executable, "-m", "tests.v41flash.nn.test_vision"]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["{'data': 4} equal", "{'data': 2, 'context': 2} equal"]


def main():
    pictures = [RowImage(2, to_patches(CONFIG.vision, picture((84, 70), i))) for i in range(4)]
    batch = batch_of([[image] for image in pictures], 2, 4)
    x = np.zeros((4, T, CONFIG.hidden_size), np.float32)
    params = random_params()
    alone = embed.lower(params, x, batch).compile()
    expected, flops = np.asarray(alone(params, x, batch)), alone.cost_analysis()["flops"]
    for sizes in ({"data": 4}, {"data": 2, "context": 2}):
        mesh = sharding.make_mesh(sizes)
        with jax.set_mesh(mesh):
            spread = jax.device_put((x, batch), sharding.batch_sharding(mesh))
            run = quick(apply).lower(params, *spread).compile()
            np.testing.assert_allclose(run(params, *spread), expected, atol=1e-5)
        # Every device encodes a quarter of the slots.
        share = run.cost_analysis()["flops"] / flops
        assert share < 0.4, share
        print(f"{sizes} equal", flush=True)


if __name__ == "__main__":
    main()
