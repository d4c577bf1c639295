"""Loss by position: bands, means and their errors, the plot, the flags."""

import math

import numpy as np
import pytest

from eval import perplexity


def test_bands_cover_every_position_once():
    for length in (2, 64, 65, 128, 1000, 4096):
        covered = [n for first, last in perplexity.bands(length) for n in range(first, last)]
        assert covered == list(range(length))
    assert perplexity.bands(300) == [(0, 64), (64, 128), (128, 256), (256, 300)]


def test_means_and_errors(tmp_path):
    nats = np.zeros((3, 200))
    nats[:, :64], nats[:, 128:] = 2.0, [[1.0], [2.0], [6.0]]
    found = perplexity.by_position(nats)
    assert found["nats"] == {"0": 2.0, "64": 0.0, "128": 3.0}
    assert found["error"]["128"] == pytest.approx(math.sqrt(7) / math.sqrt(3))
    assert found["all"] == pytest.approx((64 * 2 + 72 * 3) / 200)
    perplexity.plot(found, tmp_path / "sub" / "p.png")
    assert (tmp_path / "sub" / "p.png").read_bytes()[:4] == b"\x89PNG"
    perplexity.plot(perplexity.by_position(nats[:1]), tmp_path / "one.png")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "--workdir is missing"),
        (["--workdir=x"], "--text is missing"),
        (["--workdir=x", "--text=y", "--length=1"], "length"),
        (["--workdir=x", "--text=y", "z"], "'z' is no flag"),
        (["--workdir=/nowhere", "--text=y"], "/nowhere: must be the folder of a training run"),
    ],
)
def test_wrong_flags_end_in_one_line(flags, message, capsys):
    assert perplexity.main(flags) == 2
    error = capsys.readouterr().err
    assert message in error and len(error.splitlines()) == 1
