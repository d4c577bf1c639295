"""Engram rows on the device, for decoding loops that never return to the host.

The same hash as `v41flash.text.engram_hash`, bit for bit, with 64-bit numbers held as pairs of
uint32 (high, low): JAX has no 64-bit integers unless its x64 mode is on, which this model leaves
off.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from v41flash.text.engram_hash import EngramHasher


def _product(ids: jax.Array, high: jax.Array, low: jax.Array) -> tuple[jax.Array, jax.Array]:
    """ids * (high * 2^32 + low) modulo 2^64, as (high, low); all uint32."""
    id0, id1 = ids & 0xFFFF, ids >> 16
    low0, low1 = low & 0xFFFF, low >> 16
    p00, p01, p10, p11 = id0 * low0, id0 * low1, id1 * low0, id1 * low1
    middle = (p00 >> 16) + (p01 & 0xFFFF) + (p10 & 0xFFFF)
    carry = p11 + (p01 >> 16) + (p10 >> 16) + (middle >> 16)
    return ids * high + carry, (p00 & 0xFFFF) | (middle << 16)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["multipliers_high", "multipliers_low", "primes", "offsets", "pad"],
    meta_fields=["digit_bits"],
)
@dataclasses.dataclass(frozen=True)
class DeviceHasher:
    """Constants of an `EngramHasher`: S sites, orders 2 .. N, R rows per token and site.

    Attributes:
        multipliers_high: uint32 [S, N].
        multipliers_low: uint32 [S, N].
        primes: uint32 [S, N - 1, heads].
        offsets: int32 [S, N - 1, heads].
        pad: int32 scalar, canonical id of history that is not there.
        digit_bits: bits of the dividend that one step of the modulo takes in.
    """

    multipliers_high: np.ndarray | jax.Array
    multipliers_low: np.ndarray | jax.Array
    primes: np.ndarray | jax.Array
    offsets: np.ndarray | jax.Array
    pad: np.ndarray | jax.Array
    digit_bits: int

    @classmethod
    def create(cls, hasher: EngramHasher) -> DeviceHasher:
        """The constants of `hasher`, as NumPy arrays.

        Raises:
            ValueError: the model has no Engram layer.
        """
        if not hasher.layer_ids:
            raise ValueError("engram_layer_ids is empty: a model without Engram hashes nothing")
        primes = np.array(hasher.primes, np.uint32)
        return cls(
            multipliers_high=(hasher.multipliers >> 32).astype(np.uint32),
            multipliers_low=(hasher.multipliers & 0xFFFFFFFF).astype(np.uint32),
            primes=primes,
            offsets=hasher.offsets.astype(np.int32).reshape(primes.shape),
            pad=np.int32(hasher.pad_compressed_id),
            digit_bits=32 - int(primes.max() - 1).bit_length(),
        )

    def start(self, batch: int) -> jax.Array:
        """The look-back int32 [B, N - 1] at the start of a document: nothing but pad."""
        return jnp.full((batch, self.multipliers_high.shape[1] - 1), self.pad, jnp.int32)

    def history(
        self, ids: jax.Array, look_back: jax.Array, dead: jax.Array | None = None
    ) -> jax.Array:
        """The ids that each token hashes, newest first.

        Args:
            ids: int32 [B, T] canonical ids.
            look_back: int32 [B, N - 1], newest first: `start`, or what `next_look_back` returned.
            dead: bool [B, T], tokens at which the look-back latches (image tokens), or None.

        Returns:
            int32 [B, T, N]. A dead token and everything older than it is the pad.
        """
        lags, length = look_back.shape[1], ids.shape[1]
        line = jnp.concatenate([look_back[:, ::-1], ids], axis=1)
        if dead is None:
            dead = jnp.zeros(ids.shape, bool)
        # Ids before the chunk were latched when the look-back was made.
        died = jnp.pad(dead, ((0, 0), (lags, 0)))
        latched, out = jnp.zeros(ids.shape, bool), []
        for lag in range(lags + 1):
            here = slice(lags - lag, lags - lag + length)
            latched = latched | died[:, here]
            out.append(jnp.where(latched, self.pad, line[:, here]))
        return jnp.stack(out, axis=-1).astype(jnp.int32)

    def next_look_back(self, history: jax.Array, look_back: jax.Array, new: jax.Array) -> jax.Array:
        """The look-back int32 [B, N - 1] after the first `new` int32 [B] tokens of a chunk.

        Args:
            history: int32 [B, T, N] of the chunk.
            look_back: int32 [B, N - 1] before it.
            new: int32 [B], 0 .. T tokens that count; the rest is padding.
        """
        every = jnp.concatenate([look_back[:, None], history[..., :-1]], axis=1)
        return jnp.take_along_axis(every, new[:, None, None], axis=1)[:, 0]

    def rows(self, history: jax.Array) -> jax.Array:
        """Table rows of every token.

        Args:
            history: int32 [..., N] canonical ids, newest first; not negative.

        Returns:
            int32 [..., S, R], equal to those of `EngramHasher.rows`.
        """
        ids = history[..., None, :].astype(jnp.uint32)
        high, low = _product(ids, self.multipliers_high, self.multipliers_low)
        mix_high, mix_low, rows = high[..., 0], low[..., 0], []
        for order in range(self.primes.shape[1]):
            mix_high = mix_high ^ high[..., order + 1]
            mix_low = mix_low ^ low[..., order + 1]
            remainder = self._modulo(mix_high, mix_low, self.primes[:, order])
            rows.append(remainder.astype(jnp.int32) + self.offsets[:, order])
        return jnp.concatenate(rows, axis=-1)

    def _modulo(self, high: jax.Array, low: jax.Array, primes: jax.Array) -> jax.Array:
        """(high * 2^32 + low) mod primes, uint32 [..., S, heads].

        Horner's rule. Every prime is at most 2^(32 - w), w = `digit_bits`; a remainder r is then
        below 2^(32 - w), hence r * 2^w + digit fits uint32 for a digit of w bits. The high word is
        one first digit of any size, and the low word follows in digits of w bits: five divisions
        for the primes above 16,000,000 of the released tables (w = 8).
        """
        remainder = high[..., None] % primes
        left = 32
        while left:
            taken = min(self.digit_bits, left)
            left -= taken
            digit = (low >> left) & ((1 << taken) - 1)
            remainder = ((remainder << taken) | digit[..., None]) % primes
        return remainder
