"""What the kernel tests share."""

import pytest

from tests.pallas_kernels import cuda_aot


@pytest.fixture(scope="session")
def hopper():
    """A Hopper GPU to compile for; skips, saying why, where that is not possible."""
    reason = cuda_aot.missing()
    if reason is not None:
        pytest.skip(f"cannot compile for a GPU: {reason}")
    return cuda_aot.Hopper.describe()
