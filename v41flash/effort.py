"""Effort: a number 1 .. 100, what a token of reasoning costs under it, and the best length.

    price = LengthPrice(k0=2.0, l_norm=4096.0)
    reward = solved + price.reward(effort, tokens)       # NumPy or JAX, any shapes that broadcast
    price.optimum(effort, gain=a, scale=s)               # tokens

Training subtracts a price from the reward of every trajectory (V4.1 report, effort conditioning),

    r_len(b, l) = -min(C_max, k(b) l / L_norm),    k(b) = k0 exp(-(b - b_min) / tau),
    tau = lambda delta_b.

Where the chance p(l) of solving a problem with l tokens has marginal gains p'(l) = a exp(-l / s),
the length that maximises p(l) - k(b) l / L_norm is

    l*(b) = s log(a L_norm / k(b)) = s log(a L_norm / k0) + s (b - b_min) / tau:

a straight line in b, steeper where problems are harder (larger s). A price that is itself a
straight line in b gives a logarithm instead, flat for most efforts and steep at the end; it is here
as the contrast. The constants are not published; the defaults are ours.
"""

from __future__ import annotations

import dataclasses
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from v41flash.errors import InputError

LOWEST, HIGHEST = 1, 100
EFFORTS = {"low": 50, "high": 75, "max": 100}
SHAPES = ("exponential", "linear")

Values = Any  # a number, or a NumPy or JAX array


@dataclasses.dataclass(frozen=True)
class LengthPrice:
    """The price of reasoning under an effort.

    Attributes:
        k0: price of `l_norm` tokens at effort `b_min`, in units of the task's reward.
        b_min: effort at which the price is k0.
        scale: lambda; efforts that are scale * delta_b apart differ by a factor e in price.
        delta_b: a step of effort; the distance of the presets by default.
        l_norm: reference length, tokens.
        c_max: largest price of a trajectory. The optimum is the formula's as long as the price of
            that length stays below.
        shape: "exponential", or "linear": the straight line with the same prices at `b_min` and
            at effort 100.
    """

    k0: float = 1.0
    b_min: float = 1.0
    scale: float = 1.0
    delta_b: float = 25.0
    l_norm: float = 4096.0
    c_max: float = 1.0
    shape: str = "exponential"

    def __post_init__(self):
        """Raises InputError where a constant is out of range."""
        for name in ("k0", "scale", "delta_b", "l_norm", "c_max"):
            value = vars(self)[name]
            if not 0 < value < np.inf:
                raise InputError(f"{name} = {value}: must be positive and finite")
        if not LOWEST <= self.b_min < HIGHEST:
            raise InputError(f"b_min = {self.b_min}: must be an effort, {LOWEST} .. {HIGHEST - 1}")
        if self.shape not in SHAPES:
            raise InputError(f"shape = {self.shape!r}: must be one of {', '.join(SHAPES)}")

    @property
    def tau(self) -> float:
        """Efforts for a factor e in price."""
        return self.scale * self.delta_b

    def rate(self, effort: Values) -> Values:
        """k(b): what `l_norm` tokens cost; shape of `effort`."""
        xp = _namespace(effort)
        above = xp.asarray(effort) - self.b_min
        if self.shape == "exponential":
            return self.k0 * xp.exp(-above / self.tau)
        span = HIGHEST - self.b_min
        last = self.k0 * np.exp(-span / self.tau)
        return self.k0 + (last - self.k0) * above / span

    def reward(self, effort: Values, tokens: Values) -> Values:
        """r_len(b, l) <= 0 of trajectories of `tokens` generated tokens; the two broadcast."""
        xp = _namespace(effort, tokens)
        price = self.rate(effort) * xp.asarray(tokens) / self.l_norm
        return -xp.minimum(self.c_max, price)

    def optimum(self, effort: Values, *, gain: Values, scale: Values) -> Values:
        """l*(b): tokens that maximise p(l) - k(b) l / L_norm where p'(l) = gain exp(-l / scale).

        Args:
            effort: b.
            gain: a, per token: marginal gain of the first token.
            scale: s, tokens: how soon gains fall off.

        Returns:
            Tokens, at least 0 (where even the first costs more than it gains); all broadcast.
        """
        xp = _namespace(effort, gain, scale)
        gain, scale = xp.asarray(gain), xp.asarray(scale)
        return xp.maximum(0.0, scale * xp.log(gain * self.l_norm / self.rate(effort)))

    def slope(self, scale: Values) -> Values:
        """Tokens that one more point of effort adds to the optimum, under the exponential price.

        Raises:
            InputError: the price is linear, and the response has no one slope.
        """
        if self.shape != "exponential":
            raise InputError(f"shape = {self.shape!r}: only the exponential price has one slope")
        return scale / self.tau


def _namespace(*values: Values) -> ModuleType:
    return jnp if any(isinstance(value, jax.Array) for value in values) else np
