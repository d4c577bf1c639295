"""Checkpoints of a run: parameters, optimizer state and a JSON note, saved in the background.

    <directory>/<step>/params      the parameter tree
    <directory>/<step>/opt_state   the optimizer's state
    <directory>/<step>/meta        JSON: configuration, data position, whatever the caller keeps

Parameters are an item of their own, so that evaluation reads them without knowing the optimizer. A
step's folder gets its name only when everything in it is written.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp


class Checkpoints:
    """The checkpoints under one folder. Close it (or use `with`) to finish pending saves."""

    def __init__(self, directory: str | Path, *, keep: int | None = None):
        """Opens (and creates) a folder; only the `keep` newest steps stay in it (None: all)."""
        self._directory = Path(directory).absolute()
        self._manager = ocp.CheckpointManager(
            self._directory,
            item_names=("params", "opt_state", "meta"),
            options=ocp.CheckpointManagerOptions(max_to_keep=keep, enable_async_checkpointing=True),
        )

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def latest_step(self) -> int | None:
        """The newest complete checkpoint, or None."""
        return self._manager.latest_step()

    def steps(self) -> list[int]:
        """All complete checkpoints, oldest first."""
        return sorted(self._manager.all_steps())

    def save(self, step: int, *, params: Any, opt_state: Any, meta: dict[str, Any]) -> None:
        """Starts saving. Returns once the arrays are copied: they may be donated afterwards.

        Args:
            step: updates done.
            params: tree of arrays.
            opt_state: tree of arrays.
            meta: JSON values.
        """
        self._manager.save(
            step,
            args=ocp.args.Composite(
                params=ocp.args.StandardSave(params),
                opt_state=ocp.args.StandardSave(opt_state),
                meta=ocp.args.JsonSave(meta),
            ),
        )

    def meta(self, step: int) -> dict[str, Any]:
        """The JSON note of a checkpoint."""
        restored = self._manager.restore(step, args=ocp.args.Composite(meta=ocp.args.JsonRestore()))
        return restored["meta"]

    def restore(self, step: int, *, params: Any, opt_state: Any) -> tuple[Any, Any]:
        """Reads a checkpoint onto the shardings of the given abstract trees.

        Args:
            step: one of `steps()`.
            params: `jax.ShapeDtypeStruct`s with shardings; any mesh, not only the one saved from.
            opt_state: likewise.

        Returns:
            (params, opt_state).

        Raises:
            ValueError: shapes or structure differ from what was saved.
        """
        restored = self._manager.restore(
            step,
            args=ocp.args.Composite(
                params=ocp.args.StandardRestore(params),
                opt_state=ocp.args.StandardRestore(opt_state),
            ),
        )
        return restored["params"], restored["opt_state"]

    def restore_params(self, step: int, params: Any) -> Any:
        """Reads the parameters alone, onto the shardings of an abstract tree; see `restore`."""
        restored = self._manager.restore(
            step, args=ocp.args.Composite(params=ocp.args.StandardRestore(params))
        )
        return restored["params"]

    def wait(self) -> None:
        """Returns when pending saves are complete."""
        self._manager.wait_until_finished()

    def close(self) -> None:
        """Finishes pending saves and frees the background threads."""
        self._manager.close()
