"""The command that prints what TPU kernels take."""

import pytest

from pallas_kernels import account
from pallas_kernels.tpu import LEAST_VMEM_BYTES, Account


def test_table():
    lines = list(account.table({"op": {"case": Account(2**20, 82 * 10**9, 197 * 10**9, copies=7)}}))
    assert [line.count("|") for line in lines] == [10] * 3
    assert lines[2].startswith("| op: case | 1.0 | 8.2e+04 | 197 | 7 | 1e+05 |")


def test_every_kernel_fits_the_least_vector_memory():
    for op, stating in account.stating().items():
        named = stating()
        assert named, op
        for what, stated in named.items():
            assert 0 < stated.vmem_bytes < LEAST_VMEM_BYTES, (op, what)
            assert stated.hbm_bytes > 0, (op, what)


def test_usage(capsys):
    with pytest.raises(SystemExit) as exit:
        account.main(["--op=none"])
    assert exit.value.code == 2
    assert "--op" in capsys.readouterr().err
