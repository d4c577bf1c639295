"""A text sample from parameters in training: every token by a full forward pass.

Simple and slow, one fixed-length buffer and one compilation. Serving has its own code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from train.step import data_shards, to_device
from v41flash.nn import ced
from v41flash.text.tokenizer import Tokenizer

EngramRows = Callable[[np.ndarray, np.ndarray], np.ndarray]


def generate(
    model: ced.CED,
    params: Any,
    mesh: Mesh,
    tokenizer: Tokenizer,
    engram_rows: EngramRows,
    *,
    prompt: str,
    count: int,
    temperature: float,
    seed: int,
) -> str:
    """Continues a prompt.

    Args:
        model: the model.
        params: its parameters, on `mesh`.
        mesh: the training mesh.
        tokenizer: of the training data.
        engram_rows: (tokens, positions), i32[B,T] each -> i32[B,T,S,R] table rows.
        prompt: text to start from; "" starts a document.
        count: tokens to draw; fewer if the document ends.
        temperature: 0 takes the likeliest token.
        seed: of the draws.

    Returns:
        Prompt and continuation.
    """
    head = np.concatenate([[tokenizer.bos_id], tokenizer.encode(prompt)]).astype(np.int32)
    # Positions are laid over the mesh's context axis.
    unit = ced.ALIGNMENT * mesh.shape["context"]
    length = -(-(head.size + count) // unit) * unit
    # Rows are laid over the data axes of the mesh like a training batch: all hold the same text.
    rows = data_shards(mesh)
    tokens = np.full((rows, length), tokenizer.pad_id, np.int32)
    tokens[:, : head.size] = head
    positions = np.broadcast_to(np.arange(length, dtype=np.int32), tokens.shape)

    @jax.jit
    def draw(params, batch, last, key):
        outputs = model.apply({"params": params}, **batch)
        logits = ced.logits(params, outputs.hidden[0, last])
        # Specials other than the end of the document are no text, nor is what the model's
        # vocabulary has beyond the tokenizer's.
        ids = jnp.arange(logits.shape[-1])
        no_text = (ids == tokenizer.bos_id) | (ids == tokenizer.pad_id)
        logits = jnp.where(no_text | (ids >= tokenizer.vocab_size), -jnp.inf, logits)
        if temperature == 0:
            return jnp.argmax(logits)
        return jax.random.categorical(key, logits / temperature)

    local = jax.process_count()
    key = jax.random.key(seed)
    end = head.size
    for index in range(count):
        batch = {
            "tokens": tokens,
            "positions": positions,
            "segment_ids": (positions < end).astype(np.int32),
            "engram_rows": engram_rows(tokens, positions),
        }
        batch = {name: value[: rows // local] for name, value in batch.items()}
        token = int(draw(params, to_device(batch, mesh), end - 1, jax.random.fold_in(key, index)))
        if token == tokenizer.eos_id:
            break
        tokens[:, end] = token
        end += 1
    return tokenizer.decode(tokens[0, 1:end])
