"""Head-wise Muon: momentum orthogonalised matrix by matrix, a head being a matrix."""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from pallas_kernels.dispatch import Implementation
from pallas_kernels.newton_schulz import HYBRID, check_steps, newton_schulz
from v41flash.optim import checks, placed
from v41flash.optim.axes import MATRIX, Matrices, MatrixSpec, Specs, leaf_names, momenta
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
        ValueError: a hyperparameter out of its range; from `init`, a parameter that holds no
            floating-point numbers, or whose axes are not all declared; from `update`, gradients of
            another tree or shape.
        TypeError: a hyperparameter that is no number.

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

    for name, value in (("rms", rms), ("eps", eps)):
        checks.number(name, value)
    checks.number("momentum", momentum, below=1)
    checks.floating("momentum_dtype", momentum_dtype)
    checks.floating("compute_dtype", compute_dtype)
    iterate = _Iteration(
        check_steps(coefficients, form), form, compute_dtype, mesh, placed_at, implementation
    )

    def init(params):
        checks.parameters(params)
        Matrices.of_tree(specs, params, MatrixSpec)
        return HeadMuonState(momenta(params, momentum_dtype))

    def update(updates, state, params=None, **extra_args):
        del params, extra_args
        checks.gradients(updates, state.momentum)
        grads, treedef = jax.tree.flatten(jax.tree.map(jnp.asarray, updates))
        kept = jax.tree.leaves(state.momentum)
        planned, names = Matrices.of_tree(specs, updates, MatrixSpec), leaf_names(updates)

        # Numbers are arguments: on a mesh with Explicit axes injected ones may not be closed over.
        def run(grads, kept, numbers):
            mu, rms, eps = numbers
            accumulated = [
                _accumulate(grad, old, mu, nesterov) for grad, old in zip(grads, kept, strict=True)
            ]
            directions = [direction for _, direction in accumulated]
            done = iterate(planned, directions, names, rms, eps)
            scaled = [x.astype(grad.dtype) for x, grad in zip(done, grads, strict=True)]
            return scaled, [new for new, _ in accumulated]

        scaled, kept = with_auto_axes(run, 0, 1)(grads, kept, (momentum, rms, eps))
        return treedef.unflatten(scaled), HeadMuonState(treedef.unflatten(kept))

    return optax.GradientTransformationExtraArgs(init, update)


def _accumulate(
    grad: jax.Array, kept: jax.Array, mu: jax.typing.ArrayLike, nesterov: bool
) -> tuple[jax.Array, jax.Array]:
    """(new momentum, what is orthogonalised)."""
    wide = jnp.promote_types(kept.dtype, jnp.float32)
    new = (mu * kept.astype(wide) + grad.astype(wide)).astype(kept.dtype)
    if not nesterov:
        return new, new
    return new, (mu * new.astype(wide) + grad.astype(wide)).astype(wide)


class _Iteration(NamedTuple):
    """Newton-Schulz of every matrix of every parameter; fields as in `scale_by_head_muon`."""

    coefficients: Sequence[tuple[float, float, float]]
    form: str | None
    compute_dtype: jax.typing.DTypeLike | None
    mesh: jax.sharding.Mesh | None
    placed_at: Callable[[str], jax.sharding.PartitionSpec] | None
    implementation: Implementation

    def __call__(
        self,
        planned: list[Matrices],
        directions: list[jax.Array],
        names: list[str],
        rms: jax.typing.ArrayLike,
        eps: jax.typing.ArrayLike,
    ) -> list[jax.Array]:
        """Update of every parameter, in float32 at least."""
        narrow = [
            x.astype(self.compute_dtype or jnp.promote_types(x.dtype, jnp.float32))
            for x in directions
        ]
        everything = range(len(planned))
        known = []
        if self.placed_at is not None and devices(self.mesh) > 1:
            known = [i for i in everything if len(planned[i].columns) == 1]
        done = placed.apply(
            functools.partial(self._newton_schulz, eps, unroll=False),
            [planned[i] for i in known],
            [narrow[i] for i in known],
            [self._place(names[i]) for i in known],
            self.mesh,
        )
        results = dict(zip(known, done, strict=True))
        results |= self._by_shape(
            {i: planned[i].take(narrow[i]) for i in everything if i not in known}, planned, eps
        )
        return [_scaled(results[i], planned[i], directions[i].dtype, rms) for i in everything]

    def _place(self, name: str) -> jax.sharding.PartitionSpec:
        spec = self.placed_at(name)
        if not isinstance(spec, jax.sharding.PartitionSpec):
            raise TypeError(f"placed_at({name!r}) must be a PartitionSpec, got {spec!r}")
        return spec

    def _newton_schulz(
        self, eps: jax.typing.ArrayLike, matrices: jax.Array, *, unroll: bool
    ) -> jax.Array:
        return newton_schulz(
            matrices,
            self.coefficients,
            eps=eps,
            form=self.form,
            unroll=unroll,
            implementation=self.implementation,
        )

    def _by_shape(
        self,
        parts: dict[int, list[jax.Array]],
        planned: list[Matrices],
        eps: jax.typing.ArrayLike,
    ) -> dict[int, jax.Array]:
        """Parameters orthogonalised, from their parts. Matrices of one shape share a Newton-Schulz
        call; on a mesh those of a parameter that fill it have one of their own, and stay in place
        that way."""
        groups = defaultdict(list)
        count = devices(self.mesh)
        for leaf, matrices in parts.items():
            for part, batch in enumerate(matrices):
                alone = (leaf, part) if batch.shape[0] >= count > 1 else None
                groups[batch.shape[1:], batch.dtype, alone].append((leaf, part, batch))
        for members in groups.values():
            joined = [batch for _, _, batch in members]
            batch = joined[0] if len(joined) == 1 else jnp.concatenate(joined)
            done = self._newton_schulz(eps, spread(batch, self.mesh), unroll=count > 1)
            start = 0
            for leaf, part, batch in members:
                parts[leaf][part] = done[start : start + batch.shape[0]]
                start += batch.shape[0]
        return {leaf: planned[leaf].put(matrices) for leaf, matrices in parts.items()}


def _scaled(
    x: jax.Array, plan: Matrices, dtype: jax.typing.DTypeLike, rms: jax.typing.ArrayLike
) -> jax.Array:
    """Times rho sqrt(max(fan_in, fan_out)), which differs between parts of unequal width."""
    wide = jnp.promote_types(dtype, jnp.float32)
    factors = [math.sqrt(max(plan.rows, columns)) for columns in plan.columns]
    if len(set(factors)) == 1:
        return x.astype(wide) * (rms * factors[0])
    parts = [
        part.astype(wide) * (rms * factor)
        for part, factor in zip(plan.take(x), factors, strict=True)
    ]
    return plan.put(parts)


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
    checks.learning_rate(learning_rate)
    checks.number("weight_decay", weight_decay)
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
