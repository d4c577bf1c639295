"""loss.png of a run, curves of a comparison."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

from train import records  # noqa: E402


def loss_plot(rows: list[dict[str, Any]], path: Path, *, baseline: float | None = None) -> None:
    """Draws training loss and held-out bits per byte over steps.

    Args:
        rows: the logged objects (`train.metrics.read`).
        path: PNG file to write.
        baseline: bits per byte of the n-gram model, drawn as a line.
    """
    heldout = [row for row in rows if "heldout_bits_per_byte" in row]
    figure, axes = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    steps = [row["step"] for row in rows]
    axes[0].plot(steps, [row["ce"] for row in rows], label="cross entropy")
    axes[0].set(xlabel="step", ylabel="nats per token", title="training")
    axes[0].legend()
    axes[1].plot(
        [row["step"] for row in heldout],
        [row["heldout_bits_per_byte"] for row in heldout],
        marker="o",
        label="model",
    )
    if baseline is not None:
        axes[1].axhline(baseline, color="tab:gray", linestyle="--", label="order-2 byte n-gram")
    axes[1].set(xlabel="step", ylabel="bits per byte", title="held out")
    axes[1].legend()
    for axis in axes:
        axis.grid(alpha=0.3)
    _save(figure, path)


def comparison_plot(found: Sequence[records.Record], path: Path) -> None:
    """Draws several runs: held-out numbers at the end by learning rate, and over steps at each
    family's best rate, means over seeds. Training losses are drawn where there are any.

    Args:
        found: the runs.
        path: PNG file to write.
    """
    training = any(record.get("ce") for record in found)
    figure, axes = plt.subplots(1, 2 + training, figsize=(10 + 5 * training, 4.5))
    figure.set_layout_engine("constrained")
    for number, (family, rates) in enumerate(records.by_rate(found).items()):
        rate = records.best(rates)
        look = dict(color=f"C{number}", marker="o")
        ends = {at: [records.final(run) for run in runs] for at, runs in rates.items()}
        means = [records.mean(numbers) for numbers in ends.values()]
        bars = [records.spread(numbers) for numbers in ends.values()]
        axes[0].errorbar(list(ends), means, bars, capsize=3, linewidth=0.8, **look)
        label = f"{family}, {rate:g}"
        _over_steps(axes[1], rates[rate], records.HELDOUT, label=label, **look)
        if training:
            _over_steps(axes[2], rates[rate], "ce", label=label, color=look["color"])
    axes[0].set(xscale="log", xlabel="learning rate", ylabel="bits per byte", title="held out")
    axes[1].set(xlabel="step", ylabel="bits per byte", title="held out, best rate of each")
    if training:
        axes[2].set(xlabel="step", ylabel="nats per token", title="training, best rate of each")
    for axis in axes:
        axis.grid(alpha=0.3)
    axes[1].legend()
    _save(figure, path)


def _over_steps(axis: Any, runs: Sequence[records.Record], key: str, **look: Any) -> None:
    """Means over runs, at the steps that all of them have."""
    shared = set.intersection(*(set(run.get(key, {})) for run in runs))
    steps = sorted(shared, key=int)
    values = [[run[key][step] for run in runs] for step in steps]
    means = [math.nan if None in numbers else records.mean(numbers) for numbers in values]
    axis.plot([int(step) for step in steps], means, **look)


def _save(figure: Any, path: Path) -> None:
    """In one piece: never half a file under its final name."""
    partial = path.with_name(path.name + ".partial")
    figure.savefig(partial, format="png", dpi=120)
    plt.close(figure)
    partial.replace(path)
