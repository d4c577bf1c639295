"""Loss by position on long documents: whether a model goes on profiting from what lies far back.

    python -m eval.perplexity --workdir=DIR --text=GLOB [--length=4096 --documents=16]
                              [--out=FOLDER --json=FILE]

The beginnings of documents of at least --length tokens are read, every layer over every token.
Positions are put together by powers of two from 64 up: the mean loss of each, with its standard
error over documents, goes to FOLDER/perplexity.png (by default FOLDER is DIR/perplexity) and to
the JSON, {"nats": {"64": .., "128": ..}, ..} under the first position of each. Exit status 2: the
flags, the files or the run folder are wrong.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
import numpy as np  # noqa: E402
from absl import flags  # noqa: E402

from eval.replay import pieces  # noqa: E402
from eval.scoring import Scorer  # noqa: E402
from eval.statistics import standard_error  # noqa: E402
from v41flash import command_line  # noqa: E402
from v41flash.serving import Generator, Options  # noqa: E402

_FIRST = 64


class Arguments(NamedTuple):
    """The command line."""

    workdir: Path
    text: str
    length: int
    documents: int
    batch_size: int
    out: Path
    json: Path | None


def parse(arguments: Sequence[str]) -> Arguments:
    """Reads the command line (without the program); InputError in one line."""
    values = flags.FlagValues()
    here = dict(flag_values=values)
    flags.DEFINE_string("workdir", None, "Folder of the run.", **here)
    flags.DEFINE_string("text", None, "Files, a document each.", **here)
    flags.DEFINE_integer("length", 4096, "Tokens of each.", lower_bound=2, **here)
    flags.DEFINE_integer("documents", 16, "How many.", lower_bound=1, **here)
    flags.DEFINE_integer("batch_size", 4, "Documents at a time.", lower_bound=1, **here)
    flags.DEFINE_string("out", None, "Folder for the plot.", **here)
    flags.DEFINE_string("json", None, "File for the numbers.", **here)
    command_line.read(values, arguments, ("workdir", "text"))
    workdir = Path(values.workdir)
    return Arguments(
        workdir,
        values.text,
        values.length,
        values.documents,
        values.batch_size,
        Path(values.out) if values.out else workdir / "perplexity",
        Path(values.json) if values.json else None,
    )


def bands(length: int) -> list[tuple[int, int]]:
    """(first, last + 1) of the positions that are put together: 0..63, 64..127, 128..255, ..."""
    edges, edge = [0], _FIRST
    while edge < length:
        edges.append(edge)
        edge *= 2
    return list(zip(edges, [*edges[1:], length], strict=True))


def by_position(nats: np.ndarray) -> dict[str, dict[str, float]]:
    """Means and their errors over documents of losses [documents, length]."""
    found: dict[str, dict[str, float]] = {"nats": {}, "error": {}}
    for first, last in bands(nats.shape[1]):
        means = nats[:, first:last].mean(1)
        found["nats"][str(first)] = float(means.mean())
        found["error"][str(first)] = standard_error(means.tolist())
    return found | {"all": float(nats.mean())}


def plot(found: dict, path: Path) -> None:
    """Draws the loss over positions."""
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    firsts = [max(int(first), _FIRST // 2) for first in found["nats"]]
    errors = list(found["error"].values())
    errors = None if np.isnan(errors).any() else errors
    axes.errorbar(firsts, list(found["nats"].values()), errors, marker="o", capsize=3)
    axes.set(xscale="log", xlabel="position from", ylabel="nats per token")
    axes.set_xticks(firsts, list(found["nats"]))
    axes.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)


@command_line.program(__doc__)
def main(arguments: Sequence[str]) -> int:
    """Runs the command line; returns the exit status."""
    chosen = parse(arguments)
    options = Options(batch_size=chosen.batch_size)
    generator = Generator.from_workdir(chosen.workdir, options=options)
    tokens = pieces(generator, chosen.text, chosen.documents, chosen.length + 1)
    scored = Scorer(generator).score(list(tokens))
    found = by_position(-np.stack([one.logprobs for one in scored]))
    for first, nats in found["nats"].items():
        print(f"from position {first:>6}: {nats:.4f} +- {found['error'][first]:.4f} nats per token")
    plot(found, chosen.out / "perplexity.png")
    if chosen.json:
        chosen.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
