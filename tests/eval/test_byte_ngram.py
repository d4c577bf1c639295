"""The byte n-gram model against counting by hand and against an entropy that is known."""

import math

import numpy as np
import pytest

from eval.tasks import byte_ngram


@pytest.mark.parametrize("order", [0, 1, 2])
def test_a_distribution_over_bytes(order):
    model = byte_ngram.fit([b"abracadabra", b"a", b"", b"cab"], order)
    every_byte = np.arange(256)
    for context in (0, ord("a"), ord("a") * 256 + ord("b"), 256**2 - 1):
        contexts = np.full(256, context % 256**order)
        total = model.probabilities(contexts, every_byte, order).sum()
        assert total == pytest.approx(1, abs=1e-12)


def by_hand(model, train, held_out):
    bits = 0.0
    for document in held_out:
        for t, byte in enumerate(document):
            p = 1 / 256
            for n in range(min(t, model.order) + 1):
                context = document[t - n : t]
                starts = [
                    (d, i) for d in train for i in range(n, len(d)) if d[i - n : i] == context
                ]
                hits = sum(d[i] == byte for d, i in starts)
                p = (hits + model.weights[n] * p) / (len(starts) + model.weights[n])
            bits -= math.log2(p)
    return bits


def test_equals_counting_by_hand():
    rng = np.random.default_rng(0)
    train = [rng.integers(97, 101, n).astype(np.uint8).tobytes() for n in (30, 1, 17)]
    held_out = [b"abcd", b"z", b"aab"]
    model = byte_ngram.fit(train, 2)
    assert model.bits(held_out) == pytest.approx(by_hand(model, train, held_out), rel=1e-12)
    assert byte_ngram.ngram_bits_per_byte(train, held_out) == pytest.approx(
        model.bits(held_out) / 8, rel=1e-12
    )


def test_reaches_the_entropy_of_a_second_order_source():
    # The next byte is one of two, chosen by the two before it: 1 bit a byte, hidden from order 1.
    rng = np.random.default_rng(1)

    def document(length):
        text = [0, 2]
        for coin in rng.integers(0, 2, length):
            text.append(2 * ((text[-1] // 2 + text[-2] // 2) % 4) + int(coin))
        return bytes(text)

    train, held_out = [document(40_000)], [document(4_000)]
    by_order = [byte_ngram.ngram_bits_per_byte(train, held_out, n) for n in range(3)]
    assert by_order[2] < by_order[1] - 0.3
    assert by_order[2] == pytest.approx(1, abs=0.02)


def test_documents_do_not_see_each_other():
    model = byte_ngram.fit([b"ab" * 50], 2)
    assert model.bits([b"ab", b"ab"]) == pytest.approx(2 * model.bits([b"ab"]))


def test_bad_input():
    with pytest.raises(ValueError, match="order=3"):
        byte_ngram.fit([b"abc"], 3)
    with pytest.raises(ValueError, match="training"):
        byte_ngram.fit([b""])
    with pytest.raises(ValueError, match="held-out"):
        byte_ngram.ngram_bits_per_byte([b"abc"], [])
