"""Head-wise Muon: momentum orthogonalised matrix by matrix, a head being a matrix."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from pallas_kernels.dispatch import Implementation
from pallas_kernels.newton_schulz import HYBRID, newton_schulz
from v41flash.optim import placed
from v41flash.optim.axes import MATRIX, Matrices, MatrixSpec, Specs, leaf_names, leaf_specs
from v41flash.optim.meshes import devices, spread, with_auto_axes


class HeadMuonState(NamedTuple):
    """State of `scale_by_head_muon`.

    Attributes:
        momentum: M, shaped like the parameters.
    """

    momentum: optax.Updates


def scale_by_head_muon(
    specs: Specs = MATRIX,
    *,
    momentum: float = 0.95,
    nesterov: bool = True,
    coefficients: Sequence[tuple[float, float, float]] = HYBRID,
    rms: float = 0.18,
    eps: float = 1e-20,
    momentum_dtype: jax.typing.DTypeLike | None = None,
    compute_dtype: jax.typing.DTypeLike = "bfloat16",
    form: str | None = None,
    mesh: jax.sharding.Mesh | None = None,
    placed_at: Callable[[str], jax.sharding.PartitionSpec] | None = None,
    implementation: Implementation = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Orthogonalises the momentum of every matrix, to an RMS that does not depend on its shape.

    For each matrix [fan_in, fan_out] that `specs` declares (DeepSeek-V4 report, Algorithm 1):

    .. math::
        M_t &= \mu M_{t-1} + G_t \\
        O_t &= \mathrm{NS}(\mu M_t + G_t) \\
        \Delta_t &= \rho \sqrt{\max(\text{fan\_in}, \text{fan\_out})}\; O_t

    NS is `pallas_kernels.newton_schulz`, which brings singular values to 1. The Frobenius norm of
    O is then sqrt(min(fan_in, fan_out)) where M has full rank, and the RMS of the update rho. A
    head declared as a batch axis is a matrix of its own, with its own norm and its own factor.

    Differences to `optax.contrib.scale_by_muon`: the momentum is a sum, not a bias-corrected mean
    (the same direction after some 50 steps); eps does not swallow tiny gradients; nothing about the
    shape of a parameter decides what happens to it.

    Memory: one buffer like the parameters (4 bytes per float32 or bfloat16 parameter, 2 with
    momentum_dtype="bfloat16"). During the update, matrices of equal shape go through one batched
    iteration, as a copy in `compute_dtype`.

    On a mesh of Auto axes the batch is spread over all devices, filled up with zeros to a multiple
    of their number, so that every matrix is worked on once; the mesh is the one in force
    (`jax.set_mesh`) or `mesh`. How the compiler gets there is up to it, and parameters that are
    split along several axes it may first make whole on every device. Told where they are
    (`placed_at`), devices exchange matrices one for one (`v41flash.optim.placed`). Arrays of a
    mesh with Explicit axes keep their layout.

    Args:
        specs: a `MatrixSpec`, a tree of them (a prefix of the parameters), or a function from the
            parameter tree to such a tree. The default holds for plain [in, out] matrices.
        momentum: mu.
        nesterov: orthogonalise mu M_t + G_t; else M_t.
        coefficients: (a, b, c) of every Newton-Schulz step.
        rms: rho, 0.18 as published.
        eps: added to the Frobenius norm of each matrix.
        momentum_dtype: of the state. None: the parameter's, at least float32.
        compute_dtype: of the iteration, "bfloat16" or "float32"; None: the parameter's, at least
            float32. See `pallas_kernels.newton_schulz` for the error.
        form: "direct", "gram" or None for the cheaper, see `pallas_kernels.newton_schulz`.
        mesh: devices to spread over where none is in force.
        placed_at: for the path of a parameter, such as "decoder/attn/wq", how it lies on the mesh.
            A fused parameter (`MatrixSpec.split`) is left to the compiler all the same.
        implementation: of newton_schulz.

    Returns:
        A transform whose update has the gradient's dtypes. With `optax.inject_hyperparams`, a
        function as `specs` is static.

    Raises:
        ValueError: from `init`, for a parameter whose axes are not all declared.

    Example:
        >>> import jax, jax.numpy as jnp, optax
        >>> target = jnp.arange(12.0).reshape(2, 3, 2)  # [in, heads, head_dim]
        >>> per_head = MatrixSpec(reduction=0, output=2, batch=1)
        >>> rate = optax.linear_schedule(2.0, 0.0, 200)
        >>> tx = optax.chain(scale_by_head_muon(per_head), optax.scale_by_learning_rate(rate))
        >>> @jax.jit
        ... def step(w, state):
        ...     updates, state = tx.update(w - target, state)
        ...     return optax.apply_updates(w, updates), state
        >>> w = jnp.zeros_like(target)
        >>> state = tx.init(w)
        >>> for _ in range(200):
        ...     w, state = step(w, state)
        >>> bool(jnp.max(jnp.abs(w - target)) < 0.05)
        True

    References:
        Jordan et al., Muon, https://kellerjordan.github.io/posts/muon, 2024;
        Liu et al., Muon is Scalable for LLM Training, https://arxiv.org/abs/2502.16982, 2025
        (the RMS factor); the DeepSeek-V4 and V4.1 reports (the hybrid schedule, heads).
    """

    def plans(tree):
        shapes = [leaf.shape for leaf in jax.tree.leaves(tree)]
        parts = zip(leaf_specs(specs, tree, MatrixSpec), shapes, leaf_names(tree), strict=True)
        return [Matrices.of(*part) for part in parts]

    def init(params):
        plans(params)

        def zeros(leaf):
            dtype = momentum_dtype or jnp.promote_types(leaf.dtype, jnp.float32)
            return jnp.zeros_like(leaf, dtype=dtype)

        return HeadMuonState(jax.tree.map(zeros, params))

    def accumulate(grad, kept):
        wide = jnp.promote_types(kept.dtype, jnp.float32)
        new = (momentum * kept.astype(wide) + grad.astype(wide)).astype(kept.dtype)
        if not nesterov:
            return new, new
        return new, (momentum * new.astype(wide) + grad.astype(wide)).astype(wide)

    def update(updates, state, params=None, **extra_args):
        del params, extra_args
        grads, treedef = jax.tree.flatten(updates)
        kept = jax.tree.leaves(state.momentum)
        planned = plans(updates)

        def run(grads, kept):
            accumulated = [accumulate(*pair) for pair in zip(grads, kept, strict=True)]
            directions = [direction for _, direction in accumulated]
            scaled = orthogonalise(planned, directions, leaf_names(updates))
            scaled = [x.astype(grad.dtype) for x, grad in zip(scaled, grads, strict=True)]
            return scaled, [new for new, _ in accumulated]

        scaled, kept = with_auto_axes(run, 0, 1)(grads, kept)
        return treedef.unflatten(scaled), HeadMuonState(treedef.unflatten(kept))

    def iterate(matrices, unroll=False):
        return newton_schulz(
            matrices,
            coefficients,
            eps=eps,
            form=form,
            unroll=unroll,
            implementation=implementation,
        )

    def widened(done, direction, shape):
        wide = jnp.promote_types(direction.dtype, jnp.float32)
        return done.astype(wide) * (rms * math.sqrt(max(shape)))

    def orthogonalise(
        planned: list[Matrices], directions: list[jax.Array], names: list[str]
    ) -> list[jax.Array]:
        """Update of every parameter."""
        narrow = [
            x.astype(compute_dtype or jnp.promote_types(x.dtype, jnp.float32)) for x in directions
        ]
        everything = range(len(planned))
        known = []
        if placed_at is not None and devices(mesh) > 1:
            known = [i for i in everything if len(planned[i].columns) == 1]
        others = [i for i in everything if i not in known]
        done = placed.apply(
            iterate,
            [planned[i] for i in known],
            [narrow[i] for i in known],
            [placed_at(names[i]) for i in known],
            mesh,
        )
        results = {
            i: widened(x, directions[i], (planned[i].rows, *planned[i].columns))
            for i, x in zip(known, done, strict=True)
        }
        results |= by_shape(planned, narrow, directions, others)
        return [results[i] for i in everything]

    def by_shape(
        planned: list[Matrices],
        narrow: list[jax.Array],
        directions: list[jax.Array],
        leaves: list[int],
    ) -> dict[int, jax.Array]:
        """Update of some parameters. Matrices of one shape share a Newton-Schulz call; on a mesh
        those of a parameter that fill it have one of their own, and stay in place that way."""
        groups = defaultdict(list)
        count = devices(mesh)
        for leaf in leaves:
            for part, matrices in enumerate(planned[leaf].take(narrow[leaf])):
                fills = matrices.shape[0] >= count > 1
                alone = (leaf, part) if fills else None
                key = (matrices.shape[1:], matrices.dtype, alone)
                groups[key].append((leaf, part, matrices))
        parts: dict[tuple[int, int], jax.Array] = {}
        for (shape, _, _), members in groups.items():
            joined = [matrices for _, _, matrices in members]
            batch = joined[0] if len(joined) == 1 else jnp.concatenate(joined)
            done = iterate(spread(batch, mesh), unroll=count > 1)
            start = 0
            for leaf, part, matrices in members:
                end = start + matrices.shape[0]
                parts[leaf, part] = widened(done[start:end], directions[leaf], shape)
                start = end
        return {
            leaf: planned[leaf].put([parts[leaf, i] for i in range(len(planned[leaf].columns))])
            for leaf in leaves
        }

    return optax.GradientTransformationExtraArgs(init, update)


def head_muon(
    learning_rate: optax.ScalarOrSchedule,
    specs: Specs = MATRIX,
    *,
    weight_decay: float = 0.1,
    weight_decay_mask: Any | Callable[[Any], Any] | None = None,
    momentum: float = 0.95,
    nesterov: bool = True,
    coefficients: Sequence[tuple[float, float, float]] = HYBRID,
    rms: float = 0.18,
    eps: float = 1e-20,
    momentum_dtype: jax.typing.DTypeLike | None = None,
    compute_dtype: jax.typing.DTypeLike = "bfloat16",
    form: str | None = None,
    mesh: jax.sharding.Mesh | None = None,
    placed_at: Callable[[str], jax.sharding.PartitionSpec] | None = None,
    implementation: Implementation = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Head-wise Muon, decoupled decay: :math:`W \leftarrow W (1-\eta\lambda)-\eta\Delta`.

    With rms=0.18 the updates have about the RMS of AdamW's, so that both can share a learning rate.

    Args:
        learning_rate: eta, or a schedule of it.
        specs: as in `scale_by_head_muon`.
        weight_decay: lambda; multiplied by the learning rate.
        weight_decay_mask: tree of booleans (or a function of the parameters) of what decays. None:
            everything.
        momentum: as in `scale_by_head_muon`, like the rest.
        nesterov: see there.
        coefficients: see there.
        rms: see there.
        eps: see there.
        momentum_dtype: see there.
        compute_dtype: see there.
        form: see there.
        mesh: see there.
        placed_at: see there.
        implementation: see there.

    Returns:
        The transform. `update` needs the parameters.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> params = {"q": jnp.ones((8, 4, 2)), "out": jnp.ones((8, 8))}
        >>> specs = {"q": MatrixSpec(0, 2, batch=1), "out": MatrixSpec(0, 1)}
        >>> tx = head_muon(1e-2, specs)
        >>> updates, state = tx.update(params, tx.init(params), params)
        >>> updates["q"].shape
        (8, 4, 2)
    """
    return optax.chain(
        scale_by_head_muon(
            specs,
            momentum=momentum,
            nesterov=nesterov,
            coefficients=coefficients,
            rms=rms,
            eps=eps,
            momentum_dtype=momentum_dtype,
            compute_dtype=compute_dtype,
            form=form,
            mesh=mesh,
            placed_at=placed_at,
            implementation=implementation,
        ),
        optax.add_decayed_weights(weight_decay, weight_decay_mask),
        optax.scale_by_learning_rate(learning_rate),
    )
