"""The file of one page: a header, then the rows as they lie in memory.

    bytes 0 .. 7     magic and version
          8 .. 15    payload bytes, little-endian
         16 .. 47    key of the page
         48 .. 79    BLAKE2b-256 of bytes 0 .. 47 and the payload
         80 ..       payload

Every byte is covered: the digest by being compared, all others by the digest. Nothing in a page is
ever executed; it is numbers of a size that the reader knows beforehand.
"""

from __future__ import annotations

import hashlib
import struct
from typing import BinaryIO

from v41flash.tiers.keys import KEY_BYTES

_MAGIC = b"V41PAGE\x01"
_HEAD = struct.Struct(f"<8sQ{KEY_BYTES}s")
_DIGEST_BYTES = 32
HEADER_BYTES = _HEAD.size + _DIGEST_BYTES


class DamagedPage(ValueError):
    """A file that is not the page it is named after; says what is wrong with it."""


def file_bytes(payload: int) -> int:
    """Size of the file of a page of `payload` bytes."""
    return HEADER_BYTES + payload


def header(key: bytes, payload: bytes) -> bytes:
    """What stands before the payload."""
    head = _HEAD.pack(_MAGIC, len(payload), key)
    return head + _digest(head, payload)


def read(file: BinaryIO, key: bytes, payload: int) -> bytes:
    """The payload of a page.

    Args:
        file: at its beginning.
        key: the page that is wanted.
        payload: bytes that it must have.

    Raises:
        DamagedPage: it is cut short, too long, changed in any bit, or another page.
        OSError: it cannot be read.
    """
    found = file.read(HEADER_BYTES)
    if len(found) < HEADER_BYTES:
        raise DamagedPage(f"cut short: {len(found)} bytes of a header of {HEADER_BYTES}")
    head, checksum = found[: _HEAD.size], found[_HEAD.size :]
    magic, size, own = _HEAD.unpack(head)
    if magic != _MAGIC:
        raise DamagedPage(f"begins with {magic!r}: not a page of this version")
    if size != payload:
        raise DamagedPage(f"holds {size} bytes, where the model's pages have {payload}")
    if own != key:
        raise DamagedPage(f"is the page {own.hex()}")
    # One byte more than there should be shows a file that is too long.
    data = file.read(payload + 1)
    if len(data) != payload:
        what = "cut short" if len(data) < payload else "too long"
        raise DamagedPage(f"{what}: must be {file_bytes(payload)} bytes")
    if _digest(head, data) != checksum:
        raise DamagedPage("does not have its checksum")
    return data


def _digest(head: bytes, payload: bytes) -> bytes:
    state = hashlib.blake2b(head, digest_size=_DIGEST_BYTES)
    state.update(payload)
    return state.digest()
