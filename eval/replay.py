"""What bounded replay costs: loss and greedy text after a replay, against the exact state.

    python -m eval.replay --workdir=DIR --text=GLOB [--prefix=384 --suffix=128 --pieces=64]
                          [--lengths=32,64,128,192] [--greedy=64] [--json=FILE]

Pieces of prefix + suffix tokens are cut from the text files. A state is made of the prefix in one
of these ways, then the suffix is scored with it token by token, and continued greedily instead:

    exact            all layers over all tokens
    decoder R        the encoder over all tokens, the decoder over the last R (every prefill)
    encoder R        as exact, but the encoder's window rows are made again out of the last R tokens
    both R           the global cache alone is there: encoder replay over the last R tokens, then
                     decoder replay over the last R (a prefix hit)

Per way and R: nats per token over the suffix and over its first W tokens (one window), the
difference from exact with its standard error over pieces, mean |log-probability difference|, and
the tokens that the greedy continuation shares with the exact one before it first departs. Exit
status 2: the flags or the run folder are wrong.
"""

from __future__ import annotations

import dataclasses
import functools
import glob
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from v41flash import command_line
from v41flash.errors import InputError
from v41flash.serving import Generator, Options, forward
from v41flash.serving.decode import Stops
from v41flash.serving.forward import Model
from v41flash.serving.prefill import prefill
from v41flash.serving.replay import begin_replay
from v41flash.serving.sampling import Sampling
from v41flash.serving.state import State
from v41flash.serving.weights import Weights

_BATCH = 16


class Arguments(NamedTuple):
    """The command line; see the module's description."""

    workdir: Path
    text: str
    prefix: int
    suffix: int
    pieces: int
    lengths: tuple[int, ...]
    greedy: int
    json: Path | None


class Outcome(NamedTuple):
    """What one state gives: log-probabilities [pieces, suffix], greedy tokens [pieces, n]."""

    logprobs: np.ndarray
    greedy: np.ndarray


def parse(arguments: Sequence[str]) -> Arguments:
    """Reads the command line (without the program); InputError in one line."""
    values = flags.FlagValues()
    here = dict(flag_values=values)
    flags.DEFINE_string("workdir", None, "Folder of the run.", **here)
    flags.DEFINE_string("text", None, "Files to cut pieces from.", **here)
    flags.DEFINE_integer("prefix", 384, "Tokens before.", lower_bound=2, **here)
    flags.DEFINE_integer("suffix", 128, "Tokens scored.", lower_bound=1, **here)
    flags.DEFINE_integer("pieces", 64, "Pieces of text.", lower_bound=2, **here)
    flags.DEFINE_list("lengths", ["32", "64", "96", "128", "160", "192"], "Replays.", **here)
    flags.DEFINE_integer("greedy", 64, "Tokens continued greedily.", lower_bound=2, **here)
    flags.DEFINE_string("json", None, "File for the numbers.", **here)
    (lengths,) = command_line.read(values, arguments, ("workdir", "text"), lengths=int)
    for length in lengths:
        if not 2 <= length <= values.prefix:
            raise InputError(f"--lengths: {length} must be between 2 and the prefix")
    return Arguments(
        Path(values.workdir),
        values.text,
        values.prefix,
        values.suffix,
        values.pieces,
        lengths,
        values.greedy,
        Path(values.json) if values.json else None,
    )


def pieces(generator: Generator, pattern: str, count: int, length: int) -> np.ndarray:
    """int32 [count, length] tokens: the beginnings of the files, bos in front.

    Raises:
        InputError: too few files that are long enough.
    """
    found = []
    for name in sorted(glob.glob(pattern, recursive=True)):
        tokens = generator.encode(Path(name).read_text(errors="replace"))
        if len(tokens) >= length:
            found.append(tokens[:length])
    if len(found) < count:
        raise InputError(f"--text={pattern}: {len(found)} files of {length} tokens, not {count}")
    # Spread over all files, which are sorted by folder.
    return np.stack(found)[np.linspace(0, len(found) - 1, count).astype(int)]


def log_probabilities(model: Model, weights: Weights, state: State, tokens: jax.Array) -> jax.Array:
    """float32 [B, T, V] after each of `tokens` int32 [B, T], all layers over exact rows."""
    new = jnp.full(tokens.shape[0], tokens.shape[1])
    step = forward.all_layers(model, weights, state, tokens, new)
    return jax.nn.log_softmax(forward.logits(weights, step.hidden), axis=-1)


class Experiment:
    """One batch of pieces, and the states that their prefixes can be given."""

    def __init__(
        self, generator: Generator, score: Any, tokens: np.ndarray, prefix: int, greedy: int
    ):
        """`score` is `log_probabilities`, compiled; tokens [B, prefix + suffix]."""
        self._generator, self._score, self._greedy = generator, score, greedy
        self._prefix, self._suffix = tokens[:, :prefix], tokens[:, prefix:]

    def exact(self) -> tuple[jax.Array, State]:
        """(logits after the prefix, state)."""
        return self._take(self._fresh(), self._prefix, exact=True)

    def decoder(self, replay: int) -> tuple[jax.Array, State]:
        """Decoder replay."""
        return self._take(self._fresh(), self._prefix, replay=replay)

    def encoder(self, replay: int) -> tuple[jax.Array, State]:
        """Encoder replay under an exact decoder."""
        logits, state = self.exact()
        _, again = self.both(replay)
        return logits, dataclasses.replace(state, encoder=again.encoder)

    def both(self, replay: int) -> tuple[jax.Array, State]:
        """Encoder replay, then decoder replay."""
        generator = self._generator
        _, state = self.exact()
        empty = dataclasses.replace(self._fresh(), cache=state.cache)
        state, start = begin_replay(
            generator.programs, generator.weights, empty, list(self._prefix), replay
        )
        return self._take(state, self._prefix[:, start[0] :], replay=replay)

    def outcome(self, logits: jax.Array, state: State) -> Outcome:
        """Scores the suffix and continues greedily; the state is used up."""
        weights, programs = self._generator.weights, self._generator.programs
        after = self._score(weights, state, jnp.asarray(self._suffix[:, :-1]))
        first = jax.nn.log_softmax(logits, axis=-1)[:, None]
        own = np.concatenate([first, after], axis=1)
        logprobs = np.take_along_axis(own, self._suffix[..., None], axis=-1)[..., 0]
        batch = len(self._suffix)
        sampling = Sampling.create(batch, self._generator.allowed, temperature=0)
        stops = Stops.create(batch, limit=self._greedy)
        active = jnp.ones(batch, bool)
        sequences, draw = programs.begin(logits, state.positions, active, sampling, stops)
        _, _, chunk = programs.run(
            weights, state, sequences, sampling, stops, self._greedy - 1, size=self._greedy - 1
        )
        return Outcome(logprobs, np.concatenate([draw.tokens[None], chunk.tokens]).T)

    def _fresh(self) -> State:
        batch, room = len(self._prefix), self._suffix.shape[1] + self._greedy
        pages = -(-(self._prefix.shape[1] + room) // 128)
        table = np.arange(batch * pages, dtype=np.int32).reshape(batch, pages)
        config, weights = self._generator.config, self._generator.weights
        return State.create(config, weights, batch * pages, table)

    def _take(self, state: State, tokens: np.ndarray, **keywords: Any) -> tuple:
        programs, weights = self._generator.programs, self._generator.weights
        return prefill(programs, weights, state, list(tokens), chunk=128, **keywords)


def compare(outcomes: list[Outcome], exact: list[Outcome], window: int) -> dict[str, float]:
    """The figures of one way; see the module's description."""
    logprobs, truth = (np.concatenate([o.logprobs for o in x]) for x in (outcomes, exact))
    greedy, expected = (np.concatenate([o.greedy for o in x]) for x in (outcomes, exact))
    difference = truth - logprobs
    same = np.cumprod(greedy == expected, axis=1).sum(axis=1)
    count = np.sqrt(len(difference))
    near = difference[:, :window]
    return {
        "nats": float(-logprobs.mean()),
        "nats_first_window": float(-logprobs[:, :window].mean()),
        "loss": float(difference.mean()),
        "loss_error": float(difference.mean(1).std(ddof=1) / count),
        "loss_first_window": float(near.mean()),
        "loss_first_window_error": float(near.mean(1).std(ddof=1) / count),
        "absolute": float(np.abs(difference).mean()),
        "absolute_first_window": float(np.abs(near).mean()),
        "greedy_shared": float(same.mean()),
        "greedy_equal": float(np.mean(same == greedy.shape[1])),
    }


def run(arguments: Arguments) -> Iterator[dict[str, Any]]:
    """Yields one row of figures per way and length."""
    generator = Generator.from_workdir(arguments.workdir, options=Options(batch_size=_BATCH))
    length = arguments.prefix + arguments.suffix
    tokens = pieces(generator, arguments.text, arguments.pieces, length)
    score = jax.jit(functools.partial(log_probabilities, generator.programs.model))
    experiments = [
        Experiment(generator, score, part, arguments.prefix, arguments.greedy)
        for part in np.array_split(tokens, -(-len(tokens) // _BATCH))
    ]
    exact = [each.outcome(*each.exact()) for each in experiments]
    window = min(generator.config.sliding_window, arguments.suffix)
    yield {"way": "exact", "replay": None} | compare(exact, exact, window)
    ways = {
        "decoder": Experiment.decoder,
        "encoder": Experiment.encoder,
        "both": Experiment.both,
    }
    for way, make in ways.items():
        for replay in arguments.lengths:
            found = [each.outcome(*make(each, replay)) for each in experiments]
            yield {"way": way, "replay": replay} | compare(found, exact, window)


@command_line.program(__doc__)
def main(arguments: Sequence[str]) -> int:
    """Runs the command line; returns the exit status."""
    chosen, rows = parse(arguments), []
    for row in run(chosen):
        rows.append(row)
        figures = "  ".join(f"{k} {v:.5f}" for k, v in row.items() if isinstance(v, float))
        print(f"{row['way']:8s} {row['replay'] or '':4}  {figures}", flush=True)
    if chosen.json:
        chosen.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
