"""What several test files share: quick compilation; the recorded model, compiled once a session."""

import importlib.metadata
import os
import pathlib

import pytest

GOLDEN = pathlib.Path(__file__).parent / "golden"

# Tests compile much and compute little. Programs of a run with XLA_FLAGS of its own (`make
# test-all`) are compiled as it says. Read by XLA when the first backend is made.
_QUICK_COMPILATION = [
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
]
if importlib.metadata.version("jax").startswith("0.10."):
    _QUICK_COMPILATION.append("--xla_cpu_use_fusion_emitters=false")
os.environ.setdefault("XLA_FLAGS", " ".join(_QUICK_COMPILATION))


@pytest.fixture(scope="session")
def recorded():
    """The recorded text model (8 layers, random weights) with its compiled forward passes."""
    from tests.golden_check import Recorded

    return Recorded.load(GOLDEN / "layout_i")
