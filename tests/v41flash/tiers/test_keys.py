"""Keys: equal exactly where model and tokens are."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from v41flash.tiers.keys import KeyChain, digest

TOKENS = st.lists(st.integers(0, 3), max_size=20)


def chain(tokens, model=b"m", cuts=()):
    made = KeyChain(model, 4)
    for part in np.split(np.array(tokens, np.int32), sorted(cuts)):
        made.extend(part)
    return made


@settings(max_examples=50, deadline=None)
@given(TOKENS, TOKENS, st.lists(st.integers(0, 20), max_size=4))
def test_keys_follow_from_the_tokens_alone(one, other, cuts):
    a, b = chain(one, cuts=[min(cut, len(one)) for cut in cuts]), chain(other)
    assert a.tokens.tolist() == one and len(a.keys) == len(one) // 4
    for pages in range(1, min(len(a.keys), len(b.keys)) + 1):
        same = one[: 4 * pages] == other[: 4 * pages]
        assert (a.keys[pages - 1] == b.keys[pages - 1]) == same
    assert a.keys == chain(one).keys
    assert not set(a.keys) & set(chain(one, b"n").keys)
    for length in range(min(len(one), len(other)) + 1):
        for own in (length, length // 2):
            same = one[:length] == other[:own]
            assert (a.place(length) == b.place(own)) == same


@given(st.lists(st.binary(max_size=3), max_size=4), st.lists(st.binary(max_size=3), max_size=4))
def test_digests_tell_parts_apart(one, other):
    assert (digest(*one) == digest(*other)) == (one == other)
