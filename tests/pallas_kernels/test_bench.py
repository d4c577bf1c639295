"""The benchmark command on small cases."""

import json
import sys
import threading
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import bench, measure


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


def test_floor_is_that_of_the_ceiling_that_binds():
    ceilings = measure.Ceilings(matmul=4.0, fp8=8.0, copy=2.0)

    def floor(flops, bytes_, **fp8):
        return [
            ceilings.floor(measure.Variant(None, (), flops, bytes_, 0.0, **fp8)),
            ceilings.floor(measure.Foreign(None, None, None, flops, bytes_, 0.0, **fp8)),
        ]

    assert floor(24.0, 2.0) == [6.0] * 2
    assert floor(24.0, 2.0, fp8=True) == [3.0] * 2
    assert floor(24.0, 14.0) == [7.0] * 2


def test_products_on_the_grid_have_the_ceiling_of_fp8(tmp_path, capsys):
    lines = tmp_path / "lines.json"
    flags = ["--op=indexer", "--implementation=xla", "--budget=0.01", f"--json={lines}"]
    assert bench.main(flags) == 0
    assert " fp8, copy" in capsys.readouterr().out
    rows = {row["variant"]: row for row in map(json.loads, lines.read_text().splitlines())}
    flops = 2.0 * 64 * 512 * 32 * 128
    for variant, ceilings in (
        ("bfloat16", ["matmul_flops"]),
        ("on_grid", ["matmul_flops", "fp8_flops"]),
    ):
        row = rows[variant]
        np.testing.assert_allclose(row["floor_ms"], flops / max(row[c] for c in ceilings) * 1e3)
        np.testing.assert_allclose(row["fraction"], row["floor_ms"] / row["ms"])


def test_ceiling_of_fp8_is_a_product_of_fp8(hopper):
    factor = jax.ShapeDtypeStruct((8192, 8192), jnp.float8_e4m3fn)
    options = {"xla_gpu_enable_triton_gemm": False, "xla_gpu_autotune_level": 0}
    program = hopper.compile(
        measure.rows_by_rows, factor, factor, compiler_options=options
    ).as_text()
    assert "__cublas$lt$matmul$f8" in program
    assert not any(word in program for word in (" convert(", " transpose("))


def test_cases_are_named_on_the_command_line(tmp_path):
    lines = tmp_path / "lines.json"
    cases = [f"--case=tiny{part}" for part in ("", "_rows", "_weights")]
    flags = ["--op=grouped_matmul", "--implementation=xla", "--budget=0.01", f"--json={lines}"]
    assert bench.main([*flags, *cases]) == 0
    rows = [json.loads(line) for line in lines.read_text().splitlines()]
    ours = [row["case"] for row in rows if row["implementation"] == "xla"]
    assert ours == ["tiny", "tiny_rows", "tiny_weights"]


@pytest.mark.parametrize(
    "flags, named",
    [
        (["--op=nothing"], "choose from"),
        (["--op=topk", "--case=nothing"], "topk have C1"),
        (["--op=topk", "--implementation=nothing"], "mosaic_gpu, mosaic_tpu, xla"),
        (["--op=topk", "--rivals=no.such"], "no.such"),
    ],
)
def test_wrong_names_are_wrong_usage(flags, named, capsys):
    with pytest.raises(SystemExit) as ended:
        bench.main(flags)
    assert ended.value.code == 2
    assert named in capsys.readouterr().err


def test_rivals_that_do_not_run_are_said_to(monkeypatch, capsys, tmp_path):
    def absent(case):
        raise ImportError("No module named 'torch'")

    def broken(case):
        def start():
            raise RuntimeError("needs a GPU")

        def refused(x):
            raise TypeError("of another version")

        return {
            "theirs": measure.Foreign(start, None, None, 0.0, 0.0, 0.0),
            "old": measure.Variant(lambda _: refused, (jnp.ones(3),), 0.0, 0.0, 0.0),
        }

    rivals = types.SimpleNamespace(RIVALS={"sinkhorn": broken, "topk": absent})
    monkeypatch.setitem(sys.modules, "outside", rivals)
    ours = ["--op=sinkhorn", "--op=topk", "--variant=float32", "--implementation=xla"]
    lines = tmp_path / "lines.json"
    assert bench.main([*ours, "--budget=0.01", "--rivals=outside", f"--json={lines}"]) == 0
    assert "topk small, rivals: No module named 'torch'" in capsys.readouterr().out
    rows = [json.loads(line) for line in lines.read_text().splitlines()]
    declined = {row["variant"]: row["declined"] for row in rows if "declined" in row}
    assert declined == {
        "theirs": "RuntimeError: needs a GPU",
        "old": "TypeError: of another version",
    }


def test_side_by_side(tmp_path):
    """Compiling goes on together; who times waits for those that compile, and is alone then."""
    lock, seen, compiling = str(tmp_path / "lock"), [], threading.Barrier(3)

    def work(seconds):
        with measure.side_by_side(lock, alone=False):
            compiling.wait(timeout=30)  # never passed if one had to wait for another
            time.sleep(seconds)
            seen.append("compiled")
        with measure.side_by_side(lock, alone=True):
            seen.append("begins")
            time.sleep(0.05)
            seen.append("ends")

    threads = [threading.Thread(target=work, args=(0.1 * i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert seen == ["compiled"] * 3 + ["begins", "ends"] * 3
    with measure.side_by_side(None, alone=True):
        pass


def test_repeated():
    count = measure.repeated(lambda x, y: x + y, 5)
    np.testing.assert_array_equal(count(jnp.arange(3), 1), [1, 2, 3])


@pytest.mark.parametrize("flag", ["--case=none", "--op=none", "--typo=1"])
def test_usage(flag, capsys):
    with pytest.raises(SystemExit) as exit:
        bench.main(["--op=sinkhorn", flag])
    assert exit.value.code == 2
    assert flag.split("=")[0] in capsys.readouterr().err
