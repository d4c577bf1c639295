"""Held-out numbers, and what a run ends with: sample.txt, loss.png and a summary."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from eval.tasks import byte_ngram
from train import metrics as metrics_lib
from train import plots, runinfo, sample
from train import step as step_lib
from train.data import pipeline
from train.plan import Plan
from train.settings import EvalSettings
from v41flash.text.tokenizer import ByteTokenizer

PLOT, SAMPLE = "loss.png", "sample.txt"
# Of the last logged row, that it has been evaluated.
NUMBERS = "heldout_bits_per_byte"


def heldout(plan: Plan, index: int, eval_step: Any, params: Any) -> dict[str, Any]:
    """Nats per token and bits per byte of the first `eval.batches` held-out batches.

    Args:
        plan: of the run.
        index: the stage whose data and model are meant.
        eval_step: from `train.step.make_eval_step`; its sums may be arrays, one entry per model.
        params: of the model, or of several.

    Returns:
        heldout_loss, heldout_bits_per_byte, heldout_accuracy, each like a sum of `eval_step`.
    """
    nats = tokens = correct = size = 0.0
    hosts = dict(host_index=jax.process_index(), host_count=jax.process_count())
    for batch in plan.data[index].heldout_batches(plan.settings.eval.batches, **hosts):
        batch, host = pipeline.split_host_fields(batch)
        sums = jax.device_get(eval_step(params, step_lib.to_device(batch, plan.mesh)))
        nats, tokens, correct = nats + sums.nats, tokens + sums.tokens, correct + sums.correct
        size += _over_hosts(host["row_bytes"].sum())
    numbers = {
        "heldout_loss": nats / tokens,
        NUMBERS: nats / math.log(2) / size,
        "heldout_accuracy": correct / tokens,
    }
    return {name: np.asarray(number, np.float64).tolist() for name, number in numbers.items()}


def _over_hosts(value: Any) -> float:
    if jax.process_count() == 1:
        return float(value)
    return float(np.sum(multihost_utils.process_allgather(np.asarray(value))))


def ngram(plan: Plan, index: int) -> dict[str, float]:
    """What an order-2 byte n-gram model reaches on the bytes that `heldout` is measured on.

    Returns:
        ngram_bits_per_byte; nothing where tokens are not bytes, nor in processes but the first.
    """
    data = plan.data[index]
    if not isinstance(data.tokenizer, ByteTokenizer) or jax.process_index():
        return {}
    return {"ngram_bits_per_byte": ngram_bits_per_byte(data, plan.settings.eval.batches)}


def ngram_bits_per_byte(data: pipeline.Data, batches: int) -> float:
    """An order-2 byte n-gram model on the bytes of the first held-out batches.

    It is fitted on all training documents, and sees of a piece what the language model sees: the
    byte before its first target, where the piece does not begin its document.
    """
    model = byte_ngram.fit(data.train_texts())
    pieces = data.heldout_texts(batches)
    bits = model.bits([before + text for before, text in pieces])
    bits -= model.bits([before for before, _ in pieces])
    return bits / sum(len(text) for _, text in pieces)


def missing(workdir: Path, evaluation: EvalSettings) -> list[str]:
    """What the folder of a run that has done all its steps still lacks."""
    rows = metrics_lib.read(workdir)
    lacking = [] if rows and NUMBERS in rows[-1] else [NUMBERS]
    if evaluation.sample_tokens and not (workdir / SAMPLE).exists():
        lacking.append(SAMPLE)
    if not (workdir / PLOT).exists():
        lacking.append(PLOT)
    return lacking


def forget(workdir: Path) -> None:
    """Removes what an earlier, shorter part of the run ended with."""
    for name in (PLOT, SAMPLE):
        (workdir / name).unlink(missing_ok=True)


def write_sample(plan: Plan, index: int, params: Any, workdir: Path) -> None:
    """Draws sample.txt; all processes take part, the first one writes."""
    evaluation, data = plan.settings.eval, plan.data[index]
    text = sample.generate(
        plan.inference_model(index),
        params,
        plan.mesh,
        data.tokenizer,
        data.engram_rows,
        prompt=evaluation.sample_prompt,
        count=evaluation.sample_tokens,
        temperature=evaluation.sample_temperature,
        seed=evaluation.sample_seed,
    )
    if jax.process_index() == 0:
        runinfo.write_text(workdir / SAMPLE, text + "\n")


def write_plot(workdir: Path) -> None:
    """Draws loss.png from metrics.jsonl."""
    rows = metrics_lib.read(workdir)
    baseline = rows[-1].get("ngram_bits_per_byte")
    plots.loss_plot(rows, workdir / PLOT, baseline=baseline)


def print_summary(workdir: Path) -> None:
    """The lines that end a run, from its folder."""
    row = metrics_lib.read(workdir)[-1]
    if (workdir / SAMPLE).exists():
        print(f"\nsample:\n{(workdir / SAMPLE).read_text()}")
    print(f"done: {row['step']} steps, loss {row['loss']:.4f}")
    print(f"held-out: {row[NUMBERS]:.4f} bits per byte")
    if "ngram_bits_per_byte" in row:
        print(
            "order-2 byte n-gram, fitted on the training text, on the same bytes: "
            f"{row['ngram_bits_per_byte']:.4f} bits per byte"
        )
    print(f"run folder: {workdir} (checkpoints, metrics.jsonl, {PLOT})")
