"""The Engram look-up's TPU kernel: interpreted against XLA's form, and compiled for TPUs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import fp4
from pallas_kernels.engram_gather import engram_gather, mosaic_tpu, reference

SHAPES = {"small": (90, (3, 13), 4), "odd": (90, (70,), 3), "tiles": (300, (2, 65), 8)}


def arguments(name, channels):
    """(table, rows) with rows that repeat, are absent, and are out of range."""
    count, lead, each = SHAPES[name]
    rng = np.random.default_rng(0)
    table = rng.normal(size=(count, channels)).astype(np.float32)
    rows = rng.integers(count, size=(*lead, each))
    rows = np.where(rng.random(rows.shape) < 0.2, rng.choice([-1, -7, count, 1 << 30]), rows)
    return jnp.asarray(table), jnp.asarray(rows, jnp.int32)


def packed_table(count, seed=0):
    """Any bytes: every code and every scale, NaN among them."""
    size = (count, fp4.row_bytes("fp8", 256))
    return jnp.asarray(np.random.default_rng(seed).integers(256, size=size), jnp.uint8)


def check_floats(name, interpret):
    table, rows = arguments(name, 128)
    for dtype in (None, jnp.bfloat16):
        ours = mosaic_tpu.engram_gather(table, rows, dtype, interpret=interpret)
        np.testing.assert_array_equal(ours, reference.engram_gather(table, rows, dtype))


def check_packed(name, interpret, dtype=jnp.bfloat16):
    _, rows = arguments(name, 128)
    table = packed_table(SHAPES[name][0])
    layout = mosaic_tpu.to_layout(table)
    ours = jax.jit(functools.partial(mosaic_tpu.engram_gather, dtype=dtype, interpret=interpret))(
        layout, rows
    )
    # Rows that the layout adds are in range, and zero.
    expected = reference.engram_gather(mosaic_tpu.from_layout(layout), rows, dtype)
    np.testing.assert_array_equal(np.asarray(ours, np.float32), np.asarray(expected, np.float32))


def test_packed(interpreted):
    check_packed("small", interpreted)


@pytest.mark.slow
@pytest.mark.parametrize("name", SHAPES)
def test_every_shape(interpreted, name):
    check_floats(name, interpreted)
    check_packed(name, interpreted, jnp.float32)


@pytest.mark.slow
def test_gradient(interpreted):
    table, rows = arguments("small", 128)
    kernel = functools.partial(mosaic_tpu.engram_gather, interpret=interpreted)
    grad = jnp.asarray(np.random.default_rng(1).normal(size=(3, 13, 4 * 128)), jnp.float32)
    ours, theirs = (
        jax.vjp(lambda t, f=f: f(t, rows), table)[1](grad)[0]
        for f in (kernel, reference.engram_gather)
    )
    np.testing.assert_allclose(ours, theirs, atol=1e-5)
    named = np.asarray(rows)[(np.asarray(rows) >= 0) & (np.asarray(rows) < len(table))]
    assert set(np.flatnonzero(np.asarray(ours).any(axis=1))) == set(named)


def test_layout_and_back():
    table = packed_table(70)
    back = mosaic_tpu.from_layout(mosaic_tpu.to_layout(table))
    np.testing.assert_array_equal(back[:70], table)
    assert not np.asarray(back[70:]).any()
    with pytest.raises(ValueError, match=r"must be uint8\[N, 264\]"):
        mosaic_tpu.to_layout(table[:, :-1])


def test_what_is_declined():
    rows = jnp.zeros((2, 4), jnp.int32)
    with pytest.raises(NotImplementedError, match="needs a TPU"):
        engram_gather(jnp.ones((8, 128)), rows, implementation="mosaic_tpu")
    gather = functools.partial(mosaic_tpu.engram_gather, interpret=object())
    with pytest.raises(NotImplementedError, match="takes those of to_layout"):
        gather(packed_table(8), rows)
    for table in (jnp.ones((8, 96)), jnp.ones((8, 128), jnp.bfloat16)):
        with pytest.raises(NotImplementedError, match="c a multiple of 128"):
            gather(table, rows)


def compile_for(tpu, table, tokens, each=24):
    gather = functools.partial(engram_gather, dtype=jnp.bfloat16, implementation="mosaic_tpu")
    rows = jax.ShapeDtypeStruct((1, tokens, each), jnp.int32)
    compiled = tpu.compile(gather, table, rows)
    assert compiled.as_text().count('custom_call_target="tpu_custom_call"') == 1
    # The row numbers in two orders; never the table.
    assert compiled.memory_analysis().temp_size_in_bytes < 16 * tokens * each + 2**20


def packed_shape(count):
    return jax.eval_shape(mosaic_tpu.to_layout, jax.ShapeDtypeStruct((count, 264), jnp.uint8))


def test_compiles(tpu):
    compile_for(tpu, packed_shape(4_000_000), 64, each=4)


@pytest.mark.slow
def test_published_shapes_compile(tpu):
    compile_for(tpu, packed_shape(4_000_000), 16384)
    compile_for(tpu, jax.ShapeDtypeStruct((4_000_000, 256), jnp.float32), 16384)
