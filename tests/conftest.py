"""What several test files share: the recorded model, compiled once a session."""

import pathlib

import pytest

GOLDEN = pathlib.Path(__file__).parent / "golden"


@pytest.fixture(scope="session")
def recorded():
    """The recorded text model (8 layers, random weights) with its compiled forward passes."""
    from tests.golden_check import Recorded

    return Recorded.load(GOLDEN / "layout_i")
