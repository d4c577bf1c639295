"""loss.png of a run."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402


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


def comparison_plot(rows: list[dict[str, Any]], runs: list[tuple[str, float]], path: Path) -> None:
    """Draws several runs: held-out numbers at the end by learning rate, and the best over steps.

    Args:
        rows: objects in which the numbers of a step are lists, one entry a run; the last of them
            has held-out numbers.
        runs: (family, learning rate) of each.
        path: PNG file to write.
    """
    key = "heldout_bits_per_byte"
    final = [math.inf if math.isnan(bits) else bits for bits in rows[-1][key]]
    figure, axes = plt.subplots(1, 3, figsize=(15, 4.5), layout="constrained")
    for number, family in enumerate(dict.fromkeys(family for family, _ in runs)):
        members = [lane for lane, run in enumerate(runs) if run[0] == family]
        members.sort(key=lambda lane: runs[lane][1])
        best = min(members, key=lambda lane: final[lane])
        look = dict(color=f"C{number}", label=f"{family}, {runs[best][1]:g}")
        axes[0].plot([runs[i][1] for i in members], [final[i] for i in members], "o", **look)
        axes[1].plot([row["step"] for row in rows], [row["ce"][best] for row in rows], **look)
        points = [row for row in rows if key in row]
        axes[2].plot(
            [row["step"] for row in points], [row[key][best] for row in points], "o-", **look
        )
    axes[0].set(xscale="log", xlabel="learning rate", ylabel="bits per byte", title="held out")
    axes[1].set(xlabel="step", ylabel="nats per token", title="training, the best of each")
    axes[2].set(xlabel="step", ylabel="bits per byte", title="held out, the best of each")
    for axis in axes:
        axis.grid(alpha=0.3)
    for axis in axes[1:]:  # on the first it would hide runs
        axis.legend()
    _save(figure, path)


def _save(figure: Any, path: Path) -> None:
    """In one piece: never half a file under its final name."""
    partial = path.with_name(path.name + ".partial")
    figure.savefig(partial, format="png", dpi=120)
    plt.close(figure)
    partial.replace(path)
