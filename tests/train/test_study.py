"""Comparisons put together: means over seeds, the best rate, what is refused."""

import json
import statistics

import pytest

from train import records, study


def folder(path, runs, *, lost=()):
    """What `train.compare` leaves, for (family, rate, seed, final bits per byte); None is null."""
    path.mkdir()
    rows = [
        {"step": 10, "ce": [3.0 for _ in runs]},
        {"step": 20, "ce": [2.0 for _ in runs], records.HELDOUT: [run[3] for run in runs]},
    ]
    named = [
        {"family": family, "optimizer": {"learning_rate": rate}, "seed": seed}
        for family, rate, seed, _ in runs
    ]
    files = {
        "summary.json": json.dumps({"runs": named}),
        "curves.jsonl": "".join(json.dumps(row) + "\n" for row in rows),
        "versions.json": json.dumps({"commit": "abc"}),
    }
    for name, text in files.items():
        if name not in lost:
            (path / name).write_text(text)
    return path


FIRST = [("adamw", 1e-3, 0, 1.7), ("adamw", 2e-3, 0, 1.5), ("adamw", 4e-3, 0, None)]
SECOND = [("adamw", 1e-3, 1, 1.8), ("adamw", 1e-3, 2, 1.6), ("v41", 1e-3, 0, 1.4)]


def test_two_comparisons(tmp_path, capsys):
    one, two = folder(tmp_path / "one", FIRST), folder(tmp_path / "two", SECOND)
    output = tmp_path / "all.jsonl"
    assert study.main([f"--output={output}", str(one)]) == 0
    assert study.main([f"--output={output}", str(two)]) == 0
    shown = capsys.readouterr().out.splitlines()[-5:]
    deviation = statistics.stdev([1.7, 1.8, 1.6])
    # The rate with three seeds is judged before one that was lucky once.
    assert shown[2] == f"| 0.001 | **1.7000 +- {deviation:.4f} (3)** | **1.4000** |"
    assert shown[3:] == ["| 0.002 | 1.5000 |  |", "| 0.004 | inf |  |"]
    found = study.read(output)
    assert len(found) == 6 and {run["commit"] for run in found} == {"abc"}
    assert found[0]["ce"] == {"10": 3.0, "20": 2.0} and found[0][records.HELDOUT] == {"20": 1.7}
    assert output.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    before = output.read_bytes()
    assert study.main([f"--output={output}"]) == 0 and output.read_bytes() == before


def test_the_best_of_equal_seeds():
    rows = [{"step": 1, records.HELDOUT: [1.6, 1.5, 1.9, None]}]
    named = [("a", 1e-3, 0), ("a", 2e-3, 0), ("a", 3e-3, 0), ("a", 4e-3, 0)]
    (rates,) = records.by_rate(records.of_comparison(named, rows, None)).values()
    assert records.best(rates) == 2e-3


@pytest.mark.parametrize("lost", ["summary.json", "curves.jsonl", "versions.json"])
def test_an_unfinished_folder(tmp_path, capsys, lost):
    path = folder(tmp_path / "one", FIRST, lost=(lost,))
    assert study.main([f"--output={tmp_path / 'all.jsonl'}", str(path)]) == 2
    error = capsys.readouterr().err
    assert "one: no finished comparison" in error and lost in error and error.count("\n") == 1
    assert not (tmp_path / "all.jsonl").exists()


def test_refused(tmp_path, capsys):
    path = folder(tmp_path / "one", FIRST)
    output = tmp_path / "all.jsonl"
    assert study.main([f"--output={output}", str(path), str(path)]) == 2
    assert "('adamw', 0.001, 0) is in" in capsys.readouterr().err
    assert study.main([f"--output={tmp_path / 'all.png'}", str(path)]) == 2
    assert "must end in .jsonl" in capsys.readouterr().err
    output.write_text('{"family": 1}\n')
    assert study.main([f"--output={output}", str(path)]) == 2
    assert "not a file of runs" in capsys.readouterr().err
    assert study.main([f"--output={tmp_path / 'none.jsonl'}"]) == 2
    assert "none.jsonl" in capsys.readouterr().err
