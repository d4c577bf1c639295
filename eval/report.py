"""report.md of a sweep: claims, tables and plots, and where every number comes from."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

from eval import results, statistics  # noqa: E402
from eval import sweep as sweep_lib  # noqa: E402
from eval.statistics import Difference, Noise, Sample  # noqa: E402
from eval.sweep import Claim, Sweep, Variant  # noqa: E402
from v41flash.accounting import parameters  # noqa: E402

FILE, PLOTS = "report.md", "plots"
_COLOURS = ("tab:blue", "tab:orange", "tab:green", "tab:red", "tab:purple", "tab:brown")

Rows = Mapping[str, Mapping[str, Any]]


class Size(NamedTuple):
    """Parameters of a model, and how many of them a token of text activates."""

    total: int
    activated: int


class Verdict(NamedTuple):
    """A claim with its numbers."""

    claim: Claim
    variant: Sample
    alternative: Sample
    difference: Difference
    text: str


def _having(rows: Rows, variant: str, metric: str) -> Iterator[Mapping[str, Any]]:
    """The finished points of a variant that have a number."""
    for row in rows.values():
        if row["variant"] == variant and row["status"] == results.DONE:
            if metric in row["metrics"]:
                yield row


def sample(rows: Rows, variant: str, metric: str) -> Sample:
    """The values of a metric in the finished points of a variant."""
    return Sample.of(row["metrics"][metric] for row in _having(rows, variant, metric))


def gains(sweep: Sweep, rows: Rows, claim: Claim) -> Sample:
    """By how much the variant of a claim is better, under every seed that both have."""
    metric = claim.metric or sweep.metric
    sign = 1.0 if sweep.lower_is_better else -1.0
    sides = (claim.variant, metric), (claim.alternative, claim.other_metric or metric)
    own, other = (
        {row["seed"]: row["metrics"][name] for row in _having(rows, variant, name)}
        for variant, name in sides
    )
    return Sample.of(sign * (other[seed] - own[seed]) for seed in own if seed in other)


def decide(sweep: Sweep, rows: Rows) -> list[Verdict]:
    """Every claim of a sweep with what the results say of it."""

    def alike(claim: Claim) -> tuple:
        """What claims must share for their gains to spread alike."""
        same_runs = claim.variant == claim.alternative
        metric = sweep.metric if same_runs else claim.metric or sweep.metric
        return _config(sweep.variant(claim.variant)), metric, same_runs

    found = [(claim, gains(sweep, rows, claim)) for claim in sweep.claims]
    kinds: dict[tuple, list[Sample]] = {}
    for claim, gained in found:
        kinds.setdefault(alike(claim), []).append(gained)
    noise = {kind: Noise.pooled(samples) for kind, samples in kinds.items()}
    verdicts = []
    for claim, gained in found:
        metric = claim.metric or sweep.metric
        first = sample(rows, claim.variant, metric)
        second = sample(rows, claim.alternative, claim.other_metric or metric)
        gain = statistics.difference(gained, noise[alike(claim)])
        text = statistics.verdict(gain, claim.kind, claim.margin)
        verdicts.append(Verdict(claim, first, second, gain, text))
    return verdicts


def _config(variant: Variant) -> str | None:
    return variant.training.config if variant.training else None


def sizes(sweep: Sweep) -> dict[str, Size]:
    """Of every variant that trains."""
    known: dict[str, Mapping[str, Any]] = {}
    found = {}
    for variant in sweep.variants:
        if variant.training is not None:
            path = variant.training.config
            if path not in known:
                known[path] = sweep_lib.flat_config(path)
            model = sweep_lib.model(variant.training, known[path])
            totals = parameters.total(model), parameters.activated_decode(model)
            found[variant.name] = Size(*(sum(counts.values()) for counts in totals))
    return found


def write(sweep: Sweep, path: str, workdir: Path) -> Path:
    """Writes report.md and its plots; returns its path."""
    rows = results.read(workdir)
    wanted = [point.id for point in sweep_lib.points(sweep)]
    rows = {id: rows[id] for id in wanted if id in rows}
    (workdir / PLOTS).mkdir(parents=True, exist_ok=True)
    parts = [_head(path, wanted, rows), _claims(sweep, rows, workdir)]
    groups: dict[str, list[Variant]] = {}
    for variant in sweep.variants:
        if any(row["variant"] == variant.name for row in rows.values()):
            groups.setdefault(variant.group, []).append(variant)
    known = sizes(sweep)
    for group, variants in groups.items():
        parts.append(_group(group, variants, known, sweep, rows, workdir))
    parts += [_failures(rows), _sources(rows)]
    text = "\n".join(part for part in parts if part)
    partial = workdir / f"{FILE}.partial"
    partial.write_text(text)
    os.replace(partial, workdir / FILE)
    return workdir / FILE


def _head(path: str, wanted: Sequence[str], rows: Rows) -> str:
    done = [row for row in rows.values() if row["status"] == results.DONE]
    places = {(row.get("device", "?"), row.get("jax", "?"), row["commit"]) for row in done}
    lines = [f"# {path}", "", f"{len(done)} of {len(wanted)} points are finished."]
    failed, missing = len(rows) - len(done), len(wanted) - len(rows)
    if failed or missing:
        lines[-1] += f" {failed} have failed, {missing} have not been run."
    for device, jax, commit in sorted(map(str, place) for place in places):
        lines += ["", f"* device {device}, jax {jax}, commit {commit}"]
    if any(row["modified"] for row in done):
        lines += ["", "Some points ran in a checkout with uncommitted changes (see Sources)."]
    return "\n".join(lines) + "\n"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def _shown(found: Sample) -> str:
    text = "–" if not found.values else f"{found.mean:.4f}"
    if len(found.values) > 1:
        text += f" ± {found.deviation:.4f}"
    return text + (f" ({found.lost} diverged)" if found.lost else "")


def _claims(sweep: Sweep, rows: Rows, workdir: Path) -> str:
    if not sweep.claims:
        return ""
    verdicts = decide(sweep, rows)
    waiting = [verdict for verdict in verdicts if verdict.text == statistics.MISSING]
    verdicts = [verdict for verdict in verdicts if verdict.text != statistics.MISSING]
    if not verdicts:
        return ""
    lines = []
    for claim, variant, other, found, text in verdicts:
        kind = claim.kind if claim.kind == "better" else f"no worse (by {claim.margin:g})"
        width = "" if math.isnan(found.half_width) else f" ± {found.half_width:.4f}"
        gain = "–" if math.isnan(found.mean) else f"{found.mean:+.4f}{width}"
        names = [f"{name}: {_shown(s)}" for name, s in _sides(claim, variant, other)]
        lines.append([claim.statement, *names, kind, gain, text])
    head = ["claim", "variant", "alternative", "claimed to be", "gain, 95 % interval", "verdict"]
    parts = [
        "## Claims\n",
        f"Means of {sweep.metric} (or of the number named) ± standard deviation over seeds. The "
        "gain is the mean over seeds of by how much the variant is better than the alternative of "
        "the same seed; its interval is Student's, with the spread of a gain taken from all claims "
        "of the same configuration and number together. A claim holds where the whole "
        "interval is on its side, is contradicted where all of it is on the other, and is not "
        "shown in between.\n",
        _table(head, lines),
    ]
    if waiting:
        parts.append(f"{len(waiting)} claims have no numbers yet.\n")
    statements = dict.fromkeys(verdict.claim.statement for verdict in verdicts)
    for number, statement in enumerate(statements):
        chosen = [verdict for verdict in verdicts if verdict.claim.statement == statement]
        shown = [side for v in chosen for side in _sides(v.claim, v.variant, v.alternative)]
        name, axis = f"{PLOTS}/claim_{number:02d}.png", _axis(chosen[0].claim, sweep)
        if _plot(list(dict(shown).items()), statement, axis, workdir / name):
            parts.append(f"![{statement}]({name})\n")
    return "\n".join(parts)


def _sides(claim: Claim, variant: Sample, other: Sample) -> list[tuple[str, Sample]]:
    metrics = (claim.metric, claim.other_metric or claim.metric)
    names = (claim.variant, claim.alternative)
    if claim.variant == claim.alternative:
        names = (claim.metric or claim.variant, claim.other_metric or claim.alternative)
    elif metrics[0] != metrics[1]:
        names = tuple(f"{n} ({m})" if m else n for n, m in zip(names, metrics, strict=True))
    return [(names[0], variant), (names[1], other)]


def _axis(claim: Claim, sweep: Sweep) -> str:
    if claim.other_metric and claim.metric != claim.other_metric:
        return sweep.metric
    return claim.metric or sweep.metric


def _group(
    group: str,
    variants: Sequence[Variant],
    known: Mapping[str, Size],
    sweep: Sweep,
    rows: Rows,
    workdir: Path,
) -> str:
    lines, shown = [], []
    for variant in variants:
        found = sample(rows, variant.name, sweep.metric)
        seconds = [
            row["seconds"]
            for row in rows.values()
            if row["variant"] == variant.name and row["status"] == results.DONE
        ]
        size = known.get(variant.name)
        lines.append(
            [
                variant.name,
                str(len(found.values) + found.lost),
                _shown(found),
                f"{size.total:,}" if size else "–",
                f"{size.activated:,}" if size else "–",
                f"{max(seconds):.0f}" if seconds else "–",
                _other_metrics(rows, variant, sweep),
            ]
        )
        shown.append((variant.name, found))
    name = f"{PLOTS}/group_{re.sub(r'[^A-Za-z0-9]+', '_', group)}.png"
    head = ["variant", "n", sweep.metric, "parameters", "activated", "job, s", "other numbers"]
    parts = [f"## Variants: {group}\n", _table(head, lines)]
    if _plot(shown, group, sweep.metric, workdir / name):
        parts.append(f"![{group}]({name})\n")
    return "\n".join(parts)


def _other_metrics(rows: Rows, variant: Variant, sweep: Sweep) -> str:
    """Evaluations, and held-out numbers under other settings: what the table has no column for."""
    metric, shown = sweep.metric, sweep.shown
    names = {
        name
        for row in rows.values()
        if row["variant"] == variant.name and row["status"] == results.DONE
        for name in row["metrics"]
        if name in shown or (name != metric and ("." in name or name.startswith(f"{metric}_")))
    }
    return "; ".join(
        f"{name.removeprefix(f'{metric}_')} {_shown(sample(rows, variant.name, name))}"
        for name in sorted(names)
    )


def _plot(shown: Sequence[tuple[str, Sample]], title: str, axis: str, path: Path) -> bool:
    """A row for every variant: its seeds as dots, their mean as a bar. False: nothing to draw."""
    if not any(found.values for _, found in shown):
        return False
    height = 1.2 + 0.34 * len(shown)
    figure, axes = plt.subplots(figsize=(8, height), layout="constrained")
    for place, (_, found) in enumerate(shown):
        colour = _COLOURS[place % len(_COLOURS)]
        axes.plot(found.values, [place] * len(found.values), "o", color=colour, alpha=0.6)
        if found.values:
            axes.plot([found.mean], [place], "|", color=colour, markersize=18, markeredgewidth=2)
    axes.set_yticks(range(len(shown)), [name for name, _ in shown])
    axes.set_ylim(len(shown) - 0.5, -0.5)
    axes.set(xlabel=axis.replace("_", " "), title=title)
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return True


def _failures(rows: Rows) -> str:
    failed = [row for row in rows.values() if row["status"] == results.FAILED]
    if not failed:
        return ""
    lines = [[row["id"], row["error"].replace("|", "\\|"), row["folder"]] for row in failed]
    return "## Failed points\n\n" + _table(["point", "error", "log in"], lines)


def _sources(rows: Rows) -> str:
    """Command, configuration and commit of every point."""
    parts = [
        "## Sources\n",
        "Run from the root of the checkout at the commit named. The resolved configuration of a "
        "training is run/config.json in the point's folder.\n",
    ]
    # Points that trained together have the same.
    for folder, row in {row["folder"]: row for row in rows.values()}.items():
        commit = f"commit {row['commit']}" + (" with changes" if row["modified"] else "")
        place = f"{row['status']} {row['finished']}, {row['seconds']} s, {row.get('device', '?')}"
        commands = "\n".join(row["commands"])
        parts.append(f"{folder}: {place}; {commit}\n\n```\n{commands}\n```\n")
    return "\n".join(parts)
