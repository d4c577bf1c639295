"""The indexer's loss, selected and dense, against a loop over queries, layers and heads."""

import jax
import numpy as np
import pytest

from v41flash.kernels import Kernels
from v41flash.nn.context import Ranges
from v41flash.nn.index_loss import indexer_kl, teach
from v41flash.nn.indexer import IndexQuery

B, T, G, K, LAYERS = 2, 9, 7, 4, 3
H, D, HI, DI = 3, 8, 2, 4
MODES = pytest.mark.parametrize("dense", [False, True], ids=["selected", "dense"])


def example(seed, dense):
    """Keyword arguments of `loss`: queries that see no entry, one, and several; and padding."""
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return rng.normal(size=shape).astype(np.float32)

    hi = np.minimum((np.arange(T) + 1) // 2 * np.ones((B, 1), int), G).astype(np.int32)
    lo = np.where(hi > 1, rng.integers(0, 2, (B, T)), 0).astype(np.int32)
    indices = np.full((B, T, K), -1, np.int32)
    for at in np.ndindex(B, T):
        chosen = rng.permutation(np.arange(lo[at], hi[at]))[:K]
        indices[at][: len(chosen)] = np.sort(chosen)
    valid = np.ones((B, T), bool)
    valid[1, 6:] = False
    return {
        "query": IndexQuery(normal(B, T, HI, DI), normal(B, T, HI)),
        "keys": normal(B, G, DI),
        "q": normal(LAYERS, B, T, H, D),
        "lse": 3 + normal(LAYERS, B, T, H),
        "rows": normal(B, G, D),
        "visible": Ranges(lo, hi),
        "indices": None if dense else indices,
        "valid": valid,
    }


@jax.jit
def loss(query, keys, q, lse, rows, visible, indices, valid):
    lessons = [
        teach(q[i], lse[i], rows, indices, query, keys, visible, Kernels()) for i in range(LAYERS)
    ]
    total = jax.tree.map(lambda *parts: sum(parts), *lessons)
    return indexer_kl(total, LAYERS, query, keys, indices, valid, Kernels())


def gradients(case):
    return jax.jit(jax.grad(lambda case: loss(**case), allow_int=True))(case)


def entries(case, at):
    if case["indices"] is not None:
        return [j for j in case["indices"][at] if j >= 0]
    return list(range(case["visible"].lo[at], case["visible"].hi[at]))


def teacher(case, layer, at):
    """Shares of the entries of one query in one layer, float64."""
    keys = case["rows"][at[0], entries(case, at)].astype(np.float64)
    logits = case["q"][layer][at] @ keys.T * D**-0.5
    mass = np.exp(logits - case["lse"][layer][at][:, None]).sum(0)
    return mass / mass.sum()


def student(case, at):
    keys = case["keys"][at[0], entries(case, at)].astype(np.float64)
    scores = case["query"].weights[at] @ np.maximum(case["query"].q[at] @ keys.T, 0)
    return np.exp(scores) / np.exp(scores).sum()


@MODES
def test_equals_a_loop(dense):
    case = example(0, dense)
    total, empty = 0.0, 0
    for at in zip(*np.nonzero(case["valid"]), strict=True):
        empty += not entries(case, at)
        for layer in range(LAYERS):
            if entries(case, at):
                p = teacher(case, layer, at)
                total += np.sum(p * np.log(p / student(case, at)))
    assert empty
    np.testing.assert_allclose(loss(**case), total / LAYERS / case["valid"].sum(), rtol=1e-5)


@MODES
def test_gradient_is_that_of_the_mean_teacher_and_reaches_the_indexer_alone(dense):
    case = example(1, dense)
    weights = np.zeros((B, T, HI))
    for at in zip(*np.nonzero(case["valid"]), strict=True):
        if entries(case, at):
            mean = np.mean([teacher(case, layer, at) for layer in range(LAYERS)], axis=0)
            keys = case["keys"][at[0], entries(case, at)]
            dots = np.maximum(case["query"].q[at] @ keys.T, 0)
            weights[at] = dots @ (student(case, at) - mean) / case["valid"].sum()
    gradient = gradients(case)
    np.testing.assert_allclose(gradient["query"].weights, weights, atol=1e-6)
    assert np.asarray(gradient["keys"]).any() and np.asarray(gradient["query"].q).any()
    for name in ("q", "lse", "rows"):
        assert not np.asarray(gradient[name]).any()


@MODES
def test_is_zero_when_the_student_is_every_teacher(dense):
    """One attention head over the index keys, with scores that ReLU does not cut."""
    case = example(2, dense)
    keys, q = abs(case["keys"]), abs(case["query"].q[:, :, :1])
    case |= {"query": IndexQuery(q, np.full((B, T, 1), 0.5, np.float32)), "keys": keys}
    case |= {"q": np.stack([q] * LAYERS), "lse": case["lse"][..., :1], "rows": keys}
    assert DI**-0.5 == 0.5
    np.testing.assert_allclose(loss(**case), 0, atol=1e-6)
    np.testing.assert_allclose(gradients(case)["query"].q, 0, atol=1e-6)


@MODES
def test_padding_alone_is_zero_with_zero_gradients(dense):
    case = example(3, dense)
    nothing = jax.tree.map(np.zeros_like, case["visible"])
    case |= {"valid": np.zeros((B, T), bool), "visible": nothing}
    if not dense:
        case["indices"] = np.full_like(case["indices"], -1)
    assert loss(**case) == 0
    assert not any(np.asarray(leaf).any() for leaf in gradients(case)["query"])


@MODES
def test_parts_weighted_by_their_tokens_make_the_whole(dense):
    case = example(4, dense)
    whole, parts = loss(**case), 0.0
    for b in range(B):
        valid = case["valid"] & (np.arange(B) == b)[:, None]
        parts += loss(**case | {"valid": valid}) * valid.sum()
    np.testing.assert_allclose(whole, parts / case["valid"].sum(), rtol=1e-6)


def test_dense_chunks_do_not_change_the_loss(monkeypatch):
    case = example(5, dense=True)
    expected, whole = loss(**case), gradients(case)["keys"]
    monkeypatch.setattr("v41flash.nn.index_loss.chunk_size", lambda *_: 4)
    chunked = jax.jit(jax.value_and_grad(lambda keys: loss.__wrapped__(**case | {"keys": keys})))
    value, gradient = chunked(case["keys"])
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    np.testing.assert_allclose(gradient, whole, atol=1e-6)
