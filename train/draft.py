"""Trains a draft head (DSpark) on the frozen backbone of a finished run.

    python -m train.draft --workdir=DIR [--steps=400 --blocks=2 --block_size=5 --layers=3,4,5]

The head learns on the run's own training data to draft what the backbone would say: at random
places of every row it drafts `block_size` tokens from the true ones, and for slot i, with p the
backbone's distribution and q the draft's (weights as in the public DSpark training),

    exp(-i / 4) (0.1 CE(q, true token) + 0.9 |q - p|_1 + BCE(confidence, 1 - |q - p|_1 / 2)).

1 - |q - p|_1 / 2 is the chance that the draft is accepted. The head is saved in DIR/draft, where
generation finds it. Exit status: 0, 2 the flags or the run are wrong.
"""

from __future__ import annotations

import functools
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import flags
from ml_collections import ConfigDict

from train.data import pipeline
from v41flash import command_line
from v41flash.checkpoints import names
from v41flash.checkpoints.orbax import Checkpoints, SaveError
from v41flash.config import ModelConfig
from v41flash.errors import InputError
from v41flash.nn import ced
from v41flash.nn.dspark import DSpark, target_hidden
from v41flash.serving.run import DRAFT_FOLDER, Run, init_draft, with_draft

CE_WEIGHT, L1_WEIGHT, CONFIDENCE_WEIGHT, DECAY = 0.1, 0.9, 1.0, 4.0


class Arguments(NamedTuple):
    """The command line."""

    workdir: Path
    steps: int
    learning_rate: float
    places: int
    seed: int
    head: dict[str, Any]


class Anchors(NamedTuple):
    """Places to draft from, A of every row.

    Attributes:
        rows: int32 [B, A], row of the last token before the draft.
        truth: int32 [B, A, n], the tokens that follow.
        valid: bool [B, A, n], whether they do, in the same document.
    """

    rows: jax.Array
    truth: jax.Array
    valid: jax.Array


def parse(arguments: Sequence[str]) -> Arguments:
    """Reads the command line (without the program); InputError in one line."""
    values = flags.FlagValues()
    here = dict(flag_values=values)
    least = dict(lower_bound=1)
    flags.DEFINE_string("workdir", None, "Folder of the run.", **here)
    flags.DEFINE_integer("steps", 400, "Updates.", **least, **here)
    flags.DEFINE_float("learning_rate", 6e-4, "Peak.", lower_bound=0.0, **here)
    flags.DEFINE_integer("places", 32, "Drafts a row.", **least, **here)
    flags.DEFINE_integer("seed", 0, "Of parameters and places.", **here)
    flags.DEFINE_integer("blocks", 2, "Blocks of the head.", **least, **here)
    flags.DEFINE_integer("block_size", 5, "Tokens of a draft.", **least, **here)
    flags.DEFINE_list("layers", [], "Layers that it reads; the last three by default.", **here)
    flags.DEFINE_integer("markov_rank", 64, "Rank of the bigram bias.", **least, **here)
    flags.DEFINE_integer("experts", 4, "Routed experts of a block.", **least, **here)
    flags.DEFINE_integer("experts_per_token", 2, "Of them, active.", **least, **here)
    (layers,) = command_line.read(values, arguments, layers=int)
    if not values.workdir:
        raise InputError("--workdir is missing: give the folder of the run")
    head = dict(
        num_nextn_predict_layers=values.blocks,
        dspark_block_size=values.block_size,
        dspark_target_layer_ids=layers,
        dspark_markov_rank=values.markov_rank,
        dspark_n_routed_experts=values.experts,
        dspark_num_experts_per_tok=values.experts_per_token,
    )
    return Arguments(
        Path(values.workdir), values.steps, values.learning_rate, values.places, values.seed, head
    )


def anchors(batch: dict[str, jax.Array], key: jax.Array, places: int, slots: int) -> Anchors:
    """Draws places to draft from, uniformly over the rows."""
    rows, length = batch["tokens"].shape
    at = jax.random.randint(key, (rows, places), 0, length)
    steps = at[..., None] + jnp.arange(slots)
    inside = jnp.minimum(steps, length - 1)

    def pick(values: jax.Array) -> jax.Array:
        return jnp.take_along_axis(values[:, None], inside, axis=2)

    valid = (steps < length) & (pick(batch["loss_mask"]) > 0)
    return Anchors(at, pick(batch["targets"]), jnp.cumprod(valid, axis=-1) > 0)


def backbone(
    model: ced.CED, params: Any, batch: dict[str, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """(hidden [B, T, d], what the head reads [B, T, k]) of a batch; no gradient passes."""
    outputs, state = model.apply(
        {"params": params},
        *(batch[name] for name in ("tokens", "positions", "segment_ids", "engram_rows")),
        mutable=["intermediates"],
    )
    streams = []
    for layer in model.config.dspark_target_layer_ids:
        (group, part), index = names.place(model.config, layer)
        kept = state["intermediates"][group][part]["hc_attn"]["streams"][0]
        streams.append(kept[index][:, : batch["tokens"].shape[1]])
    return jax.lax.stop_gradient((outputs.hidden, target_hidden(streams)))


def losses(
    head: DSpark,
    draft_params: Any,
    params: Any,
    batch: dict[str, jax.Array],
    seen: tuple[jax.Array, jax.Array],
    at: Anchors,
) -> tuple[jax.Array, jax.Array]:
    """(loss, chance of acceptance [n] per slot) of drafts at the anchors."""
    config = head.config
    hidden, targets = seen
    window, slots = config.sliding_window, config.dspark_block_size
    variables = {"params": draft_params}
    every = head.apply(variables, targets, batch["positions"], method="context_rows")
    batch_size, places = at.rows.shape
    flat = lambda x: x.reshape(batch_size * places, *x.shape[2:])  # noqa: E731
    before = at.rows[..., None] - window + jnp.arange(window)

    def past(rows: jax.Array) -> jax.Array:
        index = jnp.maximum(before, 0).reshape(batch_size, -1, 1)
        return jnp.take_along_axis(rows, index, axis=1).reshape(-1, window, rows.shape[-1])

    token = flat(jnp.take_along_axis(batch["tokens"], at.rows, axis=1))
    position = flat(jnp.take_along_axis(batch["positions"], at.rows, axis=1))
    truth, valid = flat(at.truth), flat(at.valid)
    draft = head.apply(
        variables,
        token,
        position,
        tuple(map(past, every)),
        jnp.minimum(position, window),
        params["embed"],
        params["head"],
        lambda _, slot: truth[:, slot],
    )
    steps = jnp.minimum(at.rows[..., None] + jnp.arange(slots), hidden.shape[1] - 1)
    index = steps.reshape(batch_size, -1, 1)
    after = jnp.take_along_axis(hidden, index, axis=1).reshape(-1, slots, hidden.shape[-1])
    p = jax.nn.softmax(ced.logits(params, after), axis=-1)
    log_q = jax.nn.log_softmax(draft.logits, axis=-1)
    distance = jnp.sum(jnp.abs(jnp.exp(log_q) - p), axis=-1)
    own = -jnp.take_along_axis(log_q, truth[..., None], axis=-1)[..., 0]
    chance = jax.lax.stop_gradient(1 - distance / 2)
    trust = optax.sigmoid_binary_cross_entropy(draft.confidence, chance)
    each = CE_WEIGHT * own + L1_WEIGHT * distance + CONFIDENCE_WEIGHT * trust
    weight = valid * jnp.exp(-jnp.arange(slots) / DECAY)
    loss = jnp.sum(each * weight) / jnp.maximum(jnp.sum(weight), 1e-9)
    rate = jnp.sum(chance * valid, axis=0) / jnp.maximum(jnp.sum(valid, axis=0), 1)
    return loss, rate


def train(run: Run, config: ModelConfig, data: pipeline.Data, arguments: Arguments) -> Any:
    """Trains the head; returns its parameters. Prints a line every 50 updates."""
    model, head = ced.CED(config, run.kernels), DSpark(config, run.kernels)
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, arguments.learning_rate, min(20, arguments.steps), max(arguments.steps, 21)
    )
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))
    draft_params = jax.jit(functools.partial(init_draft, head))(jax.random.key(arguments.seed))
    opt_state = jax.jit(optimizer.init)(draft_params)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def update(draft_params: Any, opt_state: Any, params: Any, batch: Any, key: jax.Array) -> tuple:
        seen = backbone(model, params, batch)
        at = anchors(batch, key, arguments.places, config.dspark_block_size)

        def objective(draft_params: Any) -> tuple[jax.Array, jax.Array]:
            return losses(head, draft_params, params, batch, seen, at)

        (loss, rate), gradients = jax.value_and_grad(objective, has_aux=True)(draft_params)
        updates, opt_state = optimizer.update(gradients, opt_state, draft_params)
        return optax.apply_updates(draft_params, updates), opt_state, loss, rate

    batches = data.train_iterator(start_step=0, host_index=0, host_count=1)
    start, key = time.perf_counter(), jax.random.key(arguments.seed + 1)
    for step in range(1, arguments.steps + 1):
        batch, _ = pipeline.split_host_fields(next(batches))
        draft_params, opt_state, loss, rate = update(
            draft_params, opt_state, run.params, batch, jax.random.fold_in(key, step)
        )
        if step % 50 == 0 or step == arguments.steps:
            # Drafts that stand, counted on: each needs those before it.
            length = float(np.cumprod(rate).sum())
            print(
                f"step {step}/{arguments.steps}  loss {float(loss):.4f}  acceptance by slot"
                f" {np.array2string(np.asarray(rate), precision=3)}  length about {length:.2f}"
                f"  {time.perf_counter() - start:.0f} s",
                flush=True,
            )
    return draft_params


@command_line.program(__doc__)
def main(arguments: Sequence[str]) -> int:
    """Runs the command line; returns the exit status."""
    chosen = parse(arguments)
    run = Run.load(chosen.workdir)
    fields = dict(chosen.head)
    last = run.config.num_hidden_layers
    fields["dspark_target_layer_ids"] = fields["dspark_target_layer_ids"] or tuple(
        range(max(last - 3, run.config.num_encoder_layers), last)
    )
    fields["dspark_noise_token_id"] = run.config.pad_token_id
    config = with_draft(run.config, fields)
    # grain's workers ask absl whether flags have been parsed.
    flags.FLAGS.mark_as_parsed()
    values = json.loads((chosen.workdir / "config.json").read_text())
    data = pipeline.from_config(ConfigDict(values["data"]), config)
    params = train(run, config, data, chosen)
    try:
        with Checkpoints(chosen.workdir / DRAFT_FOLDER, keep=1, writes=True) as stored:
            done = {"steps": np.asarray(chosen.steps)}
            stored.save(chosen.steps, params=params, opt_state=done, meta={"model": fields})
    except SaveError as error:
        print(f"training failed: {error}", file=sys.stderr)
        return 1
    print(f"draft head saved in {chosen.workdir / DRAFT_FOLDER}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
