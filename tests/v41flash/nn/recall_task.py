"""A recall task that only a trained indexer can solve, and a model that learns it in seconds.

A row is one document: `pairs` tokens, each a key with a value, in random order; `gap` fillers; then
`queries` tokens, each asking for the value of one key. Every key occurs once, so the entry that a
query needs can be told from the others by content alone, and the gap is wider than the windows of
all layers together. Most visible entries are pairs: an indexer that prefers pairs to other tokens,
or late entries to early ones, gains little over chance.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from v41flash.config import ModelConfig
from v41flash.nn import ced

# Compiling is most of the time that so small a model takes; this saves a third of it.
_COMPILER_OPTIONS = {
    "xla_backend_optimization_level": 1,
    "xla_llvm_disable_expensive_passes": True,
}


@dataclasses.dataclass(frozen=True)
class RecallTask:
    """Sizes of the task. Answers are the tokens 0 .. values - 1."""

    pairs: int = 160
    gap: int = 16
    queries: int = 80
    values: int = 4

    @property
    def length(self) -> int:
        return self.pairs + self.gap + self.queries

    @property
    def vocab_size(self) -> int:
        """Tokens: pairs (key * values + value), queries (one per key), the filler."""
        return self.pairs * self.values + self.pairs + 1

    @property
    def asked(self) -> slice:
        """Positions of the query tokens."""
        return slice(self.length - self.queries, self.length)

    def visible(self, ratio: int = 1) -> np.ndarray:
        """Entries of `ratio` tokens that each query token sees, i[queries]."""
        return (np.arange(self.length)[self.asked] + 1) // ratio

    def chance(self, top_k: int, ratio: int = 1) -> float:
        """Recall of a selection that knows nothing."""
        return float(np.mean(top_k / self.visible(ratio)))


class Rows(NamedTuple):
    """tokens i32[B, T]; answers and needed (position of the pair asked for) i32[B, queries]."""

    tokens: jax.Array
    answers: jax.Array
    needed: jax.Array


def make_rows(task: RecallTask, key: jax.Array, batch: int, keys: jax.Array | int) -> Rows:
    """Random rows with `keys` different keys; fewer than `pairs` means that pairs are repeated."""

    def one(key: jax.Array) -> Rows:
        chosen, values, order, asked = jax.random.split(key, 4)
        value_of = jax.random.randint(values, (task.pairs,), 0, task.values)
        present = jax.random.permutation(chosen, task.pairs)[jnp.arange(task.pairs) % keys]
        present = jax.random.permutation(order, present)
        needed = jax.random.permutation(asked, task.pairs)[: task.queries]
        pairs = present * task.values + value_of[present]
        filler = jnp.full((task.gap,), task.vocab_size - 1)
        queries = task.pairs * task.values + present[needed]
        return Rows(jnp.concatenate((pairs, filler, queries)), value_of[present[needed]], needed)

    return jax.vmap(one)(jax.random.split(key, batch))


def model_config(task: RecallTask, **overrides: Any) -> ModelConfig:
    """A window layer, then a decoder of one Full layer and a Reuse layer."""
    fields = dict(
        vocab_size=task.vocab_size,
        hidden_size=64,
        num_hidden_layers=3,
        num_attention_heads=2,
        head_dim=64,
        qk_rope_head_dim=4,
        q_lora_rank=64,
        o_lora_rank=64,
        o_groups=1,
        sliding_window=4,
        compress_ratios=(0, 1, 1),
        kv_source_layer_ids=(1,),
        index_source_layer_ids=(1,),
        index_n_heads=4,
        index_head_dim=64,
        index_topk=8,
        candidate_source_layer_id=None,
        candidate_topk_blocks=0,
        candidate_block_size=0,
        n_routed_experts=2,
        num_experts_per_tok=1,
        moe_intermediate_size=32,
        routed_scaling_factor=1.0,
        swiglu_limit=10.0,
        hc_mult=2,
        hc_sinkhorn_iters=2,
        hc_eps=1e-6,
        rms_norm_eps=1e-20,
        max_position_embeddings=task.length,
        rope_theta=10_000.0,
        compress_rope_theta=160_000.0,
        rope_factor=1.0,
        rope_beta_fast=32.0,
        rope_beta_slow=1.0,
        rope_original_max_position_embeddings=task.length,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
        image_token_id=0,
        dtype="float32",
        initializer_range=0.1,
        hc_base_init="identity",
    )
    return ModelConfig(**(fields | overrides))


class State(NamedTuple):
    """Parameters and Adam's moments."""

    params: Any
    moments: Any


_ADAM = optax.scale_by_adam(b2=0.99)


def init_state(task: RecallTask, config: ModelConfig, seed: int) -> State:
    """Random parameters.

    The embedding of a pair starts as the sum of a random vector of its key and one of its value,
    that of a query as its key's plus one that all queries share: what layers that read a key and a
    value in sequence would hand on. To compare keys, and to index by them, is left to be learnt.
    """

    def init(key: jax.Array) -> State:
        model_key, *keys = jax.random.split(key, 5)
        row = jnp.zeros((1, ced.ALIGNMENT), jnp.int32)
        params = nn.unbox(ced.CED(config).init(model_key, row, row, row + 1))["params"]
        width = config.hidden_size
        of_key = jax.random.normal(keys[0], (task.pairs, width))
        of_value = jax.random.normal(keys[1], (task.values, width))
        of_query, filler = jax.random.normal(keys[2], (2, 1, width))
        pairs = (of_key[:, None] + of_value).reshape(-1, width)
        params = {**params, "embed": jnp.concatenate((pairs, of_key + of_query, filler))}
        return State(params, _ADAM.init(params))

    return jax.jit(init, compiler_options=_COMPILER_OPTIONS)(jax.random.key(seed))


def _recalls(config: ModelConfig, intermediates: Any, task: RecallTask, needed: jax.Array) -> dict:
    """Fraction of queries whose selection holds the needed entry, for every index source."""
    recalls = {}
    for group in config.groups:
        sown = intermediates[group.name]["first"]["attn"]
        if "indices" in sown:
            indices = sown["indices"][0][:, task.asked]
            found = jnp.any(indices == needed[..., None] // group.first.ratio, axis=-1)
            recalls[f"recall_{group.name}"] = jnp.mean(found)
    return recalls


def make_steps(task: RecallTask, config: ModelConfig, batch: int) -> Any:
    """Compiles training steps.

    Returns:
        (state, key, kl_weight, rates f32[n], keys i32[n]) -> (state, metrics, f32[n] each): n steps
        of Adam on fresh rows of `keys` different keys each, the loss being the cross entropy of the
        answers + kl_weight * the indexer's loss. Metrics are those before the update: ce, accuracy,
        kl, and, where selection is not dense, recall_<group> of each index source. A rate of 0
        measures.
    """
    model = ced.CED(config, indexer_loss=True)
    positions = jnp.broadcast_to(jnp.arange(task.length), (batch, task.length))

    def loss(params: Any, rows: Rows, kl_weight: jax.Array) -> tuple[jax.Array, dict]:
        outputs, state = model.apply(
            {"params": params},
            rows.tokens,
            positions,
            jnp.ones_like(rows.tokens),
            mutable=["intermediates"],
        )
        logits = ced.logits(params, outputs.hidden[:, task.asked])[..., : task.values]
        ce = optax.softmax_cross_entropy_with_integer_labels(logits, rows.answers).mean()
        metrics = {
            "ce": ce,
            "accuracy": jnp.mean(jnp.argmax(logits, axis=-1) == rows.answers),
            "kl": outputs.indexer_kl,
        }
        metrics |= _recalls(config, state["intermediates"], task, rows.needed)
        return ce + kl_weight * outputs.indexer_kl, metrics

    @functools.partial(jax.jit, compiler_options=_COMPILER_OPTIONS)
    def steps(state, key, kl_weight, rates, keys):
        def step(state: State, inputs: tuple) -> tuple[State, dict]:
            key, rate, keys = inputs
            rows = make_rows(task, key, batch, keys)
            gradients, metrics = jax.grad(loss, has_aux=True)(state.params, rows, kl_weight)
            updates, moments = _ADAM.update(gradients, state.moments)
            params = jax.tree.map(lambda p, u: p - rate * u, state.params, updates)
            return State(params, moments), metrics

        return jax.lax.scan(step, state, (jax.random.split(key, len(rates)), rates, keys))

    return steps
