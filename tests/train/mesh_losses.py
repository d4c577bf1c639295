"""Losses of a short run on one mesh, as a JSON line: what runs on several meshes are compared by.

    python -m tests.train.mesh_losses NAME STEPS BATCH LENGTH '{"fsdp": 2, "expert": 4}' [WORD...]

Everything but the mesh is the same each time: parameters, and packed batches of random tokens.
Words: `bfloat16` leaves dtypes and formats as they are configured, `gently` makes small steps.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from configs import quickstart, small
from pallas_kernels.packed_rows import document_starts
from train import optimizer as optimizer_lib
from train import plan, settings, step
from v41flash import sharding
from v41flash.nn import ced
from v41flash.text.engram_hash import EngramHasher

CONFIGS = {"quickstart": quickstart, "small": small}
# Of the learning rate, where what rounding decides shall stay small (docs/results/full_scale.md).
GENTLE = 0.001


def settled(
    name: str, batch: int, length: int, *, exact: bool, gently: bool = False
) -> settings.Settings:
    """A configuration, its batch and length replaced.

    Args:
        name: of `CONFIGS`.
        batch: rows of a step.
        length: tokens of a row.
        exact: float32, and nothing rounded to a cache's format: a sum in another order would round
            some entries the other way.
        gently: at `GENTLE` of the learning rate.
    """
    config = CONFIGS[name].get_config()
    config.data.batch_size, config.data.sequence_length = batch, length
    config.model.engram_row_multiple = 8
    if gently:
        config.optimizer.learning_rate *= GENTLE
    if exact:
        config.model.dtype = "float32"
        # Without it AdamW moves entries whose gradient is nothing but rounding by the whole rate,
        # one way or the other as sums are ordered.
        config.optimizer.eps = 1e-5
        for field in ("main_kv_format", "window_kv_format", "index_format"):
            config.model[field] = "none"
    return settings.resolve(config)


def batches(model, batch: int, length: int):
    """Endless packed batches: two documents a row, some padding."""
    rng = np.random.default_rng(0)
    hasher = EngramHasher.from_config(model, pad_compressed_id=model.engram_pad_token_id)
    while True:
        shape = (batch, length)
        fields = {name: np.zeros(shape, np.int32) for name in ("tokens", "targets")}
        positions, segments = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
        mask = np.zeros(shape, np.float32)
        for row in range(batch):
            first = int(rng.integers(length // 4, length // 2))
            sizes = [first, length - first - 16]
            for number, (start, size) in enumerate(zip(document_starts(sizes), sizes, strict=True)):
                # Text with something to learn: a token follows from the one before, mostly.
                text = np.cumsum(rng.integers(1, 4, size + 1)) % 200 + 3
                here = slice(start, start + size)
                fields["tokens"][row, here], fields["targets"][row, here] = text[:-1], text[1:]
                positions[row, here], segments[row, here] = np.arange(size), number + 1
                mask[row, here] = 1
        rows = hasher.rows(fields["tokens"], positions)
        rest = dict(loss_mask=mask, segment_ids=segments, positions=positions, engram_rows=rows)
        yield fields | rest


class Program(NamedTuple):
    """A train step compiled for a mesh.

    Attributes:
        mesh: the mesh.
        optimizer: the transform.
        abstract: its `train.step.TrainState`, shapes and shardings.
        step: (state, batch on the devices) -> (state, metrics); the state is donated.
    """

    mesh: jax.sharding.Mesh
    optimizer: optax.GradientTransformation
    abstract: step.TrainState
    step: Any

    @classmethod
    def of(cls, setting: settings.Settings, sizes: dict[str, int], batch: Any) -> Program:
        """Compiles; `batch` is one of `batches`."""
        mesh = sharding.make_mesh({"data": 1} | sizes)
        plan.check_layout(setting, mesh)
        model = ced.CED(setting.model, setting.kernels, indexer_loss=True)
        params = step.abstract_params(model, mesh)
        optimizer = optimizer_lib.build(setting.optimizer, params)
        abstract = step.abstract_state(params, optimizer)
        with jax.set_mesh(mesh):
            made = step.make_train_step(model, optimizer, setting)
            compiled = step.compile_train_step(made, abstract, step.to_device(batch, mesh), mesh)
        return cls(mesh, optimizer, abstract, compiled)

    def start(self, params: Any) -> step.TrainState:
        """The state before the first update, from parameters of the host."""
        with jax.set_mesh(self.mesh):
            return step.state_of(put(params, self.abstract.params), self.optimizer, self.abstract)

    def __call__(self, state: step.TrainState, batch: Any) -> tuple[step.TrainState, dict]:
        """One step, of a batch of the host."""
        with jax.set_mesh(self.mesh):
            return self.step(state, step.to_device(batch, self.mesh))


def put(tree: Any, abstract: Any) -> Any:
    """Arrays of the host, laid out like abstract ones."""
    return jax.tree.map(lambda x, like: jax.device_put(x, like.sharding), tree, abstract)


def initial(setting: settings.Settings) -> Any:
    """The parameters that every run starts from, on the host."""
    model = ced.CED(setting.model, setting.kernels)
    mesh = sharding.make_mesh({}, jax.devices()[:1])
    alone = jax.jit(step.parameter_init(model, mesh), compiler_options=step.init_options())
    return jax.device_get(alone(jax.random.key(0)))


def run(setting: settings.Settings, sizes: dict[str, int], steps: int) -> dict:
    """Losses and seconds of every step."""
    data = setting.data
    source = batches(setting.model, data.batch_size, data.sequence_length)
    texts = list(itertools.islice(source, steps))
    program = Program.of(setting, sizes, texts[0])
    state = program.start(initial(setting))
    losses, seconds = [], []
    for batch in texts:
        started = time.perf_counter()
        state, metrics = program(state, batch)
        losses.append(float(metrics["loss"]))
        seconds.append(time.perf_counter() - started)
    stats = jax.local_devices()[0].memory_stats() or {}
    peak = stats.get("peak_bytes_in_use")
    return {"mesh": sizes, "losses": losses, "seconds": seconds, "peak_bytes": peak}


def main(arguments: list[str]) -> None:
    """Runs the command line."""
    name, steps, batch, length, sizes, *words = arguments
    exact, gently = "bfloat16" not in words, "gently" in words
    setting = settled(name, int(batch), int(length), exact=exact, gently=gently)
    print(json.dumps(run(setting, json.loads(sizes), int(steps))), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
