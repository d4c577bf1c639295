"""Times kernels against their reference, their rivals and the ceilings of the device.

    python -m pallas_kernels.bench --op=sinkhorn --case=E1 --case=E2 --json=lines.json

An op takes part when `pallas_kernels/<op>/cases.py` has BENCHMARKS and a function `benchmark(name)`
that returns a `measure.Benchmark`. The ceilings are measured in the same run; a line's floor is the
time that its FLOPs or its bytes take at them, whichever is longer. `--rivals=MODULE` adds code from
outside of this package: `MODULE.RIVALS[op](name)` returns more `measure.Variant`s by name, or
`measure.Foreign`s. `--tune` times the configurations of the cases' kernels instead, and records the
fastest: see `pallas_kernels.tuning`.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import importlib
import json
import pathlib
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import jax

from pallas_kernels import measure, tuning

_COLUMNS = "{case:28} {variant:18} {implementation:12} {ms:>10} {fraction:>9} {error:>9}"


def _cases() -> dict[str, ModuleType]:
    """The cases modules of the ops that can be timed."""
    folders = pathlib.Path(__file__).parent.glob("*/cases.py")
    names = sorted(path.parent.name for path in folders)
    modules = {name: importlib.import_module(f"pallas_kernels.{name}.cases") for name in names}
    return {name: module for name, module in modules.items() if hasattr(module, "benchmark")}


def _parse(argv: list[str] | None, cases: Mapping[str, ModuleType]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m pallas_kernels.bench", description=__doc__.splitlines()[0]
    )
    several = dict(action="append", metavar="NAME")
    parser.add_argument("--op", choices=list(cases), help="default: all", **several)
    parser.add_argument("--case", help="default: small", **several)
    parser.add_argument("--implementation", help="default: all that the op has", **several)
    parser.add_argument("--variant", help="default: all that the case has", **several)
    parser.add_argument("--rivals", metavar="MODULE", help="module with further rivals")
    parser.add_argument("--tune", action="store_true", help="fill the table of configurations")
    parser.add_argument("--budget", type=float, default=2.0, help="seconds a line, default 2")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="one JSON object a line")
    chosen = parser.parse_args(argv)
    chosen.op = chosen.op or list(cases)
    chosen.case = chosen.case or ["small"]
    known = sorted({name for op in chosen.op for name in cases[op].BENCHMARKS})
    for case in chosen.case:
        if case not in known:
            parser.error(f"--case {case}: {', '.join(chosen.op)} have {', '.join(known)}")
    return chosen


def _tune(chosen: argparse.Namespace, cases: Mapping[str, ModuleType]) -> int:
    """Returns the number of cases of which no candidate runs."""
    failed = 0
    for op in chosen.op:
        for case in chosen.case:
            if case in cases[op].BENCHMARKS and hasattr(cases[op], "tuning"):
                print(f"{op} {case}", flush=True)
                best = tuning.tune(cases[op].tuning(case), budget=chosen.budget)
                print(f"{op} {case}: {best or 'no candidate runs'}", flush=True)
                failed += best is None
    return failed


@dataclasses.dataclass(frozen=True)
class _Line:
    """One line to be: `compiled` is a promise of a function, or of why there is none."""

    names: Mapping[str, str]
    variant: measure.Variant | measure.Foreign
    compiled: concurrent.futures.Future | None


def _compile(variant: measure.Variant, implementation: str | None) -> Any:
    try:
        return jax.jit(variant.function(implementation)).lower(*variant.arguments).compile()
    except NotImplementedError as reason:
        return reason


def _time(line: _Line, expected: Any, budget: float) -> dict[str, Any]:
    """Times and checks one line; {"declined": why} where the implementation cannot run."""
    variant = line.variant
    if isinstance(variant, measure.Foreign):
        error = measure.error(variant.convert(variant.start()), expected)
        spent = measure.seconds(variant.start, budget=budget, wait=variant.wait)
    else:
        function = line.compiled.result()
        if isinstance(function, NotImplementedError):
            return {"declined": str(function)}
        error = measure.error(function(*variant.arguments), expected)
        spent = measure.seconds(function, *variant.arguments, budget=budget) / variant.repeats
    return {"ms": spent * 1e3, "error": error, "passed": error <= variant.tolerance}


def _plan(
    chosen: argparse.Namespace,
    cases: Mapping[str, ModuleType],
    pool: concurrent.futures.Executor,
) -> list[tuple[measure.Benchmark, list[_Line]]]:
    """The lines of every case; all are compiled at the same time."""
    outside = importlib.import_module(chosen.rivals).RIVALS if chosen.rivals else {}
    plan = []
    for op in chosen.op:
        package = importlib.import_module(f"pallas_kernels.{op}")
        for case in chosen.case:
            if case not in cases[op].BENCHMARKS:
                continue
            bench = cases[op].benchmark(case)
            own = [name for name in bench.variants if name in (chosen.variant or [name])]
            rivals = {**bench.rivals, **(outside[op](case) if op in outside else {})}
            todo = [
                (name, implementation, bench.variants[name])
                for name in own
                for implementation in chosen.implementation or package.IMPLEMENTATIONS
            ] + [(name, None, rival) for name, rival in rivals.items()]
            lines = []
            for name, implementation, variant in todo:
                names = {
                    "op": op,
                    "case": case,
                    "variant": name,
                    "implementation": implementation or "rival",
                }
                ours = isinstance(variant, measure.Variant)
                compiled = pool.submit(_compile, variant, implementation) if ours else None
                lines.append(_Line(names, variant, compiled))
            plan.append((bench, lines))
    return plan


def _lines(chosen: argparse.Namespace, cases: Mapping[str, ModuleType], ceilings):
    """Yields a dict per timed line."""
    with concurrent.futures.ThreadPoolExecutor() as pool:
        plan = _plan(chosen, cases, pool)
    for bench, lines in plan:
        expected = None
        for line in lines:
            if expected is None:
                expected = jax.jit(bench.reference)(*line.variant.arguments)
            result = _time(line, expected, chosen.budget)
            if "ms" in result:
                variant = line.variant
                floor = max(variant.flops / ceilings.matmul, variant.bytes / ceilings.copy)
                result |= {"floor_ms": floor * 1e3, "fraction": floor * 1e3 / result["ms"]}
            yield {**line.names, **result}


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status: 1 where a result is off, 2 for wrong usage."""
    cases = _cases()
    chosen = _parse(argv, cases)
    if chosen.tune:
        return int(_tune(chosen, cases) > 0)
    device = jax.devices()[0].device_kind
    ceilings = measure.ceilings(chosen.budget)
    print(
        f"{device}, jax {jax.__version__}: matmul {ceilings.matmul / 1e12:.2f} TFLOP/s bf16, "
        f"copy {ceilings.copy / 1e9:.0f} GB/s"
    )
    header = ("case", "variant", "implementation", "ms", "fraction", "error")
    print(_COLUMNS.format(**{name: name for name in header}))
    failed = 0
    lines = []
    for line in _lines(chosen, cases, ceilings):
        lines.append(
            {
                **line,
                "device": device,
                "jax": jax.__version__,
                "matmul_flops": ceilings.matmul,
                "copy_bytes": ceilings.copy,
            }
        )
        shown = {**line, "case": f"{line['op']} {line['case']}"}
        if "ms" in line:
            failed += not line["passed"]
            mark = "" if line["passed"] else " WRONG"
            shown |= {
                "ms": f"{line['ms']:.4f}",
                "fraction": f"{line['fraction']:.3f}",
                "error": f"{line['error']:.1e}{mark}",
            }
        else:
            shown |= {"ms": "declined", "fraction": "", "error": line["declined"]}
        print(_COLUMNS.format(**shown), flush=True)
    if chosen.json:
        chosen.json.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
