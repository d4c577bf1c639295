"""Prints what each TPU kernel takes, and the time that follows for each generation.

    python -m pallas_kernels.account [--op=mhc]

An op takes part when `pallas_kernels/<op>/cases.py` has a function `tpu_accounts()` that returns
{what: `pallas_kernels.tpu.Account`} at the published shapes. All is counted, nothing measured: the
time is that of main memory or of the matrix unit, at the rates that jax states for the generation.
"""

from __future__ import annotations

import argparse
import importlib
import pathlib
import sys
from collections.abc import Callable, Iterator, Mapping

from pallas_kernels.tpu import GENERATIONS, Account


def stating() -> dict[str, Callable[[], Mapping[str, Account]]]:
    """{op: its `tpu_accounts`} of the ops that have it."""
    folders = sorted(path.parent.name for path in pathlib.Path(__file__).parent.glob("*/cases.py"))
    modules = {name: importlib.import_module(f"pallas_kernels.{name}.cases") for name in folders}
    return {
        name: module.tpu_accounts
        for name, module in modules.items()
        if hasattr(module, "tpu_accounts")
    }


def table(stated: Mapping[str, Mapping[str, Account]]) -> Iterator[str]:
    """Lines of a Markdown table, one account a line."""
    heads = ["kernel", "VMEM, MiB", "HBM, MB", "GFLOP", "copies"]
    heads += [f"{generation}, us" for generation in GENERATIONS]
    yield _row(heads)
    yield _row(["---", *["---:"] * (len(heads) - 1)])
    for op, named in stated.items():
        for what, account in named.items():
            yield _row(
                [
                    f"{op}: {what}",
                    f"{account.vmem_bytes / 2**20:.1f}",
                    f"{account.hbm_bytes / 1e6:.3g}",
                    f"{account.flops / 1e9:.3g}",
                    f"{account.copies:,}",
                    *(f"{account.seconds(g) * 1e6:.3g}" for g in GENERATIONS),
                ]
            )


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status."""
    known = stating()
    parser = argparse.ArgumentParser(
        prog="python -m pallas_kernels.account", description=__doc__.splitlines()[0]
    )
    parser.add_argument(
        "--op", choices=list(known), help="default: all", action="append", metavar="NAME"
    )
    chosen = parser.parse_args(argv).op or list(known)
    print(*table({op: known[op]() for op in chosen}), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
