"""Images: the encoder, the projector, and the rows of the text that they fill.

A vision transformer with two-dimensional rotary positions sees the patches of an image at its own
resolution; r x r neighbouring patches (r = `downsample_ratio`) become one image token of the text
model. In the text an image is a span START, rows of image tokens each closed by NEWLINE, END
(`v41flash.images`); all of these rows replace token embeddings before anything else happens, and
what follows is causal as ever.
"""

from __future__ import annotations

from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.chunking import chunk_size, map_queries
from pallas_kernels.rms_norm import rms_norm
from v41flash.config import ModelConfig, VisionConfig
from v41flash.image_rows import END, FEATURES, NEWLINE, START
from v41flash.nn.linear import contract
from v41flash.sharding import constrain, partitioned

_NORM_EPS = 1e-6
# Score of a key that a query does not see; its exponential is zero.
_UNSEEN = -1e30


class ImageBatch(NamedTuple):
    """The images of a batch of B rows: S slots a row, N image tokens a slot, R = r*r patches each.

    A slot holds one image or several; patches attend within their image. Image tokens of an image
    lie in row-major order, as do the patches of a token.

    Attributes:
        patches: uint8 [B, S, N, R, 3 * patch_size^2], channel-major pixels (channel, row, column).
        places: int32 [B, S, N, R, 2], row and column of each patch in its image; -1 where there is
            none: past the edge of an image whose patches do not fill its tokens, and padding.
        segments: int32 [B, S, N], number of the image inside its slot; 0 on padding.
        source: int32 [B, T], what a row of the text is (`v41flash.image_rows`): TEXT, START,
            NEWLINE, END, or FEATURES + k for image token k of the row's S * N.
    """

    patches: jax.Array
    places: jax.Array
    segments: jax.Array
    source: jax.Array


# (p / 255 - 0.5) / 0.5 in float32, rounded to bfloat16, for every p.
_NORMALIZED = (
    ((np.arange(256, dtype=np.float32) / np.float32(255) - np.float32(0.5)) / np.float32(0.5))
    .astype(jnp.bfloat16)
    .astype(np.float32)
)


def normalized(pixels: jax.Array) -> jax.Array:
    """uint8 pixels in [-1, 1], float32 holding bfloat16 values: the published encoder's input.

    Looked up: compilers divide by 255 in more ways than one, and 127 / 255 - 0.5 shows it.
    """
    return jnp.take(_NORMALIZED, pixels, mode="clip")


def rotation(config: VisionConfig, places: jax.Array) -> tuple[jax.Array, jax.Array]:
    """cos and sin, float32 [..., head_dim / 2], of patches at `places` [..., 2].

    The first half of the angles are the row times theta^(-4i / head_dim), the second the column
    times the same.
    """
    dim = config.hidden_size // config.num_attention_heads
    index = np.arange(dim // 4, dtype=np.float64)
    frequencies = (config.rope_theta ** (-4.0 * index / dim)).astype(np.float32)
    angles = places.astype(jnp.float32)[..., None] * frequencies
    angles = angles.reshape(*places.shape[:-1], dim // 2)
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates channels (i, i + head_dim / 2) of x [B, P, heads, head_dim] by angle i."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, :, None], sin[:, :, None]
    turned = (first * cos - second * sin, second * cos + first * sin)
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)


def attend(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array) -> jax.Array:
    """Attention of every patch to those of its image, in chunks of queries.

    Args:
        q: [B, P, heads, D].
        k: likewise.
        v: likewise.
        segments: int32 [B, P]; 0 where there is no patch, whose result means nothing.

    Returns:
        [B, P, heads, D].
    """
    batch, length, heads, dim = q.shape
    precision = jax.lax.Precision.HIGHEST if q.dtype == jnp.float32 else None

    def body(q: jax.Array, own: jax.Array) -> jax.Array:
        scores = jnp.einsum(
            "bqhd,bkhd->bhqk", q, k, precision=precision, preferred_element_type=jnp.float32
        )
        seen = own[:, None, :, None] == segments[:, None, None, :]
        # Not -inf: a query that `map_queries` pads may see nothing at all.
        weights = jax.nn.softmax(jnp.where(seen, scores * dim**-0.5, _UNSEEN), axis=-1)
        return contract("bhqk,bkhd->bqhd", weights.astype(v.dtype), v)

    chunk = chunk_size(length, batch, 4 * heads * length)
    return map_queries(body, (q, segments), chunk)


class _Parameters:
    """Declares the parameters of a module by the init range of its `config`."""

    config: ModelConfig

    def weight(self, name: str, shape: tuple[int, ...], *axes: str | None) -> jax.Array:
        init = nn.initializers.truncated_normal(self.config.initializer_range)
        return self.param(name, partitioned(init, axes), shape, jnp.float32)

    def vector(self, name: str, *shape: int, ones: bool = False) -> jax.Array:
        init = nn.initializers.ones if ones else nn.initializers.zeros
        return self.param(name, partitioned(init, (None,) * len(shape)), shape, jnp.float32)


class EncoderBlock(nn.Module, _Parameters):
    """Pre-norm attention and SwiGLU over the patches of each image."""

    config: ModelConfig

    @nn.compact
    def __call__(
        self, x: jax.Array, cos: jax.Array, sin: jax.Array, segments: jax.Array
    ) -> tuple[jax.Array, None]:
        """Runs the block on x [B, P, width]; a scan's carry and (no) output."""
        c = self.config.vision
        width, heads, hidden = c.hidden_size, c.num_attention_heads, c.intermediate_size
        dim = width // heads
        wqkv = self.weight("wqkv", (width, 3, heads, dim), "embed", None, None, None)
        wqkv_bias = self.vector("wqkv_bias", 3, heads, dim)
        wo = self.weight("wo", (heads, dim, width), None, None, "embed")
        wo_bias = self.vector("wo_bias", width)
        w13 = self.weight("w13", (width, 2, hidden), "embed", None, None)
        w2 = self.weight("w2", (hidden, width), None, "embed")

        y = rms_norm(x, self.vector("attn_norm", width, ones=True), _NORM_EPS)
        y = contract("bpc,cjhd->bpjhd", y, wqkv) + wqkv_bias.astype(x.dtype)
        q, k, v = (y[:, :, part] for part in range(3))
        y = attend(rotate(q, cos, sin), rotate(k, cos, sin), v, segments)
        y = contract("bphd,hdc->bpc", y, wo) + wo_bias.astype(x.dtype)
        self.sow("intermediates", "attn", y)
        x = x + y
        y = rms_norm(x, self.vector("mlp_norm", width, ones=True), _NORM_EPS)
        y = contract("bpc,cjf->bpjf", y, w13)
        x = x + contract("bpf,fc->bpc", jax.nn.silu(y[:, :, 0]) * y[:, :, 1], w2)
        self.sow("intermediates", "out", x)
        return x, None


class Encoder(nn.Module, _Parameters):
    """The vision transformer."""

    config: ModelConfig

    @nn.compact
    def __call__(self, pixels: jax.Array, places: jax.Array, segments: jax.Array) -> jax.Array:
        """Encodes patches.

        Args:
            pixels: float32 [B, P, 3 * patch_size^2], `normalized`.
            places: int32 [B, P, 2], see `ImageBatch`.
            segments: int32 [B, P], see `attend`.

        Returns:
            [B, P, width]; zero where there is no patch.
        """
        vision, dtype = self.config.vision, self.config.dtype
        width = vision.hidden_size
        proj = self.weight("patch_embed", (pixels.shape[-1], width), None, "embed")
        bias = self.vector("patch_embed_bias", width)
        x = contract("bpi,ic->bpc", pixels.astype(dtype), proj) + bias.astype(dtype)
        self.sow("intermediates", "patch_embed", x)
        block = EncoderBlock
        if not self.is_initializing():
            block = nn.remat(EncoderBlock, prevent_cse=False)
        blocks = nn.scan(
            block,
            variable_axes={"params": 0, "intermediates": 0},
            split_rngs={"params": True},
            in_axes=nn.broadcast,
            length=vision.num_hidden_layers,
            metadata_params={nn.PARTITION_NAME: "layers"},
        )
        cos, sin = rotation(vision, places)
        x, _ = blocks(self.config, name="blocks")(x, cos, sin, segments)
        x = rms_norm(x, self.vector("norm", width, ones=True), _NORM_EPS)
        self.sow("intermediates", "out", x)
        return jnp.where((segments > 0)[..., None], x, 0)


class Aligner(nn.Module, _Parameters):
    """Projects the r x r patches of each image token to the width of the text model."""

    config: ModelConfig

    @nn.compact
    def __call__(self, encoded: jax.Array) -> jax.Array:
        """[B, tokens * r*r, width] -> [B, tokens, d]."""
        d, width = self.config.hidden_size, encoded.shape[-1]
        patches = self.config.vision.downsample_ratio**2
        # Published as [d, width * r*r]: channel-major.
        w1 = self.weight("w1", (width, patches, d), None, None, "embed")
        w1_bias = self.vector("w1_bias", d)
        w2 = self.weight("w2", (d, d), "embed", None)
        w2_bias = self.vector("w2_bias", d)
        unfolded = encoded.reshape(encoded.shape[0], -1, patches, width)
        y = contract("btrc,crd->btd", unfolded, w1) + w1_bias.astype(encoded.dtype)
        y = jax.nn.gelu(y, approximate=False)
        return contract("bte,ed->btd", y, w2) + w2_bias.astype(encoded.dtype)


class Images(nn.Module, _Parameters):
    """From pixels to the rows of the text that stand for them.

    `Images(config).apply({"params": params["images"]}, x, batch)` works apart from the text model.
    """

    config: ModelConfig

    @nn.compact
    def __call__(self, x_BxTxd: jax.Array, batch: ImageBatch | None) -> jax.Array:
        """Replaces the rows of images.

        Args:
            x_BxTxd: [B, T, d] token embeddings.
            batch: the images; None declares the parameters alone.

        Returns:
            [B, T, d].
        """
        cfg, vision = self.config, self.config.vision
        patches_a_token = vision.downsample_ratio**2
        if batch is None:
            batch = _nothing(vision, x_BxTxd.shape)
        rows, slots, tokens = batch.segments.shape
        shape = (rows * slots, tokens * patches_a_token)
        seen = batch.places[..., 0] >= 0
        segments = jnp.where(seen, batch.segments[..., None], 0).reshape(shape)
        segments = constrain(segments, "images", None)
        pixels = normalized(batch.patches).reshape(*shape, -1)
        places = jnp.maximum(batch.places, 0).reshape(*shape, 2)
        encoder = Encoder(cfg, name="vision")
        encoded = encoder(constrain(pixels, "images", None, None), places, segments)
        features = Aligner(cfg, name="aligner")(encoded)
        self.sow("intermediates", "features", features)
        features = features.reshape(rows, slots * tokens, cfg.hidden_size)

        place = jnp.maximum(batch.source - FEATURES, 0)[..., None]
        image = jnp.take_along_axis(features, place, axis=1)
        x = jnp.where((batch.source >= FEATURES)[..., None], image, x_BxTxd)
        for kind, name in ((START, "start"), (NEWLINE, "newline"), (END, "end")):
            vector = self.weight(name, (cfg.hidden_size,), None).astype(x.dtype)
            x = jnp.where((batch.source == kind)[..., None], vector, x)
        return x


def _nothing(vision: VisionConfig, shape: tuple[int, ...]) -> ImageBatch:
    """No image in any row, in the smallest slot there is."""
    rows, length, _ = shape
    patches = vision.downsample_ratio**2
    pixels = 3 * vision.patch_size**2
    return ImageBatch(
        jnp.zeros((rows, 1, 1, patches, pixels), jnp.uint8),
        jnp.full((rows, 1, 1, patches, 2), -1, jnp.int32),
        jnp.zeros((rows, 1, 1), jnp.int32),
        jnp.zeros((rows, length), jnp.int32),
    )
