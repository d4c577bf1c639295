"""Continuous batching: requests join and leave a running batch between compiled calls.

    with Engine(generator, context=4096) as engine:
        ticket = engine.submit(Request(prompt=ids, max_tokens=64, seed=1), listener)

One thread owns the device. A round of it drops what was cancelled, prefills requests into free
slots and decodes some tokens of every running sequence. Short prompts share a round, up to about a
chunk of tokens; a long one is prefilled whole, and the others wait for it. What a request gets does
not depend on what else is running: it is what `Generator` gives for the same prompt, settings and
seed.

Where the generator has a prefix store, sequences with a common prefix share pages of the device,
and prompts begin with what the store has of them. Prompts with images are left out: tokens do not
tell what they show.

A fault ends the request that it met; where it took the caches with it, those that ran beside it
too, and the engine goes on with new caches. Only `MAX_FAULTS` rounds in a row that fail stop it.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from v41flash.cache import PAGE_TOKENS
from v41flash.errors import InputError
from v41flash.image_rows import RowImage, assemble
from v41flash.nn.vision import ImageBatch
from v41flash.serving.decode import IDLE, RUNNING, Stops
from v41flash.serving.forward import ImageRows
from v41flash.serving.generator import Generator, finish_reason
from v41flash.serving.prefill import chunk_width, prefill
from v41flash.serving.prefixes import Trail
from v41flash.serving.sampling import Sampling
from v41flash.serving.state import State
from v41flash.serving.text_stream import TextStream
from v41flash.tiers.device import DevicePages, Lease

_logger = logging.getLogger(__name__)

MAX_FAULTS = 3
# The likeliest tokens that a request may ask for; all of them are computed where one does.
MAX_TOP = 20

Decode = Callable[[Sequence[int]], str]


class Busy(InputError):
    """As many requests wait as may."""


class Stopped(RuntimeError):
    """The engine has ended, by `close` or by a fault; requests get it too."""


class Request(NamedTuple):
    """What to continue, and how.

    Attributes:
        prompt: int32 [n], token ids.
        max_tokens: to emit at most.
        temperature, top_p, top_k, seed: see `Sampling`.
        stop: texts that end it.
        top: likeliest tokens to report, at most `MAX_TOP`.
        decode: token ids to text; the tokenizer's when None.
        images: the prompt's, at the places of their spans.
        share: look it up in the prefix store, and add it there.
    """

    prompt: np.ndarray
    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    stop: tuple[str, ...] = ()
    top: int = 0
    decode: Decode | None = None
    images: tuple[RowImage, ...] = ()
    share: bool = True


class Progress(NamedTuple):
    """News of one request.

    Attributes:
        text: what has become certain.
        tokens: int32 [n], new tokens.
        logprobs: float32 [n], under the model's own distribution (temperature 1).
        top_tokens: int32 [n, top].
        top_logprobs: float32 [n, top].
        finish: "stop" or "length" with the last news, else None.
        error: why there will be no more, else None.
    """

    text: str
    tokens: np.ndarray
    logprobs: np.ndarray
    top_tokens: np.ndarray
    top_logprobs: np.ndarray
    finish: str | None = None
    error: Exception | None = None


Listener = Callable[[Progress], None]


@dataclasses.dataclass(eq=False)
class Ticket:
    """A request under way.

    Attributes:
        request: what was asked for.
        cancelled: nobody listens any more.
    """

    request: Request
    listener: Listener
    text: TextStream
    cancelled: bool = False


@dataclasses.dataclass
class Counts:
    """What an engine has done so far.

    Attributes:
        admitted: requests prefilled.
        finished: requests that ended by themselves.
        cancelled: requests given up by their listeners.
        prompt_tokens: prefilled, those of replays included.
        cached_tokens: of prompts, whose global cache was there already.
        replayed_tokens: of them, gone over again for their window rows.
        tokens: decoded and given out.
        peak: sequences that ran at the same time at most.
    """

    admitted: int = 0
    finished: int = 0
    cancelled: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    replayed_tokens: int = 0
    tokens: int = 0
    peak: int = 0


class Engine:
    """Serves many requests from one generator's model.

    Attributes:
        context: tokens of a prompt and its continuation at most.
        counts: see `Counts`.
    """

    def __init__(
        self,
        generator: Generator,
        *,
        context: int | None = None,
        waiting: int = 256,
        on_fault: Callable[[], None] = lambda: None,
    ):
        """Allocates the caches and starts the thread.

        Args:
            generator: model, tokenizer and `Options`: `batch_size` slots, `chunk` and `steps`.
                Drafts are not used: a round's length would depend on the neighbours.
            context: see `Engine.context`; the model's positions when None. Every slot has pages
                for so many tokens.
            waiting: requests that may wait for a slot.
            on_fault: called from the engine's thread if it stops by itself.

        Raises:
            InputError: a context or a number of waiting requests that cannot be.
        """
        limit = generator.config.max_position_embeddings
        self.context = limit if context is None else context
        if not 2 <= self.context <= limit:
            raise InputError(f"context = {context}: must be 2 .. {limit}, positions of the model")
        if waiting < 1:
            raise InputError(f"waiting = {waiting}: must be at least 1")
        self._generator, self._options = generator, generator.options
        self._slots = self._options.batch_size
        # Enough for every slot to hold a whole context that it shares with none.
        self._pages_each = -(-self.context // PAGE_TOKENS)
        self._prefixes = generator.prefixes
        self._running: dict[int, Ticket] = {}
        self._clear()
        self._max_waiting, self._on_fault = waiting, on_fault
        self._waiting: collections.deque[Ticket] = collections.deque()
        self._changed = threading.Condition()
        self._closing = False
        self._fault: Exception | None = None
        self.counts = Counts()
        self._thread = threading.Thread(target=self._work, name="engine", daemon=True)
        self._thread.start()

    def __enter__(self) -> Engine:
        """The engine itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Closes it."""
        self.close()

    def close(self) -> None:
        """Ends the thread; requests under way get `Stopped`."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()

    @property
    def stopped(self) -> bool:
        """Nothing is served any more."""
        return self._closing

    @property
    def failed(self) -> bool:
        """It has stopped by itself."""
        return self._fault is not None

    def check_room(self, requests: int) -> None:
        """Raises `Busy` where so many more requests could not wait."""
        if len(self._waiting) + requests > self._max_waiting:
            raise Busy(
                f"{len(self._waiting)} of at most {self._max_waiting} requests wait:"
                " try again later"
            )

    @property
    def load(self) -> tuple[int, int]:
        """(requests running, requests waiting)."""
        return len(self._running), len(self._waiting)

    def submit(self, request: Request, listener: Listener) -> Ticket:
        """Hands in a request.

        Args:
            request: what to continue.
            listener: called from the engine's thread with every `Progress`; must not block.

        Raises:
            InputError: a request that cannot be served.
            Busy: too many wait.
            Stopped: the engine has ended.
        """
        self._check(request)
        decode = request.decode or self._generator.tokenizer.decode
        ticket = Ticket(request, listener, TextStream(decode, request.stop))
        with self._changed:
            if self._closing:
                raise Stopped("the engine is closed") from self._fault
            self.check_room(1)
            self._waiting.append(ticket)
            self._changed.notify()
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """Gives up a request, whether it waits or runs; nothing more is told of it."""
        with self._changed:
            ticket.cancelled = True
            self._changed.notify()

    def _check(self, request: Request) -> None:
        prompt, vocabulary = request.prompt, self._generator.config.vocab_size
        if prompt.ndim != 1 or not prompt.size:
            raise InputError("prompt: must be at least one token")
        if not 0 <= prompt.min() <= prompt.max() < vocabulary:
            raise InputError(
                f"prompt: token ids {prompt.min()}..{prompt.max()} leave the vocabulary of"
                f" {vocabulary}"
            )
        if request.max_tokens < 1:
            raise InputError(f"max_tokens = {request.max_tokens}: must be at least 1")
        if len(prompt) + request.max_tokens > self.context:
            raise InputError(
                f"max_tokens = {request.max_tokens} and a prompt of {len(prompt)} tokens exceed"
                f" the context of {self.context} tokens"
            )
        if not 0 <= request.top <= MAX_TOP:
            raise InputError(f"top = {request.top}: must be 0 .. {MAX_TOP}")
        if any(not text for text in request.stop):
            raise InputError("stop: an empty text would stop everything")
        self._sampling([request])

    # -- The thread ------------------------------------------------------------------------------

    def _work(self) -> None:
        faults, stopped = 0, Stopped("the engine was closed")
        while self._wait():
            try:
                self._drop_cancelled()
                self._admit()
                if self._running:
                    self._decode()
                faults = 0
            except Exception as fault:  # Whatever it is, those who wait must hear of it.
                _logger.exception("a round failed")
                faults += 1
                self._fail(list(self._running.values()), fault)
                self._running.clear()
                self._clear()
                if faults == MAX_FAULTS:
                    stopped = self._fault = fault
                    break
        with self._changed:
            self._closing = True
            left = [*self._running.values(), *self._waiting]
            self._running.clear()
            self._waiting.clear()
        self._fail(left, stopped)
        if self._fault is not None:
            self._on_fault()

    def _clear(self) -> None:
        """Empty caches, no sequences."""
        generator, each = self._generator, self._pages_each
        table = np.full((self._slots, each), -1)
        self._state = State.create(generator.config, generator.weights, table.size, table)
        self._sequences = None
        self._pages = DevicePages(table.size)
        self._leases: dict[int, Lease] = {}
        self._trails: dict[int, Trail] = {}

    def _fail(self, tickets: Sequence[Ticket], error: Exception) -> None:
        for ticket in tickets:
            self._tell(ticket, _news(error=error))

    def _wait(self) -> bool:
        """Returns when there is something to do; False: nothing any more."""
        with self._changed:
            self._changed.wait_for(lambda: self._closing or self._running or self._waiting)
            return not self._closing

    def _drop_cancelled(self) -> None:
        with self._changed:
            kept = [ticket for ticket in self._waiting if not ticket.cancelled]
            self.counts.cancelled += len(self._waiting) - len(kept)
            self._waiting = collections.deque(kept)
        gone = [slot for slot, ticket in self._running.items() if ticket.cancelled]
        self.counts.cancelled += len(gone)
        self._free(gone)

    def _free(self, slots: Sequence[int]) -> None:
        for slot in slots:
            del self._running[slot]
            self._pages.release(self._leases.pop(slot))
            self._trails.pop(slot, None)
        if slots:
            finish = self._sequences.finish.at[np.array(slots)].set(IDLE)
            self._sequences = self._sequences._replace(finish=finish)

    def _admit(self) -> None:
        """Prefills requests into free slots, about a chunk of tokens."""
        budget = self._options.chunk
        for slot in range(self._slots):
            if slot in self._running:
                continue
            with self._changed:
                # The first one is taken whatever its length.
                fits = self._waiting and (
                    budget == self._options.chunk or len(self._waiting[0].request.prompt) <= budget
                )
                if not fits:
                    return
                ticket = self._waiting.popleft()
            budget -= len(ticket.request.prompt)
            self._begin(slot, ticket)

    def _begin(self, slot: int, ticket: Ticket) -> None:
        request, options, programs = ticket.request, self._options, self._generator.programs
        try:
            images = self._image_rows(request) if request.images else None
        except Exception as fault:  # The caches are whole: it is this request's alone.
            _logger.exception("images of a request")
            self._fail([ticket], fault)
            return
        # From here on a fault is everybody's.
        self._running[slot] = ticket
        part, start = self._restored(slot, request)
        logits, part = prefill(
            programs,
            self._generator.weights,
            part,
            [request.prompt[start:]],
            chunk=options.chunk,
            exact=options.exact,
            replay=options.replay,
            images=images,
            after_chunk=self._keeper(slot),
        )
        place = jnp.array([slot])
        self._state = self._state.put(place, part)
        self._keep(slot)
        self._remember(slot)
        top = MAX_TOP if request.top else 0
        sampling, stops = self._sampling([request]), self._stops([request])
        active = jnp.ones(1, bool)
        sequence, draw = programs.begin(logits, part.positions, active, sampling, stops, top=top)
        if self._sequences is None:
            idle = jax.tree.map(lambda x: jnp.repeat(x, self._slots, axis=0), sequence)
            self._sequences = idle._replace(finish=jnp.full(self._slots, IDLE, jnp.int32))
        self._sequences = jax.tree.map(
            lambda whole, own: whole.at[place].set(own), self._sequences, sequence
        )
        self.counts.admitted += 1
        self.counts.prompt_tokens += len(request.prompt) - start
        self.counts.peak = max(self.counts.peak, len(self._running))
        first = (draw.tokens, draw.logprobs, draw.top_tokens, draw.top_logprobs)
        self._keep(slot, np.asarray(draw.tokens))
        self._report({slot: tuple(np.asarray(x) for x in first)}, {slot: int(sequence.finish[0])})

    def _image_rows(self, request: Request) -> ImageRows:
        """Image spans of the prompt, in arrays of few sizes: every size is compiled."""
        generator, images = self._generator, request.images
        length = chunk_width(len(request.prompt), 1 << 30)
        tokens = np.pad(request.prompt[None], ((0, 0), (0, length - len(request.prompt))))
        slots = 1 << (len(images) - 1).bit_length()
        size = 1 << (max(len(image.patches.pixels) for image in images) - 1).bit_length()
        batch = assemble(generator.config.vision, [images], length, slots, size)
        return generator.programs.image_rows(generator.weights, tokens, ImageBatch(*batch))

    def _restored(self, slot: int, request: Request) -> tuple[State, int]:
        """(a sequence on pages of its own, with what is known of its prompt; where to go on)."""
        trail = None
        # Tokens do not tell what images show.
        if self._prefixes is not None and request.share and not request.images:
            trail = self._trails[slot] = self._prefixes.trail(request.prompt)
        count = -(-(len(request.prompt) + request.max_tokens) // PAGE_TOKENS)
        lease = self._pages.lease(trail.chain.keys if trail else (), count)
        self._leases[slot] = lease
        state = self._empty(lease)
        if trail is None:
            return state, 0
        state, found = self._prefixes.restore(state, [trail], [lease.shared])
        self._name(slot)
        start, cached = int(found.starts[0]), int(found.cached[0])
        self.counts.cached_tokens += cached
        self.counts.replayed_tokens += cached - start
        return state, start

    def _empty(self, lease: Lease) -> State:
        """A sequence without tokens."""
        generator, own = self._generator, np.full((1, self._pages_each), -1, np.int32)
        fresh = State.create(generator.config, generator.weights, 1, own)
        own[0, : len(lease.pages)] = lease.pages
        cache = dataclasses.replace(
            self._state.cache, page_table=jnp.asarray(own), lengths=fresh.cache.lengths
        )
        return dataclasses.replace(fresh, cache=cache)

    def _keep(self, slot: int, tokens: Sequence[int] | np.ndarray = ()) -> None:
        """Stores the pages of a slot that are full; `tokens` it has emitted since the last time."""
        trail = self._trails.get(slot)
        if trail is not None:
            trail.extend(np.asarray(tokens, np.int32))
            self._prefixes.keep(self._state, slot, trail)
            self._name(slot)

    def _keeper(self, slot: int) -> Callable[[State], None] | None:
        """Stores the pages of a prompt as its prefill, a batch of one, fills them."""
        trail = self._trails.get(slot)
        return None if trail is None else lambda state: self._prefixes.keep(state, 0, trail)

    def _name(self, slot: int) -> None:
        """Lets others share the pages of a slot that are full."""
        trail, lease = self._trails[slot], self._leases[slot]
        for number in range(trail.full):
            self._pages.name(lease.pages[number], trail.chain.keys[number])

    def _remember(self, slot: int) -> None:
        if slot in self._trails:
            self._prefixes.remember(self._state, slot, self._trails[slot])

    def _decode(self) -> None:
        """Some tokens of every running sequence."""
        requests = [
            self._running[slot].request if slot in self._running else None
            for slot in range(self._slots)
        ]
        top = MAX_TOP if any(request and request.top for request in requests) else 0
        self._state, self._sequences, chunk = self._generator.programs.run(
            self._generator.weights,
            self._state,
            self._sequences,
            self._sampling(requests),
            self._stops(requests),
            self._options.steps,
            size=self._options.steps,
            top=top,
        )
        steps = int(chunk.steps)
        rows = [np.asarray(x)[:steps] for x in chunk[:4]]
        finish = np.asarray(self._sequences.finish)
        news = {}
        for slot in self._running:
            held = rows[0][:, slot] >= 0
            news[slot] = tuple(x[:, slot][held] for x in rows)
            self._keep(slot, news[slot][0])
        self._report(news, {slot: int(finish[slot]) for slot in news})

    def _report(self, news: dict[int, tuple[np.ndarray, ...]], finish: dict[int, int]) -> None:
        """Tells listeners of new tokens and frees the slots of those that have ended."""
        ended = []
        for slot, (tokens, logprobs, top_tokens, top_logprobs) in news.items():
            ticket = self._running[slot]
            before = ticket.text.tokens
            said = ticket.text.feed(tokens)
            used, reason = len(tokens), None
            if finish[slot] != RUNNING:
                reason = finish_reason(finish[slot])
            if ticket.text.stopped:
                used, reason = ticket.text.tokens - before, "stop"
            if reason is not None:
                said += ticket.text.close()
                ended.append(slot)
                self._remember(slot)
                self.counts.finished += 1
            self.counts.tokens += used
            top = ticket.request.top
            progress = Progress(
                said,
                tokens[:used],
                logprobs[:used],
                top_tokens[:used, :top],
                top_logprobs[:used, :top],
                reason,
            )
            self._tell(ticket, progress)
        self._free(ended)

    def _tell(self, ticket: Ticket, progress: Progress) -> None:
        if ticket.cancelled:
            return
        try:
            ticket.listener(progress)
        except Exception:  # A listener's fault is not the others'.
            _logger.exception("a listener failed: its request is given up")
            ticket.cancelled = True

    # -- Settings of a batch -----------------------------------------------------------------------

    def _sampling(self, requests: Sequence[Request | None]) -> Sampling:
        def values(name: str, idle: float) -> list:
            return [idle if r is None else getattr(r, name) for r in requests]

        return Sampling.create(
            len(requests),
            self._generator.allowed,
            temperature=values("temperature", 0.0),
            top_p=values("top_p", 1.0),
            top_k=values("top_k", 0),
            seed=values("seed", 0),
        )

    def _stops(self, requests: Sequence[Request | None]) -> Stops:
        # Texts that stop are found on the host: they would make shapes depend on requests.
        limits = [1 if r is None else r.max_tokens for r in requests]
        eos = self._generator.tokenizer.eos_id
        return Stops.create(len(requests), limit=limits, tokens=(eos,))


def _news(error: Exception) -> Progress:
    none, nothing = np.zeros(0, np.int32), np.zeros(0, np.float32)
    grid = np.zeros((0, 0))
    return Progress("", none, nothing, grid.astype(np.int32), grid, error=error)
