"""Pages on disk, found by their keys; several processes may share one folder.

    DIR/pages/ab/abcd...      a page (`v41flash.tiers.page_file`), named after its key
    DIR/writing/              pages that are being written
    DIR/usage                 bytes of everything above, with a checksum
    DIR/lock                  held for moments by who changes names or `usage`

A page is written under another name, flushed to the disk, and renamed: under its own name it is
whole. Its bytes count towards the budget from before the first of them is written, so the budget
holds at every moment. Whoever is killed on the way leaves a file in `writing/`, which whoever comes
next removes (the writer holds a lock on it that dies with the process), and nothing else.

Reading takes no lock. A page that is removed while it is read is read to its end; one that is
removed before is a miss. A file that is not what its name says is a miss, too: it is reported,
removed and never served.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import hashlib
import logging
import os
import secrets
import stat
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from v41flash.errors import InputError
from v41flash.tiers import page_file
from v41flash.tiers.keys import PageNameError, page_key, page_name
from v41flash.tiers.page_file import DamagedPage

_logger = logging.getLogger(__name__)

DEFAULT_BUDGET = 16 << 30
DEFAULT_LIFETIME = 72 * 3600.0
# O_NOFOLLOW: a link in place of a page would lead out of the folder. O_NONBLOCK: a pipe would
# make the reader wait for ever.
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_USAGE = struct.Struct("<Q16s")
# More than is needed is removed at once, so that the folder is not listed for every page.
_SLACK = 16
# A folder full of young pages is not listed again for so long.
_FULL_SECONDS = 60.0


@dataclasses.dataclass
class Counts:
    """What one store object has seen.

    Attributes:
        hits: pages read.
        misses: pages that were not there.
        damaged: pages that were not what their name says (misses as well, not counted there).
        written: pages written.
        present: pages that were there when they should have been written.
        refused: pages not written for want of room.
        failed: pages neither read nor written because of the file system.
        evicted: pages removed to make room.
    """

    hits: int = 0
    misses: int = 0
    damaged: int = 0
    written: int = 0
    present: int = 0
    refused: int = 0
    failed: int = 0
    evicted: int = 0


@dataclasses.dataclass(frozen=True)
class _File:
    used: float
    size: int
    path: Path


class DiskStore:
    """A folder of pages.

    Attributes:
        folder: DIR.
        budget: bytes of all files at most.
        min_lifetime: seconds after its last use for which a page is not removed to make room; new
            pages are refused where that leaves none.
        counts: see `Counts`.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        budget: int = DEFAULT_BUDGET,
        min_lifetime: float = DEFAULT_LIFETIME,
        clock: Callable[[], float] = time.time,
    ):
        """Makes the folder where it does not exist, and clears up after writers that were killed.

        Args:
            folder: DIR.
            budget: bytes; the file system's own overhead is not counted.
            min_lifetime: seconds.
            clock: the time, in seconds since 1970.

        Raises:
            InputError: a folder that cannot be made or written, or numbers that cannot be.
        """
        if budget < 1 or not min_lifetime >= 0:
            raise InputError(
                f"store {folder}: budget {budget} must be at least 1 byte,"
                f" min_lifetime {min_lifetime} 0 seconds or more"
            )
        self.folder, self.budget, self.min_lifetime = Path(folder), budget, min_lifetime
        self.counts = Counts()
        self._clock, self._full_until = clock, 0.0
        self._pages, self._writing = self.folder / "pages", self.folder / "writing"
        try:
            for path in (self._pages, self._writing):
                path.mkdir(parents=True, exist_ok=True)
            with self._locked():
                usage = self._read_usage()
                self._write_usage(self._scan()[0] if usage is None else self._swept(usage))
        except OSError as error:
            raise InputError(f"store {folder}: must be a folder to write to: {error}") from error

    @property
    def usage(self) -> int:
        """Bytes of all files, those being written included."""
        with self._locked():
            usage = self._read_usage()
            return self._scan()[0] if usage is None else usage

    def get(self, key: bytes, payload: int) -> bytes | None:
        """The payload of a page, or None: it is not there, or not whole.

        Args:
            key: of the page.
            payload: bytes that it must have.

        Raises:
            PageNameError: not a key.
        """
        path = self._path(key)
        try:
            descriptor = os.open(path, _READ)
        except FileNotFoundError:
            self.counts.misses += 1
            return None
        except OSError as error:
            if error.errno == errno.ELOOP:
                self._damaged(path, os.lstat(path), "a link")
            else:  # Too many open files, say: nothing that the page could do about.
                self.counts.failed += 1
                _logger.warning("%s: page not read: %s", path, error)
            return None
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise DamagedPage("not a file")
            with open(descriptor, "rb", closefd=False) as file:
                data = page_file.read(file, key, payload)
        except (OSError, DamagedPage) as error:
            self._damaged(path, status, str(error))
            return None
        finally:
            os.close(descriptor)
        self.counts.hits += 1
        return data

    def put(self, key: bytes, payload: bytes) -> bool:
        """Writes a page, if it is not there; whether it is there now.

        Raises:
            PageNameError: not a key.
        """
        path = self._path(key)
        try:
            if path.exists():
                self.counts.present += 1
                return True
            with self._reserve(page_file.file_bytes(len(payload))) as (file, temporary):
                if file is None:
                    self.counts.refused += 1
                    return False
                _write(file, page_file.header(key, payload))
                _write(file, payload)
                os.fsync(file)
                self._publish(file, temporary, path)
        except OSError as error:
            # A full disk, say: those who are served lose time by it, not answers.
            self.counts.failed += 1
            _logger.warning("%s: page not written: %s", path, error)
            return False
        self.counts.written += 1
        return True

    def touch(self, keys: Sequence[bytes]) -> None:
        """Notes that the pages of a prefix, first one first, are used now.

        A page counts as used later than those behind it, which are no good without it.
        """
        now = int(self._clock() * 1e9)
        for place, key in enumerate(keys):
            moment = now + 1000 * (len(keys) - place)
            path = self._path(key)
            try:
                os.utime(path, ns=(moment, moment), follow_symlinks=False)
            except FileNotFoundError:
                continue  # Made room for others meanwhile.
            except OSError as error:
                # It may leave earlier than it should, which costs a prefill.
                _logger.warning("%s: use not noted: %s", path, error)
                return

    # -- Names -------------------------------------------------------------------------------------

    def _path(self, key: bytes) -> Path:
        name = page_name(key)
        return self._pages / name[:2] / name

    def _damaged(self, path: Path, status: os.stat_result, reason: str) -> None:
        """Reports a file that is not the page it should be, and makes room for one that is."""
        self.counts.damaged += 1
        _logger.warning("%s: damaged page, not used: %s", path, reason)
        try:
            with self._locked():
                found = os.stat(path, follow_symlinks=False)
                # Another process may have put a whole page in its place.
                if (found.st_ino, found.st_dev) == (status.st_ino, status.st_dev):
                    os.unlink(path)
                    # Its size may not be what was counted: the next who needs room counts anew.
                    (self.folder / "usage").unlink(missing_ok=True)
        except OSError as error:
            _logger.warning("%s: cannot be removed: %s", path, error)

    # -- Writing -----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _reserve(self, size: int) -> Iterator[tuple[int | None, Path]]:
        """An open file of `size` bytes in `writing/`, gone at the end unless it was published; no
        file where there is no room."""
        temporary = self._writing / secrets.token_hex(16)
        with self._locked():
            file = self._create(temporary, size) if self._make_room(size) else None
        if file is None:
            yield None, temporary
            return
        try:
            yield file, temporary
        finally:
            with self._locked():
                if temporary.exists():
                    os.unlink(temporary)
                    self._count(-size)
            os.close(file)

    def _create(self, temporary: Path, size: int) -> int:
        file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        # Held until the file is closed: a killed writer holds it no more.
        fcntl.flock(file, fcntl.LOCK_EX)
        self._count(size)
        os.ftruncate(file, size)
        return file

    def _publish(self, file: int, temporary: Path, path: Path) -> None:
        now = self._clock()
        os.utime(file, (now, now))
        folder = path.parent
        if not folder.is_dir():
            folder.mkdir(exist_ok=True)
            _sync(self._pages)
        with self._locked():
            # Whoever wrote the same page first has won.
            if not path.exists():
                os.rename(temporary, path)
        _sync(folder)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Alone among all that change names or the usage, threads of this process included."""
        file = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield
        finally:
            os.close(file)

    # -- Room (all with the lock held) -------------------------------------------------------------

    def _make_room(self, size: int) -> bool:
        """Whether `size` more bytes fit, after removing what may be removed."""
        usage = self._read_usage()
        if usage is not None and usage + size <= self.budget:
            return True
        now = self._clock()
        if size > self.budget or now < self._full_until:
            return False
        usage, files = self._scan()
        if usage + size > self.budget:
            wanted = usage + size - self.budget + self.budget // _SLACK
            usage -= self._evict(files, wanted, now)
        self._write_usage(usage)
        if usage + size <= self.budget:
            return True
        self._full_until = now + _FULL_SECONDS
        _logger.warning(
            "%s: %d of %d bytes are in pages younger than %g hours: new ones are not stored",
            self.folder, usage, self.budget, self.min_lifetime / 3600,
        )  # fmt: skip
        return False

    def _evict(self, files: list[_File], wanted: int, now: float) -> int:
        """Removes the least recently used pages, up to `wanted` bytes; the bytes removed."""
        freed = 0
        for file in sorted(files, key=lambda file: file.used):
            if freed >= wanted or now - file.used < self.min_lifetime:
                break
            file.path.unlink(missing_ok=True)
            freed += file.size
            self.counts.evicted += 1
        return freed

    def _scan(self) -> tuple[int, list[_File]]:
        """(bytes of all files, the pages); files of killed writers are removed on the way."""
        files = []
        for folder in os.scandir(self._pages):
            if not folder.is_dir(follow_symlinks=False):
                continue
            for entry in os.scandir(folder.path):
                try:
                    page_key(entry.name)
                except PageNameError:
                    continue  # Not ours: neither counted nor removed.
                status = entry.stat(follow_symlinks=False)
                if stat.S_ISREG(status.st_mode):
                    files.append(_File(status.st_mtime, status.st_size, Path(entry.path)))
        return self._sweep()[0] + sum(file.size for file in files), files

    def _swept(self, usage: int) -> int:
        """The usage once the files of killed writers are gone."""
        return max(usage - self._sweep()[1], 0)

    def _sweep(self) -> tuple[int, int]:
        """Removes the files of killed writers: (bytes that are being written, bytes removed)."""
        kept = removed = 0
        for entry in os.scandir(self._writing):
            if not entry.is_file(follow_symlinks=False):
                continue
            file = os.open(entry.path, _READ)
            try:
                size = os.fstat(file).st_size
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                kept += size
            else:
                os.unlink(entry.path)
                removed += size
            finally:
                os.close(file)
        return kept, removed

    def _count(self, change: int) -> None:
        usage = self._read_usage()
        # Unknown: the next who needs room counts.
        if usage is not None:
            self._write_usage(max(usage + change, 0))

    def _read_usage(self) -> int | None:
        """The recorded usage; None where there is none, or a damaged one."""
        try:
            data = (self.folder / "usage").read_bytes()
        except FileNotFoundError:
            return None
        if len(data) != _USAGE.size:
            return None
        usage, checksum = _USAGE.unpack(data)
        return usage if checksum == _usage_checksum(usage) else None

    def _write_usage(self, usage: int) -> None:
        (self.folder / "usage").write_bytes(_USAGE.pack(usage, _usage_checksum(usage)))


def _usage_checksum(usage: int) -> bytes:
    return hashlib.blake2b(usage.to_bytes(8, "little"), digest_size=16).digest()


def _write(file: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]


def _sync(folder: Path) -> None:
    """Makes the names in a folder last."""
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)
