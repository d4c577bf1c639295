"""What a run folder says about its run: config.json, params.txt, versions.json."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import sys
from pathlib import Path
from typing import Any

import jax
from clu import parameter_overview

from v41flash import checkout

_PACKAGES = (
    "jax",
    "jaxlib",
    "flax",
    "optax",
    "orbax-checkpoint",
    "grain",
    "numpy",
    "ml_dtypes",
    "jax-cuda13-plugin",
    "jax-cuda12-plugin",
    "libtpu",
)


def write_text(path: Path, text: str) -> None:
    """Writes a file in one piece: never half of it under its final name."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text)
    os.replace(partial, path)


def write_json(path: Path, value: Any) -> None:
    """Writes indented JSON in one piece."""
    write_text(path, json.dumps(value, indent=2) + "\n")


def versions() -> dict[str, Any]:
    """Python, packages, devices, commit and command of this process."""
    packages = {}
    for name in _PACKAGES:
        try:
            packages[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": packages,
        "backend": jax.default_backend(),
        "devices": jax.device_count(),
        "device_kind": jax.devices()[0].device_kind,
        "processes": jax.process_count(),
        **checkout.read()._asdict(),
        "command": sys.argv,
    }


def parameter_table(params: Any, activated: int) -> str:
    """Every parameter's path, shape, dtype and count, with the totals below."""
    table = parameter_overview.get_parameter_overview(params, include_stats=False)
    return f"{table}\nActivated per token: {activated:,}\n"
