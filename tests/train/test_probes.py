"""Tasks during training: their numbers are those of the checkpoint, computed one by one."""

import jax
import numpy as np
import pytest

from eval.tasks import long_context
from tests.train import micro
from tests.v41flash.nn.samples import QUICK_COMPILE
from train import loop, metrics, probes, settings
from train import plan as plan_lib
from train import stages as stages_lib
from train import step as step_lib
from v41flash.nn import ced
from v41flash.serving.run import Run
from v41flash.text.engram_hash import EngramHasher

_TASKS = ("needle:128", "copy:131")


def _config(folder):
    config = micro.config(folder).copy_and_resolve_references()
    config.eval.tasks = _TASKS
    config.eval.task_problems = 5
    return config


def _direct(run, name):
    """The share of right tokens, a problem at a time and by its own words."""
    task, length = name.split(":")
    model = ced.CED(run.config, run.kernels)

    @jax.jit
    def forward(params, *inputs):
        return ced.logits(params, model.apply({"params": params}, *inputs).hidden)

    pad = int(run.token_map[run.config.engram_pad_token_id])
    hasher = EngramHasher.from_config(run.config, pad)
    right = total = 0
    for number in range(5):
        problem = long_context.problem(task, int(length), number / 4, number)
        text = problem.prompt + problem.answer
        tokens = np.array([[run.tokenizer.bos_id, *run.tokenizer.encode(text)]], np.int32)
        positions = np.arange(tokens.size, dtype=np.int32)[None]
        rows = hasher.rows(run.token_map[tokens], positions)
        inputs = (tokens, positions, np.ones_like(tokens), rows)
        likeliest = np.asarray(forward(run.params, *inputs))[0].argmax(-1)
        answer = tokens.size - len(problem.answer) + np.arange(len(problem.answer) - 1)
        right += int((likeliest[answer - 1] == tokens[0, answer]).sum())
        total += answer.size
    return right / total


def test_scores_are_those_of_a_forward_pass_each(tmp_path):
    config = _config(tmp_path)
    plan = plan_lib.prepare(stages_lib.resolve_stages(config), tmp_path / "run", None)
    with jax.set_mesh(plan.mesh):
        key = jax.random.key(3)
        params = jax.jit(step_lib.parameter_init(plan.models[0], plan.mesh))(key)
        # Large enough for some tokens of the answers to be right by chance.
        params = {**params, "head": params["head"].at[:, ord("]") + 1 :].add(-9.0)}
        params["head"] = params["head"].at[:, : ord("0")].add(-9.0)
        eval_step = step_lib.make_eval_step(plan.inference_model(0), 64, QUICK_COMPILE)
        found = probes.scores(plan, 0, eval_step, params)
    data = plan.data[0]
    settings = plan.settings
    run = Run(settings.model, settings.kernels, params, data.tokenizer, data.token_map, 0)
    assert set(found) == {"task_needle_128", "task_copy_131"}
    for name in _TASKS:
        assert found[f"task_{name.replace(':', '_')}"] == pytest.approx(_direct(run, name))


@pytest.mark.slow
def test_a_run_logs_them_with_its_held_out_numbers(tmp_path):
    config = _config(tmp_path)
    config.train.steps, config.eval.every = 4, 2
    loop.run(config.lock(), tmp_path / "run")
    rows = metrics.read(tmp_path / "run")
    assert [("task_needle_128" in row) for row in rows] == [False, True, False, True]
    run = Run.load(tmp_path / "run")
    for name in _TASKS:
        assert rows[-1][f"task_{name.replace(':', '_')}"] == pytest.approx(_direct(run, name))


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        (("hay:128",), "eval.tasks: 'hay:128' must be a task and a length"),
        (("needle",), "eval.tasks: 'needle' must be a task and a length"),
        (("needle:100",), "must be at least 128"),
        (("needle:300",), "'needle:300' exceeds model.max_position_embeddings = 256"),
        ((3,), "eval.tasks: 3 must be a text"),
    ],
)
def test_impossible_tasks(tmp_path, tasks, message):
    config = micro.config(tmp_path).copy_and_resolve_references()
    config.eval.tasks = tasks
    with pytest.raises(settings.SettingsError, match="eval.tasks") as error:
        loop.run(config, tmp_path / "run")
    assert message in str(error.value)
    assert not (tmp_path / "run").exists()
