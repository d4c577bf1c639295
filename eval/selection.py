"""Whether the indexers select what an answer needs: recall of given entries among the top-k."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from v41flash.config import ModelConfig
from v41flash.nn import ced
from v41flash.serving.run import Run
from v41flash.text.engram_hash import EngramHasher


class Wanted(NamedTuple):
    """What some queries of a sequence ought to select.

    Attributes:
        tokens: int [n], ids of the sequence, bos in front.
        queries: int [q], their positions.
        needed: int [q], position of the token that each needs.
    """

    tokens: np.ndarray
    queries: np.ndarray
    needed: np.ndarray


def chance(config: ModelConfig, queries: np.ndarray, ratio: int) -> float:
    """Recall of a selection that knows nothing: entries selected over entries seen."""
    return float(np.mean(np.minimum(config.index_topk / ((queries + 1) // ratio), 1.0)))


def _selections(config: ModelConfig, intermediates: Mapping[str, Any]) -> dict[int, Any]:
    """Layer -> int32 [B, T, K] of every index source."""
    found = {}
    for group in config.groups:
        sown = intermediates[group.name]["first"]["attn"]
        if "indices" not in sown:
            continue
        indices = sown["indices"][0]
        if group.repeats == 1:
            found[group.start] = indices
            continue
        step = group.num_layers // group.repeats
        for repeat in range(group.repeats):
            found[group.start + repeat * step] = indices[repeat]
    return found


class Selection:
    """Looks at the selections of a trained model, in the form in which it was trained."""

    def __init__(self, run: Run):
        """Takes the model of a run."""
        self._run = run
        self._hasher = None
        if run.config.engram_layer_ids:
            pad = int(run.token_map[run.config.engram_pad_token_id])
            self._hasher = EngramHasher.from_config(run.config, pad)
        model = ced.CED(run.config, run.kernels)

        @jax.jit
        def select(params: Any, *inputs: jax.Array) -> dict[int, jax.Array]:
            _, state = model.apply({"params": params}, *inputs, mutable=["intermediates"])
            return _selections(run.config, state["intermediates"])

        self._select = select

    def recall(self, wanted: Sequence[Wanted]) -> dict[int, np.ndarray]:
        """Layer -> bool [total queries]: is the entry of the needed token selected?

        Every sequence is a forward pass of its own; those of one length share a compilation.
        """
        found: dict[int, list[np.ndarray]] = {}
        for one in wanted:
            length = -(-len(one.tokens) // ced.ALIGNMENT) * ced.ALIGNMENT
            tokens = np.full((1, length), self._run.tokenizer.pad_id, np.int32)
            tokens[0, : len(one.tokens)] = one.tokens
            positions = np.arange(length, dtype=np.int32)[None]
            segments = (positions < len(one.tokens)).astype(np.int32)
            rows = None
            if self._hasher is not None:
                rows = self._hasher.rows(self._run.token_map[tokens], positions)
            inputs = (tokens, positions, segments, rows)
            for layer, indices in self._select(self._run.params, *inputs).items():
                entries = one.needed // self._run.config.layers[layer].ratio
                chosen = np.asarray(indices[0, jnp.asarray(one.queries)])
                found.setdefault(layer, []).append((chosen == entries[:, None]).any(-1))
        return {layer: np.concatenate(parts) for layer, parts in found.items()}
