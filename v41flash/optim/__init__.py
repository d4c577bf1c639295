"""Optax transforms and schedules; imports jax, optax and pallas_kernels only."""

from v41flash.optim.schedule import warmup_constant_cosine

__all__ = ["warmup_constant_cosine"]
