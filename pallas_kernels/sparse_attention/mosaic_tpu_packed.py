"""Values of packed rows, as the TPU kernels compute them from copied words.

In an `Fp4Table` channel 8 w + j is nibble j of word w. Shifting the words of an entry gives the
channels of one nibble side by side, so a kernel has channels in the order (j mod 4, j div 4, w),
128 lanes for each j mod 4; logits do not depend on the order, and queries, window rows and results
are put into it and back outside. All 16 channels of a scale have the same pair of words, so that
one vector of scales serves every nibble.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.sparse_attention.tables import (
    CHANNELS,
    ELEMENT_ENTRIES,
    LANES,
    SCALE_ENTRIES,
)

# Rows of the two arrays of a table that an entry is in: the entry shifted right.
SHIFTS = (ELEMENT_ENTRIES.bit_length() - 1, SCALE_ENTRIES.bit_length() - 1)
_WORDS = CHANNELS // 8
_SCALE_WORDS = LANES // SCALE_ENTRIES
_NIBBLES = 4


def ordered(x: jax.Array) -> jax.Array:
    """`[.., 512]` with channels in the order of the kernel."""
    x = x.reshape(*x.shape[:-1], _WORDS, 2, _NIBBLES)
    return jnp.moveaxis(x, -3, -1).swapaxes(-3, -2).reshape(*x.shape[:-3], CHANNELS)


def restored(x: jax.Array) -> jax.Array:
    """The inverse of `ordered`."""
    x = x.reshape(*x.shape[:-1], _NIBBLES, 2, _WORDS)
    return jnp.moveaxis(x.swapaxes(-3, -2), -1, -3).reshape(*x.shape[:-3], CHANNELS)


def _float(bits):
    return lax.bitcast_convert_type(bits, jnp.float32)


def _scales(words, entry):
    """f32 `[N, 128]`: scale of the channels that lane l (and word l mod 64) holds."""
    word = lax.broadcasted_iota(jnp.int32, words.shape, 1) % _WORDS
    lane = (entry % SCALE_ENTRIES) * _SCALE_WORDS + word // 8
    own = jnp.take_along_axis(words, lane, axis=1, mode="promise_in_bounds")
    code = lax.shift_right_logical(own, word // 2 % 4 * 8) & 0xFF
    # E4M3, exponent bias 7; below its normal numbers the code counts steps of 2^-9.
    small = code.astype(jnp.float32) * 2.0**-9
    scale = jnp.where(code < 8, small, _float((code + ((127 - 7) << 3)) << 20))
    return jnp.where(code == 0x7F, jnp.nan, scale)


def values(elements: jax.Array, scales: jax.Array, entry: jax.Array, dtype) -> jax.Array:
    """Values of entries from the rows of a table that hold them.

    Args:
        elements: i32 `[N, 128]`.
        scales: i32 `[N, 128]`.
        entry: i32 `[N, 1]`.
        dtype: of the result, which both float32 and bfloat16 hold exactly.

    Returns:
        dtype `[N, 512]`, channels in the order of `ordered`.
    """
    lane = lax.broadcasted_iota(jnp.int32, elements.shape, 1)
    second = lane >= _WORDS
    # The words of the entry in both halves of the lanes, the second half for nibbles 4 to 7.
    here = second == (entry % ELEMENT_ENTRIES != 0)
    words = jnp.where(here, elements, pltpu.roll(elements, _WORDS, 1))
    words = lax.shift_right_logical(words, jnp.where(second, 16, 0))
    scale = _scales(scales, entry)
    parts = []
    for nibble in range(_NIBBLES):
        code = lax.shift_right_logical(words, 4 * nibble)
        size = code & 7
        magnitude = jnp.where(size < 2, size.astype(jnp.float32) * 0.5, _float((size + 252) << 22))
        bits = lax.bitcast_convert_type(magnitude * scale, jnp.int32)
        parts.append(_float(bits | ((code & 8) << 28)).astype(dtype))
    return jnp.concatenate(parts, axis=-1)
