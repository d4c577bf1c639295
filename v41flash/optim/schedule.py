"""Learning-rate schedule: linear warm-up, constant, cosine, constant."""

from __future__ import annotations

import jax.numpy as jnp
import optax

from v41flash.optim import checks


def warmup_constant_cosine(
    peak: float,
    *,
    warmup_steps: int = 0,
    decay_from: int | None = None,
    decay_until: int | None = None,
    final: float | None = None,
) -> optax.Schedule:
    r"""The V4.1 pre-training schedule (V4.1 report section 4.2.2), counted in optimizer steps.

    .. math::
        \eta(s) = \begin{cases}
            \eta_\text{peak} (s + 1) / w & s < w \\
            \eta_\text{peak} & w \le s < a \\
            \eta_\text{final} + \tfrac12 (\eta_\text{peak} - \eta_\text{final})
                (1 + \cos \pi \tfrac{s - a}{b - a}) & a \le s < b \\
            \eta_\text{final} & s \ge b
        \end{cases}

    The first update already has a positive rate, peak / warmup_steps. The horizon is given here and
    nowhere else: how long a run lasts does not change the rate at any of its steps.

    Args:
        peak: the rate after the warm-up.
        warmup_steps: w; 0 starts at the peak.
        decay_from: a, the step at which the cosine starts. None: the rate stays at its peak.
        decay_until: b, the step from which the rate is `final`. Needed where `decay_from` is given.
        final: the last rate; None means a tenth of the peak, as published.

    Returns:
        A function from the step count (updates done so far) to an f32 scalar.

    Raises:
        ValueError: negative rates or steps, or steps that are not in the order w <= a < b.

    Example:
        >>> rate = warmup_constant_cosine(1.0, warmup_steps=4, decay_from=6, decay_until=10)
        >>> [round(float(rate(step)), 3) for step in (0, 3, 5, 8, 10, 99)]
        [0.25, 1.0, 1.0, 0.55, 0.1, 0.1]
    """
    checks.number("learning_rate", peak)
    if final is None:
        final = peak / 10
    checks.number("final learning rate", final)
    if warmup_steps < 0:
        raise ValueError(f"warmup_steps {warmup_steps} is negative")
    if (decay_from is None) != (decay_until is None):
        raise ValueError(
            f"decay_from {decay_from} and decay_until {decay_until} go together: give both or none"
        )
    if decay_from is not None and not warmup_steps <= decay_from < decay_until:
        raise ValueError(
            f"the steps must be ordered warmup_steps <= decay_from < decay_until, got "
            f"{warmup_steps}, {decay_from}, {decay_until}"
        )

    def schedule(count):
        step = jnp.asarray(count, jnp.float32)
        rate = jnp.asarray(peak, jnp.float32)
        if decay_from is not None:
            progress = jnp.clip((step - decay_from) / (decay_until - decay_from), 0.0, 1.0)
            rate = final + 0.5 * (peak - final) * (1.0 + jnp.cos(jnp.pi * progress))
        if warmup_steps:
            rate = jnp.where(step < warmup_steps, peak * (step + 1) / warmup_steps, rate)
        return rate

    return schedule
