"""Number formats of published weights against ml_dtypes and the model's own quantisers.

That recorded files are read as recorded is part of `tests/test_golden_storage.py`.
"""

import hypothesis
import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels import fp4
from v41flash.checkpoints import formats

BLOCKS = {8: [(32, 32), (1, 32), (3, 7)], 4: [(1, 32)]}
CASES = [(bits, block) for bits, blocks in BLOCKS.items() for block in blocks]
SHAPES = [(1, 32), (33, 96), (64, 64), (5, 128)]


def random_bytes(bits, block, shape, seed):
    """Elements without NaN, and scales around 1."""
    rng = np.random.default_rng(seed)
    out, inner = shape
    elements = rng.integers(0, 256, (out, inner * bits // 8), np.uint8)
    if bits == 8:
        elements[elements & 0x7F == 0x7F] = 0x80
    blocks = (-(-out // block[0]), -(-inner // block[1]))
    return elements, rng.integers(100, 150, blocks).astype(np.uint8)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("bits, block", CASES)
def test_values_are_elements_times_powers_of_two(bits, block, shape):
    elements, scales = random_bytes(bits, block, shape, 0)
    if bits == 8:
        plain = elements.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    else:
        nibbles = np.stack([elements & 15, elements >> 4], axis=-1).reshape(shape)
        plain = nibbles.view(ml_dtypes.float4_e2m1fn).astype(np.float64)
    rows, columns = (np.arange(n) // b for n, b in zip(shape, block, strict=True))
    expected = plain * 2.0 ** (scales.astype(np.float64)[rows[:, None], columns] - 127)
    np.testing.assert_array_equal(formats.dequantize(elements, scales, bits, block), expected)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("bits, block", CASES)
def test_what_was_not_changed_comes_back_bit_for_bit(bits, block, shape):
    elements, scales = random_bytes(bits, block, shape, 1)
    values = formats.dequantize(elements, scales, bits, block)
    again = formats.quantize(values, scales, bits, block)
    np.testing.assert_array_equal(again[0], elements)
    np.testing.assert_array_equal(again[1], scales)
    # Through bfloat16 too.
    again = formats.quantize(
        values.astype(ml_dtypes.bfloat16).astype(np.float32), scales, bits, block
    )
    np.testing.assert_array_equal(again[0], elements)


@pytest.mark.parametrize("bits, block", CASES)
def test_only_changed_blocks_get_another_scale(bits, block):
    elements, scales = random_bytes(bits, block, (64, 96), 2)
    values = formats.dequantize(elements, scales, bits, block)
    values[40, 50] = 1e4 * np.abs(values).max()
    new_elements, new_scales = formats.quantize(values, scales, bits, block)
    changed = np.argwhere(new_scales != scales)
    np.testing.assert_array_equal(changed, [[40 // block[0], 50 // block[1]]])
    same = np.ones(values.shape, bool)
    rows, columns = (slice(c * b, (c + 1) * b) for c, b in zip(changed[0], block, strict=True))
    same[rows, columns] = False
    back = formats.dequantize(new_elements, new_scales, bits, block)
    np.testing.assert_array_equal(back[same], values[same])
    assert abs(back[40, 50] / values[40, 50] - 1) <= 2.0**-2


_finite = hnp.arrays(
    np.float32,
    (3, 64),
    elements=st.floats(-(2.0**60), 2.0**60, width=32, allow_subnormal=False),
)


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(values=_finite, fmt=st.sampled_from(["fp8", "mxfp4"]))
def test_new_scales_are_those_of_the_models_quantisers(values, fmt):
    bits = {"fp8": 8, "mxfp4": 4}[fmt]
    elements, scales = formats.quantize(values, None, bits, (1, 32))
    rows = np.asarray(fp4.pack(jnp.asarray(values), fmt))
    split = 64 * bits // 8
    np.testing.assert_array_equal(scales, rows[:, split:])
    ours = formats.decode(elements, bits)
    np.testing.assert_array_equal(ours, formats.decode(rows[:, :split], bits))


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(values=_finite, case=st.sampled_from(CASES))
def test_what_was_rounded_once_stays(values, case):
    """A second way through the files changes no value, with or without the scales kept."""
    bits, block = case
    elements, scales = formats.quantize(values, None, bits, block)
    once = formats.dequantize(elements, scales, bits, block)
    for kept in (None, scales):
        again = formats.dequantize(*formats.quantize(once, kept, bits, block), bits, block)
        np.testing.assert_array_equal(again, once)
