"""The corpus that needs no download: the running interpreter's standard library.

About 10 MB of Python source with its prose docstrings, on every machine that can run this code.
Another Python version is another corpus, so figures name the version beside them.
"""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

from v41flash.errors import InputError

# Tests (most of the bytes, much of them tables), what was installed beside the library, programs
# with their own data, and the near-identical code page tables of `encodings`, which would leak from
# the training documents into the held-out ones.
EXCLUDED_FOLDERS = frozenset(
    {
        "test", "tests", "idle_test", "site-packages", "dist-packages", "idlelib", "turtledemo",
        "ensurepip", "encodings", "lib-dynload", "__pycache__",
    }
)  # fmt: skip


def stdlib_files(root: str | Path | None = None) -> list[Path]:
    """The corpus' files, empty ones left out, in a deterministic order.

    Args:
        root: the library folder; None is the running interpreter's.

    Returns:
        Paths sorted by their place under `root`.

    Raises:
        InputError: the folder holds no source files (an interpreter that ships compiled files
            only).
    """
    root = Path(sysconfig.get_paths()["stdlib"] if root is None else root)
    found = []
    for folder, subfolders, names in os.walk(root):
        # _sysconfigdata*, config-*: what this machine's compiler was called, not a text.
        subfolders[:] = [
            name
            for name in subfolders
            if name not in EXCLUDED_FOLDERS and not name.startswith("config-")
        ]
        for name in names:
            path = Path(folder, name)
            generated = name.startswith("_sysconfigdata")
            if path.suffix == ".py" and not generated and path.stat().st_size:
                found.append((path.relative_to(root).parts, path))
    if not found:
        raise InputError(
            f'data.kind="builtin": no .py files under {root}; use data.kind="text" with data.path'
        )
    return [path for _, path in sorted(found)]
