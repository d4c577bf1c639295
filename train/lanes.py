"""Several runs side by side in one program, which differ in optimizer, learning rate and seed.

The runs are lanes of `jax.vmap`: parameters and optimizer states have a leading axis of runs, and
all see the same batches. A small model leaves an accelerator idle, waiting for its host; twenty of
them side by side do not.

Runs that differ in learning rate and seed alone form a group, which shares one transform. Its
learning rate is traced: an update is proportional to the peak of its schedule (weight decay, which
the rate multiplies, included), so that it is taken at peak 1 and scaled. A step is one call for the
gradients of all runs, whatever their optimizers, and one for the update of each group; compiled
apart, and at the same time.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from train import optimizer as optimizer_lib
from train import step as step_lib
from train.settings import OptimizerSettings, Settings
from v41flash.nn import ced


class Run(NamedTuple):
    """One lane: its optimizer, learning rate included, and the seed of its parameters."""

    optimizer: OptimizerSettings
    seed: int


@dataclasses.dataclass(frozen=True)
class Group:
    """Lanes first, first + 1, ... : runs that share a transform.

    Attributes:
        first: lane of the first run.
        runs: they differ in learning rate and seed.
        transform: at a peak rate of 1.
        settings: of the run whose rate is 1.
    """

    first: int
    runs: tuple[Run, ...]
    transform: optax.GradientTransformation
    settings: Settings

    @property
    def rates(self) -> jax.Array:
        """The peak learning rate of each run, f32."""
        return jnp.array([run.optimizer.learning_rate for run in self.runs], jnp.float32)

    def take(self, tree: Any) -> Any:
        """Its part of arrays [lanes, ...]."""
        last = self.first + len(self.runs)
        return jax.tree.map(lambda leaf: leaf[self.first : last], tree)


class State(NamedTuple):
    """State of a group: i32 updates done; parameters and optimizer state, [its runs, ...]."""

    step: jax.Array
    params: Any
    opt_state: Any


def group(runs: Sequence[Run], settings: Settings) -> tuple[Group, ...]:
    """Sorts runs into groups, in the order in which their transforms first occur.

    Args:
        runs: any optimizers with `final_learning_rate=None`, a tenth of the peak.
        settings: everything but the optimizer.
    """
    members = defaultdict(list)
    for run in runs:
        members[dataclasses.replace(run.optimizer, learning_rate=1.0)].append(run)
    groups, first = [], 0
    for shared, its_runs in members.items():
        transform = optimizer_lib.build(shared)
        unit = dataclasses.replace(settings, optimizer=shared)
        groups.append(Group(first, tuple(its_runs), transform, unit))
        first += len(its_runs)
    return tuple(groups)


def lane_order(groups: Sequence[Group]) -> tuple[Run, ...]:
    """The run of every lane."""
    return tuple(run for group in groups for run in group.runs)


def make_init(model: ced.CED, groups: Sequence[Group], mesh: jax.sharding.Mesh) -> Any:
    """Builds the function from keys [lanes] to the states of all groups, to be jitted.

    A seed's key gives the parameters that it gives a run alone.
    """
    parameters = jax.vmap(step_lib.parameter_init(model, mesh))

    def init(keys: jax.Array) -> tuple[State, ...]:
        params = parameters(keys)
        states = []
        for group in groups:
            own = group.take(params)
            opt_state = jax.vmap(group.transform.init)(own)
            states.append(State(jnp.zeros((), jnp.int32), own, opt_state))
        return tuple(states)

    return init


def keys(groups: Sequence[Group]) -> jax.Array:
    """The key of every lane's seed."""
    return jnp.stack([jax.random.key(run.seed) for run in lane_order(groups)])


class Step:
    """One update of all runs.

    Calling it takes (states, batch) and returns (states, metrics): the metrics are those of
    `train.step.make_train_step`, f32 [lanes] each, and stay on the device.
    """

    def __init__(
        self,
        model: ced.CED,
        groups: Sequence[Group],
        states: Sequence[State],
        batch: step_lib.Batch,
        pool: Executor,
        compiler_options: Mapping[str, Any] | None = None,
    ):
        """Starts to compile; the first call waits for it.

        Args:
            model: built with `indexer_loss=True`.
            groups: from `group`.
            states: of the groups; shapes are enough.
            batch: of the shapes to come.
            pool: threads to compile in.
            compiler_options: of XLA.
        """
        self._groups = groups
        one_run = jax.vmap(step_lib.make_gradients(model, groups[0].settings), in_axes=(0, None))

        def gradients(params: Sequence[Any], batch: step_lib.Batch) -> tuple[Any, ...]:
            learned = one_run(joined(params), batch)
            return tuple(group.take(learned) for group in groups)

        def compiled(function: Any, *arguments: Any, donate: tuple[int, ...] = ()) -> Any:
            lowered = jax.jit(function, donate_argnums=donate).lower(*arguments)
            return pool.submit(lowered.compile, compiler_options)

        params = [state.params for state in states]
        self._gradients = compiled(gradients, params, batch)
        learned = jax.eval_shape(gradients, params, batch)
        self._updates = [
            compiled(_make_update(group), *rest, group.rates, donate=(0,))
            for group, *rest in zip(groups, states, learned, strict=True)
        ]

    def __call__(
        self, states: Sequence[State], batch: step_lib.Batch
    ) -> tuple[tuple[State, ...], dict[str, jax.Array]]:
        """See the class."""
        learned = self._gradients.result()([state.params for state in states], batch)
        lanes = zip(self._updates, states, learned, self._groups, strict=True)
        done = [update.result()(state, part, group.rates) for update, state, part, group in lanes]
        states, metrics = zip(*done, strict=True)
        return states, joined(metrics)


def joined(parts: Sequence[Any]) -> Any:
    """Trees of arrays [runs of a group, ...] -> one of arrays [lanes, ...]."""
    return jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *parts)


def _make_update(group: Group) -> Any:
    """(State, Learned of its runs, rates) -> (State, metrics)."""

    def one(count, params, opt_state, learned, rate):
        def scaled(*arguments):
            updates, opt_state = group.transform.update(*arguments)
            return jax.tree.map(lambda leaf: rate * leaf, updates), opt_state

        transform = optax.GradientTransformation(group.transform.init, scaled)
        state = step_lib.TrainState(count, params, opt_state)
        state, metrics = step_lib.make_update(transform, group.settings)(state, learned)
        metrics["learning_rate"] = rate * metrics["learning_rate"]
        return state.params, state.opt_state, metrics

    def update(state: State, learned: step_lib.Learned, rates: jax.Array) -> Any:
        lanes = jax.vmap(one, in_axes=(None, 0, 0, 0, 0))
        params, opt_state, metrics = lanes(*state, learned, rates)
        return State(state.step + 1, params, opt_state), metrics

    return update


def state_bytes(state: State) -> int:
    """Bytes of the optimizer state of one run of a group, from its arrays."""
    leaves = jax.tree.leaves(state.opt_state)
    return sum(leaf.nbytes for leaf in leaves) // jax.tree.leaves(state.params)[0].shape[0]
