"""Other people's code for the same work, for `python -m pallas_kernels.bench --rivals`."""

from __future__ import annotations

import jax.numpy as jnp
import optax

from pallas_kernels.measure import Foreign, Variant
from pallas_kernels.newton_schulz import HYBRID, cases
from pallas_kernels.topk import cases as topk_cases


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


def torch_topk(name: str) -> dict[str, Foreign]:
    """torch.topk of the same scores; among equal scores it takes any."""
    import torch

    case = topk_cases.BENCHMARKS[name]
    if case.block > 1:
        return {}
    scores = torch.from_dlpack(topk_cases.scores(name))

    def rival(ordered):
        return Foreign(
            start=lambda: torch.topk(scores, case.k, dim=-1, sorted=ordered),
            wait=lambda _: torch.cuda.synchronize(),
            convert=lambda found: jnp.sort(jnp.from_dlpack(found.indices.int()), axis=-1),
            flops=0.0,
            bytes=float(4 * scores.numel() + 4 * case.shape[0] * case.k),
            tolerance=1e-3,
        )

    return {"torch.topk": rival(False), "torch.topk sorted": rival(True)}


RIVALS = {"newton_schulz": optax_muon, "topk": torch_topk}
