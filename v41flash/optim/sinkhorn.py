"""Sinkhorn-balanced updates for embeddings, output heads and look-up tables."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from pallas_kernels.dispatch import Implementation
from pallas_kernels.sinkhorn import sinkhorn_update
from v41flash.optim import checks
from v41flash.optim.axes import TABLE, Matrices, Specs, TableSpec, momenta
from v41flash.optim.meshes import with_auto_axes
from v41flash.optim.sinkhorn_rows import scale_by_sinkhorn_rows


class SinkhornState(NamedTuple):
    """State of `scale_by_sinkhorn`.

    Attributes:
        momentum: M, shaped like the parameters.
    """

    momentum: optax.Updates


def scale_by_sinkhorn(
    specs: Specs = TABLE,
    *,
    beta: float = 0.95,
    tau: float = 1e-3,
    iterations: int = 11,
    gamma: float = 0.18,
    eps: float = 1e-20,
    momentum_dtype: jax.typing.DTypeLike | None = None,
    compute_dtype: jax.typing.DTypeLike | None = None,
    implementation: Implementation = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Balances rows and columns of the averaged gradient (V4.1 report, Algorithm 1).

    For every table [m rows, n columns] that `specs` declares:

    .. math::
        M_t &= \beta M_{t-1} + (1-\beta) G_t, \qquad \hat G_t = \beta M_t + (1-\beta) G_t \\
        U^{(0)}_i &= \hat G_i \;[\rho_i > \tau\,\mathrm{mean}(\rho)], \qquad
            \rho_i = \|\hat G_i\|_2 \\
        U^{(k)} &= \text{rows (k odd) or columns (k even) of } U^{(k-1)}
            \text{ divided by their norm} + \epsilon, \quad k = 1 \dots K \\
        \Delta_t &= \gamma \sqrt{n}\; U^{(K)}

    Every row that is above the mask moves by RMS gamma, whatever the size of its gradient; the
    others do not move. A row that is seen once goes on moving until beta^t has taken it below the
    mask, some 135 steps later for a row of average norm at the defaults. There is no second moment
    and no bias correction.

    Memory: one buffer like the parameters (4 bytes per float32 or bfloat16 parameter, 2 with
    momentum_dtype="bfloat16"). Within a step the matrix keeps its values, and only a vector of row
    scales and one of column scales change. Rows may be sharded.

    Gradients in float32 may have entries up to 1e10. NaN, inf and larger ones show as NaN in the
    update of the whole table.

    Args:
        specs: a `TableSpec`, a tree of them (a prefix of the parameters), or a function from the
            parameter tree to such a tree. The default holds for [rows, columns].
        beta: decay of the momentum.
        tau: threshold of the row mask.
        iterations: K, odd.
        gamma: RMS of a row's update, in other words a factor of the learning rate.
        eps: added to every norm.
        momentum_dtype: of the state. None: the parameter's, at least float32.
        compute_dtype: of the averaged gradient while it is balanced, see `pallas_kernels.sinkhorn`.
        implementation: of sinkhorn_update.

    Returns:
        A transform whose update has the gradient's dtypes. With `optax.inject_hyperparams`,
        iterations and a function as `specs` are static.

    Raises:
        ValueError: a hyperparameter out of its range; from `init`, a parameter that holds no
            floating-point numbers, or whose axes are not all declared; from `update`, gradients of
            another tree or shape.
        TypeError: a hyperparameter that is no number.

    Example:
        >>> import jax, jax.numpy as jnp, optax
        >>> target = jnp.arange(12.0).reshape(4, 3)
        >>> rate = optax.linear_schedule(2.0, 0.0, 200)
        >>> tx = optax.chain(scale_by_sinkhorn(), optax.scale_by_learning_rate(rate))
        >>> @jax.jit
        ... def step(w, state):
        ...     updates, state = tx.update(w - target, state)
        ...     return optax.apply_updates(w, updates), state
        >>> w = jnp.zeros_like(target)
        >>> state = tx.init(w)
        >>> for _ in range(200):
        ...     w, state = step(w, state)
        >>> bool(jnp.max(jnp.abs(w - target)) < 0.1)
        True

    References:
        The DeepSeek-V4.1 report, section 2.5; Sinkhorn and Knopp, Concerning nonnegative matrices
        and doubly stochastic matrices, Pacific Journal of Mathematics 21, 1967 (the iteration).
    """

    checks.sinkhorn(beta=beta, tau=tau, gamma=gamma, eps=eps, iterations=iterations)
    checks.floating("momentum_dtype", momentum_dtype)
    checks.floating("compute_dtype", compute_dtype)

    def init(params):
        checks.parameters(params)
        Matrices.of_tree(specs, params, TableSpec)
        return SinkhornState(momenta(params, momentum_dtype))

    def one(plan, grad, kept, numbers):
        beta, tau, gamma, eps = numbers
        if not grad.size:
            return grad, kept
        balanced, new = sinkhorn_update(
            *plan.take(grad),
            *plan.take(kept),
            beta=beta,
            tau=tau,
            iterations=iterations,
            eps=eps,
            dtype=compute_dtype,
            implementation=implementation,
        )
        return plan.put([balanced * gamma]).astype(grad.dtype), plan.put([new])

    def update(updates, state, params=None, **extra_args):
        del params, extra_args
        checks.gradients(updates, state.momentum)
        grads, treedef = jax.tree.flatten(jax.tree.map(jnp.asarray, updates))
        kept = jax.tree.leaves(state.momentum)
        planned = Matrices.of_tree(specs, updates, TableSpec)

        # Numbers are arguments: on a mesh with Explicit axes injected ones may not be closed over.
        def run(grads, kept, numbers):
            leaves = zip(planned, grads, kept, strict=True)
            done = [one(*leaf, numbers) for leaf in leaves]
            return [balanced for balanced, _ in done], [new for _, new in done]

        balanced, kept = with_auto_axes(run, 0, 1)(grads, kept, (beta, tau, gamma, eps))
        return treedef.unflatten(balanced), SinkhornState(treedef.unflatten(kept))

    return optax.GradientTransformationExtraArgs(init, update)


def sinkhorn_balanced(
    learning_rate: optax.ScalarOrSchedule,
    specs: Specs = TABLE,
    *,
    capacity: int | None = None,
    beta: float = 0.95,
    tau: float = 1e-3,
    iterations: int = 11,
    gamma: float = 0.18,
    eps: float = 1e-20,
    momentum_dtype: jax.typing.DTypeLike | None = None,
    compute_dtype: jax.typing.DTypeLike | None = None,
    implementation: Implementation = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Sinkhorn-balanced descent, without weight decay: :math:`W \leftarrow W - \eta\Delta`.

    Args:
        learning_rate: eta, or a schedule of it.
        specs: as in `scale_by_sinkhorn`.
        capacity: None for the full form; a number of rows for `scale_by_sinkhorn_rows`.
        beta: as in `scale_by_sinkhorn`, like the rest.
        tau: see there.
        iterations: see there.
        gamma: see there.
        eps: see there.
        momentum_dtype: see there.
        compute_dtype: see there.
        implementation: of sinkhorn_update.

    Returns:
        The transform.

    Example:
        >>> import jax.numpy as jnp
        >>> embedding = jnp.ones((10, 4))
        >>> tx = sinkhorn_balanced(1e-2)
        >>> updates, state = tx.update(embedding, tx.init(embedding), embedding)
        >>> [round(float(x), 5) for x in updates[0]]
        [-0.0018, -0.0018, -0.0018, -0.0018]
    """
    checks.learning_rate(learning_rate)
    keywords = dict(
        beta=beta,
        tau=tau,
        iterations=iterations,
        gamma=gamma,
        eps=eps,
        momentum_dtype=momentum_dtype,
        compute_dtype=compute_dtype,
        implementation=implementation,
    )
    if capacity is None:
        scale = scale_by_sinkhorn(specs, **keywords)
    else:
        scale = scale_by_sinkhorn_rows(specs, capacity=capacity, **keywords)
    return optax.chain(scale, optax.scale_by_learning_rate(learning_rate))
