"""The compiled step: parameters and optimizer state in, one update and its metrics out."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from train import losses
from train import optimizer as optimizer_lib
from train.settings import Settings
from v41flash import exchange, sharding
from v41flash.config import ModelConfig
from v41flash.nn import ced, moe
from v41flash.nn.block import NONFINITE
from v41flash.nn.vision import ImageBatch

Batch = Mapping[str, jax.Array]
# (params, hidden [B, T, d], batch, totals of `counts`) -> (this batch's share of a loss, metrics).
Objective = Callable[
    [Any, jax.Array, Batch, Mapping[str, jax.Array]], tuple[jax.Array, dict[str, jax.Array]]
]


class TrainState(NamedTuple):
    """What a step replaces: i32 count of updates done, parameters, optimizer state."""

    step: jax.Array
    params: Any
    opt_state: Any


# -- Layout ------------------------------------------------------------------------------------


def _example(config: ModelConfig, mesh: Mesh) -> dict[str, jax.Array]:
    """The smallest batch that divides over the mesh; parameters do not depend on it."""
    shape = (data_shards(mesh), ced.ALIGNMENT * mesh.shape["context"])
    rows = (*shape, config.num_engram_sites, config.engram_rows_per_token)
    inputs = {name: jnp.zeros(shape, jnp.int32) for name in ("tokens", "positions", "segment_ids")}
    return inputs | {"engram_rows": jnp.zeros(rows, jnp.int32)}


def data_shards(mesh: Mesh) -> int:
    """Number of parts that the rows of a batch are split into."""
    return math.prod(mesh.shape[axis] for axis in sharding.batch_sharding(mesh).spec[0])


def abstract_params(model: ced.CED, mesh: Mesh) -> Any:
    """Shapes, dtypes and shardings of the model's parameters; nothing is computed."""
    inputs = _example(model.config, mesh)
    boxed = jax.eval_shape(functools.partial(model.init, **inputs), jax.random.key(0))["params"]
    shardings = sharding.param_shardings(boxed, mesh)
    return jax.tree.map(
        lambda leaf, where: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where),
        nn.unbox(boxed),
        shardings,
    )


def abstract_state(params: Any, optimizer: optax.GradientTransformation) -> TrainState:
    """Shapes, dtypes and shardings of a whole TrainState.

    An optimizer's per-parameter arrays lie as their parameter does, its counters everywhere.

    Args:
        params: from `abstract_params`.
        optimizer: the transform.
    """
    replicated = NamedSharding(jax.tree.leaves(params)[0].sharding.mesh, PartitionSpec())

    def alike(leaf, param):
        if isinstance(leaf, optax.MaskedNode):
            return leaf
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=param.sharding)

    opt_state = optax.tree_utils.tree_map_params(
        optimizer,
        alike,
        jax.eval_shape(optimizer.init, params),
        params,
        transform_non_params=lambda leaf: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=replicated
        ),
        # The parameters that another transform of a partitioned optimizer has.
        is_leaf=lambda node: isinstance(node, optax.MaskedNode),
    )
    return TrainState(jax.ShapeDtypeStruct((), jnp.int32, sharding=replicated), params, opt_state)


def parameter_init(model: ced.CED, mesh: Mesh) -> Any:
    """The function from a random key to the model's parameters, to be jitted."""
    inputs = _example(model.config, mesh)
    return lambda key: nn.unbox(model.init(key, **inputs))["params"]


# On a GPU, XLA lets a kernel write straight into the array that a loop over layers collects its
# results in; where the result has other uses too, as that of attention has, it runs the kernel
# twice.
PLATFORM_OPTIONS = {"gpu": {"xla_gpu_enable_dynamic_slice_fusion": False}}


def init_options() -> dict[str, Any] | None:
    """Compiler options for the initialisation.

    On the CPU, optimising some hundred random number generators takes far longer than running them
    once without.
    """
    return {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else None


def init_state(
    model: ced.CED, optimizer: optax.GradientTransformation, abstract: TrainState, seed: int
) -> TrainState:
    """A fresh state, made where it is going to live.

    Args:
        model: the model.
        optimizer: the transform.
        abstract: from `abstract_state`.
        seed: of the parameters.
    """
    make = parameter_init(model, abstract.step.sharding.mesh)

    def init(key):
        params = make(key)
        return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params))

    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
    compiled = jax.jit(init, out_shardings=shardings, compiler_options=init_options())
    return compiled(jax.random.key(seed))


def state_of(
    params: Any, optimizer: optax.GradientTransformation, abstract: TrainState
) -> TrainState:
    """A state before the first update with given parameters, which it takes over.

    Args:
        params: on the shardings of `abstract`.
        optimizer: the transform.
        abstract: from `abstract_state`.
    """
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
    make = jax.jit(
        lambda params: TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params)),
        out_shardings=shardings,
        donate_argnums=0,
    )
    return make(params)


def to_device(batch: Mapping[str, np.ndarray], mesh: Mesh) -> dict[str, jax.Array]:
    """This process's rows of a batch -> global arrays, rows over the mesh's data axes."""
    where = sharding.batch_sharding(mesh)
    return {
        name: jax.make_array_from_process_local_data(where, value) for name, value in batch.items()
    }


# -- The step ----------------------------------------------------------------------------------


class Learned(NamedTuple):
    """What a batch says about the parameters; microbatches add up, each a share of the means.

    Attributes:
        gradients: like the parameters.
        router_load: tokens per expert, see `v41flash.nn.moe.update_router_bias`.
        nonfinite: rows whose outputs of a layer are not finite, see `v41flash.nn.block`.
        metrics: f32 scalars by name; those called max_.. are maxima, the others add up.
    """

    gradients: Any
    router_load: Any
    nonfinite: Any
    metrics: dict[str, jax.Array]


def _images(batch: Batch) -> ImageBatch | None:
    if "image_source" not in batch:
        return None
    return ImageBatch(*(batch[f"image_{name}"] for name in ImageBatch._fields))


def model_outputs(model: ced.CED, params: Any, batch: Batch) -> tuple[ced.Outputs, Any, Any]:
    """(outputs of the model on a batch, load of its routers, rows that are not finite)."""
    outputs, state = model.apply(
        {"params": params},
        batch["tokens"],
        batch["positions"],
        batch["segment_ids"],
        batch["engram_rows"],
        _images(batch),
        batch.get("decoder_starts"),
        mutable=["router_load", NONFINITE],
    )
    return outputs, state["router_load"], state[NONFINITE]


def _cross_entropy(
    params: Any, hidden: jax.Array, batch: Batch, chunk_tokens: int
) -> losses.CrossEntropy:
    """Sums over the batch; every device takes its own tokens, `chunk_tokens` at a time."""

    def local(axes, head, hidden, targets, mask):
        head = exchange.gathered(head, axes["embed"], 0, head.dtype)

        def logits(hidden):
            own = ced.logits({"head": head}, hidden)
            if not axes["vocab"]:
                return own
            return jax.lax.all_gather(own, axes["vocab"], axis=own.ndim - 1, tiled=True)

        sums = losses.cross_entropy(logits, hidden, targets, mask, chunk_tokens=chunk_tokens)
        shared = axes["batch"] + axes["length"]
        return tuple(jax.lax.psum(sums, shared) if shared else sums)

    token = ("batch", "length")
    run = sharding.on_shards(local, (("embed", "vocab"), (*token, None), token, token), ((),) * 3)
    return losses.CrossEntropy(*run(params["head"], hidden, batch["targets"], batch["loss_mask"]))


def counts(batch: Batch) -> dict[str, jax.Array]:
    """Denominators of the means: targets, document tokens, rows that hold any."""
    tokens = batch["segment_ids"] > 0
    return {
        "targets": jnp.sum(batch["loss_mask"]),
        "tokens": jnp.sum(tokens, dtype=jnp.float32),
        "rows": jnp.sum(jnp.any(tokens, axis=1), dtype=jnp.float32),
    }


def _microbatches(batch: Batch, count: int) -> Batch:
    """[B, ...] -> [count, B / count, ...]; microbatch i takes rows i, i + count, ...

    With this order the rows of every microbatch stay on the device that holds them.
    """

    def split(array):
        rows = array.reshape(array.shape[0] // count, count, *array.shape[1:])
        return jnp.swapaxes(rows, 0, 1)

    return jax.tree.map(split, dict(batch))


def _largest_norm_weight(params: Any) -> jax.Array:
    kinds = jax.tree.leaves(optimizer_lib.kinds(params))
    leaves = zip(kinds, jax.tree.leaves(params), strict=True)
    return jnp.max(jnp.stack([jnp.max(jnp.abs(leaf)) for kind, leaf in leaves if kind == "norm"]))


def _split_norm(gradients: Any) -> tuple[jax.Array, jax.Array]:
    """Global norms of (everything but the indexers, the indexers)."""
    inside, outside = [], []
    for path, leaf in jax.tree_util.tree_leaves_with_path(gradients):
        side = outside if optimizer_lib.is_indexer(optimizer_lib.path_names(path)) else inside
        side.append(leaf)
    return optax.tree.norm(inside), optax.tree.norm(outside)


def nonfinite_counts(learned: Learned) -> dict[str, Any]:
    """Where numbers are none: rows by layer, and arrays of gradients by the parameters' group.

    Squares are what the norms need anyway, so nothing is read once more.
    """
    gradients = {
        group: sum(~jnp.isfinite(jnp.sum(jnp.square(leaf))) for leaf in jax.tree.leaves(tree))
        for group, tree in learned.gradients.items()
    }
    layers = jax.tree.map(lambda rows: jnp.sum(rows, axis=-1), learned.nonfinite)
    return {"layers": layers, "gradients": gradients}


def next_token_objective(chunk_tokens: int) -> Objective:
    """The mean cross entropy of the targets: metrics ce and accuracy."""

    def objective(params, hidden, batch, totals):
        entropy = _cross_entropy(params, hidden, batch, chunk_tokens)
        ce = entropy.nats / totals["targets"]
        return ce, {"ce": ce, "accuracy": entropy.correct / totals["targets"]}

    return objective


def make_share(model: ced.CED, settings: Settings, objective: Objective) -> Any:
    """Builds what a part of a batch adds to the step: its shares sum to exact means.

    Args:
        model: built with `indexer_loss=True`.
        settings: `train` gives the weights of the model's own losses.
        objective: what is to be minimised beside them.

    Returns:
        (params, part of the batch, `counts` of the whole batch) -> `Learned`; add with `join`.
    """
    train = settings.train

    def share(params, batch, totals):
        if train.freeze_vision:
            params = optimizer_lib.with_frozen_vision(params)
        outputs, router_load, nonfinite = model_outputs(model, params, batch)
        own = counts(batch)
        value, metrics = objective(params, outputs.hidden, batch, totals)
        balance = outputs.balance_loss * own["rows"] / totals["rows"]
        kl = outputs.indexer_kl * own["tokens"] / totals["tokens"]
        loss = value + train.balance_weight * balance + train.indexer_weight * kl
        metrics = {
            "loss": loss,
            **metrics,
            "balance": balance,
            "indexer_kl": kl,
            "max_main_kv": outputs.max_main_kv,
        }
        return loss, (router_load, nonfinite, metrics)

    def part(params, batch, totals):
        gradient = jax.value_and_grad(share, has_aux=True)
        (_, aux), gradients = gradient(params, batch, totals)
        return Learned(gradients, *aux)

    return part


def join(a: Learned, b: Learned) -> Learned:
    """What two parts of a batch say together."""
    added = jax.tree.map(jnp.add, a, b)
    largest = {
        name: jnp.maximum(value, b.metrics[name])
        for name, value in a.metrics.items()
        if name.startswith("max_")
    }
    return added._replace(metrics=added.metrics | largest)


def make_gradients(model: ced.CED, settings: Settings) -> Any:
    """Builds the part of a step that knows of the data: losses and their gradients.

    Args:
        model: built with `indexer_loss=True`.
        settings: `train` gives accumulation and loss weights.

    Returns:
        (params, batch) -> `Learned` of the whole batch.
    """
    train = settings.train
    part = make_share(model, settings, next_token_objective(train.loss_chunk_tokens))

    def whole(params: Any, batch: Batch) -> Learned:
        totals = counts(batch)
        positions = batch["segment_ids"].size
        tokens = totals["tokens"]
        totals = jax.tree.map(lambda total: jnp.maximum(total, 1.0), totals)
        if train.accumulation == 1:
            done = part(params, batch, totals)
        else:
            micro = _microbatches(batch, train.accumulation)
            first = jax.tree.map(lambda array: array[0], micro)
            zero = jax.tree.map(
                lambda leaf: jnp.zeros(leaf.shape, leaf.dtype),
                jax.eval_shape(part, params, first, totals),
            )
            done, _ = jax.lax.scan(
                lambda total, micro: (join(total, part(params, micro, totals)), None), zero, micro
            )
        seen = {"padding": 1.0 - tokens / positions, "tokens": tokens}
        return done._replace(metrics={**done.metrics, **seen})

    return whole


def make_update(optimizer: optax.GradientTransformation, settings: Settings) -> Any:
    """Builds the part of a step that moves the parameters.

    Args:
        optimizer: from `train.optimizer.build`.
        settings: `optimizer` gives the rate that is logged, `train` the speed of router biases.

    Returns:
        (TrainState, Learned) -> (TrainState, metrics).
    """
    schedule = optimizer_lib.schedule(settings.optimizer)

    def update(state: TrainState, learned: Learned) -> tuple[TrainState, dict[str, jax.Array]]:
        updates, opt_state = optimizer.update(learned.gradients, state.opt_state, state.params)
        if settings.train.freeze_vision:
            updates = optimizer_lib.without_vision(updates)
        params = optax.apply_updates(state.params, updates)
        speed = settings.train.router_bias_speed
        params = moe.update_router_bias(params, learned.router_load, speed)
        grad_norm, indexer_grad_norm = _split_norm(learned.gradients)
        metrics = {
            **learned.metrics,
            "grad_norm": grad_norm,
            "indexer_grad_norm": indexer_grad_norm,
            "learning_rate": schedule(state.step),
            "max_norm_weight": _largest_norm_weight(params),
        }
        return TrainState(state.step + 1, params, opt_state), metrics

    return update


def make_train_step(
    model: ced.CED, optimizer: optax.GradientTransformation, settings: Settings
) -> Any:
    """Builds the update function; jit it with `compile_train_step`.

    Args:
        model: built with `indexer_loss=True`.
        optimizer: from `train.optimizer.build`.
        settings: `train` gives accumulation and loss weights, `optimizer` the rate that is logged.

    Returns:
        (TrainState, batch) -> (TrainState, metrics), metrics a dict of f32 scalars: loss = ce +
        balance_weight * balance + indexer_weight * indexer_kl, and accuracy, grad_norm (before the
        clip, without the indexers), indexer_grad_norm, learning_rate, padding, tokens,
        max_main_kv, max_norm_weight; and under "nonfinite" what `train.origin` reads.
    """
    gradients = make_gradients(model, settings)
    update = make_update(optimizer, settings)

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, Any]]:
        learned = gradients(state.params, batch)
        state, metrics = update(state, learned)
        return state, {**metrics, NONFINITE: nonfinite_counts(learned)}

    return step


def jit_train_step(step: Any, abstract: TrainState, batch: Batch, mesh: Mesh) -> Any:
    """Jits a step for its layout; arguments as for `compile_train_step`."""
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
    batch_shardings = jax.tree.map(lambda leaf: leaf.sharding, dict(batch))
    return jax.jit(
        step,
        in_shardings=(shardings, batch_shardings),
        out_shardings=(shardings, NamedSharding(mesh, PartitionSpec())),
        donate_argnums=0,
    )


def compile_train_step(
    step: Any,
    abstract: TrainState,
    batch: Batch,
    mesh: Mesh,
    compiler_options: Mapping[str, Any] | None = None,
) -> Any:
    """Compiles ahead of the first call. The state that is passed in is donated.

    Args:
        step: from `make_train_step`.
        abstract: from `abstract_state`.
        batch: a batch on the device, or abstract arrays with shardings.
        mesh: of both.
        compiler_options: of XLA; they come before those that the platform needs.

    Returns:
        The compiled executable; call it as `step`.
    """
    jitted = jit_train_step(step, abstract, batch, mesh)
    options = {**PLATFORM_OPTIONS.get(platform(mesh), {}), **(compiler_options or {})}
    return jitted.lower(abstract, dict(batch)).compile(options or None)


def platform(mesh: Mesh) -> str:
    """Kind of a mesh's devices: "cpu", "gpu" or "tpu"."""
    return mesh.devices.flat[0].platform


def optimizer_milliseconds(
    optimizer: optax.GradientTransformation, state: TrainState, repeats: int = 3
) -> float:
    """Time of the optimizer's part of a step alone, the best of `repeats`.

    The gradients are stand-ins of the right size and layout. Nothing is donated, so the device must
    have room for a second copy of parameters and optimizer state.
    """

    @jax.jit
    def update(params, opt_state):
        gradients = jax.tree.map(lambda leaf: 1e-3 * leaf, params)
        updates, opt_state = optimizer.update(gradients, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    compiled = update.lower(state.params, state.opt_state).compile()
    best = math.inf
    for _ in range(repeats):
        started = time.perf_counter()
        jax.block_until_ready(compiled(state.params, state.opt_state))
        best = min(best, time.perf_counter() - started)
    return 1e3 * best


def make_eval_step(
    model: ced.CED, chunk_tokens: int, compiler_options: Mapping[str, Any] | None = None
) -> Any:
    """(params, batch) -> `losses.CrossEntropy` sums over the batch."""

    @functools.partial(jax.jit, compiler_options=compiler_options)
    def step(params: Any, batch: Batch) -> losses.CrossEntropy:
        outputs, _, _ = model_outputs(model, params, batch)
        return _cross_entropy(params, outputs.hidden, batch, chunk_tokens)

    return step
