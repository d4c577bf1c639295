"""One attention sublayer at a time: its switches, the bound on its cache, the indexer's loss."""

import dataclasses
import functools
from typing import NamedTuple

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import fp4
from tests import reference_np
from tests.v41flash.nn import samples
from v41flash.config import ConfigError, ModelConfig
from v41flash.kernels import Kernels
from v41flash.nn.context import make_context
from v41flash.nn.csa2 import CSA2
from v41flash.nn.index_loss import indexer_kl

T = 40
FULL_M2, FULL_M1, REINDEX = 1, 3, 4
FORMATS = {"main_kv_format": "fp4", "window_kv_format": "fp8", "index_format": "mxfp4"}
# Which values each format rounds; all others stay bit for bit.
ROUNDED = {
    "main_kv_format": {"comp_kv"},
    "window_kv_format": {"win_kv"},
    "index_format": {"k", "q_index"},
}


@pytest.fixture(scope="module")
def params():
    config = samples.five_layers()
    return samples.params_of(config, samples.random_weights(config, seed=7))


@pytest.fixture(scope="module")
def x():
    d = samples.five_layers().hidden_size
    return np.random.default_rng(8).normal(size=(1, T, d)).astype(np.float32)


def layer_params(config, params, layer):
    keys, index = samples.names.place(config, layer)
    return jax.tree.map(lambda leaf: leaf[index], params[keys[0]][keys[1]]["attn"])


@functools.cache
def compiled(config: ModelConfig, layers: tuple[int, ...]):
    """jitted (params, x) -> results and intermediates of `layers`, one after the other on x."""

    def run(params, x):
        positions = jnp.arange(x.shape[1], dtype=jnp.int32)[None]
        context = make_context(config, positions, positions * 0 + 1, None)
        shared, results = None, []
        for layer in layers:
            module = CSA2(config, config.layers[layer], Kernels(), teacher=True)
            variables = {"params": layer_params(config, params, layer)}
            result, state = module.apply(variables, x, shared, context, mutable=["intermediates"])
            shared = result.shared
            kl = jnp.zeros(())
            if result.lesson is not None:
                source = shared.index_query, shared.index_keys, shared.indices
                kl = indexer_kl(result.lesson, 1, *source, context.valid, Kernels())
            results.append((result, state["intermediates"], kl))
        return results

    return jax.jit(run, compiler_options=samples.QUICK_COMPILE)


def values(kept):
    """name -> array of the cached or compared values of a Full layer."""
    named = {name: kept[name][0] for name in ("q", "latent", "win_kv", "comp_kv")}
    return named | {"k": kept["indexer"]["k"][0], "q_index": kept["indexer"]["q"][0]}


def make_cache(config, params, layer, x, memory=None):
    """(latent, main rows, index keys) of a Full layer."""
    positions = jnp.arange(x.shape[1], dtype=jnp.int32)[None]
    context = make_context(config, positions, positions * 0 + 1, None)
    module = CSA2(config, config.layers[layer], Kernels())
    variables = {"params": layer_params(config, params, layer)}
    (rows, keys, *_), state = module.apply(
        variables, x, context, memory, method=CSA2.make_cache, mutable=["intermediates"]
    )
    return jax.device_get((state["intermediates"]["latent"][0], rows, keys))


@pytest.mark.parametrize("layer, fmt", [(FULL_M2, "fp4"), (FULL_M1, "fp8")])
def test_alternatives_of_what_is_rounded(params, x, layer, fmt):
    """Before the rotation, or under a scale of the tensor; index keys stay as they are."""
    config = samples.five_layers(main_kv_format=fmt)
    ratio = config.layers[layer].ratio
    firsts, freqs = np.arange(T)[::ratio], reference_np.frequencies(config, True)
    latent, usual, keys = make_cache(config, params, layer, x)
    turned = reference_np.rotate(latent[0].astype(np.float64), firsts, freqs)
    scale = np.abs(turned).max() / {"fp4": 6 * 448, "fp8": 448}[fmt]
    before = reference_np.fake_quantize(latent[0].astype(np.float64), fmt)
    expected = {
        "before_rope": reference_np.rotate(before, firsts, freqs),
        "global_scale": reference_np.fake_quantize(turned / scale, fmt) * scale,
    }
    for rounding, rows in expected.items():
        other = dataclasses.replace(config, main_kv_rounding=rounding)
        _, found, unchanged = make_cache(other, params, layer, x)
        # A value on the edge between two roundings may fall to either side.
        assert np.isclose(found[0], rows, atol=1e-5).mean() > 0.999
        assert np.mean(found != usual) > 0.1
        np.testing.assert_array_equal(unchanged, keys)


def test_no_cache_holds_the_alternatives(params, x):
    other = samples.five_layers(main_kv_rounding="before_rope")
    latent = jnp.zeros((1, 1, other.head_dim))

    class Groups(NamedTuple):
        kv: jax.Array
        score: None
        first: jax.Array

    class Somewhere:
        def complete(self, *_):
            return Groups(latent[:, :, None], None, jnp.zeros((1, 1), jnp.int32)), self

    with pytest.raises(ConfigError, match="main_kv_rounding = 'before_rope': must be 'after_rope'"):
        make_cache(other, params, FULL_M1, x[:, :1], Somewhere())


@pytest.mark.parametrize("field", FORMATS)
def test_a_format_rounds_what_it_names_and_nothing_else(params, x, field):
    plain = samples.five_layers(**samples.NO_ROUNDING)
    rounding = dataclasses.replace(plain, **{field: FORMATS[field]})
    (without,) = compiled(plain, (FULL_M2,))(params, x)
    (with_it,) = compiled(rounding, (FULL_M2,))(params, x)
    before, after = values(without[1]), values(with_it[1])
    for name, value in before.items():
        if name in ROUNDED[field]:
            expected = fp4.fake_quantize(value, FORMATS[field])
            np.testing.assert_array_equal(after[name], expected, err_msg=name)
            assert np.abs(after[name] - value).max() > 1e-3
        else:
            np.testing.assert_array_equal(after[name], value, err_msg=name)
    assert np.abs(with_it[0].out - without[0].out).max() > 1e-3


def visible_scores(kept, keys):
    """Float64 index scores [T, G] of a layer with m = 1, -inf beyond what is visible."""
    q, w = (np.asarray(kept["indexer"][name][0][0], np.float64) for name in ("q", "w"))
    dots = np.maximum(np.einsum("thd,gd->thg", q, np.asarray(keys[0], np.float64)), 0)
    scores = np.einsum("thg,th->tg", dots, w)
    return np.where(np.tri(T, dtype=bool), scores, -np.inf)


def test_the_pool_restricts_reindex_layers_alone(params, x):
    with_pool = samples.five_layers()
    without_pool = samples.five_layers(use_candidate_pool=False)
    pooled = compiled(with_pool, (FULL_M1, REINDEX))(params, x)
    free = compiled(without_pool, (FULL_M1, REINDEX))(params, x)
    np.testing.assert_array_equal(pooled[0][0].shared.indices, free[0][0].shared.indices)
    np.testing.assert_array_equal(pooled[0][0].out, free[0][0].out)
    assert free[0][0].shared.pool is None
    blocks = np.asarray(pooled[0][0].shared.pool.blocks)[0]
    size, topk = with_pool.candidate_block_size, with_pool.index_topk
    outside = 0
    for results, in_pool in ((pooled, True), (free, False)):
        reindex = results[1][0]
        scores = visible_scores(results[1][1], reindex.shared.index_keys)
        for t in range(T):
            chosen = np.asarray(reindex.shared.indices)[0, t]
            chosen = chosen[chosen >= 0]
            allowed = np.isin(np.arange(T) // size, blocks[t]) if in_pool else np.ones(T, bool)
            reachable = np.where(allowed, scores[t], -np.inf)
            best = np.argsort(-reachable, kind="stable")[:topk]
            expected = sorted(j for j in best if reachable[j] > -np.inf)
            np.testing.assert_allclose(
                reachable[chosen].sum(), reachable[expected].sum(), rtol=1e-5
            )
            assert len(chosen) == min(topk, t + 1) == len(expected)
            if not in_pool:
                outside += np.sum(~np.isin(chosen // size, blocks[t]))
    assert outside > 10


@pytest.mark.parametrize("layers", [(FULL_M2, FULL_M2 + 1), (FULL_M1, REINDEX)])
def test_dense_selection_is_sparse_selection_of_everything(params, x, layers):
    """Outputs and the indexer's loss; and it differs where top-k leaves some out."""
    everything = samples.five_layers(index_topk=T, candidate_topk_blocks=T)
    dense = samples.five_layers(dense_selection=True)
    ours = compiled(dense, layers)(params, x)
    theirs = compiled(everything, layers)(params, x)
    assert ours[-1][0].shared.indices is None
    for (a, _, a_kl), (b, _, b_kl) in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a.out, b.out, atol=2e-6)
        np.testing.assert_allclose(a_kl, b_kl, atol=1e-6)
    if layers[1] == REINDEX:
        few = compiled(samples.five_layers(), layers)(params, x)
        assert np.abs(ours[-1][0].out - few[-1][0].out).max() > 1e-3


@functools.partial(jax.jit, static_argnums=0, compiler_options=samples.QUICK_COMPILE)
def cache_rows(fmt, attention_params, x):
    """(cached entries, `max_main_kv`)."""
    config = samples.five_layers(main_kv_format=fmt)
    positions = jnp.arange(x.shape[1], dtype=jnp.int32)[None]
    context = make_context(config, positions, positions * 0 + 1, None)
    module = CSA2(config, config.layers[FULL_M2], Kernels())
    made = module.apply({"params": attention_params}, x, context, method="make_cache")
    rows, _, largest, _ = made
    return rows, largest


def test_cached_entries_are_bounded(params):
    """|entry| <= sqrt(head_dim) max|norm weight| before rounding, which is what `max_main_kv` is,
    and rounding to FP4 keeps that up to its step.
    """
    config = samples.five_layers()
    attention_params = layer_params(config, params, FULL_M2)

    @hypothesis.settings(max_examples=40, deadline=None, derandomize=True)
    @hypothesis.given(
        seed=st.integers(0, 2**32 - 1),
        log_scale=st.floats(-6, 6),
        log_norm=st.floats(-3, 2),
        one_channel=st.booleans(),
    )
    def check(seed, log_scale, log_norm, one_channel):
        rng = np.random.default_rng(seed)
        x = rng.normal(size=(1, 16, config.hidden_size)) * 10**log_scale
        norm = (rng.normal(size=config.head_dim) * 10**log_norm).astype(np.float32)
        compressor = dict(attention_params["compressor"], norm=norm)
        if one_channel:
            # Latents with one channel that is not zero reach the bound.
            compressor["wkv"] = compressor["wkv"].at[:, 1:].set(0)
        own = dict(attention_params, compressor=compressor)
        plain, largest = cache_rows("none", own, x.astype(np.float32))
        rounded, largest_of_rounded = cache_rows("fp4", own, x.astype(np.float32))
        plain, rounded = np.asarray(plain), np.asarray(rounded)
        assert largest == largest_of_rounded == np.abs(plain).max()
        bound = np.sqrt(config.head_dim) * np.abs(norm).max()
        assert np.abs(plain).max() <= bound * (1 + 1e-5)
        if one_channel:
            reached = np.sqrt(config.head_dim) * abs(norm[0])
            np.testing.assert_allclose(np.abs(plain[..., 0]), reached, rtol=1e-4)
        # The scale is a sixth of the block's largest, rounded to E4M3: to a sixteenth, or by half
        # the smallest E4M3 number. An element is off by half the widest E2M1 step, or clamped.
        exact = max(bound, 6 * 2.0**-9) / 6
        off = max(exact / 16, 2.0**-10)
        assert np.abs(rounded).max() <= 6 * (exact + off) * (1 + 1e-5)
        blocks = plain.reshape(-1, 16)
        scale = np.maximum(np.abs(blocks).max(-1, keepdims=True) / 6, 2.0**-9)
        off = np.maximum(scale / 16, 2.0**-10)
        limit = np.maximum(scale + off, 6 * off) * (1 + 1e-5)
        assert (np.abs(rounded.reshape(-1, 16) - blocks) <= limit).all()

    check()
