"""Where documents come from: files in a fixed order, each read into documents.

A source is a kind, a list of files and a field name. Whatever cannot be read (missing permission,
not UTF-8, a malformed row) is counted, skipped and reported once; only a source without a single
readable document is an error.
"""

from __future__ import annotations

import collections
import dataclasses
import glob as glob_module
import gzip
import hashlib
import json
import logging
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from eval.tasks import digit_pages, long_context
from train.data import builtin
from train.data.images import ImageFields, Interleaved, PlannedImage, listed
from v41flash.errors import InputError
from v41flash.image_files import FORMATS, ImageError

_logger = logging.getLogger(__name__)

_NAMES_PER_REASON = 3
_RECORDS_PER_READ = 512
# Kinds whose rows have fields, of which one may be a prompt.
_ROWS = ("jsonl", "parquet", "array_record")
_DEFAULT_PATTERNS = {
    "text": "**/*",
    "jsonl": "**/*.jsonl*",
    "parquet": "**/*.parquet",
    "array_record": "**/*.array_record*",
}
# Corpora that packages ship; they take no path.
_SHIPPED = ("builtin", "digits")
# Made here; the path says what and how long.
_GENERATED = "long_context"
KINDS = (*_SHIPPED, _GENERATED, *_DEFAULT_PATTERNS)


class SourceError(InputError):
    """A data source that cannot be used as configured."""


class Skipped:
    """Counts what was skipped, by reason, with the first few names of each."""

    def __init__(self):
        """Starts with nothing skipped."""
        self.counts: collections.Counter[str] = collections.Counter()
        self._names: dict[str, list[str]] = collections.defaultdict(list)

    def add(self, reason: str, name: str) -> None:
        """Counts one skipped file or row."""
        self.counts[reason] += 1
        if len(self._names[reason]) < _NAMES_PER_REASON:
            self._names[reason].append(name)

    def __str__(self) -> str:
        """One line: count, reason and first names of everything skipped; "" where nothing was."""
        parts = []
        for reason, count in sorted(self.counts.items()):
            names = ", ".join(self._names[reason])
            parts.append(
                f"{count} {reason} ({names}{', ...' if count > _NAMES_PER_REASON else ''})"
            )
        return "; ".join(parts)


@dataclasses.dataclass(frozen=True)
class Document:
    """One document.

    Attributes:
        texts: its text, cut where images stand: one more than there are images.
        data: the UTF-8 bytes of the text, without the markers of images.
        document_id: stable, from text and images.
        images: in order.
        prompt: what is read before the text, and not learnt.
    """

    texts: tuple[str, ...]
    data: bytes
    document_id: int
    images: tuple[PlannedImage, ...] = ()
    prompt: str = ""


def document_id(data: bytes) -> int:
    """A stable id in [0, 2^63) that depends on the content alone (so equal documents share it)."""
    digest = hashlib.blake2b(data, digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@dataclasses.dataclass(frozen=True)
class Source:
    """Files of one kind, in the order in which their documents are read."""

    kind: str
    files: tuple[Path, ...]
    text_field: str = "text"
    images: ImageFields | None = None
    prompt_field: str = ""

    def listing_digest(self) -> str:
        """A hash over kind, fields and every file's path, size and modification time.

        Image files that rows refer to by path are not among them: to find those, every row would
        have to be read each time. After replacing one, touch the file whose rows name it.
        """
        digest = hashlib.blake2b(f"{self.kind}\0{self.text_field}".encode(), digest_size=16)
        if self.images is not None:
            digest.update(f"\0{self.images}\0{FORMATS}\0{digit_pages.VERSION}".encode())
        if self.kind == _GENERATED:
            digest.update(f"\0{long_context.VERSION}".encode())
        if self.prompt_field:
            digest.update(f"\0prompt {self.prompt_field}".encode())
        for path in self.files:
            stat = path.stat()
            digest.update(f"\0{path}\0{stat.st_size}\0{stat.st_mtime_ns}".encode())
        return digest.hexdigest()

    def documents(self, skipped: Skipped) -> Iterator[Document]:
        """Reads every document once; what cannot be read goes to `skipped`."""
        read = _READERS[self.kind]
        images = self.images.field if self.images else ""
        fields = Fields(self.text_field, images, self.prompt_field)
        for path in self.files:
            for name, item in read(path, fields, skipped):
                try:
                    document = _to_document(name, item, self.images, path.parent, skipped)
                except ImageError as error:
                    if self.images.strict:
                        raise SourceError(
                            f'{error} (data.bad_images="skip" leaves such rows out)'
                        ) from error
                    skipped.add("rows with an unusable image", name)
                    continue
                if document is not None:
                    yield document


def open_source(
    kind: str,
    path: str = "",
    pattern: str = "",
    text_field: str = "text",
    images: ImageFields | None = None,
    prompt_field: str = "",
) -> Source:
    """Lists a source's files.

    Args:
        kind: one of `KINDS`.
        path: a file, a folder, or a glob; must be empty for "builtin" and "digits"; tasks and a
            length, such as "needle,copy:256", for "long_context".
        pattern: glob inside the folder; "" is the kind's own. Hidden files and folders are left
            out.
        text_field: name of the JSONL field, Parquet column or ArrayRecord JSON field; "" means that
            ArrayRecord records are themselves UTF-8 text.
        images: how rows carry images; None: they do not.
        prompt_field: field whose text is read before the other one and not learnt; "": there is
            none.

    Returns:
        The source, files sorted.

    Raises:
        SourceError: unknown kind, prompts or images where they cannot be, nothing at `path`, or a
            package that the kind needs is missing.
    """
    if kind not in KINDS:
        raise SourceError(f"data.kind={kind!r}: must be one of {', '.join(KINDS)}")
    if prompt_field and (kind not in _ROWS or images is not None):
        raise SourceError(
            f"data.prompt_field={prompt_field!r}: must be empty with data.kind={kind!r} and "
            f"data.image_field={images.field if images else ''!r}: prompts are fields of "
            f"{', '.join(_ROWS)}, without images"
        )
    if prompt_field and not text_field:
        raise SourceError(
            f"data.text_field is empty: data.prompt_field={prompt_field!r} needs one beside it"
        )
    if kind in _SHIPPED:
        if path:
            raise SourceError(
                f'data.path={path!r}: data.kind="{kind}" takes no path; did you mean "text"?'
            )
        _require_package(kind)
        if kind == "digits":
            return Source(kind, (digit_pages.source_file(),), text_field, images)
        return Source(kind, tuple(builtin.stdlib_files()), text_field, images)
    if kind == _GENERATED:
        _parse_tasks(path)
        # What is made is all that there is to choose.
        return Source(kind, (Path(long_context.__file__),), text_field=path)
    if not path:
        raise SourceError(f"data.path is empty: data.kind={kind!r} needs a file, folder or glob")
    _require_package(kind)
    files = _list_files(path, pattern or _DEFAULT_PATTERNS[kind])
    if not files:
        raise SourceError(
            f"data.path={path!r}, data.pattern={pattern!r}: no files found (pattern defaults to "
            f"{_DEFAULT_PATTERNS[kind]!r} for {kind!r})"
        )
    return Source(kind, tuple(files), text_field, images, prompt_field)


def _parse_tasks(path: str) -> tuple[tuple[str, ...], int]:
    """"needle,copy:256" -> (tasks, length)."""
    tasks, _, length = path.partition(":")
    try:
        chosen = tuple(tasks.split(","))
        next(long_context.training_texts(chosen, int(length)))
    except ValueError as error:
        raise SourceError(
            f"data.path={path!r}: must be tasks and a length, such as 'needle,copy:256': {error}"
        ) from error
    return chosen, int(length)


def _list_files(path: str, pattern: str) -> list[Path]:
    root = Path(path).expanduser()
    if root.is_file():
        return [root.resolve()]
    if root.is_dir():
        candidates = ((p.relative_to(root), p) for p in root.glob(pattern))
    else:
        matches = glob_module.glob(str(root), recursive=True)
        candidates = ((Path(m), Path(m)) for m in matches)
    found = [
        (relative.as_posix(), p.resolve())
        for relative, p in candidates
        if p.is_file() and not any(part.startswith(".") and part != ".." for part in relative.parts)
    ]
    return [p for _, p in sorted(found)]


def _require_package(kind: str) -> None:
    try:
        if kind == "parquet":
            import pyarrow.parquet  # noqa: F401
        elif kind == "digits":
            import sklearn  # noqa: F401
        elif kind == "array_record":
            from array_record.python import array_record_module  # noqa: F401
    except ImportError as error:
        packages = {"parquet": "pyarrow", "array_record": "array_record", "digits": "scikit-learn"}
        package = packages[kind]
        raise SourceError(
            f"data.kind={kind!r} needs the package {package}: pip install {package}"
        ) from error


class Fields(NamedTuple):
    """Names of the fields that a reader takes out of a row; "" stands for none but in `text`."""

    text: str
    images: str
    prompt: str


class Prompted(NamedTuple):
    """A text with what is read before it."""

    prompt: str | bytes
    text: str | bytes


def _to_document(
    name: str,
    item: bytes | str | Interleaved | Prompted,
    fields: ImageFields | None,
    folder: Path,
    skipped: Skipped,
) -> Document | None:
    if isinstance(item, Prompted):
        return _prompted(name, item, skipped)
    item = item if isinstance(item, Interleaved) else Interleaved(item, ())
    try:
        data = item.text if isinstance(item.text, bytes) else item.text.encode("utf-8")
        text = data.decode("utf-8")
    except UnicodeError:
        skipped.add("not UTF-8", name)
        return None
    texts = (text,)
    if item.images:
        texts = tuple(text.split(fields.marker))
        if len(texts) != 1 + len(item.images):
            skipped.add(f"rows without one {fields.marker!r} for each image", name)
            return None
        data = "".join(texts).encode("utf-8")
    if not data and not item.images:
        skipped.add("empty", name)
        return None
    if not item.images:
        return Document(texts, data, document_id(data))
    images = fields.read(item.images, name, folder)
    whole = b"\0".join([text.encode("utf-8"), *(image.data for image in images)])
    return Document(texts, data, document_id(whole), images)


def _prompted(name: str, item: Prompted, skipped: Skipped) -> Document | None:
    try:
        prompt, data = (text if isinstance(text, bytes) else text.encode("utf-8") for text in item)
        before, text = prompt.decode("utf-8"), data.decode("utf-8")
    except UnicodeError:
        skipped.add("not UTF-8", name)
        return None
    if not data:
        skipped.add("empty", name)
        return None
    return Document((text,), data, document_id(prompt + b"\0" + data), prompt=before)


# Readers yield (name for messages, bytes or str of one document, or its text with its images or
# its prompt).
_Items = Iterator[tuple[str, bytes | str | Interleaved | Prompted]]


def _read_text(path: Path, fields: Fields, skipped: Skipped) -> _Items:
    del fields
    try:
        data = path.read_bytes()
    except OSError:
        skipped.add("unreadable files", str(path))
        return
    yield str(path), data


def _read_digits(path: Path, fields: Fields, skipped: Skipped) -> _Items:
    del path, fields, skipped
    for number, page in enumerate(digit_pages.training_pages()):
        yield f"digit page {number}", Interleaved(digit_pages.IMAGE + page.text, [page.png])


def _read_long_context(path: Path, fields: Fields, skipped: Skipped) -> _Items:
    del path, skipped
    for number, text in enumerate(long_context.training_texts(*_parse_tasks(fields.text))):
        yield f"text {number}", Prompted(*text)


def _read_jsonl(path: Path, fields: Fields, skipped: Skipped) -> _Items:
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield from _json_row(f"{path}:{number}", line, fields, skipped)
    except (OSError, EOFError, zlib.error):
        skipped.add("unreadable files", str(path))


def _json_row(name: str, data: bytes, fields: Fields, skipped: Skipped) -> _Items:
    try:
        row = json.loads(data)
    except UnicodeError:
        skipped.add("not UTF-8", name)
        return
    except (ValueError, RecursionError):
        skipped.add("malformed rows", name)
        return
    if not isinstance(row, dict):
        skipped.add(f"rows without a text {fields.text!r}", name)
        return
    yield from _row(name, row, fields, skipped)


def _row(name: str, row: Mapping[str, Any], fields: Fields, skipped: Skipped) -> _Items:
    for field in filter(None, (fields.text, fields.prompt)):
        if not isinstance(row.get(field), str | bytes):
            skipped.add(f"rows without a text {field!r}", name)
            return
    text = row[fields.text]
    images = listed(row.get(fields.images)) if fields.images else []
    if fields.prompt:
        yield name, Prompted(row[fields.prompt], text)
    else:
        yield name, Interleaved(text, images) if images else text


def _read_parquet(path: Path, fields: Fields, skipped: Skipped) -> _Items:
    import pyarrow
    import pyarrow.parquet

    columns = [name for name in fields if name]
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            lacking = [name for name in columns if name not in file.schema_arrow.names]
            if lacking:
                skipped.add(f"files without a column {lacking[0]!r}", str(path))
                return
            number = 0
            for batch in file.iter_batches(columns=columns, batch_size=_RECORDS_PER_READ):
                values = (batch.column(name).to_pylist() for name in columns)
                for row in zip(*values, strict=True):
                    named = dict(zip(columns, row, strict=True))
                    yield from _row(f"{path}:{number}", named, fields, skipped)
                    number += 1
    # Damaged names of columns are no UTF-8.
    except (OSError, UnicodeError, pyarrow.ArrowException):
        skipped.add("unreadable files", str(path))


def _read_array_record(path: Path, fields: Fields, skipped: Skipped) -> _Items:
    from array_record.python import array_record_module

    try:
        reader = array_record_module.ArrayRecordReader(str(path))
        count = reader.num_records()
        for start in range(0, count, _RECORDS_PER_READ):
            records = reader.read(list(range(start, min(start + _RECORDS_PER_READ, count))))
            for number, record in enumerate(records, start):
                name = f"{path}:{number}"
                if fields.text:
                    yield from _json_row(name, record, fields, skipped)
                else:
                    yield name, record
        reader.close()
    except (OSError, RuntimeError, ValueError, IndexError):
        skipped.add("unreadable files", str(path))


_READERS: dict[str, Callable[[Path, Fields, Skipped], _Items]] = {
    "builtin": _read_text,
    "digits": _read_digits,
    _GENERATED: _read_long_context,
    "text": _read_text,
    "jsonl": _read_jsonl,
    "parquet": _read_parquet,
    "array_record": _read_array_record,
}
