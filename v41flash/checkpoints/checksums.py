"""Checksums of a checkpoint's values, which do not depend on how its arrays are laid out.

The files of a checkpoint are written by many processes and read by others, on other meshes, so what
is summed is the values: an array's checksum is a sum modulo 2**32 over its elements of a mix of
their bits and their place, computed where the array lives, in one pass and with nothing moved but
the sum. Two such sums make 64 bits. The mix is one to one in the bits, so that one changed
element never goes unnoticed; several do with a probability of 2**-64. Sums are integers: the
order in which devices add them does not matter.

The note of a checkpoint (JSON) has a checksum of its text, and holds those of the arrays.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_KEY = "checksum"
# Odd constants: multiplying by them modulo 2**32 is one to one.
_PLACE = 0x9E3779B1
_MIXES = ((0x85EBCA6B, 0xC2B2AE35), (0x27D4EB2F, 0x165667B1))


def _bits(x: jax.Array) -> list[jax.Array]:
    """The bits of each element as uint32, one array for every 32 of them."""
    if x.dtype == jnp.bool_:
        return [x.astype(jnp.uint32)]
    size = x.dtype.itemsize
    if size > 4:
        words = jax.lax.bitcast_convert_type(x, jnp.uint32)
        return [words[..., i] for i in range(words.shape[-1])]
    if jnp.issubdtype(x.dtype, jnp.integer) and jnp.iinfo(x.dtype).bits < 8:
        return [x.astype(jnp.int8).astype(jnp.uint32)]
    unsigned = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[size]
    return [jax.lax.bitcast_convert_type(x, unsigned).astype(jnp.uint32)]


def _sums(x: jax.Array) -> jax.Array:
    """uint32 [2] of one array."""
    place, stride = jnp.zeros(x.shape, jnp.uint32), 1
    for axis in reversed(range(x.ndim)):
        index = jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis)
        place += index * np.uint32(stride % 2**32)
        stride *= x.shape[axis]
    totals = jnp.zeros(2, jnp.uint32)
    for word, bits in enumerate(_bits(x)):
        mixed = bits ^ (place * np.uint32(_PLACE) + np.uint32(word))
        sums = []
        for first, second in _MIXES:
            h = (mixed ^ (mixed >> 16)) * np.uint32(first)
            h = (h ^ (h >> 13)) * np.uint32(second)
            sums.append(jnp.sum(h ^ (h >> 16), dtype=jnp.uint32))
        totals += jnp.stack(sums)
    return totals


@functools.cache
def _program(backend: str) -> Any:
    # Run once a checkpoint: on the CPU optimising takes longer than it saves.
    options = {"xla_backend_optimization_level": 0} if backend == "cpu" else None
    return jax.jit(lambda leaves: jnp.stack([_sums(x) for x in leaves]), compiler_options=options)


def of_tree(tree: Any) -> dict[str, str]:
    """Path -> "dtype:shape:16 hex digits" of every array of a tree.

    Equal exactly where the values are, on any mesh and with any number of processes, all of which
    call this together.
    """
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    if not leaves:
        return {}
    arrays = [x if isinstance(x, jax.Array) else np.asarray(x) for _, x in leaves]
    sums = jax.device_get(_program(jax.default_backend())(arrays))
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): f"{_form(x)}:{a:08x}{b:08x}"
        for (path, _), x, (a, b) in zip(leaves, arrays, sums.tolist(), strict=True)
    }


def _form(x: Any) -> str:
    return f"{np.dtype(x.dtype).name}:{'x'.join(map(str, x.shape))}"


def differing(stored: Mapping[str, str], found: Mapping[str, str]) -> list[str]:
    """Paths of arrays whose values are not those that were stored.

    What has been given another dtype or shape on the way, or has no stored checksum, cannot be
    compared and is left out.
    """
    wrong = []
    for path, text in found.items():
        form, _, digits = text.rpartition(":")
        before = stored.get(path, "")
        if before.rpartition(":")[0] == form and before.rpartition(":")[2] != digits:
            wrong.append(path)
    return wrong


def _text_checksum(note: Mapping[str, Any]) -> str:
    text = json.dumps(note, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def sealed(note: Mapping[str, Any]) -> dict[str, Any]:
    """A note of JSON values with its checksum."""
    return {**note, _KEY: _text_checksum(note)}


def unsealed(note: Any) -> dict[str, Any]:
    """The note without its checksum.

    Raises:
        ValueError: it has none, or another one.
    """
    if not isinstance(note, dict) or _KEY not in note:
        raise ValueError("the note has no checksum")
    note = dict(note)
    if note.pop(_KEY) != _text_checksum(note):
        raise ValueError("the note does not have the recorded checksum")
    return note
