"""Times kernels against their reference, their rivals and the ceilings of the device.

    python -m pallas_kernels.bench --op=sinkhorn --case=E1 --case=E2 --json=lines.json

An op takes part when `pallas_kernels/<op>/cases.py` has BENCHMARKS and a function `benchmark(name)`
that returns a `measure.Benchmark`. The ceilings (products in bfloat16 and in FP8, a copy) are
measured in the same run; a line's floor is the time that its FLOPs or its bytes take at them,
whichever is longer. `--rivals=MODULE` adds code from
outside of this package: `MODULE.RIVALS[op](name)` returns more `measure.Variant`s by name, or
`measure.Foreign`s. `--tune` times the configurations of the cases' kernels instead, and records the
fastest: see `pallas_kernels.tuning`.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import dataclasses
import importlib
import json
import pathlib
import sys
from collections.abc import Callable, Mapping
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
    parser.add_argument("--lock", metavar="FILE", help="that benchmarks run side by side all name")
    chosen = parser.parse_args(argv)
    chosen.op = chosen.op or list(cases)
    chosen.case = chosen.case or ["small"]
    known = sorted({name for op in chosen.op for name in cases[op].BENCHMARKS})
    for case in chosen.case:
        if case not in known:
            parser.error(f"--case {case}: {', '.join(chosen.op)} have {', '.join(known)}")
    packages = [importlib.import_module(f"pallas_kernels.{op}") for op in chosen.op]
    known = sorted({name for package in packages for name in package.IMPLEMENTATIONS})
    for name in chosen.implementation or ():
        if name not in known:
            parser.error(f"--implementation {name}: there are {', '.join(known)}")
    if chosen.rivals:
        try:
            chosen.rivals = importlib.import_module(chosen.rivals)
        except ModuleNotFoundError as reason:
            parser.error(f"--rivals {chosen.rivals}: {reason}")
    return chosen


def _tune(chosen: argparse.Namespace, cases: Mapping[str, ModuleType]) -> int:
    """Returns the number of cases of which no candidate runs."""
    failed = 0
    for op in chosen.op:
        for case in chosen.case:
            if case in cases[op].BENCHMARKS and hasattr(cases[op], "tuning"):
                print(f"{op} {case}", flush=True)
                work = cases[op].tuning(case)
                if work is None:
                    print(f"{op} {case}: nothing to tune")
                    continue
                best = tuning.tune(work, budget=chosen.budget)
                print(f"{op} {case}: {best or 'no candidate runs'}", flush=True)
                failed += best is None
    return failed


@dataclasses.dataclass(frozen=True)
class _Line:
    """One line to be: `compiled` is a promise of a function, or of why there is none."""

    names: Mapping[str, str]
    variant: measure.Variant | measure.Foreign
    compiled: concurrent.futures.Future | None


@dataclasses.dataclass(frozen=True)
class _Case:
    """One case to be: its lines, what they are checked against (a promise), and its arguments."""

    reference: concurrent.futures.Future
    arguments: tuple[Any, ...]
    lines: list[_Line]


def _compile(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    return jax.jit(function).lower(*arguments).compile()


def _one_line(reason: Exception) -> str:
    return f"{type(reason).__name__}: {reason}".splitlines()[0]


def _compile_variant(variant: measure.Variant, implementation: str | None) -> Any:
    try:
        return _compile(variant.function(implementation), variant.arguments)
    except NotImplementedError as reason:
        return reason
    except Exception as reason:
        if implementation is None:  # other people's code, which may not compile here
            return NotImplementedError(_one_line(reason))
        raise


def _time(line: _Line, expected: Any, budget: float) -> dict[str, Any]:
    """Times and checks one line; {"declined": why} where the implementation cannot run."""
    variant = line.variant
    if isinstance(variant, measure.Foreign):
        try:
            error = measure.error(variant.convert(variant.start()), expected)
            spent = measure.seconds(variant.start, budget=budget, wait=variant.wait)
        except Exception as reason:  # other people's code, which may not run here
            return {"declined": _one_line(reason)}
    else:
        function = line.compiled.result()
        if isinstance(function, NotImplementedError):
            return {"declined": str(function)}
        error = measure.error(function(*variant.arguments), expected)
        spent = measure.seconds(function, *variant.arguments, budget=budget) / variant.repeats
    return {"ms": spent * 1e3, "error": error, "passed": error <= variant.tolerance}


def _outside(rivals: Mapping[str, Callable[[str], Mapping[str, Any]]], op: str, case: str):
    """Rivals of a case; none, and a line that says so, where their libraries are absent."""
    try:
        return rivals[op](case) if op in rivals else {}
    except ImportError as reason:
        print(f"{op} {case}, rivals: {reason}")
        return {}


def _plan(
    chosen: argparse.Namespace,
    cases: Mapping[str, ModuleType],
    pool: concurrent.futures.Executor,
) -> list[_Case]:
    """The lines of every case; all are compiled at the same time."""
    outside = chosen.rivals.RIVALS if chosen.rivals else {}
    plan, seen = [], set()
    for op in chosen.op:
        package = importlib.import_module(f"pallas_kernels.{op}")
        for case in chosen.case:
            if case not in cases[op].BENCHMARKS:
                continue
            bench = cases[op].benchmark(case)
            own = [name for name in bench.variants if name in (chosen.variant or [name])]
            seen.update(own)
            rivals = {**bench.rivals, **_outside(outside, op, case)}
            todo = [
                (name, implementation, bench.variants[name])
                for name in own
                for implementation in package.IMPLEMENTATIONS
                if implementation in (chosen.implementation or package.IMPLEMENTATIONS)
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
                compiled = pool.submit(_compile_variant, variant, implementation) if ours else None
                lines.append(_Line(names, variant, compiled))
            if lines:
                arguments = next(iter(bench.variants.values())).arguments
                reference = pool.submit(_compile, bench.reference, arguments)
                plan.append(_Case(reference, arguments, lines))
    for name in chosen.variant or ():
        if name not in seen:
            print(f"--variant {name}: no case here has it", file=sys.stderr)
    return plan


def _lines(plan: list[_Case], ceilings: measure.Ceilings, budget: float):
    """Yields a dict per timed line."""
    for case in plan:
        expected = case.reference.result()(*case.arguments)
        for line in case.lines:
            result = _time(line, expected, budget)
            if "ms" in result:
                floor = ceilings.floor(line.variant) * 1e3
                result |= {"floor_ms": floor, "fraction": floor / result["ms"]}
            yield {**line.names, **result}


def _shown(line: Mapping[str, Any]) -> str:
    """A line of the table."""
    shown = {**line, "case": f"{line['op']} {line['case']}"}
    if "ms" in line:
        shown |= {
            "ms": f"{line['ms']:.4f}",
            "fraction": f"{line['fraction']:.3f}",
            "error": f"{line['error']:.1e}{'' if line['passed'] else ' WRONG'}",
        }
    else:
        shown |= {"ms": "declined", "fraction": "", "error": line["declined"]}
    return _COLUMNS.format(**shown)


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status: 1 where a result is off, 2 for wrong usage."""
    cases = _cases()
    chosen = _parse(argv, cases)
    if chosen.tune:
        with measure.side_by_side(chosen.lock, alone=True):
            return int(_tune(chosen, cases) > 0)
    with measure.side_by_side(chosen.lock, alone=False):
        with concurrent.futures.ThreadPoolExecutor() as pool:
            plan = _plan(chosen, cases, pool)
    with measure.side_by_side(chosen.lock, alone=True):
        return _report(chosen, plan)


def _report(chosen: argparse.Namespace, plan: list[_Case]) -> int:
    """Times and prints everything; returns the exit status."""
    # Measured when everything is compiled: in the same minute as the lines.
    ceilings = measure.ceilings(chosen.budget)
    where = {
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "matmul_flops": ceilings.matmul,
        "fp8_flops": ceilings.fp8,
        "copy_bytes": ceilings.copy,
    }
    print(
        f"{where['device']}, jax {jax.__version__}: matmul {ceilings.matmul / 1e12:.2f} TFLOP/s "
        f"bf16 and {ceilings.fp8 / 1e12:.2f} fp8, copy {ceilings.copy / 1e9:.0f} GB/s"
    )
    header = ("case", "variant", "implementation", "ms", "fraction", "error")
    print(_COLUMNS.format(**{name: name for name in header}))
    failed = 0
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(chosen.json.open("w")) if chosen.json else None
        for line in _lines(plan, ceilings, chosen.budget):
            failed += not line.get("passed", True)
            print(_shown(line), flush=True)
            if file:
                print(json.dumps({**line, **where}), file=file, flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
