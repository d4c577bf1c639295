"""The backward kernel on Hopper: numerics in interpret mode, compilation, and both on a GPU."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import measure
from pallas_kernels._compat import InterpretGPUParams
from pallas_kernels.sparse_attention import backward_cases, forward_cases, reference
from pallas_kernels.sparse_attention import mosaic_gpu_backward as kernel
from pallas_kernels.sparse_attention.cases import Case, arguments
from pallas_kernels.sparse_attention.mosaic_gpu_lanes import ordered

NAMES = ("q", "window_rows", "main_rows", "sink")
SMALL = Case(((9,),), 9, 9, heads=16, dim=512, window=3, ratio=1, selected=5, untidy=True)
ON_GPU = jax.default_backend() == "gpu"
pytestmark = pytest.mark.usefixtures("no_races")
needs_interpreter = pytest.mark.skipif(
    jax.__version_info__ < (0, 11),
    reason="interpret mode of jax < 0.11 has no transposed operands",
)
# Odd lengths, padding between documents, empty rows, fewer rows than slots, every kind of index.
MATRIX = {
    "heads 16": Case(((60, 3, 9), (43,)), 82, 82, 16, 512, window=17, ratio=2, selected=64),
    "heads 16 untidy": Case(((60, 3, 9),), 82, 82, 16, 512, 17, 2, selected=70, untidy=True),
    "heads 40": Case(((60, 3, 9),), 82, 82, 40, 512, 128, 1, selected=65, untidy=True),
    "heads 64": Case(((130, 3, 9),), 160, 160, 64, 512, 128, 1, selected=70),
    "heads 64 untidy": Case(((130, 3, 9),), 160, 160, 64, 512, 128, 1, selected=70, untidy=True),
    "heads 128": Case(((70, 3),), 77, 77, 128, 512, 128, 2, selected=64, untidy=True),
    "later chunk": Case(((145,), (90, 41)), 17, 145, 64, 512, 128, 2, selected=6),
    "one row": Case(((3,),), 3, 3, 64, 512, 2, 3, selected=8),
    "many rows": Case(((40000,),), 65, 40000, 64, 512, 128, 1, selected=512),
    "a million rows": Case(((2**20,),), 9, 2**20, 64, 512, 128, 1, selected=512),
    "window alone": Case(((130, 3, 9),), 160, 160, 64, 512, 128),
    "window alone, 16 heads": Case(((60, 3, 9),), 82, 82, 16, 512, 17),
}


def _cotangents(args, lse):
    rng = np.random.default_rng(1)
    d_out = jnp.asarray(rng.normal(size=args[0].shape), jnp.bfloat16)
    d_lse = jnp.asarray(rng.normal(size=args[0].shape[:3]), jnp.float32)
    return d_out, jnp.where(lse > -jnp.inf, d_lse, 0)


@functools.partial(jax.jit, static_argnames="window")
def _pullback(args, cotangents, window):
    q, window_rows, lo, hi, main_rows, indices, sink = args
    seen = (0, 0) if cotangents is None else cotangents

    def forward(q, window_rows, main_rows, sink):
        args = q, window_rows, lo, hi, main_rows, indices, sink
        return reference.sparse_attention(*args, window=window)

    result, pullback = jax.vjp(forward, q, window_rows, main_rows, sink)
    seen = jax.tree.map(lambda x, y: jnp.asarray(x, y.dtype) * jnp.ones_like(y), seen, result)
    return result, pullback(seen)


def _relative(actual, expected):
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    return np.linalg.norm(actual - expected) / max(np.linalg.norm(expected), 1e-30)


def _errors(case, sink=None, interpret=None, repeat=False):
    """{name: (error, error of the reference in bfloat16)}, both against float32."""
    args, keywords = arguments(case, dtype=jnp.bfloat16)
    if sink is not None:
        args = (*args[:-1], np.resize(np.asarray(sink, np.float32), case.heads))
    args = jax.tree.map(jnp.asarray, args)
    exact = jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x, args)
    window = keywords["window"]
    (out, lse), _ = _pullback(exact, None, window)
    cotangents = _cotangents(args, lse)
    expected = _pullback(exact, cotangents, window)[1]
    plain = _pullback(args, cotangents, window)[1]
    run = functools.partial(
        kernel.backward, window=window, scale=case.dim**-0.5, interpret=interpret
    )
    run = run if interpret else jax.jit(run)
    actual = run(*args, out, lse, *cotangents)
    if repeat:
        jax.tree.map(np.testing.assert_array_equal, actual, run(*args, out, lse, *cotangents))
    given = [args[i] for i in (0, 1, 4, 6)]
    dtype_of = functools.partial(jax.tree.map, lambda x: x.dtype)
    assert dtype_of(list(actual)) == dtype_of(given)
    return {
        name: (_relative(a, e), _relative(p, e))
        for name, a, p, e in zip(NAMES, actual, plain, expected, strict=True)
        if a is not None
    }


@needs_interpreter
def test_chunks_of_queries_that_share_rows_with_infinite_sinks(monkeypatch):
    # Three lists of four queries, two at a time: the last chunk has less to do than it has room.
    monkeypatch.setattr(kernel, "CONTRIBUTION_BYTES", 2 * 64 * 2 * kernel.DIM)
    errors = _errors(SMALL, [-np.inf, np.inf, 200.0, -300.0, 0.5], InterpretGPUParams())
    assert all(error < 5e-3 for error, _ in errors.values()), errors


@pytest.mark.slow
@needs_interpreter
@pytest.mark.parametrize("heads, selected", [(33, 65), (65, 3)])
def test_more_tiles_and_more_heads(heads, selected):
    case = dataclasses.replace(SMALL, heads=heads, selected=selected)
    errors = _errors(case, interpret=InterpretGPUParams(detect_races=True))
    assert all(error < 5e-3 for error, _ in errors.values()), errors


@pytest.mark.parametrize("piece", [1, 3, 100])
def test_every_entry_is_added_to_its_row_once(piece):
    rng = np.random.default_rng(0)
    rows = 7
    words = rng.integers(0, rows, 50, np.int32) << 4 | rng.integers(0, 3, 50, np.int32)
    words[(words >> 4) == 3] = 0
    order, pieces, starts = map(
        np.asarray, jax.jit(kernel._inverse, static_argnums=(1, 2))(words, rows, piece)
    )
    assert (np.diff(pieces) <= piece).all()
    for row in range(rows):
        mine = [order[pieces[p] : pieces[p + 1]] for p in range(starts[row], starts[row + 1])]
        mine = np.concatenate([np.zeros(0, np.int32), *mine])
        expected = np.flatnonzero((words >> 4 == row) & (words & 15 != 0))
        np.testing.assert_array_equal(mine, expected)


def test_order_of_stored_columns():
    # Thread q of four holds columns 8 b + 2 q + {0, 1}, and stores those of four blocks b in a row.
    memory = [8 * b + 2 * q + e for q in range(4) for b in range(4) for e in range(2)]
    stored = np.asarray([memory, [32 + c for c in memory]]).reshape(1, 64)
    np.testing.assert_array_equal(ordered(stored)[0], np.arange(64))


@pytest.mark.parametrize(
    "heads, members, splits",
    [(1, 4, 1), (16, 4, 1), (17, 2, 1), (33, 1, 1), (64, 1, 1), (65, 1, 2)],
)
def test_groups_have_64_rows(heads, members, splits):
    assert kernel._grouping(heads) == (members, splits)


def _shapes(heads, queries=130, dim=512, rows=300, selected=512, dtype=jnp.bfloat16):
    def shape(*sizes, dtype=dtype):
        return jax.ShapeDtypeStruct((1, *sizes), dtype)

    bound, lse = shape(queries, dtype=jnp.int32), shape(queries, heads, dtype=jnp.float32)
    q, keys = shape(queries, heads, dim), shape(rows, dim)
    indices = shape(queries, selected, dtype=jnp.int32)
    sink = jax.ShapeDtypeStruct((heads,), jnp.float32)
    return q, keys, bound, bound, keys, indices, sink, q, lse, q, lse


_call = functools.partial(kernel.backward, window=128, scale=512**-0.5)


@pytest.mark.parametrize("heads", [pytest.param(16, marks=pytest.mark.slow), 64])
def test_compiles_for_hopper(heads, recent_hopper):
    compiled = recent_hopper.compile(_call, *_shapes(heads))
    assert compiled.as_text().count("mosaic_gpu") >= 3


def test_chunks_bound_memory(monkeypatch):
    shapes = _shapes(64, queries=5, selected=64)
    assert "bf16[1,5,192,512]" in str(jax.make_jaxpr(_call)(*shapes))
    monkeypatch.setattr(kernel, "CONTRIBUTION_BYTES", 2 * 192 * 2 * kernel.DIM)
    program = str(jax.make_jaxpr(lambda *args: _call(*args))(*shapes))
    assert "bf16[1,2,192,512]" in program and "length=3" in program


@pytest.mark.parametrize("heads", [16, 64])
def test_window_alone(heads):
    shapes = list(_shapes(heads))
    shapes[4] = shapes[5] = None
    dq, d_window, d_main, d_sink = jax.eval_shape(_call, *shapes)
    assert d_main is None
    assert (dq.shape, d_window.shape, d_sink.shape) == (shapes[0].shape, (1, 300, 512), (heads,))


@pytest.mark.parametrize(
    "change, reason",
    [
        ({"dtype": jnp.float32}, "not float32"),
        ({"dim": 256}, "head_dim 512, not 256"),
    ],
)
def test_declines(change, reason):
    with pytest.raises(NotImplementedError, match=reason):
        jax.eval_shape(_call, *_shapes(64, **change))


@pytest.mark.parametrize(
    "rows, indices, reason",
    [(jnp.uint8, jnp.int32, "uint8 have no gradient"), (jnp.bfloat16, None, "by indices alone")],
)
def test_declines_rows(rows, indices, reason):
    q, keys = _shapes(64)[:2]
    main = jax.ShapeDtypeStruct((1, 300, 512), rows)
    with pytest.raises(NotImplementedError, match=reason):
        kernel.check(q, keys, main, indices)


@pytest.mark.parametrize("kind, shared", [("random", 0.2), ("local", 0.9)])
def test_indices_of_the_benchmark(kind, shared):
    indices = forward_cases.indices(8192, kind, 20, 512)
    assert (np.diff(indices) > 0).all() and indices.min() >= 0 and indices.max() < 8192
    both = [len(np.intersect1d(a, b)) for a, b in zip(indices, indices[1:], strict=False)]
    assert abs(np.mean(both) / 512 - shared) < 0.2


def test_benchmark(monkeypatch):
    monkeypatch.setattr(backward_cases, "QUERIES", 4)
    monkeypatch.setattr(backward_cases, "SELECTED", 32)
    monkeypatch.setitem(backward_cases.BENCHMARKS, "tiny", (2, 128, "local"))
    bench = backward_cases.benchmark("tiny")
    variant = bench.variants["backward"]
    expected = jax.jit(bench.reference)(*variant.arguments)
    error = measure.error(jax.jit(variant.function("xla"))(*variant.arguments), expected)
    assert 1e-4 < error < variant.tolerance
    if not ON_GPU:
        with pytest.raises(NotImplementedError, match="needs a GPU"):
            variant.function("mosaic_gpu")(*variant.arguments)


@pytest.mark.skipif(not ON_GPU, reason="needs a Hopper GPU")
@pytest.mark.parametrize("sink", [None, (-np.inf, np.inf, 200.0, -300.0, 0.5)])
@pytest.mark.parametrize("name", MATRIX)
def test_on_the_gpu(name, sink):
    for error, plain in _errors(MATRIX[name], sink, repeat=True).values():
        assert error <= 1e-2 and error <= 1.5 * plain + 1e-5
