"""Sweeps: what is refused, what is run, what is run again after a kill, and what is reported."""

import fcntl
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from eval import main as main_lib
from eval import report, results, sweep_jobs
from eval import sweep as sweep_lib
from eval.sweep import Claim, Evaluation, Sweep, SweepError, Training, Variant

ROOT = pathlib.Path(__file__).parents[2]
_FILE = """
from eval.sweep import Claim, Evaluation, Sweep, Training, Variant

def get_sweep():
    def one(name, n, **flags):
        flags = dict(n=n, seed="{{seed}}", journal={journal!r}, **flags)
        return Variant(name, workdir="/run", evaluations=(
            Evaluation("tests.eval.sweep_program", flags),))
    return Sweep(variants=({variants}), seeds=(0, 1), metric="sweep_program.loss",
                 claims=(Claim("one is less than two", "a", "b"),))
"""
_FOUR = "one('a', 1), one('b', 2), one('c', 3), one('d', 4)"


class Folder:
    """A sweep file, its results, and the journal of what its programs did."""

    def __init__(self, path, variants=_FOUR):
        self.file, self.workdir, self.journal = path / "sweep.py", path / "out", path / "journal"
        self.write(variants)

    def write(self, variants):
        self.file.write_text(_FILE.format(journal=str(self.journal), variants=variants))

    def flags(self, *more):
        return [f"--sweep={self.file}", f"--workdir={self.workdir}", *more]

    def run(self, *more):
        return main_lib.main(self.flags(*more))

    def ran(self):
        return self.journal.read_text().splitlines() if self.journal.exists() else []

    def rows(self):
        return results.read(self.workdir)


@pytest.fixture
def folder(tmp_path):
    return Folder(tmp_path)


def test_all_points_run_once_and_are_reported(folder):
    assert folder.run("--slots=2") == 0
    assert sorted(folder.ran()) == [f"{n} {seed}" for n in (1, 2, 3, 4) for seed in (0, 1)]
    row = folder.rows()["b@1"]
    assert row["metrics"] == {"sweep_program.loss": 1.875, "sweep_program.deep.x": 1}
    command = row["commands"][0].split()
    assert command[:3] == ["python", "-m", "tests.eval.sweep_program"]
    assert {"--workdir=/run", "--seed=1", "--n=2"} <= set(command)
    assert len(row["commit"]) == 40
    text = (folder.workdir / report.FILE).read_text()
    assert "8 of 8 points are finished." in text
    # Gains 1 and 0.75: deviation 0.25 / sqrt(2), t(0.975, 1 degree) = 12.706.
    assert "a: 1.0625 ± 0.0884 | b: 1.9375 ± 0.0884 | better | +0.8750 ± 1.5883 | not shown" in text
    assert row["commands"][0] in text and row["commit"] in text
    for name in ("claim_00.png", "group_all.png"):
        assert (folder.workdir / report.PLOTS / name).read_bytes()[:4] == b"\x89PNG"
    # Nothing is left to do.
    assert folder.run() == 0 and len(folder.ran()) == 8


def test_more_seeds_and_variants_are_added_to_what_is_there(folder):
    assert folder.run("--only=a") == 0
    assert folder.run("--only=[ab]", "--seeds=0,1,2") == 0
    assert sorted(folder.ran()) == ["1 0", "1 1", "1 2", "2 0", "2 1", "2 2"]
    folder.write(_FOUR.replace("one('a', 1)", "one('a', 5)"))
    assert folder.run("--only=b") == 0
    assert folder.run() == 2


def test_a_failed_point_stops_nothing_and_is_tried_again(folder, capsys):
    folder.write("one('a', 1), one('b', 2, fail=2), one('c', 3)")
    assert folder.run() == 1
    rows = folder.rows()
    assert [rows[f"{n}@0"]["status"] for n in "abc"] == ["done", "failed", "done"]
    assert rows["b@0"]["error"] == "exit status 2: error: n is what it must not be"
    text = (folder.workdir / report.FILE).read_text()
    assert "4 of 6 points are finished. 2 have failed" in text
    assert "| b@1 | exit status 2: error: n is what it must not be | points/b@1 |" in text
    assert "## Claims" not in text
    capsys.readouterr()
    folder.write("one('a', 1), one('b', 2), one('c', 3)")
    assert folder.run() == 0
    assert sorted(folder.ran()) == sorted(["1 0", "1 1", *2 * ["2 0", "2 1"], "3 0", "3 1"])
    assert "6 points, 2 to be run" in capsys.readouterr().out


def test_what_a_program_did_not_write_is_a_failure(folder):
    # The last flag of a name counts: the file that is read is never written.
    folder.write("one('a', 1, json='/dev/null'), one('b', 2)")
    assert folder.run() == 1
    assert folder.rows()["b@0"]["status"] == "done"
    assert folder.rows()["a@0"]["error"].startswith("no results: FileNotFoundError")


def test_a_killed_sweep_goes_on_with_what_is_not_finished(folder, tmp_path):
    gate = tmp_path / "gate"
    folder.write(", ".join(f"one('v{n}', {n}, gate={str(gate)!r})" for n in (0, 1, 2, 3)))
    folder.file.write_text(folder.file.read_text().replace('"a", "b"', '"v0", "v1"'))
    command = [sys.executable, "-m", "eval.main", *folder.flags("--slots=2")]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    try:
        _wait(lambda: len(folder.ran()) == 6)  # two of the gated ones are under way
        assert {id for id, row in folder.rows().items()} == {"v0@0", "v0@1", "v1@0", "v1@1"}
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    # Half a line, as a crash may leave it.
    with open(folder.workdir / results.FILE, "a") as file:
        file.write('{"id": "v3@0", "sta')
    lock = folder.workdir / "points" / "v2@0" / sweep_jobs.LOCK
    _wait(lambda: _free(lock))  # what the sweep had started has ended with it
    before = len(folder.ran())
    gate.touch()
    assert folder.run("--slots=2") == 0
    assert sorted(folder.ran()[before:]) == ["2 0", "2 1", "3 0", "3 1"]
    assert all(row["status"] == "done" for row in folder.rows().values())
    assert len(folder.rows()) == 8


def _wait(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _free(lock):
    with open(lock, "rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
    return True


def test_a_job_held_elsewhere_is_left_alone(folder, capsys):
    held = folder.workdir / "points" / "c@1"
    held.mkdir(parents=True)
    with open(held / sweep_jobs.LOCK, "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert folder.run() == 1
    assert "c@1: held by another process" in capsys.readouterr().out
    assert len(folder.rows()) == 7 and "c@1" not in folder.rows()


def test_one_point_a_job_for_a_scheduler(folder, capsys):
    assert folder.run("--list") == 0
    lines = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    assert [line[0] for line in lines] == [f"{n}@{seed}" for n in "abcd" for seed in (0, 1)]
    assert {line[1] for line in lines} == {"waiting"} and not folder.workdir.exists()
    for id in ("b@1", "d"):
        assert folder.run(f"--point={id}") == 0
    assert set(folder.rows()) == {"b@1", "d@0", "d@1"}
    assert not (folder.workdir / report.FILE).exists()
    assert folder.run("--report") == 0
    assert "3 of 8 points are finished. 0 have failed, 5 have not been run." in (
        folder.workdir / report.FILE
    ).read_text()


def test_seeds_that_train_together_are_one_job(tmp_path):
    training = Training("configs/quickstart.py", {"train.steps": 3, "model.index_topk": 16}, True)
    also = {"fine": {"model.main_kv_format": "none", "model.compress_ratios": (0, 2, 2, 1, 1, 1)}}
    sweep = Sweep((Variant("a", training.but({}, also=also)), Variant("b", training)), seeds=(3, 5))
    sweep_lib.check(sweep)
    first, second = sweep_jobs.jobs(sweep_lib.points(sweep), tmp_path)
    assert (first.id, second.id) == ("a@3+5", "b@3+5")
    (command,) = first.commands()
    assert command[:3] == ["python", "-m", "train.compare"]
    assert "--runs=seed=3,5" in command and "--config.model.index_topk=16" in command
    fine = "--also=fine: model.main_kv_format=none model.compress_ratios=(0,2,2,1,1,1)"
    assert fine in command
    first.run_folder.mkdir(parents=True)
    runs = [{"seed": 5, "heldout_loss": 2.0, "optimizer": {"name": "x"}, "run": "b"}]
    runs.append({"seed": 3, "heldout_loss": 1.0, "optimizer": {"eps": 0.1}, "run": "a"})
    (first.run_folder / "summary.json").write_text(json.dumps({"runs": runs}))
    assert first.metrics() == [{"heldout_loss": 1.0}, {"heldout_loss": 2.0}]


def test_a_training_and_what_is_evaluated_of_it(tmp_path):
    evaluation = Evaluation("tests.eval.sweep_program", {"n": 1})
    training = Training("configs/quickstart.py", {"train.steps": 3})
    sweep = Sweep((Variant("a", training, (evaluation,)),), seeds=(7,))
    sweep_lib.check(sweep)
    (job,) = sweep_jobs.jobs(sweep_lib.points(sweep), tmp_path)
    train, evaluate = job.commands()
    assert train[:3] == ["python", "-m", "train.main"]
    assert {"--config.train.steps=3", "--config.train.seed=7"} <= set(train)
    assert f"--workdir={job.run_folder}" in train and f"--workdir={job.run_folder}" in evaluate
    job.run_folder.mkdir(parents=True)
    (job.run_folder / "metrics.jsonl").write_text('{"loss": 3.0}\n{"loss": 2.0, "step": 3}\n')
    job.evaluated(0).write_text("[1]")
    with pytest.raises(ValueError, match="must be an object, not list"):
        job.metrics()
    job.evaluated(0).write_text('{"x": 1, "flag": true, "y": {"z": 2.5}}')
    want = {"loss": 2.0, "step": 3, "sweep_program.x": 1, "sweep_program.y.z": 2.5}
    assert job.metrics() == [want]


def _variant(name="a", **fields):
    training = dict(config="configs/quickstart.py", overrides={}) | fields
    return Variant(name, Training(**training))


@pytest.mark.parametrize(
    ("sweep", "message"),
    [
        (Sweep(()), "variants: there must be at least one"),
        (Sweep((_variant(), _variant())), "variant 'a': there more than once"),
        (Sweep((_variant("a/b"),)), "variant 'a/b': a name is made of"),
        (Sweep((_variant(config="nowhere.py"),)), "config nowhere.py: there is no such file"),
        (
            Sweep((_variant(overrides={"model.index_top": 3}),)),
            "has no key 'model.index_top'; did you mean model.index_topk?",
        ),
        (
            Sweep((_variant(overrides={"model.index_topk": 3000}),)),
            "variant 'a': model.candidate_topk_blocks = 8: 8 blocks",
        ),
        (Sweep((_variant(overrides={"train.seed": 3}),)), "seeds are the sweep's"),
        (Sweep((_variant(also={"x": {}}),)), "also needs together=True"),
        (
            Sweep((_variant(also={"x": {"train.steps": 1}}, together=True),)),
            "train.steps must be a key of the model",
        ),
        (Sweep((Variant("a"),)), "must train, or have a workdir and evaluations"),
        (
            Sweep((Variant("a", workdir="x", evaluations=(Evaluation("eval.nothing"),)),)),
            "there is no program 'eval.nothing'",
        ),
        (
            Sweep((Variant("a", workdir="x", evaluations=(Evaluation("no.such"),)),)),
            "there is no program 'no.such'",
        ),
        (Sweep((_variant(),), seeds=(1, 1)), "seeds = (1, 1): must be different"),
        (Sweep((_variant(),), seeds=()), "seeds = ()"),
        (Sweep((_variant("ab"),), claims=(Claim("c", "ab", "ac"),)), "claim 'c': no variant 'ac'"),
        (
            Sweep((_variant(),), claims=(Claim("c", "a", "a", kind="good"),)),
            "kind 'good' must be one of better, no worse",
        ),
    ],
)
def test_a_malformed_sweep_is_one_line(sweep, message):
    with pytest.raises(SweepError) as error:
        sweep_lib.check(sweep)
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1", "has no get_sweep()"),
        ("def get_sweep():\n    return 3", "must return an eval.sweep.Sweep"),
        ("def get_sweep():\n    return 1 / 0", "line 2: ZeroDivisionError"),
        ("def get_sweep(:", "SyntaxError"),
        (None, "there is no such file"),
    ],
)
def test_a_file_that_is_no_sweep(tmp_path, capsys, text, message):
    file = tmp_path / "sweep.py"
    if text is not None:
        file.write_text(text)
    assert main_lib.main([f"--sweep={file}", f"--workdir={tmp_path / 'out'}"]) == 2
    shown = capsys.readouterr().err
    assert message in shown and shown.count("\n") == 1 and shown.startswith("error: ")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--workdir="], "--workdir is missing"),
        (["--only=z*"], "--only=z*: no variant has such a name"),
        (["--point=e"], "--point=e: there is no such job"),
        (["--point=a@7"], "--point=a@7: there is no such job"),
        (["--set=steps"], "--set=steps: must be KEY=VALUE"),
        (["--seeds=a"], "invalid literal"),
        (["--seeds=-1"], "seeds = (-1,)"),
        (["--slots=0"], "slots"),
        (["--list", "--report"], "exclude each other"),
        (["more"], "'more' is no flag"),
        (["--sweeps=1"], "sweeps"),
    ],
)
def test_wrong_flags_are_one_line(folder, capsys, flags, message):
    assert folder.run(*flags) == 2
    shown = capsys.readouterr().err
    assert message in shown and shown.count("\n") == 1 and shown.startswith("error: ")
    assert not folder.workdir.exists()


def test_settings_of_the_command_line_reach_every_training(tmp_path):
    sweep = Sweep((_variant(overrides={"train.steps": 50}), _variant("b")))
    changed = sweep_lib.changed(sweep, ["train.steps=20", "model.index_topk=16"], [4])
    assert changed.seeds == (4,)
    for job in sweep_jobs.jobs(sweep_lib.points(changed), tmp_path):
        (command,) = job.commands()
        given = [flag for flag in command if flag.startswith("--config.")]
        assert "--config.train.steps=20" in given and len(given) == 3


def test_gpus_are_shared_out(tmp_path, monkeypatch):
    monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION", raising=False)
    runner = sweep_jobs.Runner(tmp_path, slots=6, gpus=2)
    environments = [runner._environment(slot) for slot in range(6)]
    assert [e["CUDA_VISIBLE_DEVICES"] for e in environments] == list("010101")
    assert {e["XLA_PYTHON_CLIENT_MEM_FRACTION"] for e in environments} == {"0.300"}
    alone = sweep_jobs.Runner(tmp_path, slots=1)._environment(0)
    assert alone == dict(os.environ)
