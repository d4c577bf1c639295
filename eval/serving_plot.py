"""Tables and a plot of what `eval.serving_bench` has written.

    python -m eval.serving_plot --json=FILE [--png=FILE]

Prints Markdown; of several rows for the same point the last one counts. Times per step are shown
beside the FLOPs of a token, both over those of the shortest context.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from absl import flags

Row = dict[str, Any]
# (implementation, batch) -> rows by context.
Curves = dict[tuple[str, int], list[Row]]


def curves(rows: Sequence[Row]) -> Curves:
    """The rows of decoding, by implementation and batch."""
    points = {}
    for row in rows:
        if row["what"] == "decode":
            name = "references" if row["implementation"] == "xla" else "kernels"
            points[name, row["batch"], row["context"]] = row
    result: Curves = {}
    for (name, batch, _), row in sorted(points.items()):
        result.setdefault((name, batch), []).append(row)
    return result


def tables(rows: Sequence[Row]) -> str:
    """Everything measured, as Markdown."""
    lines = []
    for row in rows:
        if row["what"] == "cache":
            measured = row.get("device_bytes_per_token")
            lines += [f"cache of {row['tokens']:,} tokens: {row.get('device_bytes')} bytes on the"]
            lines += [f"device, {measured} per token; {row['table_bytes']} of them page table", ""]
    lines += ["| | context | step | attention, indexers | of the step | x first | FLOPs x first |"]
    lines += ["|---|---|---|---|---|---|---|"]
    for (name, batch), points in curves(rows).items():
        first = points[0]
        for row in points:
            step, part = row["step_ms"], row["selection_attention_ms"]
            lines.append(
                f"| {name}, batch {batch} | {row['context']:,} | {step:.2f} ms | {part:.2f} ms |"
                f" {part / step:.2f} | {step / first['step_ms']:.3f} |"
                f" {row['flops'] / first['flops']:.3f} |"
            )
    for what in ("prefill", "fill"):
        chosen = [row for row in rows if row["what"] == what]
        if chosen:
            lines += ["", "| prefill | tokens | seconds | tokens/s |", "|---|---|---|---|"]
        for row in chosen:
            name = row.get("layers", "one prompt")
            rate = row["tokens"] / row["seconds"]
            lines.append(f"| {name} | {row['tokens']:,} | {row['seconds']:.3f} | {rate:,.0f} |")
    return "\n".join(lines)


def plot(rows: Sequence[Row], file: Path) -> None:
    """Time per step against context, one panel for each batch size in use.

    Args:
        rows: of `eval.serving_bench`.
        file: picture to write.
    """
    import matplotlib  # a second that only plots should cost

    matplotlib.use("Agg")
    from matplotlib import pyplot

    found = curves(rows)
    long = {key: points for key, points in found.items() if len(points) > 1}
    groups = [
        ("batch 1", {key: points for key, points in long.items() if key[1] == 1}),
        ("largest batches", {key: points for key, points in long.items() if key[1] > 1}),
    ]
    groups = [(title, group) for title, group in groups if group]
    figure, axes = pyplot.subplots(1, len(groups), figsize=(11, 4), layout="constrained")
    for axis, (title, group) in zip([axes] if len(groups) == 1 else axes, groups, strict=True):
        for (name, batch), points in group.items():
            contexts = [row["context"] for row in points]
            color = "tab:blue" if name == "kernels" else "tab:orange"
            for key, style in (("step_ms", "-"), ("selection_attention_ms", "--")):
                label = f"{name}, batch {batch}: " + ("step" if style == "-" else "attn + indexer")
                values = [row[key] for row in points]
                axis.plot(contexts, values, style, marker="o", color=color, label=label)
        points = next(iter(group.values()))
        flat = [points[0]["step_ms"] * row["flops"] / points[0]["flops"] for row in points]
        contexts = [row["context"] for row in points]
        axis.plot(contexts, flat, ":", color="black", label="as FLOPs grow")
        axis.set(xscale="log", yscale="log", xlabel="context, tokens", ylabel="ms", title=title)
        axis.set_xticks(contexts, [f"{context // 1024}K" for context in contexts])
        axis.minorticks_off()
        axis.legend(fontsize="small")
    figure.savefig(file, dpi=120)
    pyplot.close(figure)


def main(arguments: Sequence[str]) -> int:
    """Runs the command line; returns the exit status."""
    if any(argument in ("-h", "--help", "-help") for argument in arguments):
        print(__doc__)
        return 0
    values = flags.FlagValues()
    flags.DEFINE_string("json", None, "File of rows.", flag_values=values)
    flags.DEFINE_string("png", None, "Picture to write.", flag_values=values)
    try:
        values(["eval.serving_plot", *arguments])
        if values.json is None:
            raise ValueError("--json is missing: name the file that eval.serving_bench has written")
        rows = [json.loads(line) for line in Path(values.json).read_text().splitlines()]
    except (flags.Error, OSError, ValueError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    print(tables(rows))
    if values.png:
        plot(rows, Path(values.png))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
