"""What a model costs: parameters, cache bytes, FLOPs, traffic, next to earlier models.

    python -m eval.accounting --config=configs/v41_flash.py [--format=json] [--plots=DIR]

Works for every configuration file; `--config.model.KEY=VALUE` changes the model first. The JSON is
{name: {value, unit, source}} in base units. `--plots` writes kv_bytes.png (global cache per token
across generations) and decode_flops.png (a token's FLOPs from 4,096 to 1,048,576 tokens of
context). Exit status 2: the flags or the configuration are wrong.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from absl import flags
from ml_collections import config_flags

from v41flash.accounting import cache, comparisons, flops
from v41flash.accounting.rows import CONTEXTS, Row, Rows, rows
from v41flash.config import ModelConfig
from v41flash.nn.context import rope_frequencies
from v41flash.text import engram_hash

_FIRST_PRIMES = 8


class UsageError(ValueError):
    """Wrong flags or a configuration that is no model; one line."""


class Arguments(NamedTuple):
    """The command line: the model, "text" or "json", and the folder for plots or None."""

    model: ModelConfig
    format: str
    plots: Path | None


def _one_line(error: BaseException) -> str:
    # KeyErrors quote their text, and ml_collections puts one into its AttributeErrors.
    text: object = error
    while isinstance(text, BaseException):
        text = text.args[0] if len(text.args) == 1 else str(text)
    return " ".join(str(text).split())


def parse(arguments: Sequence[str]) -> Arguments:
    """Reads the command line (without the program).

    Raises:
        UsageError: a flag, file or key that does not exist, or a configuration that is no model.
    """
    values = flags.FlagValues()
    argv = ["eval.accounting", *arguments]
    config = config_flags.DEFINE_config_file(
        "config", flag_values=values, lock_config=True, sys_argv=argv
    )
    output = flags.DEFINE_enum(
        "format", "text", ["text", "json"], "How to print.", flag_values=values
    )
    plots = flags.DEFINE_string("plots", None, "Folder for two plots.", flag_values=values)
    try:
        rest = values(argv)
        chosen = config.value
        sections = None if chosen is None else chosen.to_dict()
    except flags.Error as error:
        raise UsageError(_one_line(error)) from error
    except OSError as error:
        path = config_flags.get_config_filename(values["config"])
        raise UsageError(f"--config={path}: there is no such file, or it does not load") from error
    # Whatever the configuration's own code raises is a mistake in it.
    except (Exception, SystemExit) as error:
        raise UsageError(f"--config: {type(error).__name__}: {_one_line(error)}") from error
    if len(rest) > 1:
        raise UsageError(f"{rest[1]!r} is no flag: write --name=value")
    if sections is None:
        raise UsageError("--config is missing: give a file such as --config=configs/v41_flash.py")
    if "model" not in sections:
        raise UsageError(f"--config: no section model among {', '.join(sections) or 'none'}")
    try:
        model = ModelConfig.from_dict(sections["model"])
    except ValueError as error:
        raise UsageError(f"model.{_one_line(error)}") from error
    return Arguments(model, output.value, Path(plots.value) if plots.value else None)


def _hash_rows(config: ModelConfig) -> Rows:
    """Engram's primes, the table rows that they make, and its multipliers."""
    if not config.engram_layer_ids:
        return {}
    result = {}
    vocabulary = config.engram_compressed_vocab_size
    bound = (2**63 - 1) // vocabulary // 2
    result["engram.multiplier_bound"] = Row(bound, "1", "largest int64 / canonical ids / 2")
    sites = len(config.engram_layer_ids)
    moduli = engram_hash.table_primes(
        config.engram_vocab_size, config.engram_max_ngram_size, config.engram_n_heads, sites
    )
    for layer, primes in zip(config.engram_layer_ids, moduli, strict=True):
        name = f"engram.layer_{layer}"
        total = sum(map(sum, primes))
        result[f"{name}.rows_from_primes"] = Row(total, "rows", "sum of its primes")
        for i, prime in enumerate(primes[0][:_FIRST_PRIMES]):
            result[f"{name}.prime_{i}"] = Row(prime, "rows", "2-gram sub-table")
        multipliers = engram_hash.site_multipliers(vocabulary, config.engram_max_ngram_size, layer)
        for i, multiplier in enumerate(multipliers.tolist()):
            result[f"{name}.multiplier_{i}"] = Row(multiplier, "1", "generator seeded by the layer")
        largest = max(multipliers.tolist()) * (vocabulary - 1)
        result[f"{name}.largest_product"] = Row(largest, "1", "multiplier x id, below 2^63")
    return result


def _rotary_rows(config: ModelConfig) -> Rows:
    """YaRN's frequencies, and between which of them its ramp runs."""
    frequencies = rope_frequencies(config)["compressed"].astype(np.float64)
    channels = config.qk_rope_head_dim
    plain = config.compress_rope_theta ** (-np.arange(0, channels, 2) / channels)
    kept = np.flatnonzero(np.isclose(frequencies, plain, rtol=1e-6))
    divided = np.flatnonzero(np.isclose(frequencies, plain / config.rope_factor, rtol=1e-6))
    result = {
        f"yarn.frequency_{i}": Row(float(frequency), "radians/position", "compressed layers")
        for i, frequency in enumerate(frequencies)
    }
    if config.rope_factor > 1:
        if kept.size:
            result["yarn.low"] = Row(int(kept[-1]), "1", "last frequency that stays as it is")
        if divided.size:
            result["yarn.high"] = Row(int(divided[0]), "1", "first that is divided by the factor")
    return result


def figures(config: ModelConfig) -> Rows:
    """Every figure of a model, by name."""
    return {**rows(config), **_hash_rows(config), **_rotary_rows(config)}


def to_json(table: Rows) -> str:
    """{name: {value, unit, source}}."""
    return json.dumps({name: row._asdict() for name, row in table.items()}, indent=1)


def _readable(value: float) -> str:
    if isinstance(value, int) or float(value).is_integer():
        return f"{int(value):,}"
    return f"{value:,.4f}" if abs(value) >= 0.01 else f"{value:.7g}"


def to_text(table: Rows) -> str:
    """One line a figure, sections apart."""
    names = max(map(len, table))
    values = max(len(_readable(row.value)) for row in table.values())
    units = max(len(row.unit) for row in table.values())
    lines: list[str] = []
    section = None
    for name, row in table.items():
        if section not in (None, name.partition(".")[0]):
            lines.append("")
        section = name.partition(".")[0]
        unit = "" if row.unit == "1" else row.unit
        value = _readable(row.value)
        lines.append(f"{name:{names}}  {value:>{values}} {unit:{units}}  {row.source}".rstrip())
    return "\n".join(lines)


def _save(figure, path: Path) -> None:
    partial = path.with_name(path.name + ".partial")
    figure.savefig(partial, format="png", dpi=120)
    os.replace(partial, path)


def write_plots(config: ModelConfig, folder: Path) -> None:
    """kv_bytes.png and decode_flops.png of a model, in `folder`."""
    import matplotlib  # a second that only plots should cost

    matplotlib.use("Agg")
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    ours = cache.global_bytes_per_token(config)
    generations = {
        "V1-67B": comparisons.v1_67b_bytes_per_token(),
        "V3.2": comparisons.v3_2_bytes_per_token(),
        "V4-Pro": comparisons.global_bytes_per_token(comparisons.V4_PRO),
        "V4-Flash": comparisons.global_bytes_per_token(comparisons.V4_FLASH),
        "this model,\nno sharing": cache.unshared_bytes_per_token(config),
        "this model": ours,
    }
    figure, axis = pyplot.subplots(figsize=(7, 4), layout="constrained")
    bars = axis.bar(list(generations), list(generations.values()), color="tab:blue")
    axis.bar_label(bars, labels=[f"{value:,.0f}" for value in generations.values()])
    axis.set(yscale="log", ylabel="bytes per token", title="global KV cache per token")
    axis.margins(y=0.15)
    _save(figure, folder / "kv_bytes.png")
    pyplot.close(figure)

    figure, axis = pyplot.subplots(figsize=(7, 4), layout="constrained")
    contexts = [CONTEXTS[0] * 2**i for i in range((CONTEXTS[-1] // CONTEXTS[0]).bit_length())]
    costs = [flops.decode(config, context) for context in contexts]
    weighted = [flops.weighted(cost) for cost in costs]
    scores = [flops.PRECISION_WEIGHTS["fp4"] * cost["index_scores", "fp4"] for cost in costs]
    rest = [total - score for total, score in zip(weighted, scores, strict=True)]
    axis.stackplot(contexts, rest, scores, labels=["everything else", "index scores"])
    unpooled = dataclasses.replace(config, use_candidate_pool=False)
    axis.plot(
        contexts,
        [flops.weighted(flops.decode(unpooled, context)) for context in contexts],
        color="black",
        linestyle="--",
        label="without the candidate pool",
    )
    axis.set(
        xscale="log",
        xlabel="context, tokens",
        ylabel="FLOPs, weighted by precision",
        ylim=(0, None),
        title=f"one decoded token: x{weighted[-1] / weighted[0]:.3f} at {contexts[-1]:,} tokens",
    )
    axis.set_xticks(contexts[::2], [f"{context:,}" for context in contexts[::2]])
    axis.minorticks_off()
    axis.legend(loc="lower right")
    _save(figure, folder / "decode_flops.png")
    pyplot.close(figure)


def main(arguments: Sequence[str]) -> int:
    """Runs the command line; returns the exit status."""
    if any(argument in ("-h", "--help", "-help") for argument in arguments):
        print(__doc__)
        return 0
    try:
        chosen = parse(arguments)
        table = figures(chosen.model)
        if chosen.plots is not None:
            try:
                write_plots(chosen.model, chosen.plots)
            except OSError as error:
                raise UsageError(f"--plots={chosen.plots}: {error.strerror}") from error
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(to_json(table) if chosen.format == "json" else to_text(table))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
