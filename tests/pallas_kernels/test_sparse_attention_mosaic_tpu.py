"""The attention kernels for TPUs: interpreted against the reference, and compiled."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import fp4
from pallas_kernels.sparse_attention import mosaic_tpu, mosaic_tpu_rows, reference, sparse_attention
from pallas_kernels.sparse_attention.cases import CASES, Case, arguments

# With blocks of two queries two of them in a batch row, the last of which has padding.
MIXED = Case(((2,), (3,)), 3, 3, heads=3, dim=256, window=2, ratio=1, selected=4, untidy=True)
SINKS = np.float32([0.5, np.inf, -np.inf])
LISTED = [name for name, case in CASES.items() if case.selected or not case.ratio]


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(mosaic_tpu_rows, "BLOCK_QUERIES", 2)


def on_device(args):
    return tuple(None if x is None else jnp.asarray(x) for x in args)


def relative(actual, expected):
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    return np.linalg.norm(actual - expected) / max(np.linalg.norm(expected), 1e-30)


def check_forward(args, keywords, interpreted):
    """Out and lse as the reference has them; bfloat16 as exact as the reference's own."""
    args = on_device(args)
    call = functools.partial(mosaic_tpu.sparse_attention, interpret=interpreted, **keywords)
    out, lse = jax.jit(call)(*args)
    exact = jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x, args)
    reference_call = jax.jit(functools.partial(reference.sparse_attention, **keywords))
    expected, expected_lse = reference_call(*exact)
    keys = np.asarray(expected_lse) > -np.inf
    assert out.dtype == args[0].dtype
    np.testing.assert_array_equal(np.asarray(lse) > -np.inf, keys)
    np.testing.assert_allclose(np.asarray(lse)[keys], np.asarray(expected_lse)[keys], atol=1e-5)
    assert not np.any(np.asarray(out, np.float32)[~keys])
    if out.dtype == jnp.float32:
        np.testing.assert_allclose(out, expected, atol=2e-6)
    else:
        plain, _ = reference_call(*args)
        error = relative(out, expected)
        assert error <= 1e-2 and error <= 1.5 * relative(plain, expected)


@pytest.mark.parametrize("packed", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_forward(packed, small_blocks, interpreted):
    (q, window_rows, lo, hi, main_rows, indices, _), keywords = arguments(MIXED, jnp.bfloat16)
    if packed:
        window_rows, main_rows = fp4.pack(window_rows, "fp8"), fp4.pack(main_rows, "fp4")
    check_forward((q, window_rows, lo, hi, main_rows, indices, SINKS), keywords, interpreted)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
@pytest.mark.parametrize("dim", [32, 256])
@pytest.mark.parametrize("name", LISTED)
def test_forward_of_every_case(name, dim, dtype, interpreted):
    args, keywords = arguments(dataclasses.replace(CASES[name], dim=dim), dtype)
    check_forward(args, keywords, interpreted)


@pytest.mark.slow
@pytest.mark.parametrize("selected", [128, 300])
def test_whole_tiles(selected, interpreted):
    case = dataclasses.replace(MIXED, selected=selected, heads=17, window=0)
    check_forward(*arguments(case, jnp.bfloat16), interpreted)


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


def test_compiles(tpu):
    call = functools.partial(sparse_attention, implementation="mosaic_tpu", window=128)
    compiled = tpu.compile(call, *shapes())
    assert compiled.as_text().count("tpu_custom_call") == 1


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
    call = functools.partial(sparse_attention, implementation="mosaic_tpu", window=128)
    tpu.compile(call, *shapes(**change))


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
