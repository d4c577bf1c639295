"""Bias-free linear maps as einsums over parameters that keep their head and group axes.

A weight is a float array, or `Packed`: the FP8 or FP4 values and scales of a published checkpoint,
dequantised where they are multiplied. `weight` declares one or the other by `config.weight_form`,
so that a module is written once for both.
"""

from __future__ import annotations

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp

from pallas_kernels import fp4
from v41flash import quant
from v41flash.config import ModelConfig
from v41flash.layout import Layout
from v41flash.sharding import local_shape, partitioned

# Formats of `pallas_kernels.fp4` that elements are in, with their bits.
_BITS = {"fp8": 8, "mxfp4": 4}


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["elements", "scales"],
    meta_fields=["layout", "fmt", "block", "activation_format"],
)
@dataclasses.dataclass(frozen=True)
class Packed:
    """A weight as it is published.

    Attributes:
        elements: uint8 [*stack, out, in * bits / 8], E4M3 or pairs of E2M1 along in.
        scales: uint8 [*stack, ceil(out / block), in / 32], E8M0.
        layout: how the weight that the model knows lies in it.
        fmt: "fp8" or "mxfp4".
        block: rows that share scales.
        activation_format: what inputs are rounded to before the product, "fp8" or "none".
    """

    elements: jax.Array
    scales: jax.Array
    layout: Layout
    fmt: str
    block: int
    activation_format: str

    def dense(self, dtype: jax.typing.DTypeLike) -> jax.Array:
        """The weight; bfloat16 holds every value exactly."""
        scales = self.scales
        if self.block > 1:
            scales = jnp.repeat(scales, self.block, axis=-2)
            scales = scales[..., : self.elements.shape[-2], :]
        return self.layout.ours(fp4.decode(self.elements, scales, self.fmt, dtype))

    def round_input(self, x: jax.Array, axes: int = 1) -> jax.Array:
        """Rounds what the weight is multiplied with, over its last `axes` axes taken as one."""
        flat = x.reshape(*x.shape[: x.ndim - axes], -1)
        return quant.fake_quantize(flat, self.activation_format).reshape(x.shape)


def weight(
    module: nn.Module, name: str, layout: Layout, *axes: str | None, storage: str = "linear"
) -> jax.Array | Packed:
    """Declares a weight of `module`, which has a `config`.

    Packed, it is two parameters: `name` (elements) and `<name>_scale`. They start at zero: packed
    weights come from a checkpoint.

    Args:
        module: where the parameter belongs.
        name: of the parameter.
        layout: of a published linear weight.
        *axes: logical names of its axes.
        storage: "linear" (FP8), "expert" (FP4) or "unrounded" (FP8, whose input is not rounded).

    Returns:
        float32 of `layout.shape`, or Packed.
    """
    config: ModelConfig = module.config
    if config.weight_form == "expanded":
        normal = nn.initializers.truncated_normal(config.initializer_range)
        shape = local_shape(layout.shape, axes)
        return module.param(name, partitioned(normal, axes), shape, jnp.float32)
    fmt, block = ("mxfp4", 1) if storage == "expert" else ("fp8", _block_rows(config))
    out, inner = layout.published
    published = [axes[layout.order.index(axis)] for axis in range(len(layout.axes))]
    stack = published[: len(layout.stack)]
    rows, columns = published[len(stack)], published[len(stack) + layout.rows]
    zeros = nn.initializers.zeros

    def param(name: str, shape: tuple[int, ...], *axes: str | None) -> jax.Array:
        names = (*stack, *axes)
        whole = (*layout.stack, *shape)
        return module.param(name, partitioned(zeros, names), local_shape(whole, names), jnp.uint8)

    elements = param(name, (out, inner * _BITS[fmt] // 8), rows, columns)
    # Blocks of rows need not divide as rows do, and they are a thousandth of the bytes.
    shape = (-(-out // block), inner // fp4.FORMATS[fmt].block)
    scales = param(f"{name}_scale", shape, rows if block == 1 else None, None)
    activations = "none" if storage == "unrounded" else config.activation_format
    return Packed(elements, scales, layout, fmt, block, activations)


def _block_rows(config: ModelConfig) -> int:
    return config.quantization_config.weight_block_size[0]


def contract(spec: str, x: jax.Array, weight: jax.Array | Packed) -> jax.Array:
    """`einsum(spec, x, weight)` in the dtype of `x`.

    bfloat16 products accumulate in float32 on accelerators; XLA for the CPU may round partial sums
    of batched ones. float32 inputs are multiplied in full float32 on every backend (accelerators
    would otherwise round them first). A float32 weight of a bfloat16 `x` is rounded for the
    product, but its gradient is not: it comes out of the accumulation in float32.

    Args:
        spec: "x axes,weight axes->result axes", each axis in two of the three.
        x: activations.
        weight: a parameter, in the dtype of `x` or float32, or packed. Before a packed one, `x` is
            rounded as the published engine rounds it, over all contracted axes; they come last.
    """
    if isinstance(weight, Packed):
        ours, _, out = spec.replace("->", ",").split(",")
        x = weight.round_input(x, axes=len(set(ours) - set(out)))
        weight = weight.dense(x.dtype)
    if x.dtype == weight.dtype:
        return _einsum(spec, x, weight)
    return _mixed(spec, x, weight)


def _einsum(spec: str, a: jax.Array, b: jax.Array, dtype: jnp.dtype | None = None) -> jax.Array:
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jnp.einsum(spec, a, b, precision=precision, preferred_element_type=dtype)


# The transpose of a product has the dtype of its operands: autodiff of a cast weight would round
# the whole sum over tokens to bfloat16 before it is added to a float32 parameter.
@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _mixed(spec: str, x: jax.Array, weight: jax.Array) -> jax.Array:
    return _einsum(spec, x, weight.astype(x.dtype))


def _forward(spec: str, x: jax.Array, weight: jax.Array) -> tuple[jax.Array, tuple]:
    return _mixed(spec, x, weight), (x, weight)


def _backward(spec: str, residuals: tuple, grad: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, weight = residuals
    operands, out = spec.split("->")
    ours, theirs = operands.split(",")
    grad_x = _einsum(f"{out},{theirs}->{ours}", grad, weight.astype(x.dtype))
    grad_weight = _einsum(f"{ours},{out}->{theirs}", x, grad, jnp.float32)
    return grad_x, grad_weight.astype(weight.dtype)


_mixed.defvjp(_forward, _backward)
