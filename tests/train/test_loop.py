"""Whole runs of a very small model: what they leave behind, resuming, stopping."""

import functools
import json
import os
import resource
import shutil

import jax
import numpy as np
import pytest

from tests.train import micro
from tests.v41flash.nn.samples import QUICK_COMPILE
from train import closing, loop, metrics
from train import main as main_lib
from train import step as step_lib
from train.data import pipeline
from train.ledger import TrainingDiverged
from train.settings import SettingsError
from train.stopping import Stop, Stopped
from v41flash.checkpoints.orbax import Checkpoints, SaveError
from v41flash.errors import InputError

# Wall-clock numbers and what only evaluated steps have.
_TIMES = {"tokens_per_second", "step_seconds", "mfu", "peak_memory_bytes", "optimizer_ms"}


@pytest.fixture(scope="module", autouse=True)
def compilation_cache(tmp_path_factory):
    """The runs here compile the same few programs: each once, and quickly."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(step_lib.PLATFORM_OPTIONS, "cpu", QUICK_COMPILE)
        quick = functools.partial(step_lib.make_eval_step, compiler_options=QUICK_COMPILE)
        patch.setattr(step_lib, "make_eval_step", quick)
        yield from _compilation_cache(tmp_path_factory)


def _compilation_cache(tmp_path_factory):
    if os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        yield
        return
    options = {
        "jax_compilation_cache_dir": str(tmp_path_factory.mktemp("jax_cache")),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in options}
    for name, value in options.items():
        jax.config.update(name, value)
    yield
    for name, value in before.items():
        jax.config.update(name, value)


def _config(folder, **train):
    config = micro.config(folder)
    # Two stages: dense selection up to step 3.
    config.train.indexer_warmup_steps = 3
    # The optimizer with the most kinds of state.
    config.optimizer.name = "v41"
    config.eval.every = 4
    config.train.update(train)
    return config


def _rows(workdir):
    rows = metrics.read(workdir)
    return [{k: v for k, v in row.items() if k not in _TIMES} for row in rows]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("corpus")


@pytest.fixture(scope="module")
def straight(folder, tmp_path_factory, compilation_cache):
    """Eight steps without interruption, with plot, sample and n-gram comparison."""
    workdir = tmp_path_factory.mktemp("runs") / "straight"
    config = _config(folder)
    config.eval.sample_tokens = 3
    config.eval.sample_prompt = "the cat"
    config.eval.byte_ngram = True
    loop.run(config, workdir)
    return workdir


def test_the_run_folder(straight):
    names = {path.name for path in straight.iterdir()}
    assert {
        "config.json",
        "params.txt",
        "versions.json",
        "metrics.jsonl",
        "checkpoints",
        "loss.png",
        "sample.txt",
    } <= names
    assert any(name.startswith("events.out.tfevents") for name in names)
    assert not any("partial" in name for name in names)
    assert json.loads((straight / "config.json").read_text())["train"]["steps"] == 8
    assert json.loads((straight / "versions.json").read_text())["packages"]["jax"]
    table = (straight / "params.txt").read_text()
    assert "group_1/first/attn/indexer/wq_b" in table and "Activated per token" in table
    assert (straight / "sample.txt").read_text().startswith("the cat")
    with Checkpoints(straight / "checkpoints") as checkpoints:
        # The boundary of the two stages, and the end.
        assert checkpoints.steps() == [3, 8]


def test_the_metrics(straight):
    rows = metrics.read(straight)
    assert [row["step"] for row in rows] == list(range(1, 9))
    config = micro.model()
    for row in rows:
        assert {"loss", "ce", "balance", "indexer_kl", "grad_norm", "learning_rate"} <= set(row)
        assert {"padding", "tokens_per_second", "step_seconds"} <= set(row)
        total = row["ce"] + 1e-4 * row["balance"] + row["indexer_kl"]
        np.testing.assert_allclose(row["loss"], total, rtol=1e-6)
        bound = np.sqrt(config.head_dim) * row["max_norm_weight"]
        assert 0 < row["max_main_kv"] <= bound * 1.1
        assert 0 <= row["padding"] < 1
        assert "mfu" not in row
    np.testing.assert_allclose([row["learning_rate"] for row in rows[:3]], [5e-3, 1e-2, 1e-2])
    evaluated = [row["step"] for row in rows if "heldout_bits_per_byte" in row]
    assert evaluated == [4, 8]
    assert rows[-1]["heldout_bits_per_byte"] < rows[3]["heldout_bits_per_byte"] < 8
    assert [row["step"] for row in rows if "ngram_bits_per_byte" in row] == [8]
    assert 0 < rows[-1]["ngram_bits_per_byte"] < 8


def test_the_same_call_again_says_that_the_run_is_complete(straight, folder, capsys):
    before = (straight / "metrics.jsonl").read_text()
    loop.run(_config(folder), straight)
    out = capsys.readouterr().out
    assert "complete: 8 steps done, 8 asked for" in out and "held-out: " in out
    assert (straight / "metrics.jsonl").read_text() == before


@pytest.mark.slow
def test_the_same_call_again_makes_up_what_is_missing(straight, folder, tmp_path, capsys):
    """Stopped in the last evaluation: the state is saved, its numbers come with the next call."""
    shutil.copytree(straight, tmp_path / "run")
    before = (straight / "metrics.jsonl").read_text().splitlines()
    row = {k: v for k, v in json.loads(before[-1]).items() if "bits" not in k}
    (tmp_path / "run" / "metrics.jsonl").write_text("\n".join([*before[:-1], json.dumps(row)]))
    for name in ("loss.png", "sample.txt"):
        (tmp_path / "run" / name).unlink()
    config = _config(folder)
    config.eval.update(sample_tokens=3, sample_prompt="the cat", byte_ngram=True)
    loop.run(config, tmp_path / "run")
    assert _rows(tmp_path / "run") == _rows(straight)
    assert (tmp_path / "run" / "loss.png").exists()
    sample = (straight / "sample.txt").read_text()
    assert (tmp_path / "run" / "sample.txt").read_text() == sample
    assert sample in capsys.readouterr().out


@pytest.mark.slow
def test_a_run_is_saved_before_it_is_evaluated(folder, tmp_path, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(closing, "heldout", interrupt)
    with pytest.raises(KeyboardInterrupt):
        loop.run(_config(folder, steps=2, indexer_warmup_steps=8), tmp_path)
    with Checkpoints(tmp_path / "checkpoints") as checkpoints:
        assert checkpoints.steps() == [2]
    assert [row["step"] for row in _rows(tmp_path)] == [1, 2]


@pytest.mark.slow
def test_a_run_in_two_parts_has_the_same_numbers(straight, folder, tmp_path, capsys):
    # Up to the boundary of the stages.
    loop.run(_config(folder, steps=3), tmp_path)
    plot = (tmp_path / "loss.png").read_bytes()
    config = _config(folder, steps=8)
    config.eval.byte_ngram = True
    loop.run(config, tmp_path)
    assert "going on from step 3" in capsys.readouterr().out
    rows = _rows(tmp_path)
    rows[2] = {k: v for k, v in rows[2].items() if "heldout" not in k}
    assert rows == _rows(straight)
    assert (tmp_path / "loss.png").read_bytes() != plot


def test_an_interrupted_run_goes_on_with_the_same_numbers(straight, folder, tmp_path, monkeypatch):
    """Ctrl-C in step 6; the newest checkpoint is that of step 3, the boundary of the stages."""
    original = pipeline.TrainIterator.__next__

    def interrupt(self):
        if self.step == 5:
            raise KeyboardInterrupt
        return original(self)

    config = _config(folder, checkpoint_every=3)
    with monkeypatch.context() as patch:
        patch.setattr(pipeline.TrainIterator, "__next__", interrupt)
        with pytest.raises(KeyboardInterrupt):
            loop.run(config, tmp_path)
    assert [row["step"] for row in _rows(tmp_path)] == [1, 2, 3, 4, 5]
    # As if it had been killed while it wrote the line of the step that it had just saved.
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    (tmp_path / "metrics.jsonl").write_text("\n".join([*lines[:2], lines[2][:20]]))
    config.eval.byte_ngram = True
    loop.run(config, tmp_path)
    assert _rows(tmp_path) == _rows(straight)
    with Checkpoints(tmp_path / "checkpoints") as checkpoints:
        assert checkpoints.steps() == [6, 8]


def test_another_configuration_is_refused(straight, folder, capsys):
    config = _config(folder, steps=9)
    config.optimizer.beta1 = 0.5
    with pytest.raises(SettingsError, match="config.optimizer.beta1 is 0.5"):
        loop.run(config, straight)
    assert [row["step"] for row in _rows(straight)] == list(range(1, 9))


def test_another_corpus_is_refused_before_anything_is_written(straight, folder, monkeypatch):
    before = {path: path.stat().st_mtime_ns for path in straight.rglob("*")}
    monkeypatch.setattr(pipeline.Data, "fingerprint", "another")
    with pytest.raises(InputError, match="'another': corpus or data settings changed"):
        loop.run(_config(folder, steps=9), straight)
    assert {path: path.stat().st_mtime_ns for path in straight.rglob("*")} == before


def test_a_loss_that_is_not_finite_stops_the_run_before_it_is_saved(
    folder, tmp_path, monkeypatch, capsys
):
    original = pipeline.TrainIterator.__next__

    def poison(self):
        batch = original(self)
        if self.step == 6:
            batch["loss_mask"] = batch["loss_mask"] * np.float32(np.nan)
        return batch

    monkeypatch.setattr(pipeline.TrainIterator, "__next__", poison)
    config = _config(folder, checkpoint_every=2, log_every=100, indexer_warmup_steps=8)
    config.eval.every = 0
    with pytest.raises(TrainingDiverged) as caught:
        loop.run(config, tmp_path)
    message = str(caught.value)
    assert message.startswith("step 6: loss is nan; all outputs of layers are finite; gradients ")
    assert " not in head, norm, group_1, group_0, embed (from the loss back); " in message
    assert "; document ids of its batch: " in message
    assert f"last good checkpoint: step 4 in {tmp_path / 'checkpoints'}" in message
    assert "\n" not in message
    with Checkpoints(tmp_path / "checkpoints") as checkpoints:
        assert checkpoints.steps() == [2, 4]

    def fail(*_):
        raise caught.value

    monkeypatch.setattr(loop, "run", fail)
    assert main_lib.main(["--config=configs/quickstart.py", f"--workdir={tmp_path}"]) == 1
    assert capsys.readouterr().err.startswith("training failed: step 6: loss is nan")


def _damage(folder):
    """Flips a bit in the middle of the largest file of parameters."""
    files = [path for path in (folder / "params").rglob("*") if path.is_file()]
    path = max(files, key=lambda path: path.stat().st_size)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


@pytest.mark.slow
def test_the_newest_intact_checkpoint_is_used(straight, folder, tmp_path, capsys):
    """Of steps 2, 4, 6 the last is damaged in its arrays, the one before in its note."""
    config = _config(folder, steps=6, checkpoint_every=2, indexer_warmup_steps=0)
    config.train.keep_checkpoints = 3
    workdir = tmp_path / "run"
    loop.run(config, workdir)
    expected = _rows(workdir)
    shutil.copytree(workdir, tmp_path / "hopeless")
    _damage(workdir / "checkpoints" / "6")
    note = workdir / "checkpoints" / "4" / "meta" / "metadata"
    note.write_text(note.read_text().replace('"step": 4', '"step": 5'))
    config.train.steps = 7
    capsys.readouterr()
    loop.run(config, workdir)
    printed = capsys.readouterr()
    assert "going on from step 2" in printed.out
    warnings = [line for line in printed.err.splitlines() if line.startswith("warning: ")]
    assert [line.partition(": ")[2].partition(": ")[0] for line in warnings] == [
        f"checkpoint {workdir / 'checkpoints' / step}" for step in ("4", "6")
    ]
    assert "note does not have the recorded checksum" in warnings[0]
    assert "values of 1 arrays of params are not what was saved: " in warnings[1]
    assert sorted(path.name for path in (workdir / "damaged").iterdir()) == ["4", "6"]
    # The last row of the shorter run has the held-out numbers of its end.
    for now, before in zip(_rows(workdir)[:6], expected, strict=True):
        assert now == {key: value for key, value in before.items() if key in now}
    with Checkpoints(workdir / "checkpoints") as checkpoints:
        assert checkpoints.steps() == [4, 6, 7]

    # Where none is intact nothing is moved, and training does not begin anew by itself.
    hopeless = tmp_path / "hopeless"
    for step in ("2", "4", "6"):
        _damage(hopeless / "checkpoints" / step)
    before = {path: path.stat().st_mtime_ns for path in hopeless.rglob("*") if path.is_file()}
    with pytest.raises(InputError, match=r"none of its checkpoints \[2, 4, 6\] can be used") as e:
        loop.run(config, hopeless)
    assert "\n" not in str(e.value) and "values of 1 arrays" in str(e.value)
    after = {path: path.stat().st_mtime_ns for path in hopeless.rglob("*") if path.is_file()}
    assert after == before


@pytest.mark.slow
def test_going_back_and_leaving_a_batch_out(folder, tmp_path, monkeypatch, capsys):
    """Batches 4 and 6 are bad: two rewinds; a process that comes later leaves them out too."""
    original = pipeline.TrainIterator.__next__

    def poison(self):
        number = self.step
        batch = original(self)
        if number in (4, 6):
            batch["loss_mask"] = batch["loss_mask"] * np.float32(np.nan)
        return batch

    monkeypatch.setattr(pipeline.TrainIterator, "__next__", poison)
    config = _config(folder, checkpoint_every=2, indexer_warmup_steps=0, max_rewinds=2)
    config.eval.every = 0
    loop.run(config, tmp_path / "run")
    out = capsys.readouterr().out
    assert "step 5: loss is nan" in out and "going back to step 4 and leaving the batch out" in out
    assert "step 6: loss is nan" in out and "(0 more times allowed)" in out
    rows = _rows(tmp_path / "run")
    assert [row["step"] for row in rows] == list(range(1, 9))
    assert all(np.isfinite(row["loss"]) for row in rows)

    with monkeypatch.context() as patch:
        # Batches that were left out, from the start.
        def skip(self):
            while self.step in (4, 6):
                original(self)
            return original(self)

        patch.setattr(pipeline.TrainIterator, "__next__", skip)
        config.train.max_rewinds = 0
        loop.run(config, tmp_path / "skipped")
        assert _rows(tmp_path / "skipped") == rows

    # From step 4 on, as a process that was stopped there.
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "8")
    loop.run(config, tmp_path / "run")
    assert "going on from step 6" in capsys.readouterr().out
    assert _rows(tmp_path / "run") == rows


@pytest.mark.slow
@pytest.mark.parametrize("then", ["stop", "continue"])
def test_a_checkpoint_that_cannot_be_written(folder, tmp_path, monkeypatch, capsys, then):
    """Step 4 of 2, 4, 6 meets a full disk (a limit on the size of files)."""
    original = Checkpoints.save

    def save(self, step, **arrays):
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4000 if step == 4 else soft, hard))
        try:
            original(self, step, **arrays)
            if step == 4:
                self._manager.wait_until_finished()
        except ValueError as error:
            raise self._failed(error) from error
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    monkeypatch.setattr(Checkpoints, "save", save)
    config = _config(folder, steps=6, checkpoint_every=2, indexer_warmup_steps=0)
    config.train.on_save_error = then
    name = tmp_path / "checkpoints" / "4"
    if then == "stop":
        with pytest.raises(SaveError, match=f"checkpoint {name} cannot be written: ") as caught:
            loop.run(config, tmp_path)
        assert "\n" not in str(caught.value)
        saved = [2]
    else:
        loop.run(config, tmp_path)
        warning = f"warning: checkpoint {name} cannot be written: "
        out = capsys.readouterr().out
        assert warning in out and "training goes on without it" in out
        saved = [2, 6]
    with Checkpoints(tmp_path / "checkpoints") as checkpoints:
        assert checkpoints.steps() == saved
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == [str(s) for s in saved]
    # The same command goes on, or has nothing to do.
    monkeypatch.undo()
    loop.run(config, tmp_path)
    assert [row["step"] for row in _rows(tmp_path)] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("go_on", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_request_to_stop(straight, folder, tmp_path, monkeypatch, go_on):
    """Asked in the middle of step 5: it is saved, and the run goes on from there."""
    original, stop = pipeline.TrainIterator.__next__, Stop()

    def ask(self):
        stop.requested = stop.requested or self.step == 4
        return original(self)

    config = _config(folder)
    with monkeypatch.context() as patch:
        patch.setattr(pipeline.TrainIterator, "__next__", ask)
        with pytest.raises(Stopped, match="stopped by SIGTERM after step 5, which is saved"):
            loop.run(config, tmp_path, stop)
    with Checkpoints(tmp_path / "checkpoints") as checkpoints:
        assert checkpoints.steps() == [3, 5]
    assert _rows(tmp_path) == _rows(straight)[:5]
    if go_on:
        config.eval.byte_ngram = True
        loop.run(config, tmp_path)
        assert _rows(tmp_path) == _rows(straight)

    def stopped(*_):
        raise Stopped("stopped by SIGTERM")

    monkeypatch.setattr(loop, "run", stopped)
    assert main_lib.main(["--config=configs/quickstart.py", f"--workdir={tmp_path}"]) == 75
