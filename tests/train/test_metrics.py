"""metrics.jsonl: what is read back, what is dropped, and what a full disk gives."""

import json

import pytest

from train import metrics


def test_rows_come_back_and_later_ones_can_be_dropped(tmp_path):
    reporter = metrics.Reporter(tmp_path, first_step=0, last_step=3)
    for step in (1, 2, 3):
        reporter.write({"step": step, "loss": 1.5, "ce": 1.0})
    reporter.close()
    with open(tmp_path / metrics.FILE, "a") as file:
        file.write('{"step": 4, "lo')
    assert [row["step"] for row in metrics.read(tmp_path)] == [1, 2, 3]
    metrics.Reporter(tmp_path, first_step=2, last_step=3).close()
    assert [row["step"] for row in metrics.read(tmp_path)] == [1, 2]
    metrics.replace_last(tmp_path, {"step": 2, "loss": 7.0})
    rows = [json.loads(line) for line in (tmp_path / metrics.FILE).read_text().splitlines()]
    assert rows == [{"step": 1, "loss": 1.5, "ce": 1.0}, {"step": 2, "loss": 7.0}]
    assert metrics.read(tmp_path / "absent") == []


def test_a_full_disk_is_one_line(tmp_path):
    reporter = metrics.Reporter(tmp_path, first_step=0, last_step=3)
    reporter._file.close()
    reporter._file = open("/dev/full", "a", buffering=1)
    with pytest.raises(metrics.ReportError, match="step 1 cannot be logged in .*No space") as error:
        reporter.write({"step": 1, "loss": 1.5})
    assert "\n" not in str(error.value)
    with pytest.raises(metrics.ReportError, match="cannot be completed: .*No space"):
        reporter.close()


def test_other_processes_write_nothing(tmp_path):
    reporter = metrics.Reporter(tmp_path / "run", first_step=0, last_step=3, active=False)
    reporter.write({"step": 1, "loss": 1.5})
    reporter.close()
    assert not (tmp_path / "run").exists()
