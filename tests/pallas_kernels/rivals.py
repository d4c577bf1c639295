"""Other people's code for the same work, for `python -m pallas_kernels.bench --rivals`."""

from __future__ import annotations

import jax.numpy as jnp
import optax

from pallas_kernels.measure import Variant
from pallas_kernels.newton_schulz import HYBRID, cases


def optax_muon(name: str) -> dict[str, Variant]:
    """optax.contrib.scale_by_muon with the same schedule, its momentum in and out."""
    work = cases.benchmark(name).rivals["loop bfloat16"]
    (x,) = work.arguments
    x = x.reshape(-1, *x.shape[-2:])
    specs = optax.contrib.MuonDimensionNumbers(reduction_axis=1, output_axis=2)

    def variant(dtype, tolerance):
        transform = optax.contrib.scale_by_muon(
            ns_coeffs=HYBRID, ns_steps=len(HYBRID), eps=1e-20, weight_dimension_numbers=specs
        )

        def update(x):
            gradient = x.astype(dtype)
            update, _ = transform.update(gradient, transform.init(gradient))
            return update.astype(jnp.float32)

        return Variant(lambda _: update, (x,), work.flops, work.bytes, tolerance)

    return {
        "optax bfloat16": variant(jnp.bfloat16, 0.05),
        "optax float32": variant(jnp.float32, 0.01),
    }


RIVALS = {"newton_schulz": optax_muon}
