"""Batched prompts in, tokens and log-probabilities out.

    generator = Generator.from_workdir("runs/quickstart")
    for result in generator.generate(["def main(", "import "], max_tokens=64, seed=1):
        print(result.text, result.logprobs.sum())

A result depends on its prompt, the settings and its seed (`seed` plus its number in the batch)
alone: not on the other prompts, nor on how they were put into batches. (With a prefix store it also
depends on what that holds, unless the mode is exact.)
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from v41flash.cache import PAGE_TOKENS
from v41flash.config import ModelConfig
from v41flash.errors import InputError
from v41flash.kernels import Kernels
from v41flash.serving.decode import (
    IDLE,
    LENGTH,
    NO_ROOM,
    STOP_SEQUENCE,
    STOP_TOKEN,
    Chunk,
    Sequences,
    Stops,
)
from v41flash.serving.forward import Model
from v41flash.serving.prefill import DEFAULT_CHUNK, prefill
from v41flash.serving.prefixes import Prefixes, PrefixStore
from v41flash.serving.programs import Programs
from v41flash.serving.run import Run
from v41flash.serving.sampling import Sampling
from v41flash.serving.state import State
from v41flash.serving.text_stream import TextStream
from v41flash.serving.weights import Weights
from v41flash.text.tokenizer import Tokenizer
from v41flash.tiers.disk import Counts
from v41flash.tiers.page_file import file_bytes

Prompt = str | Sequence[int] | np.ndarray
Decode = Callable[[Sequence[int]], str]
# What ends a text, as reports and endpoints call it.
_REASONS = {
    STOP_TOKEN: "stop",
    STOP_SEQUENCE: "stop",
    LENGTH: "length",
    NO_ROOM: "length",
}


@dataclasses.dataclass(frozen=True)
class Options:
    """How a generator works; results do not depend on it but for `exact`, `replay` and `speculate`.

    Attributes:
        batch_size: sequences that are decoded together at most.
        chunk: prompt tokens per compiled step.
        steps: tokens that are decoded between two looks of the host.
        exact: prefill by all layers over all tokens.
        replay: tokens that the decoder goes over at the end of a prefill, and the encoder after a
            prefix that was found in the store; `sliding_window` when None.
        speculate: draft several tokens at a time where there is a draft head. Greedy results stay
            as they are, others keep their distribution.
        min_confidence: see `speculative.run`.
    """

    batch_size: int = 8
    chunk: int = DEFAULT_CHUNK
    steps: int = 32
    exact: bool = False
    replay: int | None = None
    speculate: bool = True
    min_confidence: float = 0.0

    def __post_init__(self):
        """Raises InputError where a number is below 1."""
        for name in ("batch_size", "chunk", "steps", "replay"):
            value = vars(self)[name]
            if value is not None and value < 1:
                raise InputError(f"{name} = {value}: must be at least 1")


class Ends(NamedTuple):
    """What ends every sequence of a call: a number of tokens, tokens, texts."""

    limit: int
    tokens: tuple[int, ...]
    texts: tuple[str, ...]


class Generation(NamedTuple):
    """What came of one prompt.

    Attributes:
        text: of the tokens, without the stop text.
        tokens: int32 [n], emitted tokens; the one that ended the text is the last.
        logprobs: float32 [n], of each under the model's own distribution (temperature 1).
        finish: "stop" or "length".
        prompt_tokens: tokens of the prompt.
    """

    text: str
    tokens: np.ndarray
    logprobs: np.ndarray
    finish: str
    prompt_tokens: int


class Piece(NamedTuple):
    """Progress of one sequence.

    Attributes:
        index: number of its prompt.
        text: what has become certain.
        tokens: int32 [n], new tokens.
        logprobs: float32 [n].
        finish: "stop" or "length" with the last piece, else None.
    """

    index: int
    text: str
    tokens: np.ndarray
    logprobs: np.ndarray
    finish: str | None


@dataclasses.dataclass
class Statistics:
    """Sums over everything that a generator has done.

    Attributes:
        prompt_tokens: tokens prefilled, those of replays included.
        cached_tokens: tokens of prompts whose global cache came from the store.
        replayed_tokens: of them, those that were gone over again for their window rows.
        prefill_seconds: time for prompts, reading and writing the store included.
        tokens: tokens decoded.
        decode_seconds: time for them.
        cache_bytes: bytes that the largest batch's pages allocated.
        window_bytes: bytes of its window rows.
        cache_bytes_per_token: of the global cache.
        rounds: verifications of drafts, summed over sequences; 0 without speculation.
        accepted: drafted tokens that stood: each round emits one more.
        store: what the disk store has seen; None without one.
        store_bytes_per_token: of a page's file.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    replayed_tokens: int = 0
    prefill_seconds: float = 0.0
    tokens: int = 0
    decode_seconds: float = 0.0
    cache_bytes: int = 0
    window_bytes: int = 0
    cache_bytes_per_token: float = 0.0
    rounds: int = 0
    accepted: int = 0
    store: Counts | None = None
    store_bytes_per_token: float = 0.0


class Generator:
    """Generates from one model.

    Attributes:
        config: the model.
        tokenizer: of it.
        options: see `Options`.
        statistics: of all calls so far.
        prefixes: the model's prefixes in the store; None without one.
    """

    def __init__(
        self,
        config: ModelConfig,
        params: Any,
        tokenizer: Tokenizer,
        *,
        token_map: np.ndarray | None = None,
        draft: Any = None,
        kernels: Kernels | None = None,
        options: Options | None = None,
        prefix_store: PrefixStore | None = None,
        compiler_options: dict[str, Any] | None = None,
    ):
        """Takes the parameters apart for serving.

        Args:
            config: the model.
            params: parameter tree of `v41flash.nn.ced.CED`.
            tokenizer: whose ids the model knows.
            token_map: canonical ids of the tokens; needed where the model has Engram.
            draft: parameters of the draft head, or None.
            kernels: implementations to run; the ops' own choice when None.
            options: how to work; the defaults when None.
            prefix_store: where prompts and continuations are kept for later ones. What it holds
                decides which tokens are replayed, so results depend on it, but for `exact`.
            compiler_options: of XLA.
        """
        self.config, self.tokenizer, self.options = config, tokenizer, options or Options()
        self.weights = Weights.create(config, params, token_map, draft)
        self.programs = Programs(Model(config, kernels or Kernels()), compiler_options)
        self.statistics = Statistics()
        self.prefixes = None
        if prefix_store is not None:
            self.prefixes = Prefixes(
                self.programs,
                self.weights,
                prefix_store,
                params,
                token_map,
                replay=self.options.replay,
                exact=self.options.exact,
            )
        # Specials other than the end are no text, nor is what the vocabulary has beyond the
        # tokenizer's.
        allowed = np.arange(config.vocab_size) < tokenizer.vocab_size
        allowed[[tokenizer.bos_id, tokenizer.pad_id]] = False
        if config.image_token_id < config.vocab_size:
            allowed[config.image_token_id] = False
        self.allowed = allowed

    @classmethod
    def from_workdir(
        cls,
        workdir: str | Path,
        *,
        step: int | None = None,
        options: Options | None = None,
        prefix_store: PrefixStore | None = None,
    ) -> Generator:
        """The generator of a training run's checkpoint (the newest one when `step` is None).

        Raises:
            InputError: see `Run.load`.
        """
        run = Run.load(workdir, step)
        return cls(
            run.config,
            run.params,
            run.tokenizer,
            token_map=run.token_map,
            draft=run.draft,
            kernels=run.kernels,
            options=options,
            prefix_store=prefix_store,
        )

    def load(self, params: Any) -> None:
        """Goes on with other parameters of the same model, as training makes them.

        Nothing is compiled again. A draft head, which belongs to the old ones, is dropped.

        Args:
            params: parameter tree of `v41flash.nn.ced.CED`.

        Raises:
            ValueError: the generator has a prefix store: what that holds is the old parameters'.
        """
        if self.prefixes is not None:
            raise ValueError("a generator with a prefix store keeps its parameters")
        self.weights = self.weights.with_params(self.config, params)

    def encode(self, prompt: Prompt) -> np.ndarray:
        """Token ids int32 [n]: a text gets bos in front, ids are taken as they are."""
        if isinstance(prompt, str):
            return np.concatenate([[self.tokenizer.bos_id], self.tokenizer.encode(prompt)]).astype(
                np.int32
            )
        return np.asarray(prompt, np.int32)

    def generate(self, prompts: Sequence[Prompt], **settings: Any) -> list[Generation]:
        """Continues every prompt; settings as for `stream`."""
        prompts = self._encoded(prompts)
        pieces: list[list[Piece]] = [[] for _ in prompts]
        for piece in self.stream(prompts, **settings):
            pieces[piece.index].append(piece)
        return [
            Generation(
                "".join(piece.text for piece in own),
                np.concatenate([piece.tokens for piece in own]),
                np.concatenate([piece.logprobs for piece in own]),
                own[-1].finish,
                len(prompt),
            )
            for prompt, own in zip(prompts, pieces, strict=True)
        ]

    def stream(
        self,
        prompts: Sequence[Prompt],
        *,
        max_tokens: int = 128,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        seed: int = 0,
        stop: Sequence[str] = (),
        stop_tokens: Sequence[int] = (),
        decode: Decode | None = None,
    ) -> Iterator[Piece]:
        """Continues every prompt, telling of progress.

        Args:
            prompts: texts (which begin a document), or token ids.
            max_tokens: tokens to emit at most for each.
            temperature: 0 takes the likeliest token.
            top_p: see `Sampling`.
            top_k: see `Sampling`.
            seed: prompt i draws with seed + i.
            stop: texts that end a continuation.
            stop_tokens: tokens that do, beside the tokenizer's eos.
            decode: token ids to text; the tokenizer's, which drops specials, when None.

        Yields:
            `Piece`s, those of one prompt in order.

        Raises:
            InputError: a setting that cannot be used, or a prompt that does not fit the model.
        """
        encoded = self._encoded(prompts)
        self._check(encoded, max_tokens, stop)
        settings = dict(temperature=temperature, top_p=top_p, top_k=top_k)
        Sampling.create(max(len(encoded), 1), self.allowed, seed=seed, **settings)
        size = self.options.batch_size
        decode = decode or self.tokenizer.decode
        for first in range(0, len(encoded), size):
            batch = encoded[first : first + size]
            texts = [TextStream(decode, stop) for _ in batch]
            ends = Ends(max_tokens, (self.tokenizer.eos_id, *stop_tokens), tuple(stop))
            for piece in self._batch(batch, texts, seed + first, settings, ends):
                yield piece._replace(index=first + piece.index)

    def _encoded(self, prompts: Sequence[Prompt]) -> list[np.ndarray]:
        if isinstance(prompts, str):
            raise InputError("prompts: a text alone is no list; [text] is one")
        return [self.encode(prompt) for prompt in prompts]

    def _check(self, prompts: list[np.ndarray], max_tokens: int, stop: Sequence[str]) -> None:
        limit = self.config.max_position_embeddings
        if max_tokens < 1:
            raise InputError(f"max_tokens = {max_tokens}: must be at least 1")
        if any(not text for text in stop):
            raise InputError("stop: an empty text would stop everything")
        for index, prompt in enumerate(prompts):
            if prompt.ndim != 1 or not prompt.size:
                raise InputError(f"prompt {index}: must be at least one token")
            if not 0 <= prompt.min() <= prompt.max() < self.config.vocab_size:
                raise InputError(
                    f"prompt {index}: token ids {prompt.min()}..{prompt.max()} leave the"
                    f" vocabulary of {self.config.vocab_size}"
                )
            if len(prompt) + max_tokens > limit:
                raise InputError(
                    f"prompt {index}: {len(prompt)} tokens and max_tokens = {max_tokens} exceed the"
                    f" {limit} positions of the model"
                )

    def _batch(
        self,
        prompts: list[np.ndarray],
        texts: list[TextStream],
        seed: int,
        settings: dict[str, Any],
        ends: Ends,
    ) -> Iterator[Piece]:
        """One batch; sequences that fill it up to a power of two do nothing."""
        count, options = len(prompts), self.options
        batch = min(_power_of_two(count), options.batch_size)
        rows = [*prompts, *[np.zeros(0, np.int32)] * (batch - count)]
        tokens = max(map(len, prompts)) + ends.limit
        pages = _power_of_two(-(-tokens // PAGE_TOKENS))
        table = np.arange(batch * pages, dtype=np.int32).reshape(batch, pages)
        state = State.create(self.config, self.weights, batch * pages, table)
        self._note_memory(state)
        sampling = Sampling.create(
            batch, self.allowed, seed=[(seed + b) % 2**32 for b in range(batch)], **settings
        )
        spelled = [self.tokenizer.encode(text) for text in ends.texts]
        stops = Stops.create(batch, limit=ends.limit, tokens=ends.tokens, sequences=spelled)

        started = time.perf_counter()
        trails, starts = [], np.zeros(batch, np.int64)
        if self.prefixes is not None:
            trails = [self.prefixes.trail(row) for row in rows]
            state, (starts, cached) = self.prefixes.restore(state, trails)
            self.statistics.cached_tokens += int(cached.sum())
            self.statistics.replayed_tokens += int((cached - starts).sum())

        def keep(state: State) -> None:
            for b in range(count):
                self.prefixes.keep(state, b, trails[b])

        logits, state = prefill(
            self.programs,
            self.weights,
            state,
            [row[start:] for row, start in zip(rows, starts, strict=True)],
            chunk=options.chunk,
            exact=options.exact,
            replay=options.replay,
            after_chunk=keep if trails else None,
        )
        active = jnp.arange(batch) < count
        sequences, draw = self.programs.begin(logits, state.positions, active, sampling, stops)
        new = np.where(np.arange(batch) < count, np.asarray(draw.tokens), -1)[None]
        logprobs = np.asarray(draw.logprobs)[None]
        for b in range(count if trails else 0):
            self.prefixes.remember(state, b, trails[b])
        self.statistics.prompt_tokens += sum(map(len, prompts)) - int(starts.sum())
        self.statistics.prefill_seconds += time.perf_counter() - started

        running = set(range(count))
        while True:
            finish = np.asarray(sequences.finish)
            for b in sorted(running):
                piece = self._piece(b, texts[b], new[:, b], logprobs[:, b], finish[b])
                if piece.finish is not None:
                    running.discard(b)
                if trails:
                    trails[b].extend(new[new[:, b] >= 0, b])
                    self.prefixes.keep(state, b, trails[b])
                    if piece.finish is not None:
                        self.prefixes.remember(state, b, trails[b])
                yield piece
            if not running:
                return
            # A text may have stopped where no token or sequence did.
            going = np.isin(np.arange(batch), list(running))
            sequences = sequences._replace(finish=jnp.where(going, sequences.finish, IDLE))
            started = time.perf_counter()
            state, sequences, chunk = self._decode(state, sequences, sampling, stops)
            steps = int(chunk.steps)
            new, logprobs = np.asarray(chunk.tokens)[:steps], np.asarray(chunk.logprobs)[:steps]
            self.statistics.tokens += int(np.sum(new >= 0))
            self.statistics.decode_seconds += time.perf_counter() - started

    def _decode(
        self, state: State, sequences: Sequences, sampling: Sampling, stops: Stops
    ) -> tuple[State, Sequences, Chunk]:
        """One compiled call: some tokens of every running sequence."""
        options, arguments = self.options, (self.weights, state, sequences, sampling, stops)
        if self.weights.draft is None or not options.speculate:
            return self.programs.run(*arguments, options.steps, size=options.steps)
        # A round emits up to a whole draft and one more token.
        size = max(options.steps, self.config.dspark_block_size + 1)
        state, sequences, chunk, rounds = self.programs.speculate(
            *arguments, size, size=size, min_confidence=options.min_confidence
        )
        self.statistics.rounds += int(rounds.rounds.sum())
        self.statistics.accepted += int(rounds.accepted.sum())
        return state, sequences, chunk

    def _piece(
        self,
        index: int,
        text: TextStream,
        tokens: np.ndarray,
        logprobs: np.ndarray,
        finish: int,
    ) -> Piece:
        held = tokens >= 0
        tokens, logprobs = tokens[held], logprobs[held]
        before = text.tokens
        said = text.feed(tokens)
        reason = finish_reason(int(finish))
        if text.stopped:
            used = text.tokens - before
            tokens, logprobs, reason = tokens[:used], logprobs[:used], "stop"
        if reason is not None:
            said += text.close()
        return Piece(index, said, tokens, logprobs, reason)

    def _note_memory(self, state: State) -> None:
        cache, stats = state.cache, self.statistics
        stats.cache_bytes_per_token = cache.bytes_per_token
        if self.prefixes is not None:
            stats.store = self.prefixes.store.disk.counts
            stats.store_bytes_per_token = file_bytes(cache.page_bytes) / PAGE_TOKENS
        stats.cache_bytes = max(stats.cache_bytes, cache.page_bytes * cache.num_pages)
        windows = [w for w in (state.encoder, state.decoder) if w is not None]
        own = sum(w.bytes_per_sequence for w in windows) * state.positions.shape[0]
        stats.window_bytes = max(stats.window_bytes, own)


def finish_reason(finish: int) -> str | None:
    """"stop" or "length" for a code of `v41flash.serving.decode`; None while it runs."""
    return _REASONS.get(finish)


def _power_of_two(number: int) -> int:
    """The smallest power of two that is at least `number`: few shapes are compiled."""
    return 1 << (number - 1).bit_length()
