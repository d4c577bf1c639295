"""The optimizer of the V4.1 report for the parameter tree of `v41flash.nn`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import optax

from v41flash.optim.axes import MatrixSpec, TableSpec
from v41flash.optim.head_muon import head_muon
from v41flash.optim.partition import Rule, partition, specs
from v41flash.optim.schedule import warmup_constant_cosine
from v41flash.optim.sinkhorn import sinkhorn_balanced

_PLAIN = MatrixSpec(reduction=-2, output=-1, batch=...)
# [in, heads, out], [in, fused, out]: the axis in the middle holds matrices of their own.
_MIDDLE = MatrixSpec(reduction=-3, output=-1, batch=...)

# Axes count from the end, since the layers of a group are stacked in front.
V41_RULES = (
    Rule(r"embed", "table", TableSpec(rows=0, columns=1)),
    Rule(r"head", "table", TableSpec(rows=1, columns=0)),
    Rule(r".*/engram/table", "engram_table", TableSpec(rows=0, columns=1)),
    # Attention. The groups of wo_a are matrices; wo_b is one matrix [groups * rank, d].
    Rule(r".*/attn/(wq_a|wkv|wo_a)", "matrix", _PLAIN),
    Rule(r".*/attn/wq_b", "matrix", _MIDDLE),
    Rule(r".*/attn/wo_b", "matrix", MatrixSpec((-3, -2), -1, batch=...)),
    Rule(r".*/compressor/(wkv|wgate)", "matrix", _PLAIN),
    Rule(r".*/indexer/wq_b", "matrix", _MIDDLE),
    Rule(r".*/indexer/(weights_proj|wk)", "matrix", _PLAIN),
    # Experts; w1 and w3 lie side by side.
    Rule(r".*/router/weight", "matrix", _PLAIN),
    Rule(r".*/(shared_)?w13", "matrix", _MIDDLE),
    Rule(r".*/(shared_)?w2", "matrix", _PLAIN),
    # One matrix [rows * width, (streams + 1) * d].
    Rule(r".*/engram/wkv", "matrix", MatrixSpec(-3, (-2, -1), batch=...)),
    # mHC's projection is stored [out, in].
    Rule(r".*/hc_(attn|ffn)/fn", "matrix", MatrixSpec(-1, -2, batch=...)),
    # Images. Of the fused q, k, v each is a matrix; so are all patches of a token in the aligner.
    Rule(r"images/vision/patch_embed", "matrix", _PLAIN),
    Rule(r"images/vision/blocks/wqkv", "matrix", MatrixSpec(-4, (-2, -1), batch=...)),
    Rule(r"images/(vision/blocks/wo|aligner/w1)", "matrix", MatrixSpec((-3, -2), -1, batch=...)),
    Rule(r"images/(.*/\w+_bias|start|newline|end)", "vector"),
    Rule(r"(.*/)?(\w+_)?norm", "norm"),
    Rule(r".*/engram/[qk]_weight", "norm"),
    Rule(r".*/hc_(attn|ffn)/(base|scale)", "vector"),
    Rule(r".*/attn/sink", "vector"),
    # The load balancing rule moves them, see v41flash.nn.moe.
    Rule(r".*/router/bias(_vl)?", "router_bias"),
)


def v41_optimizer(
    learning_rate: optax.ScalarOrSchedule = 2.6e-4,
    *,
    warmup_steps: int = 0,
    decay_from: int | None = None,
    decay_until: int | None = None,
    final_learning_rate: float | None = None,
    weight_decay: float = 0.1,
    muon_momentum: float = 0.95,
    muon_rms: float = 0.18,
    sinkhorn_beta: float = 0.95,
    sinkhorn_tau: float = 1e-3,
    sinkhorn_iterations: int = 11,
    sinkhorn_gamma: float = 0.18,
    engram_lr_factor: float = 5.0,
    engram_capacity: int | None = None,
    adam_b1: float = 0.9,
    adam_b2: float = 0.95,
    adam_eps: float = 1e-20,
    momentum_dtype: jax.typing.DTypeLike | None = None,
    compute_dtype: jax.typing.DTypeLike = "bfloat16",
    mesh: jax.sharding.Mesh | None = None,
    placed_at: Callable[[str], jax.sharding.PartitionSpec] | None = None,
    rules: Sequence[Rule] = V41_RULES,
) -> optax.GradientTransformationExtraArgs:
    """The recipe of the V4.1 report (sections 2.5 and 4.2.2).

    | parameters | transform |
    |---|---|
    | linear weights, queries and index queries per head, each expert on its own | `head_muon` |
    | embedding, head | `sinkhorn_balanced` |
    | Engram tables | `sinkhorn_balanced` at `engram_lr_factor` times the rate |
    | norm weights | AdamW with weight decay |
    | biases, sinks, mHC base and scale | AdamW without |
    | router biases | no update |

    The published schedule is warmup_steps=2000, then the peak up to 28T tokens of 100.6M a step
    (decay_from=278_000), a cosine up to 40T (decay_until=398_000), and a tenth of the peak from
    there. Clipping is not part of it: chain it in front.

    Args:
        learning_rate: the peak; or a schedule, which then is the whole schedule.
        warmup_steps: of `warmup_constant_cosine`, like the next three.
        decay_from: first step of the cosine; None: the rate stays at its peak.
        decay_until: first step at the final rate.
        final_learning_rate: None: a tenth of the peak.
        weight_decay: of matrices and norm weights, multiplied by the rate.
        muon_momentum: mu of `head_muon`.
        muon_rms: RMS of its updates.
        sinkhorn_beta: of `sinkhorn_balanced`, like the next three.
        sinkhorn_tau: threshold of the row mask.
        sinkhorn_iterations: K.
        sinkhorn_gamma: RMS of a row's update.
        engram_lr_factor: of the Engram tables' rate.
        engram_capacity: rows of `scale_by_sinkhorn_rows`; None: the full form.
        adam_b1: of AdamW, like the next two.
        adam_b2: decay of the second moment.
        adam_eps: added to its root.
        momentum_dtype: of the momentum of Muon and Sinkhorn. None: float32.
        compute_dtype: of the Newton-Schulz iteration.
        mesh: devices to spread it over where none is in force (`jax.set_mesh`).
        placed_at: how the parameter of a path lies on the mesh, as in `scale_by_head_muon`.
        rules: replaced or extended for other parameter trees; labels as in `V41_RULES`.

    Returns:
        The transform. `update` needs the parameters. One momentum per parameter for Muon and
        Sinkhorn, two for AdamW's few.

    Raises:
        ValueError: steps of the schedule that are out of order, or a function as learning_rate
            together with one of the schedule's keywords.
        PartitionError: from `init`, listing the parameters that do not match exactly one rule.

    Example:
        >>> import jax.numpy as jnp
        >>> params = {"embed": jnp.ones((8, 4)), "head": jnp.ones((4, 8)), "norm": jnp.ones(4)}
        >>> tx = v41_optimizer(1e-3, warmup_steps=10)
        >>> updates, state = tx.update(params, tx.init(params), params)
        >>> sorted(updates)
        ['embed', 'head', 'norm']
    """
    scheduled = bool(warmup_steps) or decay_from is not None or decay_until is not None
    scheduled = scheduled or final_learning_rate is not None
    rate = learning_rate
    if callable(learning_rate):
        if scheduled:
            raise ValueError(
                "learning_rate is a schedule: leave out warmup_steps, decay_from, decay_until and "
                "final_learning_rate"
            )
        factored = lambda count: engram_lr_factor * learning_rate(count)  # noqa: E731
    elif scheduled:
        rate = warmup_constant_cosine(
            learning_rate,
            warmup_steps=warmup_steps,
            decay_from=decay_from,
            decay_until=decay_until,
            final=final_learning_rate,
        )
        factored = lambda count: engram_lr_factor * rate(count)  # noqa: E731
    else:
        factored = engram_lr_factor * learning_rate
    sinkhorn_keywords = dict(
        beta=sinkhorn_beta,
        tau=sinkhorn_tau,
        iterations=sinkhorn_iterations,
        gamma=sinkhorn_gamma,
        momentum_dtype=momentum_dtype,
    )
    adam_keywords = dict(b1=adam_b1, b2=adam_b2, eps=adam_eps)
    declared = specs(rules)
    return partition(
        {
            "matrix": head_muon(
                rate,
                declared,
                weight_decay=weight_decay,
                momentum=muon_momentum,
                rms=muon_rms,
                momentum_dtype=momentum_dtype,
                compute_dtype=compute_dtype,
                mesh=mesh,
                placed_at=placed_at,
            ),
            "table": sinkhorn_balanced(rate, declared, **sinkhorn_keywords),
            "engram_table": sinkhorn_balanced(
                factored, declared, capacity=engram_capacity, **sinkhorn_keywords
            ),
            "norm": optax.adamw(rate, weight_decay=weight_decay, **adam_keywords),
            "vector": optax.adam(rate, **adam_keywords),
            "router_bias": optax.set_to_zero(),
        },
        rules,
    )
