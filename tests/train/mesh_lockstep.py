"""Steps of several meshes from the same states, compared: what one step does on each of them.

    python -m tests.train.mesh_lockstep STEPS BATCH LENGTH MESH MESH...

The quickstart model in float32. The first mesh trains; the others take each step from the state
that it has reached. So every step of a run is compared for itself, and what rounding has done to
the steps before it does not add up. Of each mesh but the first a JSON line: for every step the
relative difference of the loss, and the largest difference of a gradient's entry, relative to the
largest entry of its array, outside and inside of what Engram's gate amplifies; then how many
collectives of each kind a step has, and the parameters that it gathers without a rule for it.
"""

from __future__ import annotations

import collections
import itertools
import json
import sys
from typing import Any

import jax
import numpy as np
import optax

from tests import mesh_gathers
from tests.train import mesh_losses
from train import hlo, settings, step


def gradients(before: step.TrainState, after: step.TrainState, beta: float) -> dict[str, Any]:
    """The gradients of a step of AdamW, by path, from its means of them before and after it."""
    old, new = (optax.tree_utils.tree_get(state.opt_state, "mu") for state in (before, after))
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): (now - beta * then) / (1 - beta)
        for (path, then), now in zip(
            jax.tree_util.tree_leaves_with_path(old), jax.tree.leaves(new), strict=True
        )
    }


def amplified(name: str) -> bool:
    """Whether a gradient comes through Engram's gate, sign(s) sqrt(max(|s|, 1e-6)): where s is
    small, its slope is that many times as uncertain as s, up to 500 or nothing at all at 1e-6."""
    return "engram" in name


def largest(ours: dict[str, Any], theirs: dict[str, Any], gate: bool) -> float:
    """The largest difference of an entry, relative to the largest of its array."""
    return max(
        float(np.abs(ours[name] - like).max() / max(np.abs(like).max(), 1e-30))
        for name, like in theirs.items()
        if amplified(name) == gate
    )


def exchanges(program: mesh_losses.Program) -> dict[str, Any]:
    """The collectives of a step, by kind, and the gathers of `tests.mesh_gathers.unasked`."""
    text = program.step.as_text()
    return {
        "collectives": collections.Counter(one.kind for one in hlo.collectives(text)),
        "unasked": mesh_gathers.unasked(text, program.abstract.params, program.mesh),
    }


def lockstep(setting: settings.Settings, meshes: list[dict[str, int]], steps: int) -> list[dict]:
    """See above; a result for each mesh but the first, and the losses of the first in each."""
    data = setting.data
    source = mesh_losses.batches(setting.model, data.batch_size, data.sequence_length)
    texts = list(itertools.islice(source, steps))
    programs = [mesh_losses.Program.of(setting, sizes, texts[0]) for sizes in meshes]
    results = [
        {"mesh": sizes, "losses": [], "loss": [], "gradient": [], "behind_gate": []}
        | exchanges(program)
        for sizes, program in zip(meshes[1:], programs[1:], strict=True)
    ]
    state = programs[0].start(mesh_losses.initial(setting))
    beta = setting.optimizer.beta1
    for batch in texts:
        before = jax.device_get(state)
        state, metrics = programs[0](state, batch)
        loss = float(metrics["loss"])
        expected = gradients(before, jax.device_get(state), beta)
        for program, result in zip(programs[1:], results, strict=True):
            after, metrics = program(mesh_losses.put(before, program.abstract), batch)
            found = gradients(before, jax.device_get(after), beta)
            result["losses"].append(loss)
            result["loss"].append(abs(float(metrics["loss"]) / loss - 1))
            result["gradient"].append(largest(found, expected, gate=False))
            result["behind_gate"].append(largest(found, expected, gate=True))
    return results


def main(arguments: list[str]) -> None:
    """Runs the command line."""
    steps, batch, length, *meshes = arguments
    setting = mesh_losses.settled("quickstart", int(batch), int(length), exact=True)
    for result in lockstep(setting, [json.loads(sizes) for sizes in meshes], int(steps)):
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
