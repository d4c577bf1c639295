"""Figures of the replay experiment, its pieces of text, its flags."""

import numpy as np
import pytest

from eval import replay
from eval.replay import Outcome
from v41flash.errors import InputError
from v41flash.text.tokenizer import ByteTokenizer


def test_figures():
    exact = Outcome(np.array([[-1.0, -2.0], [-3.0, -4.0]]), np.array([[5, 6, 7], [5, 6, 7]]))
    other = Outcome(np.array([[-1.5, -2.0], [-3.0, -5.0]]), np.array([[5, 6, 7], [5, 9, 7]]))
    figures = replay.compare([other], [exact], window=1)
    assert figures["nats"] == pytest.approx(11.5 / 4)
    assert figures["loss"] == pytest.approx(1.5 / 4)
    # Means over pieces are 0.25 and 0.5.
    assert figures["loss_error"] == pytest.approx(0.25 / np.sqrt(2) / np.sqrt(2))
    assert figures["loss_first_window"] == pytest.approx(0.25)
    assert figures["absolute"] == pytest.approx(1.5 / 4)
    assert figures["greedy_shared"] == 2.0 and figures["greedy_equal"] == 0.5


class _Generator:
    tokenizer = ByteTokenizer()

    def encode(self, text):
        return np.concatenate([[0], self.tokenizer.encode(text)])


def test_pieces_are_beginnings_of_files(tmp_path):
    for number in range(6):
        (tmp_path / f"{number}.txt").write_text(chr(97 + number) * (3 + 2 * number))
    pattern = str(tmp_path / "*.txt")
    found = replay.pieces(_Generator(), pattern, 2, 6)
    np.testing.assert_array_equal(found[:, 0], 0)
    assert [_Generator.tokenizer.decode(row) for row in found] == ["bbbbb", "fffff"]
    with pytest.raises(InputError, match="5 files of 6 tokens, not 6"):
        replay.pieces(_Generator(), pattern, 6, 6)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "--workdir is missing"),
        (["--workdir=x"], "--text is missing"),
        (["--workdir=x", "--text=y", "--lengths=1"], "--lengths: 1 must be between 2"),
        (["--workdir=x", "--text=y", "--lengths=a"], "invalid literal"),
        (["--workdir=x", "--text=y", "--prefix=1"], "prefix"),
        (["--workdir=x", "--text=y", "z"], "'z' is no flag"),
        (["--workdir=/nowhere", "--text=y"], "/nowhere: must be the folder of a training run"),
    ],
)
def test_wrong_flags_end_in_one_line(flags, message, capsys):
    assert replay.main(flags) == 2
    error = capsys.readouterr().err
    assert message in error and len(error.splitlines()) == 1
