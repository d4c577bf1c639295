"""Times serving at the published attention widths and layer schedule; hidden size and experts are
cut down, weights are random.

    python -m eval.serving_bench --what=decode [--contexts=4096,65536,1048576 --batches=1,8]
    python -m eval.serving_bench --what=prefill [--tokens=65536 --chunk=8192]
    python -m eval.serving_bench --what=fill [--tokens=1048576 --chunk=8192]

decode: milliseconds per step at every context and batch, the part of the indexers and the attention
    (timed apart, on the same caches), and the bytes of the global cache's arrays per token.
prefill: the encoder with its decoder replay against all layers over all tokens.
fill: prefill of one long prompt by the encoder, chunk by chunk, and what memory it took.
`--implementation=xla` times the references. One JSON object a line; --json appends them to a file.
"""

from __future__ import annotations

import functools
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from pallas_kernels import sparse_attention as attention_op
from v41flash import presets
from v41flash.cache import PAGE_TOKENS
from v41flash.config import ModelConfig
from v41flash.kernels import Kernels
from v41flash.nn.ced import ALIGNMENT, CED
from v41flash.nn.context import Ranges
from v41flash.nn.indexer import IndexQuery, select, select_in_pool
from v41flash.nn.memory import Memory
from v41flash.serving.decode import Sequences, Stops
from v41flash.serving.forward import Model
from v41flash.serving.prefill import prefill
from v41flash.serving.programs import Programs
from v41flash.serving.sampling import Sampling
from v41flash.serving.state import State
from v41flash.serving.weights import Weights
from v41flash.text.engram_hash import table_primes

_STEPS = 8


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


def random_weights(config: ModelConfig) -> Weights:
    """Weights of standard deviation 0.02, norms of one, made on the device."""
    row = jax.ShapeDtypeStruct((1, ALIGNMENT), jnp.int32)
    rows = (1, ALIGNMENT, config.num_engram_sites, config.engram_rows_per_token)
    inputs = row, row, row, jax.ShapeDtypeStruct(rows, jnp.int32)
    shapes = nn.unbox(jax.eval_shape(CED(config).init, jax.random.key(0), *inputs)["params"])
    token_map = np.arange(config.vocab_size) % config.engram_compressed_vocab_size

    def fill(key: jax.Array) -> Any:
        leaves, tree = jax.tree.flatten(shapes)
        keys = jax.random.split(key, len(leaves))

        def leaf(key: jax.Array, shape: jax.ShapeDtypeStruct) -> jax.Array:
            if len(shape.shape) == 1:
                return jnp.ones(shape.shape, jnp.float32)
            return 0.02 * jax.random.normal(key, shape.shape, jnp.bfloat16)

        return jax.tree.unflatten(tree, list(map(leaf, keys, leaves)))

    return Weights.create(config, jax.jit(fill)(jax.random.key(0)), token_map)


def filled(config: ModelConfig, weights: Weights, batch: int, context: int) -> State:
    """Sequences of `context` tokens whose caches hold random values, with a page to spare."""
    pages = -(-context // PAGE_TOKENS) + 1
    table = np.arange(batch * pages, dtype=np.int32).reshape(batch, pages)
    state = State.create(config, weights, batch * pages, table)

    @functools.partial(jax.jit, donate_argnums=0)
    def fill(state: State) -> State:
        cache, few = state.cache, min(64, batch * pages)

        def random(rows: jax.Array, fmt: Any, seed: int) -> jax.Array:
            values = jax.random.normal(jax.random.key(seed), (few, rows.shape[1], fmt.channels))
            packed = fmt.pack(values)
            # The same few pages over and over: contents do not change the time.
            return packed[jnp.arange(rows.shape[0]) % few]

        main = tuple(random(x, cache.main_format, i) for i, x in enumerate(cache.main))
        keys = tuple(random(x, cache.key_format, 9 + i) for i, x in enumerate(cache.keys))
        length = jnp.full(batch, context, jnp.int32)

        def windows(held: Any, seed: int) -> Any:
            shape = (*held.rows.shape[:-1], held.format.channels)
            rows = held.format.pack(jax.random.normal(jax.random.key(seed), shape))
            return held.__class__(
                rows, jnp.zeros_like(length), length + 0, held.first_layer, held.format
            )

        names = dict(main=main, keys=keys, page_table=cache.page_table, lengths=length + 0)
        static = dict(
            sources=cache.sources, main_format=cache.main_format, key_format=cache.key_format
        )
        return State(
            positions=length,
            cache=cache.__class__(**names, **static),
            encoder=windows(state.encoder, 20),
            decoder=windows(state.decoder, 21),
            groups=state.groups,
            look_back=state.look_back,
            draft=None,
        )

    return fill(state)


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


def seconds(call: Callable[[], Any], repeats: int = 3) -> float:
    """Least time of a call whose result is waited for; the first call compiles."""
    jax.block_until_ready(call())
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(call())
        times.append(time.perf_counter() - start)
    return min(times)


def device_bytes() -> int | None:
    """Bytes in use on the device, where it tells."""
    stats = jax.devices()[0].memory_stats()
    return None if stats is None else stats["bytes_in_use"]


def decode_times(
    model: Model, contexts: Sequence[int], batches: Sequence[int]
) -> Iterator[dict[str, Any]]:
    """One row per context and batch."""
    config = model.config
    weights = random_weights(config)
    programs = Programs(model)
    for context in contexts:
        for batch in batches:
            row: dict[str, Any] = dict(what="decode", context=context, batch=batch)
            before = device_bytes()
            state = jax.block_until_ready(filled(config, weights, batch, context))
            arrays = state.cache.main + state.cache.keys
            held = sum(x.size * x.dtype.itemsize for x in arrays)
            row["cache_bytes_per_token"] = state.cache.bytes_per_token
            row["cache_bytes"] = held
            if before is not None:
                row["device_bytes"] = device_bytes() - before
            part = jax.jit(functools.partial(selection_and_attention, model))
            row["selection_attention_ms"] = 1e3 * seconds(lambda s=state, p=part: p(s, 0))
            sampling = Sampling.create(batch, np.ones(config.vocab_size, bool), temperature=0)
            stops = Stops.create(batch, limit=1_000_000)
            sequences = Sequences(
                last=jnp.full(batch, 5, jnp.int32),
                emitted=jnp.ones(batch, jnp.int32),
                recent=jnp.zeros((batch, 1), jnp.int32),
                finish=jnp.zeros(batch, jnp.int32),
            )
            start = time.perf_counter()
            arguments = (sampling, stops)
            state, sequences, chunk = programs.run(
                weights, state, sequences, *arguments, _STEPS, size=_STEPS
            )
            jax.block_until_ready(chunk)
            row["compile_seconds"] = time.perf_counter() - start
            times = []
            for _ in range(3):
                start = time.perf_counter()
                state, sequences, chunk = programs.run(
                    weights, state, sequences, *arguments, _STEPS, size=_STEPS
                )
                jax.block_until_ready(chunk)
                times.append(time.perf_counter() - start)
            row["step_ms"] = 1e3 * min(times) / _STEPS
            del state, sequences, chunk
            yield row


def prefill_times(model: Model, tokens: int, chunk: int) -> Iterator[dict[str, Any]]:
    """The two ways of prefill over one prompt."""
    config = model.config
    weights, programs = random_weights(config), Programs(model)
    prompt = np.random.default_rng(0).integers(3, 1000, tokens).astype(np.int32)
    pages = -(-tokens // PAGE_TOKENS)
    for exact in (False, True):
        times = []
        for _ in range(2):
            state = State.create(config, weights, pages, np.arange(pages)[None])
            start = time.perf_counter()
            logits, state = prefill(programs, weights, state, [prompt], chunk=chunk, exact=exact)
            jax.block_until_ready((logits, state))
            times.append(time.perf_counter() - start)
        yield dict(
            what="prefill",
            layers="all" if exact else "encoder and replay",
            tokens=tokens,
            chunk=chunk,
            seconds=times[1],
            with_compilation=times[0],
        )


def fill_times(model: Model, tokens: int, chunk: int) -> Iterator[dict[str, Any]]:
    """One long prompt; a row per doubling of what is done."""
    config = model.config
    weights, programs = random_weights(config), Programs(model)
    pages = -(-tokens // PAGE_TOKENS)
    state = State.create(config, weights, pages, np.arange(pages)[None])
    rng, start, report = np.random.default_rng(0), time.perf_counter(), chunk
    for done in range(0, tokens, chunk):
        prompt = rng.integers(3, 1000, min(chunk, tokens - done)).astype(np.int32)
        logits, state = prefill(programs, weights, state, [prompt], chunk=chunk)
        end = done + len(prompt)
        if end >= min(report, tokens):
            jax.block_until_ready((logits, state))
            report *= 2
            stats = jax.devices()[0].memory_stats() or {}
            yield dict(
                what="fill",
                tokens=end,
                seconds=time.perf_counter() - start,
                peak_bytes=stats.get("peak_bytes_in_use"),
                finite=bool(jnp.isfinite(logits).all()),
            )


def main(arguments: Sequence[str]) -> int:
    """Runs the command line; returns the exit status."""
    if any(argument in ("-h", "--help", "-help") for argument in arguments):
        print(__doc__)
        return 0
    values = flags.FlagValues()
    here = dict(flag_values=values)
    kinds = ["decode", "prefill", "fill"]
    flags.DEFINE_enum("what", "decode", kinds, "What to time.", **here)
    flags.DEFINE_list("contexts", ["4096", "16384", "65536", "262144", "1048576"], "", **here)
    flags.DEFINE_list("batches", ["1"], "Sequences at a time.", **here)
    flags.DEFINE_integer("tokens", 65536, "Of the prompt.", lower_bound=1, **here)
    flags.DEFINE_integer("chunk", 8192, "Prompt tokens per step.", lower_bound=1, **here)
    flags.DEFINE_string("implementation", None, "Of every op; its own choice if none.", **here)
    flags.DEFINE_string("json", None, "File to append the rows to.", **here)
    try:
        values(["eval.serving_bench", *arguments])
        numbers = [[int(x) for x in values[name].value] for name in ("contexts", "batches")]
    except (flags.Error, ValueError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    ops = ("sparse_attention", "indexer", "mhc", "grouped_matmul", "engram_gather", "fp4")
    kernels = Kernels(**dict.fromkeys(ops, values.implementation))
    model = Model(bench_model(), kernels)
    rows = {
        "decode": lambda: decode_times(model, *numbers),
        "prefill": lambda: prefill_times(model, values.tokens, values.chunk),
        "fill": lambda: fill_times(model, values.tokens, values.chunk),
    }[values.what]()
    for row in rows:
        row |= {"implementation": values.implementation, "device": jax.devices()[0].device_kind}
        print(json.dumps(row), flush=True)
        if values.json:
            with Path(values.json).open("a") as file:
                file.write(json.dumps(row) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
