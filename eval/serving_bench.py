"""Times serving at the published attention widths and layer schedule; hidden size and experts are
cut down, weights are random.

    python -m eval.serving_bench --what=cache [--tokens=1048576]
    python -m eval.serving_bench --what=decode [--contexts=4096,65536,1048576 --batches=1,8]
    python -m eval.serving_bench --what=prefill [--tokens=65536 --chunk=8192]
    python -m eval.serving_bench --what=fill [--tokens=1048576 --chunk=8192]

cache: bytes that the device's allocator hands out for the global cache of one sequence. It cuts
    them out of the pool that JAX reserves by default; where XLA_PYTHON_CLIENT_PREALLOCATE is false
    it grows the pool instead, and hands out larger pieces than were asked for.
decode: milliseconds per step at every context and batch, the part of the indexers and the attention
    (timed apart, on the same caches), and a token's FLOPs by the accounting. Caches hold random
    rows.
prefill: the encoder with its decoder replay against all layers over all tokens.
fill: prefill of one long prompt, and what memory it took.

`--implementation=xla` times the references. One JSON object a line; --json appends them to a file.
Compiling takes longer than measuring: `--lock=FILE` lets several of these run at once. They compile
together; none measures before all have compiled, and then one at a time.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from pallas_kernels import measure
from pallas_kernels import sparse_attention as attention_op
from v41flash import checkout, command_line, presets
from v41flash.accounting import flops
from v41flash.cache import PAGE_TOKENS, GlobalCache
from v41flash.config import ModelConfig
from v41flash.errors import InputError
from v41flash.kernels import Kernels
from v41flash.nn.ced import ALIGNMENT, CED
from v41flash.nn.context import Ranges
from v41flash.nn.indexer import IndexQuery, select, select_in_pool
from v41flash.nn.memory import Memory
from v41flash.serving.decode import Sequences, Stops
from v41flash.serving.forward import Model, Tail
from v41flash.serving.prefill import prefill
from v41flash.serving.programs import Programs
from v41flash.serving.sampling import Sampling
from v41flash.serving.state import State
from v41flash.serving.weights import Weights
from v41flash.text.engram_hash import table_primes

# Decoded in one call.
_STEPS = 8
# Random numbers that all weights are taken from.
_NOISE = 1 << 24

# Yields rows, once everything is compiled.
Measurement = Callable[[], Iterator[dict[str, Any]]]


def bench_model() -> ModelConfig:
    """The published schedule and attention widths around a narrow residual stream."""
    published = presets.v41_flash()
    primes = table_primes(
        4096, published.engram_max_ngram_size, published.engram_n_heads, published.num_engram_sites
    )
    return presets.v41_flash(
        hidden_size=1024,
        n_routed_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=512,
        compress_ratios=published.compress_ratios[: published.num_hidden_layers],
        num_nextn_predict_layers=0,
        vision=None,
        engram_vocab_size=4096,
        engram_num_embeddings=tuple(sum(sum(order) for order in site) for site in primes),
    )


def random_weights(config: ModelConfig, noise: jax.Array) -> Weights:
    """Matrices of standard deviation 0.02, norms of one, biases of zero.

    Args:
        config: the model.
        noise: bfloat16 [N] of standard deviation 0.02, of which every matrix takes some.
    """
    row = jax.ShapeDtypeStruct((1, ALIGNMENT), jnp.int32)
    rows = (1, ALIGNMENT, config.num_engram_sites, config.engram_rows_per_token)
    inputs = row, row, row, jax.ShapeDtypeStruct(rows, jnp.int32)
    shapes = nn.unbox(jax.eval_shape(CED(config).init, jax.random.key(0), *inputs)["params"])
    token_map = np.arange(config.vocab_size) % config.engram_compressed_vocab_size
    leaves, tree = jax.tree.flatten_with_path(shapes)

    def leaf(place: int, path: Any, shape: jax.ShapeDtypeStruct) -> jax.Array:
        name = path[-1].key
        if name.endswith("norm") or name in ("scale", "q_weight", "k_weight"):
            return jnp.ones(shape.shape)
        if name in ("base", "bias", "sink") or shape.dtype == jnp.uint8:
            return jnp.zeros(shape.shape, shape.dtype)
        # A generator for every matrix would take longer to compile than the model.
        first = place * 4099 % (noise.size // 2)
        return jnp.resize(noise[first:], shape.shape)

    made = [leaf(place, *entry) for place, entry in enumerate(leaves)]
    return Weights.create(config, jax.tree.unflatten(tree, made), token_map)


def noise() -> jax.Array:
    """What `random_weights` takes."""
    values = np.random.default_rng(0).standard_normal(_NOISE, np.float32)
    return jnp.asarray(0.02 * values, jnp.bfloat16)


def empty(config: ModelConfig, weights: Weights, batch: int, tokens: int) -> State:
    """Sequences without tokens, each with pages for `tokens`."""
    pages = -(-tokens // PAGE_TOKENS)
    table = np.arange(batch * pages, dtype=np.int32).reshape(batch, pages)
    return State.create(config, weights, batch * pages, table)


def filled(
    config: ModelConfig, batch: int, tokens: int, weights: Weights, context: jax.Array
) -> State:
    """As `empty`, but `context` (a scalar) tokens on and with caches full of random values.

    Under `jax.jit` the empty rows never exist: there is not always room for both.
    """
    state = empty(config, weights, batch, tokens)
    cache, few = state.cache, 64
    length = jnp.full(state.positions.shape, context, jnp.int32)

    def random(rows: jax.Array, fmt: Any, seed: int) -> jax.Array:
        values = jax.random.normal(jax.random.key(seed), (few, rows.shape[1], fmt.channels))
        packed = fmt.pack(values)
        # The same few pages over and over: contents do not change the time.
        return packed[jnp.arange(rows.shape[0]) % few]

    def windows(held: Any, seed: int) -> Any:
        layers, _, window, _ = held.rows.shape
        values = jax.random.normal(jax.random.key(seed), (layers, 1, window, held.format.channels))
        rows = jnp.broadcast_to(held.format.pack(values), held.rows.shape)
        starts = jnp.zeros_like(length)
        return dataclasses.replace(held, rows=rows, starts=starts, lengths=length + 0)

    main = tuple(random(x, cache.main_format, i) for i, x in enumerate(cache.main))
    keys = tuple(random(x, cache.key_format, 9 + i) for i, x in enumerate(cache.keys))
    return dataclasses.replace(
        state,
        positions=length,
        cache=dataclasses.replace(cache, main=main, keys=keys, lengths=length + 0),
        encoder=windows(state.encoder, 20),
        decoder=windows(state.decoder, 21),
    )


def selection_and_attention(model: Model, state: State, seed: jax.Array) -> jax.Array:
    """Every selection and every attention of one decode step, on queries drawn from `seed`."""
    config, kernels = model.config, model.kernels
    batch = state.positions.shape[0]
    new = jnp.ones(batch, jnp.int32)
    dtype = jnp.dtype(config.dtype)
    total, pool, rows, places = jnp.zeros((batch, config.head_dim), dtype), None, None, None
    for spec in config.layers:
        windows = state.encoder if spec.part == "encoder" else state.decoder
        memory = Memory(state.cache, windows, state.groups, state.positions, new)
        key = jax.random.fold_in(jax.random.key(seed), spec.index)
        shape = (batch, 1, config.num_attention_heads, config.head_dim)
        # The result of a layer goes into the next one's query, so that none is merged or moved.
        q = jax.random.normal(key, shape, dtype) + total[:, None, None]
        unrolled = windows.unroll(spec.index, total[:, None])
        seen = windows.ranges(1, new)
        if spec.mode in ("full", "reindex"):
            hi = ((state.positions + 1) // spec.ratio)[:, None]
            visible = Ranges(jnp.zeros_like(hi), hi)
            shape = (batch, 1, config.index_n_heads, config.index_head_dim)
            weights = jax.random.normal(key, shape[:3], jnp.float32)
            query = IndexQuery(
                jax.random.normal(key, shape, dtype) + total[:, None, None, :1], weights
            )
            keys = memory.cache.index_keys(spec.kv_source)
            if spec.pool == "use":
                indices = select_in_pool(config, query, keys, visible, pool, kernels.indexer)
            else:
                indices, made = select(
                    config,
                    query,
                    memory.index_keys(spec.kv_source),
                    visible,
                    make_pool=spec.pool == "make",
                    pool=None,
                    implementation=kernels.indexer,
                )
                pool = made or pool
            rows, places = memory.selected(spec.kv_source, indices)
        out, _ = attention_op.sparse_attention(
            q,
            unrolled,
            *seen,
            rows if spec.ratio else None,
            places if spec.ratio else None,
            jnp.zeros(config.num_attention_heads, jnp.float32),
            window=config.sliding_window,
            implementation=kernels.sparse_attention,
        )
        total = total + out[:, 0].sum(axis=1) * 1e-3
    return total


def seconds(call: Callable[[], Any], repeats: int = 3, calls: int = 4) -> float:
    """Seconds per call in the fastest of some rounds of calls that do not wait for each other."""
    jax.block_until_ready(call())
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready([call() for _ in range(calls)])
        times.append((time.perf_counter() - start) / calls)
    return min(times)


def allocated(which: str = "bytes_in_use") -> int | None:
    """What the device's allocator counts, where it tells."""
    stats = jax.devices()[0].memory_stats()
    return None if stats is None else stats[which]


def decoding(config: ModelConfig, batch: int) -> tuple[Any, ...]:
    """Arguments of `decode.run` after the state: greedy sequences that do not stop."""
    sequences = Sequences(
        last=jnp.full(batch, 5, jnp.int32),
        emitted=jnp.ones(batch, jnp.int32),
        recent=jnp.zeros((batch, 1), jnp.int32),
        finish=jnp.zeros(batch, jnp.int32),
    )
    sampling = Sampling.create(batch, np.ones(config.vocab_size, bool), temperature=0)
    return sequences, sampling, Stops.create(batch, limit=1_000_000), jnp.int32(_STEPS)


def random_prompt(config: ModelConfig, tokens: int) -> np.ndarray:
    """int32 [tokens]."""
    return np.random.default_rng(0).integers(3, config.vocab_size, tokens).astype(np.int32)


class Compiled:
    """Programs for one number of sequences and pages, compiled before the device holds anything.

    Attributes:
        model: the model.
        batch, tokens: sequences, and tokens that each has pages for.
        programs: of the model; those asked for are compiled.
        seconds: that compiling took.
    """

    def __init__(
        self, model: Model, batch: int, tokens: int, wanted: Sequence[str], chunk: int = PAGE_TOKENS
    ):
        """Compiles.

        Args:
            model: the model.
            batch, tokens: see above.
            wanted: programs, of `Programs` or "filled" or "part".
            chunk: prompt tokens of a step.
        """
        start = time.perf_counter()
        config, of = model.config, jax.ShapeDtypeStruct
        self.model, self.batch, self.tokens = model, batch, tokens
        self.programs = Programs(model)
        made = functools.partial(random_weights, config)
        fill = functools.partial(filled, config, batch, tokens)
        given = of((_NOISE,), jnp.bfloat16)
        weights = jax.eval_shape(made, given)
        state = jax.eval_shape(lambda w: empty(config, w, batch, tokens), weights)
        tail = jax.eval_shape(lambda: Tail.create(config, batch, config.sliding_window))
        logits, count = of((batch, config.vocab_size), jnp.float32), of((), jnp.int32)
        step = (of((batch, chunk), jnp.int32), of((batch,), jnp.int32), None)
        part = jax.jit(functools.partial(selection_and_attention, model))
        run = functools.partial(self.programs.run.lower, size=_STEPS)
        arguments = jax.eval_shape(lambda: decoding(config, batch))
        lowered = {
            "random_weights": lambda: jax.jit(made).lower(given),
            "filled": lambda: jax.jit(fill).lower(weights, count),
            "part": lambda: part.lower(state, count),
            "run": lambda: run(weights, state, *arguments),
            "encoder_chunk": lambda: self.programs.encoder_chunk.lower(weights, state, tail, *step),
            "decoder_replay": lambda: self.programs.decoder_replay.lower(weights, state, tail),
            "exact_chunk": lambda: self.programs.exact_chunk.lower(weights, state, logits, *step),
        }
        with ThreadPoolExecutor() as pool:
            names = ["random_weights", *wanted]
            ready = dict(zip(names, pool.map(lambda n: lowered[n]().compile(), names), strict=True))
        self._weights, self._filled = ready.pop("random_weights"), ready.pop("filled", None)
        self.part = ready.pop("part", None)
        for name, program in ready.items():
            setattr(self.programs, name, program)
        self.seconds = time.perf_counter() - start
        print(f"compiled in {self.seconds:.0f} s", file=sys.stderr, flush=True)

    def weights(self) -> Weights:
        """Random ones."""
        return self._weights(noise())

    def state(self, weights: Weights, context: int | None = None) -> State:
        """The sequences, empty or after `context` tokens."""
        if context is None:
            return empty(self.model.config, weights, self.batch, self.tokens)
        return self._filled(weights, np.int32(context))


def cache_bytes(config: ModelConfig, tokens: int) -> Measurement:
    """The global cache of one sequence as the allocator sees it."""

    def measure() -> Iterator[dict[str, Any]]:
        pages = -(-tokens // PAGE_TOKENS)
        table = np.arange(pages, dtype=np.int32)[None]
        # What runs for the first time may keep memory of its own.
        jax.block_until_ready(GlobalCache.create(config, 1, table[:, :1]))
        before = allocated()
        cache = jax.block_until_ready(GlobalCache.create(config, pages, table))
        row: dict[str, Any] = dict(what="cache", tokens=tokens)
        if before is not None:
            row["device_bytes"] = allocated() - before
            row["device_bytes_per_token"] = row["device_bytes"] / tokens
        row["table_bytes"] = cache.page_table.nbytes
        row["rows_bytes_per_token"] = cache.bytes_per_token
        yield row

    return measure


def decode_times(model: Model, contexts: Sequence[int], batches: Sequence[int]) -> Measurement:
    """One row per context and batch."""
    config = model.config
    # Pages for all that is decoded.
    points = [
        (context, Compiled(model, batch, context + PAGE_TOKENS, ("filled", "part", "run")))
        for context in contexts
        for batch in batches
    ]

    def measure() -> Iterator[dict[str, Any]]:
        for context, ready in points:
            before = allocated()
            weights = ready.weights()
            state = jax.block_until_ready(ready.state(weights, context))
            row: dict[str, Any] = dict(what="decode", context=context, batch=ready.batch)
            row["flops"] = flops.weighted(flops.decode(config, context))
            row["published_flops"] = flops.weighted(flops.decode(presets.v41_flash(), context))
            row["cache_bytes_per_token"] = state.cache.bytes_per_token
            part = functools.partial(ready.part, state, np.int32(0))
            row["selection_attention_ms"] = 1e3 * seconds(part)
            sequences, *rest = decoding(config, ready.batch)
            times = []
            for _ in range(4):
                start = time.perf_counter()
                state, sequences, chunk = ready.programs.run(weights, state, sequences, *rest)
                jax.block_until_ready(chunk)
                times.append(time.perf_counter() - start)
                row.setdefault("first_tokens", chunk.tokens[:, 0].tolist())
            row["step_ms"] = 1e3 * min(times[1:]) / _STEPS
            if before is not None:
                row["peak_bytes"] = allocated("peak_bytes_in_use")
            row["compile_seconds"] = ready.seconds
            del weights, state, sequences, chunk, part
            yield row

    return measure


def prefill_times(model: Model, tokens: int, chunk: int) -> Measurement:
    """The two ways of prefill over one prompt."""
    programs = ("encoder_chunk", "decoder_replay", "exact_chunk")
    ready = Compiled(model, 1, tokens, programs, chunk)

    def measure() -> Iterator[dict[str, Any]]:
        weights = ready.weights()
        prompt = random_prompt(model.config, tokens)
        for exact in (False, True, False, True):
            state = jax.block_until_ready(ready.state(weights))
            start = time.perf_counter()
            logits, state = prefill(
                ready.programs, weights, state, [prompt], chunk=chunk, exact=exact
            )
            jax.block_until_ready((logits, state))
            yield dict(
                what="prefill",
                layers="all" if exact else "encoder and replay",
                tokens=tokens,
                chunk=chunk,
                seconds=time.perf_counter() - start,
                finite=bool(jnp.isfinite(logits).all()),
                compile_seconds=ready.seconds,
            )
            del logits, state

    return measure


def fill_times(model: Model, tokens: int, chunk: int) -> Measurement:
    """One long prompt: a row per doubling of what is done, the last with the decoder's replay."""
    ready = Compiled(model, 1, tokens, ("encoder_chunk", "decoder_replay"), chunk)
    config, programs = model.config, ready.programs

    def measure() -> Iterator[dict[str, Any]]:
        weights = ready.weights()
        state = jax.block_until_ready(ready.state(weights))
        tail = Tail.create(config, 1, config.sliding_window)
        prompt = random_prompt(config, tokens)
        start, report = time.perf_counter(), chunk
        for done in range(0, tokens, chunk):
            new = min(chunk, tokens - done)
            step = np.pad(prompt[done : done + new], (0, chunk - new))[None]
            tail, state = programs.encoder_chunk(
                weights, state, tail, step, np.array([new], np.int32), None
            )
            if done + new < min(report, tokens):
                continue
            report *= 2
            row: dict[str, Any] = dict(what="fill", chunk=chunk)
            if done + new == tokens:
                logits, state = programs.decoder_replay(weights, state, tail)
                row["finite"] = bool(jnp.isfinite(logits).all())
            jax.block_until_ready(state)
            row |= dict(
                tokens=int(state.cache.lengths[0]),
                seconds=time.perf_counter() - start,
                peak_bytes=allocated("peak_bytes_in_use"),
                compile_seconds=ready.seconds,
            )
            yield row

    return measure


@command_line.program(__doc__)
def main(arguments: Sequence[str]) -> int:
    """Runs the command line; returns the exit status."""
    values = flags.FlagValues()
    here = dict(flag_values=values)
    kinds = ["cache", "decode", "prefill", "fill"]
    flags.DEFINE_enum("what", "decode", kinds, "What to measure.", **here)
    flags.DEFINE_list("contexts", ["4096", "16384", "65536", "262144", "1048576"], "", **here)
    flags.DEFINE_list("batches", ["1"], "Sequences at a time.", **here)
    flags.DEFINE_integer("tokens", None, "Of the prompt.", lower_bound=1, **here)
    flags.DEFINE_integer("chunk", 8192, "Prompt tokens per step.", lower_bound=1, **here)
    flags.DEFINE_string("implementation", None, "Of every op; its own choice if none.", **here)
    flags.DEFINE_string("json", None, "File to append the rows to.", **here)
    flags.DEFINE_string("lock", None, "File that processes measured together name.", **here)
    numbers = command_line.read(values, arguments, contexts=int, batches=int)
    if values.what == "prefill" and (values.tokens or 1 << 16) % values.chunk:
        raise InputError(f"--tokens={values.tokens}: must be a multiple of --chunk here")
    # Which implementation each op has found.
    logging.basicConfig(stream=sys.stderr, format="%(message)s")
    logging.getLogger("pallas_kernels").setLevel(logging.INFO)
    ops = ("sparse_attention", "indexer", "mhc", "grouped_matmul", "engram_gather", "fp4")
    kernels = Kernels(**dict.fromkeys(ops, values.implementation))
    model = Model(bench_model(), kernels)
    tokens, chunk = values.tokens, values.chunk
    with measure.side_by_side(values.lock, alone=False):
        timed = {
            "cache": lambda: cache_bytes(model.config, tokens or 1 << 20),
            "decode": lambda: decode_times(model, *numbers),
            "prefill": lambda: prefill_times(model, tokens or 1 << 16, chunk),
            "fill": lambda: fill_times(model, tokens or 1 << 20, chunk),
        }[values.what]()
    common = {
        "implementation": values.implementation,
        "device": jax.devices()[0].device_kind,
        "commit": checkout.read().commit,
    }
    with measure.side_by_side(values.lock, alone=True):
        for row in timed():
            line = json.dumps(row | common)
            print(line, flush=True)
            if values.json:
                with Path(values.json).open("a") as file:
                    file.write(line + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
