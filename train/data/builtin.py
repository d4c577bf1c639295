"""The corpus that needs no download: the source files of the running interpreter's standard library.

About 10 MB of Python with its prose docstrings, on every machine that can run this code. Another Python
version is another corpus, so figures name the version beside them.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path

# Tests (most of the bytes, much of them tables), what was installed beside the library, programs with
# their own data, and the near-identical code page tables of `encodings`, which would leak from the
# training documents into the held-out ones.
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
        ValueError: the folder holds no source files (an interpreter that ships compiled files only).
    """
    root = Path(sysconfig.get_paths()["stdlib"] if root is None else root)
    found = []
    for path in root.rglob("*.py"):
        parts = path.relative_to(root).parts
        # _sysconfigdata*, config-*: what this machine's compiler was called, not a text.
        generated = any(part.startswith(("_sysconfigdata", "config-")) for part in parts)
        if not generated and EXCLUDED_FOLDERS.isdisjoint(parts) and path.stat().st_size:
            found.append((parts, path))
    if not found:
        raise ValueError(
            f'data.kind="builtin": no .py files under {root}; use data.kind="text" with data.path'
        )
    return [path for _, path in sorted(found)]
