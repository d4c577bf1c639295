"""The attention kernels for TPUs: interpreted against the reference, and compiled."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

from pallas_kernels import fp4
from pallas_kernels.sparse_attention import (
    Fp4Table,
    mosaic_tpu,
    mosaic_tpu_backward,
    mosaic_tpu_mass,
    mosaic_tpu_packed,
    mosaic_tpu_rows,
    reference,
    selected_mass,
    sparse_attention,
)
from pallas_kernels.sparse_attention.cases import CASES, Case, arguments

# With blocks of two queries two of them in a batch row, the last of which has padding.
MIXED = Case(((2,), (3,)), 3, 3, heads=3, dim=256, window=2, ratio=1, selected=4, untidy=True)
SINKS = np.float32([0.5, np.inf, -np.inf])
LISTED = [name for name, case in CASES.items() if case.selected or not case.ratio]


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(mosaic_tpu_rows, "BLOCK_QUERIES", 2)
    monkeypatch.setattr(mosaic_tpu_backward, "OWNED", 8)
    monkeypatch.setattr(mosaic_tpu_backward, "TOGETHER", 16)


def on_device(args):
    return jax.tree.map(jnp.asarray, args)


def relative(actual, expected):
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    return np.linalg.norm(actual - expected) / max(np.linalg.norm(expected), 1e-30)


def exactly(args):
    return jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x, args)


def check_result(result, exact, plain):
    """Out and lse; bfloat16 as exact as the reference's own, where that is given."""
    out, lse = result
    expected, expected_lse = exact
    keys = np.asarray(expected_lse) > -np.inf
    np.testing.assert_array_equal(np.asarray(lse) > -np.inf, keys)
    np.testing.assert_allclose(np.asarray(lse)[keys], np.asarray(expected_lse)[keys], atol=1e-5)
    assert not np.any(np.asarray(out, np.float32)[~keys])
    if out.dtype == jnp.float32:
        np.testing.assert_allclose(out, expected, atol=2e-6)
    else:
        error = relative(out, expected)
        assert error <= 1e-2 and (plain is None or error <= 1.5 * relative(plain[0], expected))


def check_forward(args, keywords, interpreted):
    args = on_device(args)
    call = functools.partial(mosaic_tpu.sparse_attention, interpret=interpreted, **keywords)
    expected = jax.jit(functools.partial(reference.sparse_attention, **keywords))
    result = jax.jit(call)(*args)
    assert result[0].dtype == args[0].dtype
    check_result(result, expected(*exactly(args)), expected(*args))


@functools.partial(jax.jit, static_argnums=0)
def with_gradients(function, args, cotangents):
    """Results, and gradients in q, window rows, main rows and sink."""
    q, window_rows, lo, hi, main_rows, indices, sink = args

    def forward(q, window_rows, main_rows, sink):
        return function(q, window_rows, lo, hi, main_rows, indices, sink)

    result, pullback = jax.vjp(forward, q, window_rows, main_rows, sink)
    d_out, d_lse = cotangents
    return result, pullback((d_out.astype(q.dtype), jnp.where(result[1] > -jnp.inf, d_lse, 0.0)))


def check_gradients(args, keywords, interpreted, *, quick=False):
    """Results and every gradient, of random cotangents."""
    args = on_device(args)
    rng = np.random.default_rng(1)
    shape = args[0].shape
    cotangents = rng.normal(size=shape), rng.normal(size=shape[:3])
    cotangents = tuple(jnp.asarray(x, jnp.bfloat16).astype(jnp.float32) for x in cotangents)
    expected = functools.partial(reference.sparse_attention, **keywords)
    exact, exact_gradients = with_gradients(expected, exactly(args), cotangents)
    plain, plain_gradients = None, [None] * 4
    if not quick:
        plain, plain_gradients = with_gradients(expected, args, cotangents)
    call = functools.partial(mosaic_tpu.sparse_attention, interpret=interpreted, **keywords)
    result, gradients = with_gradients(call, args, cotangents)
    check_result(result, exact, plain)
    values = [x for x in (args[0], args[1], args[4], args[6]) if x is not None]
    assert [x.dtype for x in jax.tree.leaves(gradients)] == [x.dtype for x in values]
    for gradient, exact, plain in zip(gradients, exact_gradients, plain_gradients, strict=True):
        if exact is None:
            continue
        error = relative(gradient, exact)
        if args[0].dtype == jnp.float32:
            assert error <= 1e-5
        else:
            # `out` reaches the backward pass rounded.
            own = 1.0 if plain is None else relative(plain, exact)
            if gradient.ndim == 1:
                # The sink's few numbers may happen to be nearer than bfloat16 rounds.
                own = max(own, 2.0**-8)
            assert error <= 1e-2 and error <= 1.5 * own + 2e-3


def test_result_and_gradients(small_blocks, interpreted):
    args, keywords = arguments(MIXED, jnp.bfloat16)
    check_gradients((*args[:-1], SINKS), keywords, interpreted, quick=True)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
@pytest.mark.parametrize("name", LISTED)
def test_gradients_of_every_case(name, dtype, interpreted):
    check_gradients(*arguments(dataclasses.replace(CASES[name], dim=256), dtype), interpreted)


@pytest.mark.slow
def test_gradients_of_contributions_in_chunks(small_blocks, interpreted, monkeypatch):
    monkeypatch.setattr(mosaic_tpu_backward, "CONTRIBUTION_BYTES", 1)
    case = dataclasses.replace(MIXED, window=0)
    check_gradients(*arguments(case, jnp.bfloat16), interpreted, quick=True)


@pytest.mark.slow
@pytest.mark.parametrize("entries, rows, most", [(45, 11, 20), (300, 135, 140)])
def test_sum_by_row(entries, rows, most, interpreted, request):
    """Several pieces of entries and of rows, a row with more entries than a piece."""
    if entries < 100:
        request.getfixturevalue("small_blocks")
    rng = np.random.default_rng(0)
    keys = rng.integers(-2, rows + 2, entries).astype(np.int32)
    keys[:most] = rows - 3
    inside = (keys >= 0) & (keys < rows)
    added = rng.normal(size=(entries, 256)).astype(jnp.bfloat16)
    expected = np.zeros((rows, 256))
    np.add.at(expected, keys[inside], added[inside].astype(np.float64))
    added[~inside] = np.nan
    added = mosaic_tpu_rows.words_of(jnp.asarray(added))
    actual = mosaic_tpu_backward.sum_by_row(added, keys, rows, 256, interpret=interpreted)
    np.testing.assert_allclose(actual, expected, atol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, pytest.param(np.float32, marks=pytest.mark.slow)])
def test_mass(dtype, small_blocks, interpreted):
    q, _, _, _, main_rows, indices, _ = on_device(arguments(MIXED, dtype)[0])
    lse = jnp.full(q.shape[:3], 3.0).at[0, 0].set(-jnp.inf).at[0, 1].set(jnp.inf)
    call = functools.partial(mosaic_tpu_mass.selected_mass, interpret=interpreted)
    mass = jax.jit(call)(q, main_rows, indices, lse)
    expected = jax.jit(reference.selected_mass)(q, main_rows, indices, lse)
    np.testing.assert_allclose(mass, expected, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
@pytest.mark.parametrize("dim", [32, 256])
@pytest.mark.parametrize("name", LISTED)
def test_forward_of_every_case(name, dim, dtype, interpreted):
    args, keywords = arguments(dataclasses.replace(CASES[name], dim=dim), dtype)
    check_forward(args, keywords, interpreted)


@pytest.mark.slow
def test_packed_rows(small_blocks, interpreted):
    (q, window_rows, lo, hi, main_rows, indices, _), keywords = arguments(MIXED, jnp.bfloat16)
    window_rows, main_rows = fp4.pack(window_rows, "fp8"), fp4.pack(main_rows, "fp4")
    check_forward((q, window_rows, lo, hi, main_rows, indices, SINKS), keywords, interpreted)


@pytest.mark.slow
@pytest.mark.parametrize("selected", [128, 300])
def test_whole_tiles(selected, interpreted):
    case = dataclasses.replace(MIXED, selected=selected, heads=17, window=0)
    check_forward(*arguments(case, jnp.bfloat16), interpreted)


def decode_arguments(sequences=2, tables=1, queries=1):
    """Sequences that share one table, or have one each."""
    rng = np.random.default_rng(0)

    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape), jnp.bfloat16)

    table = Fp4Table.pack(fp4.pack(4 * normal(tables, 48, 512), "fp4"))
    indices = rng.integers(-2, 50, (sequences, queries, 20)).astype(np.int32)
    hi = np.int32(np.arange(5, 5 + queries) + np.zeros((sequences, 1)))
    return normal(sequences, queries, 3, 512), normal(sequences, 9, 512), hi - 4, hi, table, indices


@pytest.mark.slow
@pytest.mark.parametrize("tables, queries", [(1, 1), (3, 2)])
def test_decode_from_a_table(tables, queries, interpreted):
    args = decode_arguments(3, tables, queries)
    check_forward((*args, SINKS), {"window": 4}, interpreted)


def test_values_of_a_table():
    """All codes of elements, and scales from the smallest."""
    rng = np.random.default_rng(0)
    rows = rng.integers(0, 256, (1, 32, 288)).astype(np.uint8)
    rows[..., 256:] = np.arange(1024).reshape(32, 32) % 0x7F
    table = Fp4Table.pack(rows)
    np.testing.assert_array_equal(table.rows(), rows)
    entry = np.arange(32)

    def kernel(elements_ref, scales_ref, entry_ref, out_ref):
        read = elements_ref[...], scales_ref[...], entry_ref[...]
        out_ref[...] = mosaic_tpu_packed.values(*read, jnp.bfloat16)

    actual = pl.pallas_call(
        kernel, out_shape=jax.ShapeDtypeStruct((32, 512), jnp.bfloat16), interpret=True
    )(table.elements[0, entry // 2], table.scales[0, entry // 16], entry[:, None])
    expected = jax.jit(fp4.unpack, static_argnums=(1, 2))(rows[0], "fp4", jnp.bfloat16)
    np.testing.assert_array_equal(mosaic_tpu_packed.restored(actual), expected)
    np.testing.assert_array_equal(actual, mosaic_tpu_packed.ordered(expected))


def test_tables_that_there_are_not():
    with pytest.raises(ValueError, match=r"uint8 \[X, R, 288\], got uint8\[1, 16, 18\]"):
        Fp4Table.pack(np.zeros((1, 16, 18), np.uint8))
    with pytest.raises(ValueError, match="R must be a multiple of 16, got 8"):
        Fp4Table.pack(np.zeros((1, 8, 288), np.uint8))
    q, window_rows, lo, hi, table, indices, sink = decode_shapes(entries=48)
    with pytest.raises(ValueError, match="512 channels, the queries have 256"):
        narrow = jax.ShapeDtypeStruct((2, 1, 16, 256), q.dtype), jnp.zeros((2, 9, 256))
        sparse_attention(*narrow, lo, hi, table, indices, sink, window=4)
    broken = table._replace(scales=jnp.zeros((1, 1, 128), jnp.int32))
    with pytest.raises(ValueError, match=r"got \[1, 24, 128\] and \[1, 1, 128\]"):
        sparse_attention(q, window_rows, lo, hi, broken, indices, sink, window=4)


def test_tables_hold_the_rows():
    rows = np.random.default_rng(0).normal(size=(5, 512)).astype(jnp.bfloat16)
    table = mosaic_tpu_rows.table_of(rows, jnp.bfloat16)
    assert (table.shape, table.dtype) == ((5, 256), jnp.int32)
    np.testing.assert_array_equal(mosaic_tpu_rows.values_of(table, jnp.bfloat16), rows)
    wide = mosaic_tpu_rows.table_of(rows[:, :128], jnp.bfloat16)
    assert wide.dtype == jnp.float32
    np.testing.assert_array_equal(mosaic_tpu_rows.values_of(wide, jnp.bfloat16), rows[:, :128])


def shapes(heads=16, queries=16, slots=128, dim=512, dtype=jnp.bfloat16, rows=512, main=True):
    """Of a call."""

    def shape(*sizes, dtype=dtype):
        return jax.ShapeDtypeStruct((1, *sizes), dtype)

    bound = shape(queries, dtype=jnp.int32)
    return (
        shape(queries, heads, dim),
        shape(queries, dim),
        bound,
        bound,
        shape(rows, dim) if main else None,
        shape(queries, slots, dtype=jnp.int32) if main else None,
        jax.ShapeDtypeStruct((heads,), jnp.float32),
    )


def everything(window, args, decode):
    """All kernels of the op."""
    call = functools.partial(sparse_attention, implementation="mosaic_tpu", window=window)
    q, indices = args[0], args[5]
    cotangents = jnp.ones(q.shape, q.dtype), jnp.ones(q.shape[:3])
    result, gradients = with_gradients(call, args, cotangents)
    mass = None
    if indices is not None:
        mass = selected_mass(q, args[4], indices, result[1], implementation="mosaic_tpu")
    return result, gradients, mass, call(*decode)


def check_compiles(tpu, window, args, decode):
    compiled = tpu.compile(functools.partial(everything, window), args, decode)
    # Forward and decode, backward; with main rows also their sum and the mass.
    kernels = 3 if args[4] is None else 5
    assert compiled.as_text().count("tpu_custom_call") == kernels
    table = sum(x.size * x.dtype.itemsize for x in decode[4])
    assert compiled.memory_analysis().temp_size_in_bytes < table / 4


def test_compiles_without_a_copy_of_the_cache(tpu):
    check_compiles(tpu, 16, shapes(slots=16), decode_shapes())


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [
        {"heads": 64, "slots": 512},
        {"heads": 128, "slots": 1024},
        {"dtype": jnp.float32},
        {"main": False},
        {"queries": 1, "slots": 512},
        {"heads": 3, "queries": 11, "dim": 32, "slots": 6},
    ],
)
def test_other_shapes_compile(tpu, change):
    check_compiles(tpu, 128, shapes(**change), decode_shapes(heads=64, slots=512))


def decode_shapes(sequences=2, heads=16, slots=16, entries=2**20):
    """A token each of sequences that share one table."""

    def shape(*sizes, dtype=jnp.int32):
        return jax.ShapeDtypeStruct(sizes, dtype)

    bound, table = (
        shape(sequences, 1),
        Fp4Table(shape(1, entries // 2, 128), shape(1, entries // 16, 128)),
    )
    return (
        shape(sequences, 1, heads, 512, dtype=jnp.bfloat16),
        shape(sequences, 129, 512, dtype=jnp.bfloat16),
        bound,
        bound,
        table,
        shape(sequences, 1, slots),
        shape(heads, dtype=jnp.float32),
    )


def test_table_of_rows_is_made_in_one_pass(tpu):
    rows = jax.ShapeDtypeStruct((8192, 512), jnp.bfloat16)
    compiled = tpu.compile(lambda x: mosaic_tpu_rows.table_of(x, x.dtype), rows)
    assert compiled.memory_analysis().temp_size_in_bytes < 2**20


def test_declines():
    args, keywords = arguments(MIXED)
    with pytest.raises(NotImplementedError, match="needs a TPU, the platform is cpu"):
        sparse_attention(*args, implementation="mosaic_tpu", **keywords)
    call = functools.partial(mosaic_tpu.sparse_attention, interpret="any")
    with pytest.raises(NotImplementedError, match="needs indices"):
        call(*args[:5], None, args[6], **keywords)
    with pytest.raises(NotImplementedError, match="no row that could be a key"):
        call(*args[:4], None, None, args[6], window=0)
    many = shapes(heads=4096)
    with pytest.raises(NotImplementedError, match="4096 heads, 128 keys and head_dim 512 would"):
        jax.eval_shape(functools.partial(call, window=128), *many)
