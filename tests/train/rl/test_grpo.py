"""Advantages, the loss against its definition, packing, and the settings."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eval.tasks.verifiable import Problem, open_task
from train.rl import grpo, rollout
from train.rl.rollout import Question, Trajectory
from train.rl.settings import RLSettings
from train.settings import SettingsError
from v41flash.effort import LengthPrice
from v41flash.errors import InputError

SETTINGS = RLSettings(task="modular_walk", problems=4, efforts=3, samples=2)
VOCABULARY, WIDTH = 12, 5


def test_advantages_compare_a_group():
    rewards = np.array([[1.0, 0.0, 0.5, 0.5], [0.3, 0.3, 0.3, 0.3], [-2.0, 2.0, -2.0, 2.0]])
    plain, scaled = grpo.advantages(rewards), grpo.advantages(rewards, scale=True)
    np.testing.assert_allclose(plain, rewards - rewards.mean(1, keepdims=True), atol=1e-7)
    np.testing.assert_allclose(plain.sum(1), 0, atol=1e-6)
    np.testing.assert_allclose(scaled[2], [-1, 1, -1, 1], rtol=1e-5)
    assert not scaled[1].any()


def trajectories():
    rng = np.random.default_rng(0)
    question = Question(Problem("p", "easy", None), 50)
    return [
        Trajectory(
            question,
            rng.integers(3, VOCABULARY, asked).astype(np.int32),
            rng.integers(3, VOCABULARY, said).astype(np.int32),
            rng.uniform(-3, 0, said).astype(np.float32),
            0.0,
            True,
        )
        for asked, said in ((7, 5), (3, 1), (12, 9), (4, 12))
    ]


def packed(**changes):
    settings = dict(
        length=32,
        rows_multiple=4,
        replay=5,
        pad_id=2,
        engram_rows=lambda tokens, positions: np.stack([tokens, positions], -1)[:, :, None],
    )
    weights = np.array([0.5, -1.0, 2.0, -0.25], np.float32)
    return rollout.pack(trajectories(), weights, **(settings | changes))


def test_packed_rows_hold_the_trajectories():
    batch = packed()
    assert batch["tokens"].shape == (4, 32) and batch["engram_rows"].shape == (4, 32, 1, 2)
    seen = 0
    for number, (trajectory, weight) in enumerate(
        zip(trajectories(), [0.5, -1.0, 2.0, -0.25], strict=True), 1
    ):
        row, columns = np.nonzero(batch["segment_ids"] == number)
        assert len(set(row)) == 1 and columns[0] % 8 == 0
        own = {name: value[row, columns] for name, value in batch.items()}
        whole = np.concatenate([trajectory.prompt, trajectory.tokens])
        np.testing.assert_array_equal(own["tokens"], whole[:-1])
        np.testing.assert_array_equal(own["positions"], np.arange(len(whole) - 1))
        on = own["loss_mask"] > 0
        np.testing.assert_array_equal(own["targets"][on], trajectory.tokens)
        np.testing.assert_array_equal(own["sampled_logprobs"][on], trajectory.logprobs)
        assert set(own["advantages"][on]) == {np.float32(weight)}
        # The sampler's decoder went over the last five tokens of the prompt.
        assert set(own["decoder_starts"]) == {max(len(trajectory.prompt) - 5, 0)}
        seen += len(columns)
    padding = batch["segment_ids"] == 0
    assert padding.sum() == padding.size - seen
    assert set(batch["tokens"][padding]) == {2} and not batch["loss_mask"][padding].any()
    with pytest.raises(InputError, match="data.sequence_length = 16: a trajectory of 20 tokens"):
        packed(length=16)


def test_the_loss_is_that_of_the_definition():
    """Against NumPy in float64, a token at a time; and no gradient where the ratio is clipped."""
    settings = dataclasses.replace(SETTINGS, reference_weight=0.3, clip_low=0.4, clip_high=0.1)
    batch = {name: jnp.asarray(x) for name, x in packed().items()}
    rng = np.random.default_rng(1)
    hidden = rng.normal(size=(4, 32, WIDTH)).astype(np.float32)
    head = rng.normal(size=(WIDTH, VOCABULARY)).astype(np.float32)
    allowed = np.arange(VOCABULARY) >= 3
    # Near the trainer's own, so that some ratios are clipped and some are not.
    exact = np.where(allowed, hidden.astype(np.float64) @ head, -np.inf)
    exact -= np.log(np.exp(exact).sum(-1, keepdims=True))
    mask = np.asarray(batch["loss_mask"]) > 0
    targets = np.where(mask, np.asarray(batch["targets"]), 3)
    ours = np.take_along_axis(exact, targets[..., None], -1)[..., 0]
    sampled = ours + rng.normal(size=ours.shape) * 0.5
    reference = ours + rng.normal(size=ours.shape)
    batch |= {
        "sampled_logprobs": jnp.asarray(sampled),
        "reference_logprobs": jnp.asarray(reference),
    }
    totals = {"targets": jnp.asarray(40.0)}
    loss = grpo.objective(settings, allowed, chunk_tokens=24)

    value, metrics = jax.jit(lambda head: loss({"head": head}, hidden, batch, totals))(head)
    policy, divergence, clipped = 0.0, 0.0, 0
    for place in zip(*np.nonzero(mask), strict=True):
        ratio, weight = np.exp(ours[place] - sampled[place]), float(batch["advantages"][place])
        bounded = min(max(ratio, 0.6), 1.1)
        policy -= min(ratio * weight, bounded * weight) / 40
        clipped += bounded * weight < ratio * weight
        x = reference[place] - ours[place]
        divergence += (np.exp(x) - x - 1) / 40
    np.testing.assert_allclose(metrics["policy_loss"], policy, rtol=1e-4)
    np.testing.assert_allclose(metrics["reference_kl"], divergence, rtol=1e-4)
    np.testing.assert_allclose(value, policy + 0.3 * divergence, rtol=1e-4)
    apart = np.abs(ours - sampled)[mask]
    np.testing.assert_allclose(metrics["gap"], apart.sum() / 40, rtol=1e-4)
    np.testing.assert_allclose(metrics["max_gap"], apart.max(), rtol=1e-4)
    np.testing.assert_allclose(metrics["clipped"], clipped / 40, rtol=1e-6)
    assert 0 < clipped < mask.sum()


def test_questions_are_a_function_of_seed_and_step():
    task = open_task("modular_walk")
    asked = rollout.questions(task, SETTINGS, 0, 5)
    assert asked == rollout.questions(task, SETTINGS, 0, 5)
    assert asked != rollout.questions(task, SETTINGS, 1, 5)
    assert [q.problem for q in asked[::3]] == [task.problem("train", n) for n in range(20, 24)]
    for first in range(0, 12, 3):
        own = asked[first : first + 3]
        assert len({question.effort for question in own}) == 3
        assert {question.effort for question in own} <= set(range(5, 101, 5))


def test_groups_are_sampled_and_scored():
    class Sampler:
        def generate(self, prompts, *, max_tokens, seed):
            self.asked = (len(prompts), max_tokens, seed)
            texts = [bytes(p).decode() for p in prompts]
            return [
                types.SimpleNamespace(
                    tokens=np.array([n]),
                    logprobs=np.array([-1.0]),
                    finish=("stop", "length")[n % 2],
                )
                for n, _ in enumerate(texts)
            ]

    class Asks:
        def prompt(self, problem, effort):
            return np.frombuffer(f"{problem.prompt} {effort}".encode(), np.uint8)

        def read(self, tokens):
            return types.SimpleNamespace(answer=str(tokens[0]))

    task = types.SimpleNamespace(score=lambda problem, answer: int(answer) / 10)
    asked = [Question(Problem("a", "x", None), 5), Question(Problem("b", "y", None), 7)]
    sampler = Sampler()
    found = rollout.sample(sampler, Asks(), task, asked, SETTINGS, seed=0, step=3)
    assert sampler.asked == (4, 256, 12)
    assert [t.question for t in found] == [asked[0]] * 2 + [asked[1]] * 2
    assert [t.score for t in found] == [0.0, 0.1, 0.2, 0.3]
    assert [t.finished for t in found] == [True, False, True, False]
    assert bytes(found[3].prompt) == b"b 7"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(samples=1), "rl.samples = 1: must be at least 2"),
        (dict(efforts=0), "rl.efforts = 0"),
        (dict(efforts=21), "rl.efforts = 21: must be at most 20"),
        (dict(effort_values=(5, 101)), "rl.effort_values"),
        (dict(updates=5), "rl.updates = 5: must be a divisor of 12 groups"),
        (dict(clip_low=1.5), "rl.clip_low = 1.5: must be below 1"),
        (dict(max_gap=0.0), "rl.max_gap = 0.0"),
    ],
)
def test_settings_are_checked(changes, message):
    with pytest.raises(SettingsError, match=message):
        dataclasses.replace(SETTINGS, **changes)


def test_the_price_is_that_of_effort():
    settings = dataclasses.replace(SETTINGS, k0=3.0, b_min=5, price="linear")
    assert settings.length_price() == LengthPrice(k0=3.0, b_min=5, shape="linear")
    with pytest.raises(InputError, match="k0 = 0"):
        dataclasses.replace(SETTINGS, k0=0.0)
