"""Where the time of a training step goes: the device's work by component and by pass.

    python -m train.main --config=... --workdir=DIR --config.train.profile_from=20 \
        --config.train.profile_steps=3
    python -m train.profile --workdir=DIR [--json=FILE]

The first command leaves DIR/profile: the profiler's trace (also for TensorBoard or Perfetto), and
the text of the compiled step, which says where in the model each operation comes from. The second
prints a table in Markdown, in milliseconds a step: forward, computed again for gradients, backward.
What is fused with something else counts as where the fusion ends. On a GPU the step of a run with
`profile_steps` starts its kernels one by one, not as CUDA graphs (as fast in configs/small.py).
Steps take several times as long while they are traced; their kernels do not. On a CPU, operations
run side by side, and the sum is of all threads. Exit status: 0, or 2 where there is no such trace.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from train import hlo, runinfo
from v41flash.errors import InputError

FOLDER, PROGRAM = "profile", "step.hlo.txt"
PASSES = ("forward", "again", "backward")
# A CUDA graph has one entry in the trace for all that it holds.
PLATFORM_OPTIONS = {"gpu": {"xla_gpu_enable_command_buffer": ""}}
# Of a path in the model, the first of these that it has names the component.
_COMPONENTS = (
    ("engram", "Engram"),
    ("router", "router"),
    ("indexer", "indexer"),
    ("compressor", "compressor"),
    ("hc_attn", "hyper-connections"),
    ("hc_ffn", "hyper-connections"),
    ("ffn", "experts"),
    ("attn", "attention"),
    ("images", "images"),
    ("CED._group", "between layers, indexer's loss"),
    ("jvp(CED)", "embedding, norms"),
    ("jvp(", "head and loss"),
)
_UPDATE = "optimizer and rest"
_KERNELS = " kernels"
# Instructions that hold others, which are there by themselves.
_CONTAINERS = {"while", "conditional", "call", "async-start", "async-done"}


class Event(NamedTuple):
    """One operation's run: its instruction's name, its program's, and nanoseconds."""

    instruction: str
    module: str
    nanoseconds: float


def begin(workdir: Path, update: Any) -> None:
    """Starts tracing into a run folder; `update` is the compiled step."""
    folder = workdir / FOLDER
    folder.mkdir(exist_ok=True)
    runinfo.write_text(folder / PROGRAM, update.as_text())
    jax.profiler.start_trace(str(folder))


def place(origin: hlo.Origin) -> tuple[str, str]:
    """(component, pass) of an instruction."""
    path = origin.op_name
    component = next((name for part, name in _COMPONENTS if part in path), _UPDATE)
    if origin.opcode == "custom-call" and component == "attention":
        component += _KERNELS
    if "rematted_computation" in path:
        return component, "again"
    return component, "backward" if "transpose(" in path else "forward"


def events(trace: Path) -> list[Event]:
    """The operations of a trace."""
    found = []
    for plane in jax.profiler.ProfileData.from_file(str(trace)).planes:
        for line in plane.lines:
            for event in line.events:
                stats = dict(event.stats)
                if "hlo_op" in stats:
                    module = str(stats.get("hlo_module", ""))
                    found.append(Event(str(stats["hlo_op"]), module, event.duration_ns))
    return found


def components(found: Iterable[Event], program: str, steps: int) -> dict[str, dict[str, float]]:
    """Milliseconds a step: {component: {pass: time}}, the longest component first.

    Args:
        found: events of the trace.
        program: text of the compiled step; what other programs did is left out.
        steps: how many were traced.
    """
    origins = hlo.origins(program)
    module = program.split(maxsplit=2)[1].rstrip(",")
    times: dict[str, dict[str, float]] = defaultdict(lambda: dict.fromkeys(PASSES, 0.0))
    for event in found:
        origin = origins.get(event.instruction)
        if origin is None or event.module != module or origin.opcode in _CONTAINERS:
            continue
        component, which = place(origin)
        times[component][which] += event.nanoseconds / 1e6 / steps
    return dict(sorted(times.items(), key=lambda item: -sum(item[1].values())))


def table(times: Mapping[str, Mapping[str, float]]) -> str:
    """The components in Markdown."""
    total = sum(sum(passes.values()) for passes in times.values())
    lines = [
        "| ms a step | forward | again | backward | sum | share |",
        "|---|---|---|---|---|---|",
    ]
    for name, passes in times.items():
        own = sum(passes.values())
        cells = " | ".join(f"{passes[which]:.2f}" for which in PASSES)
        lines.append(f"| {name} | {cells} | {own:.2f} | {own / total:.1%} |")
    lines.append(f"| device | | | | {total:.2f} | |")
    return "\n".join(lines)


def of_run(workdir: Path) -> dict[str, dict[str, float]]:
    """`components` of the newest trace of a run folder.

    Raises:
        InputError: there is none, or none with operations of the step.
    """
    folder = workdir / FOLDER
    traces = sorted(folder.rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime)
    if not traces or not (folder / PROGRAM).exists():
        raise InputError(f"--workdir={workdir}: no trace; train with train.profile_steps")
    steps = json.loads((workdir / "config.json").read_text())["train"]["profile_steps"]
    times = components(events(traces[-1]), (folder / PROGRAM).read_text(), steps)
    if not times:
        raise InputError(f"{traces[-1]}: holds no operations of the step")
    return times


def main(arguments: Sequence[str]) -> int:
    """Runs the command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m train.profile",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--workdir", type=Path, required=True)
    parser.add_argument("--json", type=Path)
    flags = parser.parse_args(arguments)
    try:
        times = of_run(flags.workdir)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if flags.json:
        runinfo.write_json(flags.json, times)
    print(table(times))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
