"""A model as serving sees it, beside the training form of the same model as its truth."""

from __future__ import annotations

import dataclasses
import functools

import jax
import numpy as np

from tests.v41flash.nn import samples
from v41flash.config import ModelConfig
from v41flash.serving.forward import Model
from v41flash.serving.prefill import prefill
from v41flash.serving.programs import Programs
from v41flash.serving.state import State
from v41flash.serving.weights import Weights

# Bytes, three specials, and one id for images.
CONFIG = samples.three_layers(vocab_size=260, image_token_id=259, engram_compressed_vocab_size=260)
# 3 windows + 7: every residue by m, below and above window, top-k, pool and row alignment.
PREFIXES = 3 * CONFIG.sliding_window + 7


@dataclasses.dataclass(frozen=True, eq=False)
class Served:
    """A model with random weights, compiled once per shape."""

    config: ModelConfig
    params: object
    weights: Weights
    programs: Programs

    @classmethod
    @functools.cache
    def create(cls, config: ModelConfig, seed: int = 0) -> Served:
        params = samples.params_of(config, samples.random_weights(config, seed))
        weights = Weights.create(config, params, np.arange(config.vocab_size))
        return cls(config, params, weights, Programs(Model(config), samples.QUICK_COMPILE))

    def fresh(self, batch: int, pages: int = 1) -> State:
        table = np.arange(batch * pages).reshape(batch, pages)
        return State.create(self.config, self.weights, batch * pages, table)

    def prefill(self, prompts, state: State | None = None, **keywords):
        """(logits [B, V] as NumPy, state) of prompts in a fresh state, or after `state`."""
        state = self.fresh(len(prompts)) if state is None else state
        logits, state = prefill(self.programs, self.weights, state, prompts, **keywords)
        return np.asarray(logits), state

    @functools.cached_property
    def _forward(self):
        return samples.compiled_forward(self.config)

    def truth(self, documents, length: int) -> np.ndarray:
        """Logits [B, length, V] of the training form; what lies beyond a document means nothing."""
        inputs = samples.batch_inputs(self.config, documents, length)
        return np.asarray(self._forward(self.params, *inputs)[1])


def entries(state: State, config: ModelConfig) -> dict[int, np.ndarray]:
    """Main rows that the sequences of `state` have in the cache, zeros beyond."""
    found = {}
    for layer in config.kv_source_layer_ids:
        m = config.layers[layer].ratio
        rows = state.cache.main_rows(layer)
        values = np.asarray(jax.jit(lambda r, m=m: r.read(0, 128 // m))(rows))
        held = np.arange(128 // m) < np.asarray(state.cache.lengths)[:, None] // m
        found[layer] = np.where(held[..., None], values, 0)
    return found
