"""Checkpoints of a run: parameters, optimizer state and a JSON note, saved in the background.

    <directory>/<step>/params      the parameter tree
    <directory>/<step>/opt_state   the optimizer's state
    <directory>/<step>/meta        JSON: configuration, data position, whatever the caller keeps,
                                   and the checksums of all values

Parameters are an item of their own, so that evaluation reads them without knowing the optimizer. A
step's folder gets its name only when everything in it is written, and loses it before anything in
it is deleted. What is read is held against the checksums (`v41flash.checkpoints.checksums`): it is
what was saved, or the checkpoint is named.
"""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from v41flash.checkpoints import checksums
from v41flash.errors import InputError

# Where checkpoints go that are to be deleted: in one step, as a folder that is deleted under its
# own name would be half a checkpoint for a while.
_SUPERSEDED = "superseded"
_SUMS = "checksums"
_SHOWN = 3
# Libraries say first what they were about to do, then what was wrong ("No space left"), with pages
# of their own settings in between.
_KEPT_OF_REASON = 140
# One array that cannot be written ends a save, while others are still being written: its folder is
# gone when it was not there so many times in a row.
_QUIET_LOOKS, _LOOKS, _SECONDS_BETWEEN_LOOKS = 3, 100, 0.1


class DamagedCheckpoint(InputError):
    """A checkpoint that cannot be read, or does not hold what was saved; one line.

    Attributes:
        step: of the checkpoint.
    """

    def __init__(self, step: int, text: str):
        """`text` is the whole line."""
        super().__init__(text)
        self.step = step


class SaveError(RuntimeError):
    """A checkpoint that could not be written; the text is one line for the user.

    Attributes:
        step: of the checkpoint.
    """

    def __init__(self, step: int, text: str):
        """`text` is the whole line."""
        super().__init__(text)
        self.step = step


def _reason(error: Exception) -> str:
    text = " ".join(str(error).split())
    if len(text) > 2 * _KEPT_OF_REASON:
        text = f"{text[:_KEPT_OF_REASON]} ... {text[-_KEPT_OF_REASON:]}"
    return f"{type(error).__name__}: {text}"


class Checkpoints:
    """The checkpoints under one folder. Close it (or use `with`) to finish pending saves."""

    def __init__(self, directory: str | Path, *, keep: int | None = None, writes: bool = False):
        """Opens (and creates) a folder.

        Args:
            directory: the folder.
            keep: only so many of the newest steps stay in it; None: all.
            writes: this is the one who saves here: what an interrupted save has left is removed.
        """
        self._directory = Path(directory).absolute()
        self._manager = ocp.CheckpointManager(
            self._directory,
            item_names=("params", "opt_state", "meta"),
            options=ocp.CheckpointManagerOptions(
                max_to_keep=keep,
                enable_async_checkpointing=True,
                cleanup_tmp_directories=writes,
                todelete_subdir=_SUPERSEDED,
            ),
        )
        self._saving: int | None = None
        self._writes = writes
        self._remove_superseded()

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
            step: updates done; more than those of any checkpoint in the folder.
            params: tree of arrays.
            opt_state: tree of arrays.
            meta: JSON values.

        Raises:
            SaveError: this or the save before has failed.
        """
        self.wait()
        sums = {"params": checksums.of_tree(params), "opt_state": checksums.of_tree(opt_state)}
        self._saving = step
        try:
            begun = self._manager.save(
                step,
                args=ocp.args.Composite(
                    params=ocp.args.StandardSave(params),
                    opt_state=ocp.args.StandardSave(opt_state),
                    meta=ocp.args.JsonSave(checksums.sealed({**meta, _SUMS: sums})),
                ),
            )
        except Exception as error:
            raise self._failed(error) from error
        if not begun:
            raise ValueError(f"step {step}: {self._directory} has {self.steps()} already")

    def _failed(self, error: Exception) -> SaveError:
        step, self._saving = self._saving, None
        # The manager counts what it has begun. What has been written of it may be what fills the
        # disk; where other processes still write, it stays until the next start.
        self._manager.reload()
        if jax.process_count() == 1:
            self._remove_begun(step)
        folder = self._directory / str(step)
        return SaveError(step, f"checkpoint {folder} cannot be written: {_reason(error)}")

    def _remove_superseded(self) -> None:
        if self._writes and jax.process_index() == 0:
            shutil.rmtree(self._directory / _SUPERSEDED, ignore_errors=True)

    def _remove_begun(self, step: int | None) -> None:
        """Removes the folders of a save that has failed, and what its last writers add to them."""
        quiet = 0
        for _ in range(_LOOKS):
            left = list(self._directory.glob(f"{step}.*"))
            for folder in left:
                shutil.rmtree(folder, ignore_errors=True)
            quiet = 0 if left else quiet + 1
            if quiet == _QUIET_LOOKS:
                return
            time.sleep(_SECONDS_BETWEEN_LOOKS)

    def _damaged(self, step: int, reason: str) -> DamagedCheckpoint:
        return DamagedCheckpoint(step, f"checkpoint {self._directory / str(step)}: {reason}")

    def meta(self, step: int) -> dict[str, Any]:
        """The JSON note of a checkpoint.

        Raises:
            DamagedCheckpoint: it cannot be read, or is not what was saved.
        """
        return self._read(step, {})[0]

    def _read(self, step: int, items: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """(the note, the items), all checked."""
        try:
            restored = self._manager.restore(
                step, args=ocp.args.Composite(meta=ocp.args.JsonRestore(), **items)
            )
            note = checksums.unsealed(restored["meta"])
        except Exception as error:  # whatever a library says of files that are not right
            raise self._damaged(step, f"cannot be read: {_reason(error)}") from error
        stored = note.pop(_SUMS, {})
        for item in items:
            found = checksums.of_tree(restored[item])
            wrong = checksums.differing(stored.get(item, {}), found)
            if wrong:
                names = ", ".join(wrong[:_SHOWN]) + (", ..." if len(wrong) > _SHOWN else "")
                reason = f"values of {len(wrong)} arrays of {item} are not what was saved: {names}"
                raise self._damaged(step, reason)
        return note, restored

    def restore(self, step: int, *, params: Any, opt_state: Any) -> tuple[Any, Any]:
        """Reads a checkpoint onto the shardings of the given abstract trees.

        Args:
            step: one of `steps()`.
            params: `jax.ShapeDtypeStruct`s with shardings; any mesh, not only the one saved from.
            opt_state: likewise.

        Returns:
            (params, opt_state).

        Raises:
            DamagedCheckpoint: it cannot be read as this, or is not what was saved.
        """
        items = {
            "params": ocp.args.StandardRestore(params),
            "opt_state": ocp.args.StandardRestore(opt_state),
        }
        _, restored = self._read(step, items)
        return restored["params"], restored["opt_state"]

    def restore_params(self, step: int, params: Any) -> Any:
        """Reads the parameters alone, onto the shardings of an abstract tree; see `restore`."""
        return self._read(step, {"params": ocp.args.StandardRestore(params)})[1]["params"]

    def wait(self) -> None:
        """Returns when pending saves are complete.

        Raises:
            SaveError: one could not be written.
        """
        try:
            self._manager.wait_until_finished()
        except Exception as error:
            raise self._failed(error) from error
        self._saving = None
        self._remove_superseded()

    def close(self) -> None:
        """Finishes pending saves and frees the background threads.

        Raises:
            SaveError: as `wait`.
        """
        try:
            self._manager.close()
        except Exception as error:
            raise self._failed(error) from error
        self._remove_superseded()
