"""Configurations of kernels by device kind and shape class, and the tuner that finds them.

An op keeps `tuned.json` in its folder: {device kind: {shape class: {field: value}}}. Its kernel has
a frozen dataclass for the configuration and a `Table` over that file; its cases.py may have

    def tuning(name: str) -> Tuning

of which `python -m pallas_kernels.bench --op=OP --case=NAME --tune` times every candidate and
writes the fastest into the file.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import json
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import jax

from pallas_kernels import measure

Config = TypeVar("Config")


@functools.cache
def _read(path: pathlib.Path) -> Mapping[str, Mapping[str, Mapping[str, Any]]]:
    return json.loads(path.read_text()) if path.exists() else {}


def device_kind() -> str:
    """Of the default device, as tables name it."""
    return jax.devices()[0].device_kind


@dataclasses.dataclass(frozen=True)
class Table(Generic[Config]):
    """The configurations of one op.

    Attributes:
        path: of its tuned.json, which need not exist.
        config: frozen dataclass of a configuration; its fields are numbers, strings or booleans.
    """

    path: pathlib.Path
    config: type[Config]

    def lookup(self, shape_class: str, default: Config) -> Config:
        """The configuration for the present device.

        Args:
            shape_class: what shapes share a configuration, as the kernel names it.
            default: what an untuned device or shape class gets.

        Raises:
            TypeError: the file has a field that the configuration lacks.
        """
        fields = _read(self.path).get(device_kind(), {}).get(shape_class)
        return default if fields is None else self.config(**fields)

    def record(self, device_kind: str, shape_class: str, config: Config) -> None:
        """Writes one configuration into the file."""
        _read.cache_clear()  # what other processes have written since
        table = {kind: dict(classes) for kind, classes in _read(self.path).items()}
        table.setdefault(device_kind, {})[shape_class] = dataclasses.asdict(config)
        self.path.write_text(json.dumps(table, indent=2, sort_keys=True) + "\n")
        _read.cache_clear()


@dataclasses.dataclass(frozen=True)
class Tuning(Generic[Config]):
    """What is tuned for one case.

    Attributes:
        table: where the result goes.
        shape_class: of the case.
        candidates: configurations to try.
        function: configuration -> function of `arguments`, which is jitted.
        arguments: arrays on the device.
        tolerance: largest `measure.error` between a candidate's result and that of the first
            candidate that runs.
        repeats: times that the function does the work.
    """

    table: Table[Config]
    shape_class: str
    candidates: Sequence[Config]
    function: Callable[[Config], Callable[..., Any]]
    arguments: tuple[Any, ...]
    tolerance: float = 0.0
    repeats: int = 1


def tune(
    work: Tuning[Config], *, budget: float, report: Callable[[str], None] = print
) -> Config | None:
    """Times all candidates, and records the fastest of those that agree.

    Args:
        work: what to tune.
        budget: seconds a candidate.
        report: gets one line per candidate.

    Returns:
        The fastest configuration; None where no candidate runs.
    """
    def build(config):
        try:
            return jax.jit(work.function(config)).lower(*work.arguments).compile()
        except Exception as reason:  # a candidate too large for the device is reported, not fatal
            return reason

    with concurrent.futures.ThreadPoolExecutor() as pool:
        built = list(pool.map(build, work.candidates))
    expected = best = None
    shortest = float("inf")
    for config, function in zip(work.candidates, built, strict=True):
        if isinstance(function, Exception):
            report(f"{config}: {str(function).strip().splitlines()[0]}")
            continue
        result = function(*work.arguments)
        if expected is None:
            expected = result
        error = measure.error(result, expected)
        if not error <= work.tolerance:  # NaN is not
            report(f"{config}: differs from the first candidate by {error:.1e}")
            continue
        spent = measure.seconds(function, *work.arguments, budget=budget) / work.repeats
        report(f"{config}: {spent * 1e3:.4f} ms")
        if spent < shortest:
            shortest, best = spent, config
    if best is not None:
        work.table.record(device_kind(), work.shape_class, best)
    return best
