"""Text in pieces is the text in one piece, up to the first stop text."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from v41flash.serving.text_stream import TextStream
from v41flash.text.tokenizer import ByteTokenizer

TOKENIZER = ByteTokenizer()
SPECIAL = st.sampled_from([0, 1, 2])
TEXTS = st.text(st.sampled_from("abé€😀 "), max_size=12).map(lambda t: TOKENIZER.encode(t).tolist())
NOISE = st.lists(st.integers(0, 258), max_size=4)
TOKENS = st.lists(st.one_of(TEXTS, NOISE, SPECIAL.map(lambda i: [i])), max_size=5)


def flat(parts):
    return [token for part in parts for token in part]


def streamed(tokens, cuts, stop):
    stream, said = TextStream(TOKENIZER.decode, stop), []
    edges = sorted({0, len(tokens), *(cut % (len(tokens) + 1) for cut in cuts)})
    for a, b in zip(edges, edges[1:], strict=False):
        said.append(stream.feed(tokens[a:b]))
    said.append(stream.close())
    return stream, said


@settings(deadline=None, derandomize=True)
@given(parts=TOKENS, cuts=st.lists(st.integers(0, 60), max_size=6))
def test_pieces_join_to_the_whole(parts, cuts):
    tokens = flat(parts)
    stream, said = streamed(tokens, cuts, ())
    assert "".join(said) == TOKENIZER.decode(tokens)
    assert stream.tokens == len(tokens) and not stream.stopped


@settings(deadline=None, derandomize=True)
@given(
    text=st.text(st.sampled_from("abé"), max_size=30),
    cuts=st.lists(st.integers(0, 60), max_size=6),
    stop=st.lists(st.text(st.sampled_from("abé"), min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_a_stop_text_ends_it(text, cuts, stop):
    tokens = TOKENIZER.encode(text)
    stream, said = streamed(tokens, cuts, stop)
    ends = [(text.find(s) + len(s), text.find(s)) for s in stop if s in text]
    if not ends:
        assert "".join(said) == text and not stream.stopped
        return
    # The one that is complete first; of several that end there, the one that begins first.
    end, begin = min(ends)
    assert "".join(said) == text[:begin]
    assert stream.stopped and stream.tokens == len(text[:end].encode())


def test_nothing_is_held_back_longer_than_needed():
    stream = TextStream(TOKENIZER.decode, ["stop"])
    assert stream.feed(TOKENIZER.encode("go on, st")) == "go on, "
    assert stream.feed(TOKENIZER.encode("ill")) == "still"
    euro = TOKENIZER.encode("€")
    assert [stream.feed([token]) for token in euro] == ["", "", "€"]
    assert stream.feed(TOKENIZER.encode("sto")) == ""
    assert stream.close() == "sto"


@pytest.mark.parametrize("prefix", ["", "▁a", "b"])
def test_a_decoder_that_looks_back(prefix):
    """Some decoders drop the space in front of the first token alone."""
    pieces = ["▁Hello", "▁wor", "ld", "▁", "x"] + ([prefix] if prefix else [])

    def decode(ids):
        return "".join(pieces[i] for i in ids).replace("▁", " ").removeprefix(" ")

    stream = TextStream(decode)
    said = "".join(stream.feed([i]) for i in range(len(pieces))) + stream.close()
    assert said == decode(range(len(pieces)))
