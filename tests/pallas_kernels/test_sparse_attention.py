"""CSA2 attention against a float64 loop, recorded numbers, and a plain dense softmax."""

import functools
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import fp4
from pallas_kernels.sparse_attention import selected_mass, sparse_attention
from pallas_kernels.sparse_attention.cases import CASES, arguments

GOLDEN = Path(__file__).parents[1] / "golden" / "unit" / "sparse_attention.npz"


def keys_of(b, t, window_rows, window_lo, window_hi, main_rows, indices, main_lo, main_hi):
    """Float64 rows that query t sees (window first), and the slots its main rows stand in."""
    rows = [window_rows[b, s] for s in range(window_lo[b, t], window_hi[b, t])]
    slots = []
    if main_rows is not None:
        entries = main_rows.shape[1]
        if indices is None:
            slots = [(j, j) for j in range(max(main_lo[b, t], 0), min(main_hi[b, t], entries))]
        else:
            slots = [(k, j) for k, j in enumerate(indices[b, t]) if 0 <= j < entries]
        rows += [main_rows[b, j] for _, j in slots]
    return np.asarray(rows, np.float64), [k for k, _ in slots]


def loop_attention(args, keywords):
    """Out, lse and head-summed mass of the main slots, one query and head at a time, in float64."""
    q, window_rows, window_lo, window_hi, main_rows, indices, sink = args
    main_lo, main_hi = keywords.get("main_lo"), keywords.get("main_hi")
    batch, queries, heads, dim = q.shape
    q = np.asarray(q, np.float64)
    out = np.zeros(q.shape)
    lse = np.full(q.shape[:3], -np.inf)
    slots = 0
    if main_rows is not None:
        slots = main_rows.shape[1] if indices is None else indices.shape[-1]
    mass = np.zeros((batch, queries, slots))
    for b, t in np.ndindex(batch, queries):
        rows, at = keys_of(
            b, t, window_rows, window_lo, window_hi, main_rows, indices, main_lo, main_hi
        )
        if not len(rows):
            continue
        for h in range(heads):
            logits = rows @ q[b, t, h] * dim**-0.5
            lse[b, t, h] = np.logaddexp.reduce(logits)
            p = np.exp(logits - np.logaddexp(lse[b, t, h], np.float64(sink[h])))
            out[b, t, h] = p @ rows
            np.add.at(mass[b, t], at, p[len(rows) - len(at) :])
    return out, lse, mass


def run(args, keywords, **more):
    call = functools.partial(sparse_attention, **keywords, **more)
    out, lse = jax.jit(lambda *a: call(*a))(*args)
    return np.asarray(out, np.float64), np.asarray(lse, np.float64)


@pytest.mark.parametrize("name", CASES)
def test_equals_loop(name):
    args, keywords = arguments(CASES[name])
    expected_out, expected_lse, _ = loop_attention(args, keywords)
    out, lse = run(args, keywords)
    np.testing.assert_allclose(out, expected_out, atol=2e-6)
    np.testing.assert_allclose(lse, expected_lse, atol=2e-6)


@pytest.mark.parametrize("chunk", [1, 7, 16])
def test_chunks_change_nothing(chunk):
    args, keywords = arguments(CASES["packed"])
    expected_out, expected_lse, _ = loop_attention(args, keywords)
    out, lse = run(args, keywords, chunk=chunk)
    np.testing.assert_allclose(out, expected_out, atol=2e-6)
    np.testing.assert_allclose(lse, expected_lse, atol=2e-6)


def test_cases_cover_what_they_claim():
    args, _ = arguments(CASES["packed"])
    window_lo, window_hi, indices = args[2], args[3], args[5]
    assert (window_lo >= window_hi).any(), "padding without any key"
    assert (indices[:, :, 0] == -1).any() and (indices >= 0).all(-1).any()
    (*_, main_rows, indices, _), _ = arguments(CASES["untidy"])
    assert (indices < -1).any() and (indices >= main_rows.shape[1]).any()
    assert (np.diff(np.sort(np.where(indices < 0, -1, indices)), axis=-1) == 0).any()


@pytest.mark.parametrize("name", ["packed", "every_row"])
def test_packed_rows_are_what_they_unpack_to(name):
    args, keywords = arguments(CASES[name])
    q, window_rows, lo, hi, main_rows, indices, sink = args
    window_rows, main_rows = fp4.pack(window_rows, "fp8"), fp4.pack(main_rows, "fp4")
    ranges = {k: v for k, v in keywords.items() if k != "window"}
    packed = run((q, window_rows, lo, hi, main_rows, indices, sink), keywords, chunk=7)
    mass = selected_mass(q, main_rows, indices, packed[1].astype(np.float32), **ranges)
    window_rows, main_rows = fp4.unpack(window_rows, "fp8"), fp4.unpack(main_rows, "fp4")
    plain = run((q, window_rows, lo, hi, main_rows, indices, sink), keywords, chunk=7)
    for one, other in zip(packed, plain, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)
    expected = selected_mass(q, main_rows, indices, plain[1].astype(np.float32), **ranges)
    np.testing.assert_allclose(mass, expected, atol=1e-6)


@pytest.mark.parametrize(
    "dtype, key, tolerance", [(jnp.float32, "out_f32", 1e-5), (jnp.bfloat16, "out_bf16", 1e-2)]
)
def test_recorded_numbers(dtype, key, tolerance):
    golden = np.load(GOLDEN)
    queries, _, dim = golden["q"].shape
    nothing = jnp.zeros((1, queries), jnp.int32)
    out, lse = sparse_attention(
        jnp.asarray(golden["q"], dtype)[None],
        jnp.zeros((1, 1, dim), dtype),
        nothing,
        nothing,
        jnp.asarray(golden["kv"], dtype)[None],
        golden["idx"][None],
        golden["sink"],
        window=0,
        scale=float(golden["scale"]),
    )
    assert out.dtype == dtype and lse.dtype == jnp.float32
    np.testing.assert_allclose(np.asarray(out[0], np.float32), golden[key], atol=tolerance)
    assert (np.asarray(out[0, 0]) == 0).all() and (np.asarray(lse[0, 0]) == -np.inf).all()


def test_infinite_sinks():
    args, keywords = arguments(CASES["packed"])
    args = (*args[:-1], np.asarray([-np.inf, np.inf, 200.0], np.float32))
    expected, expected_lse, _ = loop_attention(args, keywords)
    out, lse = run(args, keywords)
    np.testing.assert_allclose(out, expected, atol=2e-6)
    np.testing.assert_allclose(lse, expected_lse, atol=2e-6)
    assert (out[:, :, 1] == 0).all()
    grads = gradients(args, keywords, lambda *a: sparse_attention(*a, **keywords))
    chex.assert_tree_all_finite(grads)


def test_bfloat16_is_close_to_the_loop_on_the_same_numbers():
    args, keywords = arguments(CASES["packed"], dtype=jnp.bfloat16)
    expected_out, expected_lse, _ = loop_attention(args, keywords)
    out, lse = run(args, keywords)
    np.testing.assert_allclose(out, expected_out, atol=2e-2)
    np.testing.assert_allclose(lse, expected_lse, atol=1e-5)


def dense_attention(q, window_rows, window_lo, window_hi, main_rows, indices, sink, main=None):
    """The definition with every row as a key and a multiplicity per query; no chunks, no gather."""
    rows, sees = [window_rows], [_in_range(window_lo, window_hi, window_rows.shape[1])]
    if main_rows is not None:
        rows.append(main_rows)
        if indices is None:
            sees.append(_in_range(*main, main_rows.shape[1]))
        else:
            sees.append((indices[..., None] == np.arange(main_rows.shape[1])).sum(axis=2))
    rows = jnp.concatenate(rows, axis=1)
    count = np.concatenate(sees, axis=-1).astype(np.float32)[:, :, None]
    logits = jnp.einsum("bthd,bkd->bthk", q, rows, precision="highest") * q.shape[-1] ** -0.5
    e = count * jnp.exp(logits)
    total = e.sum(-1)
    out = jnp.einsum("bthk,bkd->bthd", e, rows, precision="highest")
    out = out / (total + jnp.exp(sink))[..., None]
    any_key = count.sum(-1) > 0
    return out, jnp.where(any_key, jnp.log(jnp.where(any_key, total, 1)), -jnp.inf)


def _in_range(lo, hi, rows):
    return (np.arange(rows) >= lo[..., None]) & (np.arange(rows) < hi[..., None])


def gradients(args, keywords, function):
    """Gradients in q, window rows, main rows and sink of a random functional of out and lse."""
    rng = np.random.default_rng(5)
    weight_out = rng.normal(size=args[0].shape).astype(np.float32)
    weight_lse = rng.normal(size=args[0].shape[:3]).astype(np.float32)
    floating = [i for i in (0, 1, 4, 6) if args[i] is not None]

    def loss(*values):
        full = list(args)
        for i, value in zip(floating, values, strict=True):
            full[i] = value
        out, lse = function(*full)
        lse = jnp.where(lse > -jnp.inf, lse, 0)
        return (out.astype(jnp.float32) * weight_out).sum() + (lse * weight_lse).sum()

    argnums = tuple(range(len(floating)))
    return jax.jit(jax.grad(loss, argnums))(*(jnp.asarray(args[i]) for i in floating))


@pytest.mark.parametrize(
    "name, chunk",
    [("window_only", 7), ("packed", None), ("untidy", 7), ("every_row", 7), ("later_chunk", None)],
)
def test_gradients_equal_those_of_the_dense_softmax(name, chunk):
    args, keywords = arguments(CASES[name])
    main = (keywords.get("main_lo"), keywords.get("main_hi"))
    expected = gradients(args, keywords, functools.partial(dense_attention, main=main))
    actual = gradients(args, keywords, lambda *a: sparse_attention(*a, **keywords, chunk=chunk))
    chex.assert_tree_all_finite(actual)
    chex.assert_trees_all_close(actual, expected, atol=1e-5)


def test_gradient_of_bfloat16_rows_adds_up_in_float32():
    # 600 queries share one row: a bfloat16 running sum over their chunks would stall at 256.
    queries = 600
    q = jnp.zeros((1, queries, 1, 2), jnp.bfloat16)
    zero = jnp.zeros((1, queries), jnp.int32)
    indices = jnp.zeros((1, queries, 1), jnp.int32)

    def total(rows):
        sink = jnp.full(1, -jnp.inf)
        out, _ = sparse_attention(q, rows, zero, zero, rows, indices, sink, window=0, chunk=1)
        return out.astype(jnp.float32).sum()

    gradient = jax.jit(jax.grad(total))(jnp.ones((1, 1, 2), jnp.bfloat16))
    np.testing.assert_allclose(np.asarray(gradient, np.float32), queries, rtol=0.01)


@pytest.mark.parametrize("indexed", [True, False])
def test_backward_memory_does_not_hold_queries_times_rows(indexed):
    tokens, heads, dim = 4096, 4, 64

    def shape(*sizes, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(sizes, dtype)

    def loss(q, window_rows, main_rows, sink, lo, hi, indices):
        selection = (indices, {}) if indexed else (None, {"main_lo": lo, "main_hi": hi})
        args = (q, window_rows, lo, hi, main_rows, selection[0], sink)
        return sparse_attention(*args, window=32, **selection[1])[0].sum()

    rows, bound = shape(1, tokens, dim), shape(1, tokens, dtype=jnp.int32)
    indices = shape(1, tokens, 32, dtype=jnp.int32)
    arguments = (shape(1, tokens, heads, dim), rows, rows, shape(heads), bound, bound, indices)
    compiled = jax.jit(jax.grad(loss, (0, 1, 2, 3))).lower(*arguments).compile()
    all_logits = 4 * heads * tokens * tokens
    assert compiled.memory_analysis().temp_size_in_bytes < all_logits / 8


@pytest.mark.parametrize("name", ["packed", "untidy", "every_row"])
@pytest.mark.parametrize("chunk", [None, 7])
def test_selected_mass(name, chunk):
    args, keywords = arguments(CASES[name])
    q, _, _, _, main_rows, indices, sink = args
    _, lse, expected = loop_attention(args, keywords)
    lse_with_sink = np.logaddexp(lse, sink).astype(np.float32)
    ranges = {k: v for k, v in keywords.items() if k != "window"}

    def mass_of(q):
        return selected_mass(q, main_rows, indices, lse_with_sink, **ranges, chunk=chunk)

    mass = jax.jit(mass_of)(q)
    np.testing.assert_allclose(mass, expected, atol=2e-6)
    if chunk is None:
        assert not np.any(jax.grad(lambda q: mass_of(q).sum())(jnp.asarray(q)))


def test_selected_mass_without_keys_or_with_infinite_sink():
    args, _ = arguments(CASES["packed"])
    q, main_rows, indices = args[0], args[4], args[5]
    for lse in (-np.inf, np.inf):
        none = np.full_like(indices, -1) if lse < 0 else indices
        mass = selected_mass(q, main_rows, none, np.full(q.shape[:3], lse, np.float32))
        assert (np.asarray(mass) == 0).all()


def test_no_rows_and_no_slots():
    args, keywords = arguments(CASES["packed"])
    q, window_rows, window_lo, window_hi, main_rows, indices, sink = args
    alone, _ = run((q, window_rows, window_lo, window_hi, None, None, sink), keywords)
    for rows, slots in ((main_rows[:, :0], indices), (main_rows, indices[..., :0])):
        out, _ = run((q, window_rows, window_lo, window_hi, rows, slots, sink), keywords)
        np.testing.assert_array_equal(out, alone)
        mass = selected_mass(q, rows, slots, np.zeros(q.shape[:3], np.float32))
        assert mass.shape == slots.shape and not np.any(mass)


def test_vmap_over_layers():
    args, keywords = arguments(CASES["packed"])
    both = [np.stack([a, a[::-1]]) for a in args[:-1]]
    call = jax.vmap(lambda *a: sparse_attention(*a, args[-1], **keywords, chunk=16)[0])
    out = call(*both)
    np.testing.assert_allclose(out[0], out[1][::-1], atol=1e-6)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"main_rows": None}, "main_rows is None"),
        ({"indices": None}, "need main_lo and main_hi"),
        ({"sink": np.zeros(4)}, r"sink must be \[3\], got \[4\]"),
        ({"window_hi": np.zeros((2, 9), np.int32)}, r"window_hi must be \[2, 43\]"),
        ({"window_rows": np.zeros((2, 43, 16))}, r"window_rows must be \[2, rows, 32\]"),
        ({"main_rows": np.zeros((2, 43, 32), np.uint8)}, r"\[2, rows, 18\] in uint8"),
        ({"q": np.zeros((2, 43, 3, 32), np.int8)}, "q must be float32 or bfloat16"),
        ({"indices": np.zeros((2, 1, 6), np.int32)}, r"indices must be \[2, 43, K\]"),
        ({"window": -1}, "window must be at least 0"),
        ({"chunk": 0}, "chunk must be at least 1"),
        ({"implementation": "cuda"}, "no implementation"),
    ],
)
def test_bad_arguments(change, message):
    args, keywords = arguments(CASES["packed"])
    names = ("q", "window_rows", "window_lo", "window_hi", "main_rows", "indices", "sink")
    with pytest.raises(ValueError, match=message):
        sparse_attention(**(dict(zip(names, args, strict=True)) | keywords | change))
