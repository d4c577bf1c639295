"""Engram hashing against recorded numbers and against the definition, position by position."""

import json
import pathlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from v41flash.text import engram_hash

GOLDEN = pathlib.Path(__file__).parents[2] / "golden"
REAL = dict(
    compressed_vocab_size=99092,
    engram_vocab_size=16_000_000,
    max_ngram=4,
    heads=8,
    layer_ids=(1, 14),
    pad_compressed_id=2,
)


@pytest.fixture(scope="module")
def released():
    return engram_hash.EngramHasher(**REAL, num_embeddings=(384_006_168, 384_016_682))


def layout_hasher():
    config = json.loads((GOLDEN / "layout_i/config.json").read_text())["text_config"]
    token_map = json.loads((GOLDEN / "layout_i/token_map.json").read_text())
    return engram_hash.EngramHasher(
        compressed_vocab_size=config["engram_compressed_vocab_size"],
        engram_vocab_size=config["engram_vocab_size"],
        max_ngram=config["engram_max_ngram_size"],
        heads=config["engram_n_heads"],
        layer_ids=config["engram_layer_ids"],
        pad_compressed_id=token_map["pad_compressed_id"],
        num_embeddings=config["engram_num_embeddings"],
    )


def by_definition(hasher, ids, positions, dead):
    """One position at a time, in Python integers."""
    out = np.zeros((*ids.shape, len(hasher.layer_ids), hasher.columns), np.int64)
    for b, t in np.ndindex(ids.shape):
        history, blocked = [], False
        for lag in range(hasher.max_ngram):
            blocked = blocked or positions[b, t] < lag or bool(dead[b, t - lag])
            history.append(hasher.pad_compressed_id if blocked else int(ids[b, t - lag]))
        for s in range(len(hasher.layer_ids)):
            column, offset = 0, 0
            for order in range(2, hasher.max_ngram + 1):
                mix = 0
                for lag in range(order):
                    mix ^= history[lag] * int(hasher.multipliers[s, lag])
                for prime in hasher.primes[s][order - 2]:
                    out[b, t, s, column] = mix % prime + offset
                    column, offset = column + 1, offset + prime
    return out


def test_released_tables_and_rows(released):
    golden = np.load(GOLDEN / "unit/engram_hash_real.npz")
    np.testing.assert_array_equal(released.multipliers, golden["multipliers_i64"])
    np.testing.assert_array_equal(released.primes, golden["primes"])
    np.testing.assert_array_equal(released.offsets, golden["offsets_i64"])
    np.testing.assert_array_equal(released.num_embeddings, golden["table_rows_i64"])
    ids, dead = golden["compressed_ids_i64"], golden["dead"]
    positions = np.broadcast_to(np.arange(ids.shape[1]), ids.shape)
    assert dead.any()
    rows = released.rows(ids, positions, dead)
    assert rows.dtype == np.int32
    np.testing.assert_array_equal(rows, golden["hash_ids"])


def test_recorded_model_tables():
    hasher = layout_hasher()
    recorded = json.loads((GOLDEN / "layout_i/meta.json").read_text())["engram"]
    np.testing.assert_array_equal(hasher.primes, recorded["primes"])
    np.testing.assert_array_equal(
        hasher.multipliers, [[int(m) for m in site] for site in recorded["multipliers"]]
    )
    assert list(hasher.num_embeddings) == recorded["rows"]


@pytest.mark.parametrize("run", ["A_fakequant", "B_noquant", "multimodal/D_multimodal"])
def test_recorded_model_rows(run):
    hasher = layout_hasher()
    golden = np.load(GOLDEN / f"layout_i/{run}.npz")
    token_map = json.loads((GOLDEN / "layout_i/token_map.json").read_text())["compressed_id"]
    ids = np.array(token_map)[golden["tokens"]][None]
    if "compressed_ids" in golden:
        np.testing.assert_array_equal(ids[0], golden["compressed_ids"])
    dead = golden["token_types"][None] >= 0 if "token_types" in golden else None
    rows = hasher.rows(ids, np.arange(ids.shape[1])[None], dead)[0]
    for site, layer in enumerate(hasher.layer_ids):
        np.testing.assert_array_equal(rows[:, site], golden[f"L{layer:02d}.engram.hash_ids"])


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_packed_rows_follow_the_definition_and_never_cross_documents(data):
    hasher = layout_hasher()
    lengths = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**16)))
    total = sum(lengths)
    ids = rng.integers(0, hasher.compressed_vocab_size, (2, total))
    dead = rng.random((2, total)) < 0.2
    positions = np.broadcast_to(np.concatenate([np.arange(n) for n in lengths]), (2, total))
    rows = hasher.rows(ids, positions, dead)
    np.testing.assert_array_equal(rows, by_definition(hasher, ids, positions, dead))
    start = total - lengths[-1]
    alone = hasher.rows(ids[:, start:], positions[:, start:], dead[:, start:])
    np.testing.assert_array_equal(rows[:, start:], alone)
    assert (rows < np.array(hasher.num_embeddings)[:, None]).all() and (rows >= 0).all()


def test_long_rows_cross_the_blocks(released):
    ids = np.random.default_rng(0).integers(0, 99092, (1, engram_hash._BLOCK + 100))
    positions = np.arange(ids.shape[1])[None]
    whole = released.rows(ids, positions)
    tail = released.rows(ids[:, -200:], positions[:, -200:])
    np.testing.assert_array_equal(whole[:, -197:], tail[:, 3:])


def test_products_cannot_overflow():
    for vocabulary in (2, 230, 99092, 2**31):
        multipliers = engram_hash.site_multipliers(vocabulary, 4, 14)
        assert all(int(m) % 2 == 1 and int(m) * (vocabulary - 1) < 2**63 for m in multipliers)


def test_primes_are_prime_distinct_and_start_inclusive():
    primes = np.ravel(engram_hash.table_primes(2, 3, 5, 2)).tolist()
    assert primes == [2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61, 67, 71]


def test_no_engram_layer_gives_no_columns():
    hasher = engram_hash.EngramHasher(**(REAL | dict(layer_ids=())), num_embeddings=())
    assert hasher.rows(np.zeros((2, 8), int), np.zeros((2, 8), int)).shape == (2, 8, 0, 24)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(num_embeddings=(384_006_168, 5)), r"engram_num_embeddings=\[384006168, 5\]"),
        (dict(max_ngram=1), "engram_max_ngram_size=1"),
        (dict(heads=0), "engram_n_heads=0"),
        (dict(pad_compressed_id=99092), "99092"),
        (dict(engram_vocab_size=2**30), "32-bit"),
    ],
)
def test_bad_parameters(change, message):
    with pytest.raises(ValueError, match=message):
        engram_hash.EngramHasher(**(REAL | change))


def test_bad_ids_and_shapes(released):
    with pytest.raises(ValueError, match="99092"):
        released.rows(np.array([[99092]]), np.array([[0]]))
    with pytest.raises(ValueError, match="positions"):
        released.rows(np.zeros((1, 4), int), np.zeros((1, 3), int))
    with pytest.raises(ValueError, match="dead"):
        released.rows(np.zeros((1, 4), int), np.zeros((1, 4), int), np.zeros((1, 3), bool))
