"""The causal encoder-decoder: embedding, layer groups, final read-out.

Encoder and decoder are one causal stack; what makes the second half a decoder is that all of it
reads one global cache, projected once from the encoder's output by the first decoder layer.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from pallas_kernels import split_products
from v41flash.config import LayerGroup, ModelConfig
from v41flash.config_checks import DOCUMENT_ALIGNMENT as ALIGNMENT
from v41flash.image_rows import TEXT
from v41flash.kernels import Kernels
from v41flash.nn import ops
from v41flash.nn.block import RECORDS, LayerAux, Unit
from v41flash.nn.context import make_context
from v41flash.nn.engram import prefetch
from v41flash.nn.lookup import embed as look_up_tokens
from v41flash.nn.mhc import Residual
from v41flash.nn.vision import ImageBatch, Images
from v41flash.sharding import constrain, partitioned


class Outputs(NamedTuple):
    """Outputs of a forward pass.

    Attributes:
        hidden: [B, T, d], input of the head, in `config.dtype`.
        balance_loss: float32 scalar, sequence-wise balance loss, mean over layers.
        indexer_kl: float32 scalar, the indexers' losses, each a mean over the tokens of documents
            (`v41flash.nn.index_loss`), summed over index sources; 0 unless the model was built with
            `indexer_loss`.
        max_main_kv: float32 scalar, largest absolute entry of the shared caches before they are
            rounded to `main_kv_format`. RMSNorm and the orthogonality of RoPE bound it by
            sqrt(head_dim) * max|norm weight|, up to the rounding of `config.dtype`.
    """

    hidden: jax.Array
    balance_loss: jax.Array
    indexer_kl: jax.Array
    max_main_kv: jax.Array


class CED(nn.Module):
    """The model (V4.1 report, section 2): the text model, with images where it has an encoder.

    Attributes:
        config: the model.
        kernels: implementations to run.
        indexer_loss: compute the indexers' loss (training).
    """

    config: ModelConfig
    kernels: Kernels = Kernels()
    indexer_loss: bool = False

    @nn.compact
    def __call__(
        self,
        tokens: jax.Array,
        positions: jax.Array,
        segment_ids: jax.Array,
        engram_rows: jax.Array | None = None,
        images: ImageBatch | None = None,
        decoder_starts: jax.Array | None = None,
    ) -> Outputs:
        """Runs all layers on all tokens of a packed batch.

        Args:
            tokens: int32 [B, T].
            positions: int32 [B, T], position inside the document; documents start at rows that are
                multiples of 8.
            segment_ids: int32 [B, T], 0 on padding, else equal inside a document.
            engram_rows: int32 [B, T, sites, rows] of `v41flash.text.engram_hash`; None where the
                model has no Engram.
            images: the images of the batch, for a model with an image encoder; None: text alone.
            decoder_starts: int32 [B, T], position in its document at which a bounded replay of the
                decoder starts, per token (`v41flash.nn.context.make_context`), so that what comes
                after it is as in generation; None: nowhere.

        Returns:
            `Outputs`; hidden states of padding rows mean nothing.
        """
        cfg = self.config
        length = tokens.shape[1]
        tokens, positions, segment_ids, engram_rows, decoder_starts = (
            _pad_rows(x) for x in (tokens, positions, segment_ids, engram_rows, decoder_starts)
        )
        normal = nn.initializers.truncated_normal(cfg.initializer_range)
        embed = self.param(
            "embed",
            partitioned(normal, ("vocab", "embed")),
            (cfg.vocab_size, cfg.hidden_size),
            jnp.float32,
        )
        # Used by `logits`, apart from the stack: the loss never holds all logits at once.
        self.param(
            "head",
            partitioned(normal, ("embed", "vocab")),
            (cfg.hidden_size, cfg.vocab_size),
            jnp.float32,
        )
        norm = self.param(
            "norm",
            partitioned(nn.initializers.ones, (None,)),
            (cfg.hidden_size,),
            jnp.float32,
        )
        is_image = None
        if images is not None:
            images = images._replace(source=_pad_rows(images.source))
            is_image = images.source != TEXT
        context = make_context(cfg, positions, segment_ids, engram_rows, is_image, decoder_starts)
        if engram_rows is not None and not self.is_initializing():
            params = self.variables["params"]
            memory = prefetch(cfg, params, engram_rows, self.kernels)
            context = context._replace(engram_memory=memory)
        x = look_up_tokens(embed, tokens, cfg.dtype)
        if images is not None or (cfg.vision is not None and self.is_initializing()):
            x = constrain(Images(cfg, name="images")(x, images), "batch", "length", None)
        self.sow("intermediates", "embed", x)
        residual = Residual.start(x, cfg.hc_mult)
        shared, aux = None, []
        for group, following in zip(cfg.groups, (*cfg.groups[1:], None), strict=True):
            residual, group_aux, shared = self._group(group, following, residual, shared, context)
            aux.append(group_aux)
        streams = residual.written(self.kernels.mhc)
        self.sow("intermediates", "x_out", streams)
        hidden = ops.mix(
            streams,
            residual.pre,
            norm,
            norm_eps=cfg.rms_norm_eps,
            implementation=self.kernels.mhc,
        )
        total = jax.tree.map(lambda *leaves: jnp.stack(leaves), *aux).reduce()
        return Outputs(
            hidden[:, :length],
            total.balance_loss / cfg.num_hidden_layers,
            total.indexer_kl,
            total.max_main_kv,
        )

    def _group(
        self,
        group: LayerGroup,
        following: LayerGroup | None,
        residual: Residual,
        shared: Any,
        context: Any,
    ) -> tuple[Residual, LayerAux, Any]:
        keep = following is not None and following.first.mode == "reindex"
        attributes = (self.config, group, self.kernels, self.indexer_loss)
        if group.repeats == 1:
            unit = Unit(*attributes, keep, name=group.name)
            residual, (aux, made) = unit(residual, shared, context)
            return residual, aux, made
        scanned = nn.scan(
            Unit,
            variable_axes={"params": 0, **RECORDS},
            split_rngs={"params": True},
            in_axes=(nn.broadcast, nn.broadcast),
            length=group.repeats,
            metadata_params={nn.PARTITION_NAME: "units"},
            # Nothing here is meant to be one; the test would be another trace of every layer.
            check_constancy_invariants=False,
        )
        unit = scanned(*attributes, False, name=group.name)
        residual, (aux, _) = unit(residual, shared, context)
        return residual, aux.reduce(), shared


def logits(params: Any, hidden: jax.Array) -> jax.Array:
    """float32 logits [..., V] of hidden states [..., d]: the head runs in float32."""
    return split_products.einsum("...d,dv->...v", hidden, params["head"])


def _pad_rows(x: jax.Array | None) -> jax.Array | None:
    """Pads axis 1 with zeros (segment 0: padding) to a multiple of `ALIGNMENT`."""
    if x is None:
        return None
    missing = -x.shape[1] % ALIGNMENT
    return jnp.pad(x, ((0, 0), (0, missing)) + ((0, 0),) * (x.ndim - 2)) if missing else x
