"""loss.png of a run."""

from __future__ import annotations

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
    partial = path.with_name(path.name + ".partial")
    figure.savefig(partial, format="png", dpi=120)
    plt.close(figure)
    partial.replace(path)
