"""Collectives are read out of compiled text, loops and device groups included."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh

from train import hlo

# The notations of several compilers, abridged.
TEXT = """HloModule jit_step

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%cond (p: (s32[], f32[8,4])) -> pred[] {
  %limit = s32[]{:T(128)} constant(5)
  %p = (s32[], f32[8,4]{1,0}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%p), index=0
  ROOT %less = pred[]{:T(512)} compare(%i, %limit), direction=LT
}

%body (p: (s32[], f32[8,4])) -> (s32[], f32[8,4]) {
  %p = (s32[], f32[8,4]{1,0}) parameter(0)
  %x = f32[8,4]{1,0:T(8,128)} get-tuple-element(%p), index=1
  %r = f32[8,4]{1,0} all-reduce(%x), replica_groups=[4,2]<=[2,2,2]T(0,2,1), to_apply=%add
  ROOT %t = (s32[], f32[8,4]{1,0}) tuple(%i, %r)
}

ENTRY %main (x: f32[8,4]) -> f32[16,4] {
  %x = f32[8,4]{1,0} parameter(0)
  %w = (s32[], f32[8,4]{1,0}) while(%init), condition=%cond, body=%body
  %g = f32[16,4]{1,0} all-gather(%x), replica_groups=mesh['a'=2,'b'=2,'c'=2] {'b'}, dimensions={0}
  %s = (bf16[8,4]{1,0}, bf16[8,4]{1,0}, u32[]) collective-permute-start(%x), {PAIRS}
  %h = f32[32,4]{1,0} all-gather(%x), {ORDERED}, dimensions={0}
  %d = bf16[8,4]{1,0} collective-permute-done(%s)
  ROOT %e = f32[16,4]{1,0} all-to-all(%g), {GROUPS}, {NAME}
}
"""
for word, notation in {
    "{PAIRS}": "source_target_pairs={{0,1},{2,3}}",
    "{ORDERED}": "replica_groups=mesh['i'=2,'j'=2,'k'=2], device_ids=([2,4]T(1,0)) {'k'}",
    "{GROUPS}": "replica_groups={{0,4},{1,5},{2,6},{3,7}}",
    "{NAME}": 'metadata={op_name="jit(step)/moe"}',
}.items():
    TEXT = TEXT.replace(word, notation)
MESH = AbstractMesh((2, 2, 2), ("a", "b", "c"))


def test_largest_copy():
    assert hlo.largest_copy(TEXT) == (0, "")
    copies = """
  %c = f32[8,4]{0,1} copy(%x)
  %k = u8[512,128,68]{2,1,0:T(8,128)(4,1)} copy(%keys), metadata={op_name="copy"}
  %s = (bf16[64,4]{1,0}, bf16[64,4]{1,0}, u32[]) copy-start(%y)
  %f = f32[1024,1024]{1,0} fusion(%x), kind=kLoop, calls=%no_copies
"""
    assert hlo.largest_copy(TEXT + copies) == (512 * 128 * 68, "u8[512,128,68]")
    # An argument that takes no result's place has to be copied.
    compiled = jax.jit(lambda x, y: (x, y)).lower(jnp.zeros((6, 7), jnp.bfloat16), 1.0).compile()
    assert hlo.largest_copy(compiled.as_text()) == (84, "bf16[6,7]")


def test_collectives_of_every_notation():
    found = {one.kind: one for one in hlo.collectives(TEXT) if one.elements != 128}
    assert set(found) == {"all-reduce", "all-gather", "collective-permute", "all-to-all"}
    reduce, gather = found["all-reduce"], found["all-gather"]
    assert (reduce.times, reduce.bytes) == (5, 128)
    assert hlo.axes_of(MESH, reduce.groups) == {"b"}
    assert (gather.times, gather.elements, gather.bytes) == (1, 64, 256)
    assert hlo.axes_of(MESH, gather.groups) == {"b"}
    assert found["collective-permute"].bytes == 64
    assert hlo.axes_of(MESH, found["collective-permute"].groups) == {"c"}
    (ordered,) = (one for one in hlo.collectives(TEXT) if one.elements == 128)
    # Devices 0 4 1 5 2 6 3 7 along i, j, k.
    assert ordered.groups == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert found["all-to-all"].op_name == "jit(step)/moe"
    assert hlo.axes_of(MESH, found["all-to-all"].groups) == {"a"}


def test_groups_in_an_unknown_notation_are_an_error():
    unknown = TEXT.replace("replica_groups={{0,4}", "replica_groups=other{{0,4}")
    with pytest.raises(ValueError, match="unknown notation"):
        hlo.collectives(unknown)


@pytest.mark.parametrize(("dtype", "size"), [("f32", 4), ("bf16", 2), ("pred", 1), ("s4", 0.5)])
def test_bytes_of_an_element(dtype, size):
    assert hlo.item_bytes(dtype) == size


def test_products_count_with_their_loops():
    def function(x, w):
        def body(x, _):
            return jax.checkpoint(lambda x: jnp.tanh(x @ w))(x), None

        return jax.lax.scan(body, x, None, length=7)[0]

    x, w = np.zeros((3, 4), np.float32), np.zeros((4, 4), np.float32)
    once = 2 * 3 * 4 * 4
    assert hlo.dot_flops(jax.make_jaxpr(function)(x, w).jaxpr) == 7 * once
    # Forward, forward again, and two products backward.
    gradient = jax.grad(lambda x, w: jnp.sum(function(x, w)), argnums=(0, 1))
    assert hlo.dot_flops(jax.make_jaxpr(gradient)(x, w).jaxpr) == 4 * 7 * once
