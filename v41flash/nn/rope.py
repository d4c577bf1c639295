"""Rotary position embedding of the last channels, adjacent pairs, with YaRN frequencies.

Layers that read a compressed cache rotate everything by the `compress_rope_theta` table with YaRN;
window-only layers (and the draft head) by the `rope_theta` table without. YaRN changes frequencies
only: no attention factor, the softmax scale stays `head_dim ** -0.5`.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class RopeTable(NamedTuple):
    """cos and sin of the rotation angles, float32 [B, T, channels / 2] each."""

    cos: jax.Array
    sin: jax.Array

    def every(self, stride: int) -> RopeTable:
        """The angles of rows 0, stride, 2*stride, ...: those of compressed entries."""
        return RopeTable(self.cos[:, ::stride], self.sin[:, ::stride])


def frequencies(
    channels: int,
    theta: float,
    *,
    yarn_factor: float = 1.0,
    original_length: int = 0,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
) -> np.ndarray:
    """Rotation frequencies in radians per position.

    Args:
        channels: number of rotated channels (two per frequency).
        theta: base of the geometric series.
        yarn_factor: YaRN's context extension; frequencies below the ramp are divided by it.
        original_length: context length before the extension; 0 turns YaRN off.
        beta_fast: rotations over `original_length` above which a frequency stays as it is.
        beta_slow: rotations below which it is fully divided.

    Returns:
        float32 [channels / 2].
    """
    index = np.arange(channels // 2, dtype=np.float64)
    inverse = theta ** (-2.0 * index / channels)
    if original_length:

        def correction(rotations: float) -> float:
            return (
                channels
                * math.log(original_length / (rotations * 2 * math.pi))
                / (2 * math.log(theta))
            )

        low = max(math.floor(correction(beta_fast)), 0)
        high = min(math.ceil(correction(beta_slow)), channels - 1)
        ramp = np.clip((index - low) / max(high - low, 1e-3), 0.0, 1.0)
        inverse = inverse / yarn_factor * ramp + inverse * (1.0 - ramp)
    return inverse.astype(np.float32)


def table(positions: jax.Array, freqs: np.ndarray) -> RopeTable:
    """Angles of `positions` [B, T]: the float32 product position * frequency, as published."""
    angle = positions.astype(jnp.float32)[..., None] * freqs
    return RopeTable(jnp.cos(angle), jnp.sin(angle))


def rotate(x: jax.Array, angles: RopeTable, *, inverse: bool = False) -> jax.Array:
    """Rotates the last channels of `x` by its rows' positions.

    Args:
        x: [B, T, D] or [B, T, heads, D]; the last `2 * angles.cos.shape[-1]` channels rotate, each
            adjacent pair (2i, 2i+1) as one complex number.
        angles: of the B x T rows.
        inverse: rotate back (the attention output, by the query's position).

    Returns:
        Shape and dtype of `x`; computed in float32.
    """
    cos, sin = angles
    if x.ndim == 4:
        cos, sin = cos[:, :, None], sin[:, :, None]
    if inverse:
        sin = -sin
    channels = 2 * cos.shape[-1]
    kept, rotated = x[..., :-channels], x[..., -channels:].astype(jnp.float32)
    real, imaginary = rotated[..., 0::2], rotated[..., 1::2]
    pairs = jnp.stack((real * cos - imaginary * sin, real * sin + imaginary * cos), axis=-1)
    return jnp.concatenate((kept, pairs.reshape(rotated.shape).astype(x.dtype)), axis=-1)
