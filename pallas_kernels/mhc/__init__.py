"""Single-pass manifold-constrained hyper-connections (mHC), V4.1 report.

A token carries n residual streams. Every sublayer F does

    x       = RMSNorm(sum_i pre_i X_i)        pre comes from one sublayer earlier
    X'_k    = post_k F(x) + sum_j comb_jk X_j post and comb come from X itself

where (next pre, post, comb) are predicted from X before the write. As the read needs nothing of its
own sublayer, writing one sublayer's output and reading the next one's input is a single pass over
the streams: `write_read`.
"""

from __future__ import annotations

import jax

from pallas_kernels.dispatch import Implementation, dispatch
from pallas_kernels.mhc import mosaic_gpu, mosaic_tpu, reference
from pallas_kernels.mhc.reference import Coefficients

__all__ = [
    "COEFFICIENTS_IMPLEMENTATIONS",
    "IMPLEMENTATIONS",
    "MIX_IMPLEMENTATIONS",
    "READ_IMPLEMENTATIONS",
    "WRITE_IMPLEMENTATIONS",
    "WRITE_READ_IMPLEMENTATIONS",
    "Coefficients",
    "coefficients",
    "mix",
    "read",
    "write",
    "write_read",
]

COEFFICIENTS_IMPLEMENTATIONS = {
    "mosaic_gpu": mosaic_gpu.coefficients,
    "mosaic_tpu": mosaic_tpu.coefficients,
    "xla": reference.coefficients,
}
MIX_IMPLEMENTATIONS = {"mosaic_tpu": mosaic_tpu.mix, "xla": reference.mix}
READ_IMPLEMENTATIONS = {
    "mosaic_gpu": mosaic_gpu.read,
    "mosaic_tpu": mosaic_tpu.read,
    "xla": reference.read,
}
WRITE_IMPLEMENTATIONS = {"mosaic_tpu": mosaic_tpu.write, "xla": reference.write}
WRITE_READ_IMPLEMENTATIONS = {
    "mosaic_gpu": mosaic_gpu.write_read,
    "mosaic_tpu": mosaic_tpu.write_read,
    "xla": reference.write_read,
}
# What the benchmarks time.
IMPLEMENTATIONS = WRITE_READ_IMPLEMENTATIONS


def coefficients(
    streams: jax.Array,
    fn: jax.Array,
    base: jax.Array,
    scale: jax.Array,
    *,
    sinkhorn_iters: int = 20,
    eps: float = 1e-6,
    norm_eps: float = 1e-20,
    implementation: Implementation = None,
) -> Coefficients:
    """Mixing weights of one sublayer from the streams that enter it.

    With z the n*d values of a token and m = (fn z) / sqrt(mean(z^2) + norm_eps), whose rows are
    [pre n | post n | comb n*n]:

        pre  = sigmoid(m_pre * scale[0] + base_pre) + eps
        post = 2 sigmoid(m_post * scale[1] + base_post)
        comb = Sinkhorn(softmax over k of (m_comb * scale[2] + base_comb)[j, k], + eps)

    Sinkhorn divides by column sums (over j), then `sinkhorn_iters` - 1 times by row sums and by
    column sums, each sum + eps; so it ends on columns.

    Args:
        streams: float[..., n, d].
        fn: f32[(2+n)*n, n*d], projection; the weight of an RMSNorm over z, if any, is folded in.
        base: f32[(2+n)*n].
        scale: f32[3].
        sinkhorn_iters: at least 1.
        eps: added to pre, to the softmax and to every Sinkhorn sum.
        norm_eps: of the normalisation of z. An all-zero token is fine forward, but its gradient is
            multiplied by norm_eps^-0.5.
        implementation: see `pallas_kernels.dispatch`.

    Returns:
        Coefficients, fp32 whatever the streams' dtype.

    Raises:
        ValueError: fn, base or scale do not fit n and d, or sinkhorn_iters < 1.
    """
    return dispatch(
        "mhc.coefficients",
        COEFFICIENTS_IMPLEMENTATIONS,
        implementation,
        streams,
        fn,
        base,
        scale,
        sinkhorn_iters=sinkhorn_iters,
        eps=eps,
        norm_eps=norm_eps,
    )


def mix(
    streams: jax.Array,
    pre: jax.Array,
    norm_weight: jax.Array,
    *,
    norm_eps: float = 1e-20,
    implementation: Implementation = None,
) -> jax.Array:
    """RMSNorm(sum_i pre_i X_i): a read alone, as the language model head does after the last layer.

    Args:
        streams: float[..., n, d].
        pre: f32[..., n].
        norm_weight: [d].
        norm_eps: of the RMSNorm.
        implementation: see `pallas_kernels.dispatch`.

    Returns:
        [..., d] in the streams' dtype, computed in fp32.
    """
    return dispatch(
        "mhc.mix", MIX_IMPLEMENTATIONS, implementation, streams, pre, norm_weight, norm_eps=norm_eps
    )


def read(
    streams: jax.Array,
    pre: jax.Array,
    fn: jax.Array,
    base: jax.Array,
    scale: jax.Array,
    norm_weight: jax.Array,
    *,
    sinkhorn_iters: int = 20,
    eps: float = 1e-6,
    norm_eps: float = 1e-20,
    implementation: Implementation = None,
) -> tuple[jax.Array, Coefficients]:
    """Input of the next sublayer, and that sublayer's coefficients.

    Args:
        streams: float[..., n, d] entering the sublayer.
        pre: f32[..., n] of the previous sublayer's coefficients.
        fn, base, scale: of this sublayer, see `coefficients`.
        norm_weight: [d], of the RMSNorm in front of this sublayer.
        sinkhorn_iters, eps: see `coefficients`.
        norm_eps: of both normalisations.
        implementation: see `pallas_kernels.dispatch`.

    Returns:
        (x[..., d] = RMSNorm(sum_i pre_i streams_i) in the streams' dtype, Coefficients): post and
        comb are for this sublayer's write, pre for the next sublayer's read.

    Raises:
        ValueError: as `coefficients`.
    """
    return dispatch(
        "mhc.read",
        READ_IMPLEMENTATIONS,
        implementation,
        streams,
        pre,
        fn,
        base,
        scale,
        norm_weight,
        sinkhorn_iters=sinkhorn_iters,
        eps=eps,
        norm_eps=norm_eps,
    )


def write(
    streams: jax.Array,
    out: jax.Array,
    post: jax.Array,
    comb: jax.Array,
    *,
    implementation: Implementation = None,
) -> jax.Array:
    """Writes a sublayer's output: X'_k = post_k out + sum_j comb[j, k] X_j.

    Args:
        streams: float[..., n, d], the ones that the coefficients were computed from.
        out: float[..., d].
        post: f32[..., n].
        comb: f32[..., n, n], old stream first.
        implementation: see `pallas_kernels.dispatch`.

    Returns:
        New streams, in the streams' dtype; summed in fp32.
    """
    return dispatch("mhc.write", WRITE_IMPLEMENTATIONS, implementation, streams, out, post, comb)


def write_read(
    streams: jax.Array,
    out: jax.Array,
    post: jax.Array,
    comb: jax.Array,
    pre: jax.Array,
    fn: jax.Array,
    base: jax.Array,
    scale: jax.Array,
    norm_weight: jax.Array,
    *,
    sinkhorn_iters: int = 20,
    eps: float = 1e-6,
    norm_eps: float = 1e-20,
    implementation: Implementation = None,
) -> tuple[jax.Array, jax.Array, Coefficients]:
    """`write` of one sublayer and `read` of the next, in one pass over the streams where possible.

    Args:
        streams, out, post, comb: see `write`.
        pre: f32[..., n] of the sublayer that is written (its coefficients mix the next read).
        fn, base, scale, norm_weight: of the next sublayer, see `read`.
        sinkhorn_iters, eps, norm_eps: see `read`.
        implementation: see `pallas_kernels.dispatch`.

    Returns:
        (new streams, x of the next sublayer, Coefficients of the next sublayer).

    Raises:
        ValueError: as `coefficients`.
    """
    return dispatch(
        "mhc.write_read",
        WRITE_READ_IMPLEMENTATIONS,
        implementation,
        streams,
        out,
        post,
        comb,
        pre,
        fn,
        base,
        scale,
        norm_weight,
        sinkhorn_iters=sinkhorn_iters,
        eps=eps,
        norm_eps=norm_eps,
    )
