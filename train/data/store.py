"""A tokenised corpus on disk, built once and then memory-mapped.

One folder per (source listing, tokenizer):

    meta.json          format, counts, dtype, sizes and checksums of the arrays, what was skipped; a
                       checksum of all that
    tokens.npy         uint16 or uint32[tokens]; every document is bos + tokens + eos, or
                       bos + prompt + tokens + eos
    offsets.npy        i64[documents + 1], first token of every document
    document_ids.npy   i64[documents], hash of the content
    document_bytes.npy i64[documents], UTF-8 bytes of the content, without the prompt
    prompt_tokens.npy  where documents have prompts: i64[documents], tokens of the prompt
    block_checksums.npy  u8[blocks, 8], of every 64 KiB of the tokens
    image_*.npy        where documents have images: see `train.data.images.ImageStore`

It is written under a temporary name and renamed when complete, so a folder under its final name is
whole; of several processes that build the same one, the first to finish wins and the others use it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from train.data.images import ARRAYS, ImageStore, ImageWriter
from train.data.sources import Document, Skipped, Source, SourceError
from v41flash.errors import InputError
from v41flash.text.tokenizer import Tokenizer

_logger = logging.getLogger(__name__)

# Part of the folder's name: raise it with every change of what the folder holds.
_FORMAT = 3
_ENCODE_BYTES = 4 << 20
_PROGRESS_SECONDS = 10.0
# Larger token files are not read whole at every start, which would take minutes: their blocks are
# checked when they are read first.
_CHECKSUM_LIMIT = 1 << 30
_BLOCK_BYTES, _BLOCK_DIGEST = 1 << 16, 8
_SMALL_ARRAYS = ("offsets", "document_ids", "document_bytes", "block_checksums")
_PROMPTS = "prompt_tokens"


class StoreError(InputError):
    """A tokenised corpus that is incomplete or damaged."""


@dataclasses.dataclass(frozen=True)
class Store:
    """An open corpus; N documents.

    Attributes:
        folder: where it lies.
        tokens: memory-mapped uint16 or uint32, all documents one after the other.
        offsets: i64[N+1].
        document_ids: i64[N], all different.
        document_bytes: i64[N].
        block_checksums: u8[blocks, 8].
        unchecked: bool [blocks], those that must be checked before they are used; None: none.
        meta: contents of meta.json.
        images: of the documents; None where there are none.
        prompt_tokens: i64[N], tokens between bos and what is learnt; None where there are none.
    """

    folder: Path
    tokens: np.ndarray
    offsets: np.ndarray
    document_ids: np.ndarray
    document_bytes: np.ndarray
    block_checksums: np.ndarray
    unchecked: np.ndarray | None
    meta: dict[str, Any]
    images: ImageStore | None = None
    prompt_tokens: np.ndarray | None = None

    def prompt_length(self, index: int) -> int:
        """Tokens of one document's prompt; 0 where documents have none."""
        return 0 if self.prompt_tokens is None else int(self.prompt_tokens[index])

    @property
    def fingerprint(self) -> str:
        """Equal exactly where documents and tokens are, whatever the paths or file times."""
        return self.meta["fingerprint"]

    @property
    def lengths(self) -> np.ndarray:
        """i64[N], tokens of every document, bos and eos included."""
        return np.diff(self.offsets)

    @property
    def skipped(self) -> str:
        """What was skipped when the store was built; "" where nothing was."""
        return self.meta["skipped"]

    def split(self, name: str, held_out_fraction: float) -> np.ndarray:
        """Indices of one split's documents, in store order.

        The split of a document depends on its content alone: it stays when documents come or go.

        Args:
            name: "train" or "heldout".
            held_out_fraction: expected share of the documents that is held out, 0 <= f < 1.

        Returns:
            i64[n].

        Raises:
            InputError: a fraction out of range.
            ValueError: another name.
        """
        if not 0 <= held_out_fraction < 1:
            raise InputError(f"data.held_out_fraction={held_out_fraction}: must be in [0, 1)")
        if name not in ("train", "heldout"):
            raise ValueError(f"split {name!r}: must be 'train' or 'heldout'")
        held_out = self.document_ids < int(held_out_fraction * 2.0**63)
        return np.flatnonzero(held_out if name == "heldout" else ~held_out)

    def document_tokens(self, index: int) -> np.ndarray:
        """Tokens of one document (a view of the map), bos and eos included.

        Raises:
            StoreError: they lie in a part of a large file that is damaged.
        """
        first, last = self.offsets[index], self.offsets[index + 1]
        if self.unchecked is not None:
            size = self.tokens.itemsize
            blocks = range(first * size // _BLOCK_BYTES, -(-last * size // _BLOCK_BYTES))
            for block in blocks:
                if self.unchecked[block]:
                    self._check(block)
        return self.tokens[first:last]

    def _check(self, block: int) -> None:
        found = _block_checksum(self.tokens.view(np.uint8), block)
        if found != self.block_checksums[block].tobytes():
            raise StoreError(
                f"{self.folder}: tokens.npy does not have the recorded checksum in its block"
                f" {block}; delete the folder to build it anew"
            )
        self.unchecked[block] = False


def open_or_build(source: Source, tokenizer: Tokenizer, cache_dir: str | Path) -> Store:
    """Opens the store of `source` under `tokenizer`, building it first where it does not exist.

    Args:
        source: what to read.
        tokenizer: how to tokenise it.
        cache_dir: folder that holds all stores.

    Returns:
        The open store.

    Raises:
        StoreError: the folder exists but is damaged.
        SourceError: the source has no readable document.
    """
    key = hashlib.blake2b(
        f"{_FORMAT}\0{source.listing_digest()}\0{tokenizer.fingerprint}".encode(), digest_size=12
    ).hexdigest()
    folder = Path(cache_dir) / f"{source.kind}-{key}"
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        building = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
        try:
            _build(source, tokenizer, building)
            _publish(building, folder)
        finally:
            shutil.rmtree(building, ignore_errors=True)
    return open_store(folder)


def open_store(folder: str | Path) -> Store:
    """Opens a store and checks it against its meta.json.

    Raises:
        StoreError: a file is missing, cut short or changed; the message says which.
    """
    folder = Path(folder)

    def damaged(what: str) -> StoreError:
        return StoreError(f"{folder}: {what}; delete the folder to build it anew")

    try:
        meta = json.loads((folder / "meta.json").read_text())
        files = meta["files"]
        recorded = meta.pop("checksum")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise damaged(f"meta.json is missing or damaged ({error})") from error
    if recorded != _meta_checksum(meta):
        raise damaged("meta.json does not have the recorded checksum")
    arrays = {}
    for name, recorded in files.items():
        path = folder / f"{name}.npy"
        size = path.stat().st_size if path.is_file() else None
        if size != recorded["bytes"]:
            raise damaged(f"{path.name} has {size} bytes, not {recorded['bytes']}")
        if size <= _CHECKSUM_LIMIT and _checksum(path) != recorded["checksum"]:
            raise damaged(f"{path.name} does not have the recorded checksum")
        mode = "r" if name in ("tokens", "image_bytes") else None
        try:
            arrays[name] = np.load(path, mmap_mode=mode, allow_pickle=False)
        except ValueError as error:  # a pickle, say, which is never opened
            raise damaged(f"{path.name} is no plain array ({error})") from error
    image_arrays = {name: arrays.pop(name) for name in [*arrays] if name in ARRAYS}
    expected = {"tokens", *_SMALL_ARRAYS}
    if set(arrays) - {_PROMPTS} != expected or len(image_arrays) not in (0, len(ARRAYS)):
        raise damaged(f"meta.json lists the arrays {sorted(files)}")
    documents = len(arrays["document_ids"])
    if len(arrays["offsets"]) != documents + 1 or arrays["offsets"][-1] != len(arrays["tokens"]):
        raise damaged("offsets do not match the tokens")
    if _PROMPTS in arrays and len(arrays[_PROMPTS]) != documents:
        raise damaged("prompt_tokens do not match the documents")
    blocks = -(-arrays["tokens"].nbytes // _BLOCK_BYTES)
    if arrays["block_checksums"].shape != (blocks, _BLOCK_DIGEST):
        raise damaged("block_checksums do not match the tokens")
    large = files["tokens"]["bytes"] > _CHECKSUM_LIMIT
    unchecked = np.ones(blocks, bool) if large else None
    images = ImageStore(**image_arrays) if image_arrays else None
    return Store(folder=folder, meta=meta, images=images, unchecked=unchecked, **arrays)


def _publish(building: Path, folder: Path) -> None:
    try:
        os.rename(building, folder)
    except OSError:
        # Another process finished the same folder first; anything else is a real failure.
        if not folder.is_dir():
            raise


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def _block_checksum(data: np.ndarray, block: int) -> bytes:
    """Of one block of u8[n]."""
    part = np.ascontiguousarray(data[block * _BLOCK_BYTES : (block + 1) * _BLOCK_BYTES])
    return hashlib.blake2b(part.data, digest_size=_BLOCK_DIGEST).digest()


def _block_checksums(path: Path) -> np.ndarray:
    """u8[blocks, 8] of an array in a .npy file."""
    data = np.load(path, mmap_mode="r", allow_pickle=False).view(np.uint8)
    blocks = range(-(-len(data) // _BLOCK_BYTES))
    joined = b"".join(_block_checksum(data, block) for block in blocks)
    return np.frombuffer(joined, np.uint8).reshape(-1, _BLOCK_DIGEST)


def _meta_checksum(meta: dict[str, Any]) -> str:
    text = json.dumps(meta, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _write_header(file: BinaryIO, dtype: np.dtype, length: int) -> int:
    # NumPy leaves room in the header for the length to grow, so it can be written last, in place.
    np.lib.format.write_array_header_1_0(
        file, {"descr": dtype.str, "fortran_order": False, "shape": (length,)}
    )
    return file.tell()


def _batches(documents: Iterator[Document]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += len(document.data) + sum(len(image.data) for image in document.images)
        if size >= _ENCODE_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _without_duplicates(documents: Iterator[Document], repeated: list[int]) -> Iterator[Document]:
    seen: set[int] = set()
    for document in documents:
        if document.document_id in seen:
            repeated[0] += 1
        else:
            seen.add(document.document_id)
            yield document


def _joined(
    document: Document,
    prompt: np.ndarray,
    texts: Iterator[np.ndarray],
    tokenizer: Tokenizer,
    image_token: int,
) -> tuple[np.ndarray, list[int]]:
    """(tokens of a document, where the spans of its images begin), from its texts' tokens."""
    parts, starts = [np.array([tokenizer.bos_id]), prompt, next(texts)], []
    for image in document.images:
        starts.append(sum(map(len, parts)))
        parts += [np.full(image.plan.span, image_token), next(texts)]
    return np.concatenate([*parts, [tokenizer.eos_id]]), starts


def _build(source: Source, tokenizer: Tokenizer, folder: Path) -> None:
    image_token = source.images.token_id if source.images else 0
    largest = max(tokenizer.vocab_size, image_token + 1)
    dtype = np.dtype("<u2" if largest <= 1 << 16 else "<u4")
    images = ImageWriter(folder)
    skipped = Skipped()
    repeated = [0]
    lengths, ids, sizes, prompt_tokens = [], [], [], []
    fingerprint = hashlib.blake2b(tokenizer.fingerprint.encode(), digest_size=12)
    if source.images is not None:
        fingerprint.update(repr(source.images).encode())
    started = reported = time.monotonic()
    with (folder / "tokens.npy").open("wb") as file:
        data_start = _write_header(file, dtype, 0)
        for batch in _batches(_without_duplicates(source.documents(skipped), repeated)):
            texts = [text for document in batch for text in document.texts]
            encoded = iter(tokenizer.encode_batch(texts))
            # Apart from their texts: where a prompt ends no token reaches across.
            prompts = tokenizer.encode_batch([document.prompt for document in batch])
            for document, prompt in zip(batch, prompts, strict=True):
                whole, starts = _joined(document, prompt, encoded, tokenizer, image_token)
                images.add(document.images, starts)
                file.write(whole.astype(dtype).tobytes())
                lengths.append(len(whole))
                prompt_tokens.append(len(prompt))
                ids.append(document.document_id)
                sizes.append(len(document.data))
                fingerprint.update(document.document_id.to_bytes(8, "little"))
            now = time.monotonic()
            if now - reported >= _PROGRESS_SECONDS:
                reported = now
                _logger.info(
                    "tokenising %s: %d documents, %.1f MB, %.1f MB/s",
                    source.kind, len(ids), sum(sizes) / 1e6, sum(sizes) / 1e6 / (now - started),
                )  # fmt: skip
        total = sum(lengths)
        file.seek(0)
        if _write_header(file, dtype, total) != data_start:
            raise RuntimeError("the .npy header changed its size")
    if skipped.counts:
        _logger.warning("data.kind=%r skipped %s", source.kind, skipped)
    if not ids:
        raise SourceError(
            f"data.kind={source.kind!r}: none of {len(source.files)} files holds a readable "
            f"document (skipped: {skipped or 'nothing'})"
        )
    np.save(folder / "offsets.npy", np.concatenate(([0], np.cumsum(lengths, dtype=np.int64))))
    np.save(folder / "document_ids.npy", np.array(ids, np.int64))
    np.save(folder / "document_bytes.npy", np.array(sizes, np.int64))
    np.save(folder / "block_checksums.npy", _block_checksums(folder / "tokens.npy"))
    names = ["tokens", *_SMALL_ARRAYS]
    if source.prompt_field:
        np.save(folder / f"{_PROMPTS}.npy", np.array(prompt_tokens, np.int64))
        names.append(_PROMPTS)
    if images.close():
        names += ARRAYS
    meta = {
        "format": _FORMAT,
        "kind": source.kind,
        "files_read": len(source.files),
        "tokenizer": tokenizer.name,
        "documents": len(ids),
        "tokens": total,
        "bytes": sum(sizes),
        "repeated_documents": repeated[0],
        "image_token": image_token,
        "skipped": str(skipped),
        "fingerprint": fingerprint.hexdigest(),
        "files": {
            name: {
                "bytes": (folder / f"{name}.npy").stat().st_size,
                "checksum": _checksum(folder / f"{name}.npy"),
            }
            for name in names
        },
    }
    meta["checksum"] = _meta_checksum(meta)
    (folder / "meta.json").write_text(json.dumps(meta, indent=1))
