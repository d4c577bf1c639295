"""What the kernel tests share."""

import jax
import pytest

from tests.pallas_kernels import cuda_aot


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
