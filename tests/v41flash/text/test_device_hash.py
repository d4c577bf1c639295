"""The hash on uint32 pairs against NumPy's int64, recorded numbers and arbitrary configurations."""

import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from v41flash.text.device_hash import DeviceHasher
from v41flash.text.engram_hash import EngramHasher

GOLDEN = pathlib.Path(__file__).parents[2] / "golden"


@jax.jit
def step(device, ids, look_back, dead, new):
    history = device.history(ids, look_back, dead)
    return device.rows(history), device.next_look_back(history, look_back, new)


rows_of = jax.jit(lambda device, history: device.rows(history))


def real_hasher():
    return EngramHasher(
        compressed_vocab_size=99092,
        engram_vocab_size=16_000_000,
        max_ngram=4,
        heads=8,
        layer_ids=(1, 14),
        pad_compressed_id=2,
    )


def layout_hasher():
    config = json.loads((GOLDEN / "layout_i/config.json").read_text())["text_config"]
    token_map = json.loads((GOLDEN / "layout_i/token_map.json").read_text())
    return EngramHasher(
        compressed_vocab_size=config["engram_compressed_vocab_size"],
        engram_vocab_size=config["engram_vocab_size"],
        max_ngram=config["engram_max_ngram_size"],
        heads=config["engram_n_heads"],
        layer_ids=config["engram_layer_ids"],
        pad_compressed_id=token_map["pad_compressed_id"],
    )


@functools.cache
def hasher_of(vocabulary, least_prime, layers):
    return EngramHasher(
        compressed_vocab_size=vocabulary,
        engram_vocab_size=least_prime,
        max_ngram=4,
        heads=2,
        layer_ids=layers,
        pad_compressed_id=vocabulary - 1,
    )


def test_released_tables():
    assert not jax.config.jax_enable_x64
    golden = np.load(GOLDEN / "unit/engram_hash_real.npz")
    device = DeviceHasher.create(real_hasher())
    assert device.digit_bits == 8
    ids = jnp.asarray(golden["compressed_ids_i64"], jnp.int32)
    new = jnp.full(len(ids), ids.shape[1])
    rows, _ = step(device, ids, device.start(len(ids)), golden["dead"], new)
    assert rows.dtype == jnp.int32
    np.testing.assert_array_equal(rows, golden["hash_ids"])


@pytest.mark.parametrize("run", ["A_fakequant", "multimodal/D_multimodal"])
def test_recorded_model_in_chunks(run):
    golden = np.load(GOLDEN / f"layout_i/{run}.npz")
    token_map = json.loads((GOLDEN / "layout_i/token_map.json").read_text())["compressed_id"]
    ids = np.array(token_map, np.int32)[golden["tokens"]][None]
    dead = golden["token_types"][None] >= 0 if "token_types" in golden else np.zeros_like(ids, bool)
    hasher = layout_hasher()
    # Multipliers around 2^56: the vocabulary is small.
    assert hasher.multipliers.max() > 2**54
    device = DeviceHasher.create(hasher)
    look_back, done = device.start(1), 0
    out = []
    # Chunks of five with zero to five tokens that count; shorter than the look-back, too.
    for count in [1, 0, 2, 5] * 20:
        count = min(count, ids.shape[1] - done)
        chunk, gone = np.zeros((1, 5), np.int32), np.ones((1, 5), bool)
        chunk[:, :count] = ids[:, done : done + count]
        gone[:, :count] = dead[:, done : done + count]
        rows, look_back = step(device, chunk, look_back, gone, jnp.full(1, count))
        out.append(np.asarray(rows[0, :count]))
        done += count
    assert done == ids.shape[1]
    rows = np.concatenate(out)
    for site, layer in enumerate(hasher.layer_ids):
        np.testing.assert_array_equal(rows[:, site], golden[f"L{layer:02d}.engram.hash_ids"])


@settings(max_examples=60, deadline=None)
@given(
    vocabulary=st.sampled_from([1, 2, 3, 230, 65536, 65537, 99092, 2**31 - 1]),
    # Digits of many widths: 4 to 26 bits.
    least_prime=st.sampled_from([2, 41, 16_000_000, 2**25 - 400, 2**27]),
    layers=st.sampled_from([(0, 1), (1, 14), (7, 1000)]),
    seed=st.integers(0, 2**16),
)
def test_any_configuration(vocabulary, least_prime, layers, seed):
    hasher = hasher_of(vocabulary, least_prime, layers)
    ids = np.random.default_rng(seed).integers(0, vocabulary, (1, 16))
    ids[0, :8] = [0, vocabulary - 1] * 4
    positions = np.arange(16)[None]
    rows = rows_of(DeviceHasher.create(hasher), hasher.history(ids, positions).astype(np.int32))
    np.testing.assert_array_equal(rows, hasher.rows(ids, positions))


@settings(max_examples=60, deadline=None)
@given(values=st.lists(st.integers(0, 2**63 - 1), min_size=8, max_size=8), data=st.data())
def test_any_multiplier(values, data):
    hasher = hasher_of(2**31 - 1, data.draw(st.sampled_from([2, 41, 16_000_000])), (1, 14))
    ids = np.array(data.draw(st.lists(st.integers(0, 2**31 - 1), min_size=4, max_size=4)))
    device = DeviceHasher.create(hasher)
    multipliers = np.array(values, np.uint64).reshape(2, 4)
    device = jax.tree.unflatten(
        jax.tree.structure(device),
        [
            (multipliers >> 32).astype(np.uint32),
            (multipliers & 0xFFFFFFFF).astype(np.uint32),
            *jax.tree.leaves(device)[2:],
        ],
    )
    rows = np.asarray(rows_of(device, ids.astype(np.int32)[None]))[0]
    for site in range(2):
        # Products beyond 2^64 wrap around, as unsigned 64-bit integers do.
        mix, expected = int(ids[0]) * int(multipliers[site, 0]) % 2**64, []
        for order, primes in enumerate(hasher.primes[site], start=1):
            mix ^= int(ids[order]) * int(multipliers[site, order]) % 2**64
            expected += [mix % prime for prime in primes]
        np.testing.assert_array_equal(rows[site] - hasher.offsets[site], expected)


def test_vmap_and_bare_vectors():
    hasher = hasher_of(230, 41, (1, 14))
    device = DeviceHasher.create(hasher)
    history = np.random.default_rng(0).integers(0, 230, (3, 5, 4)).astype(np.int32)
    rows = rows_of(device, history)
    assert rows.shape == (3, 5, 2, 6)
    np.testing.assert_array_equal(jax.jit(jax.vmap(jax.vmap(device.rows)))(history), rows)


def test_a_loop_on_the_device_makes_the_same_rows():
    hasher = hasher_of(230, 41, (1, 14))
    device = DeviceHasher.create(hasher)
    ids = np.random.default_rng(0).integers(0, 230, (2, 9))

    def token(look_back, ids_B):
        history = device.history(ids_B[:, None], look_back)
        return device.next_look_back(history, look_back, jnp.ones(2, int)), device.rows(history)

    _, rows = jax.jit(lambda x: jax.lax.scan(token, device.start(2), x))(ids.T.astype(np.int32))
    expected = hasher.rows(ids, np.broadcast_to(np.arange(9), ids.shape))
    np.testing.assert_array_equal(np.asarray(rows)[:, :, 0].swapaxes(0, 1), expected)


def test_no_engram():
    hasher = hasher_of(230, 41, ())
    with pytest.raises(ValueError, match="engram_layer_ids"):
        DeviceHasher.create(hasher)
