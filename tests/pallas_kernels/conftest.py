"""What the kernel tests share."""

import jax
import pytest
from jax.experimental.pallas import tpu as pltpu

from tests.pallas_kernels import cuda_aot, tpu_aot


@pytest.fixture(scope="session")
def hopper():
    """A Hopper GPU to compile for; skips, saying why, where that is not possible."""
    reason = cuda_aot.missing()
    if reason is not None:
        pytest.skip(f"cannot compile for a GPU: {reason}")
    return cuda_aot.Hopper.describe()


@pytest.fixture
def recent_hopper(hopper):
    """`hopper`, for kernels whose Mosaic GPU came with jax 0.11."""
    if jax.__version_info__ < (0, 11):
        pytest.skip(f"the kernel is for jax 0.11 and later, this is {jax.__version__}")
    return hopper


@pytest.fixture(scope="session", params=tpu_aot.TOPOLOGIES)
def tpu(request):
    """A TPU of each generation to compile for; skips, saying why, where that is not possible."""
    reason = tpu_aot.missing()
    if reason is not None:
        pytest.skip(f"cannot compile for a TPU: {reason}")
    return tpu_aot.Tpu.describe(request.param)


@pytest.fixture
def no_races(capsys):
    """Fails a test in which an interpreted kernel had a race: interpret modes print them."""
    yield
    assert "RACE DETECTED" not in capsys.readouterr().out


@pytest.fixture
def interpreted(no_races):
    """Parameters of TPU interpret mode; a race while the test ran fails it."""
    pltpu.reset_tpu_interpret_mode_state()  # what an exception in an earlier kernel left
    yield pltpu.InterpretParams(detect_races=True)
