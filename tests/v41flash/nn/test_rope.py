"""Rotation tables against recorded ones, and rotation as complex multiplication."""

import jax.numpy as jnp
import numpy as np
import pytest

from tests import reference_np
from tests.conftest import GOLDEN
from v41flash import presets
from v41flash.nn import rope
from v41flash.nn.context import rope_frequencies

RELEASED = presets.v41_flash()
TABLES = pytest.mark.parametrize("ours, theirs", [("window", "swa"), ("compressed", "compress")])


@pytest.fixture(scope="module")
def golden():
    return np.load(GOLDEN / "unit" / "rope_tables.npz")


@TABLES
def test_released_tables_are_the_recorded_ones(golden, ours, theirs):
    freqs = rope_frequencies(RELEASED)[ours]
    recorded = golden[f"{theirs}.freqs_f32"]
    np.testing.assert_array_max_ulp(freqs, recorded, maxulp=2)
    np.testing.assert_array_equal(freqs, golden[f"{theirs}.freqs_exact_rounded_f32"])
    positions = golden["positions"]
    angles = rope.table(jnp.asarray(positions)[None], freqs)
    tolerance = 1e-6 + 2.5e-7 * positions[:, None] * recorded
    for name, value in zip(("cos", "sin"), angles, strict=True):
        assert (np.abs(np.asarray(value[0]) - golden[f"{theirs}.{name}"]) <= tolerance).all()


@TABLES
def test_rotation_and_its_inverse_are_the_recorded_ones(golden, ours, theirs):
    """Of adjacent pairs, in the last channels only."""
    angles = rope.table(jnp.asarray(golden["positions"])[None], golden[f"{theirs}.freqs_f32"])
    x = golden["x"][None]
    rotated = np.asarray(rope.rotate(x, angles))[0]
    inverse = np.asarray(rope.rotate(x, angles, inverse=True))[0]
    np.testing.assert_allclose(rotated, golden[f"{theirs}.rotated"], atol=2e-5)
    np.testing.assert_allclose(inverse, golden[f"{theirs}.inverse"], atol=2e-5)
    np.testing.assert_array_equal(rotated[..., :16], golden["x"][..., :16])
    back = rope.rotate(jnp.asarray(rotated)[None], angles, inverse=True)
    np.testing.assert_allclose(back[0], golden["x"], atol=2e-6)


def test_yarn_ramp_and_no_attention_factor(golden):
    """Frequencies below the ramp are kept, above it divided by the factor; lengths are kept."""
    low, high = golden["compress.ramp_low_high"]
    plain = rope.frequencies(64, RELEASED.compress_rope_theta)
    ratio = plain / rope_frequencies(RELEASED)["compressed"]
    np.testing.assert_allclose(ratio[: low + 1], 1, rtol=1e-6)
    np.testing.assert_allclose(ratio[high:], RELEASED.rope_factor, rtol=1e-6)
    assert (low, high) == (15, 25) and (np.diff(ratio[low : high + 1]) > 0).all()
    positions = jnp.asarray(golden["positions"])[None]
    cos, sin = rope.table(positions, rope_frequencies(RELEASED)["compressed"])
    np.testing.assert_allclose(cos**2 + sin**2, 1, atol=1e-5)


def test_frequencies_equal_the_reference():
    config = presets.tiny()
    for name, value in rope_frequencies(config).items():
        expected = reference_np.frequencies(config, name == "compressed")
        np.testing.assert_allclose(value, expected, rtol=1e-6)


def test_heads_share_an_angle_and_entries_take_that_of_their_first_token():
    rng = np.random.default_rng(0)
    positions = jnp.arange(9)[None]
    angles = rope.table(positions, rope.frequencies(8, 100.0))
    x = rng.normal(size=(1, 9, 3, 12)).astype(np.float32)
    np.testing.assert_allclose(
        rope.rotate(x, angles)[:, :, 1], rope.rotate(x[:, :, 1], angles), atol=1e-6
    )
    np.testing.assert_array_equal(angles.every(2).cos, angles.cos[:, [0, 2, 4, 6, 8]])
