"""The benchmark command on small cases."""

import json

import pytest

from pallas_kernels import bench


def test_lines(tmp_path, capsys):
    lines = tmp_path / "lines.json"
    code = bench.main(["--op=sinkhorn", "--variant=float32", "--budget=0.01", f"--json={lines}"])
    assert code == 0
    rows = [json.loads(line) for line in lines.read_text().splitlines()]
    declined = [row["implementation"] for row in rows if "ms" not in row]
    assert declined == ["mosaic_tpu"]
    rows = [row for row in rows if "ms" in row]
    assert [(row["variant"], row["implementation"]) for row in rows] == [
        ("float32", "xla"),
        ("loop", "rival"),
    ]
    for row in rows:
        assert row["ms"] > 0 and 0 < row["fraction"] and row["error"] < 1e-4
    assert "sinkhorn small" in capsys.readouterr().out


@pytest.mark.parametrize("flag", ["--case=none", "--op=none", "--typo=1"])
def test_usage(flag, capsys):
    with pytest.raises(SystemExit) as exit:
        bench.main(["--op=sinkhorn", flag])
    assert exit.value.code == 2
    assert flag.split("=")[0] in capsys.readouterr().err
