"""Checkpoints are what was saved, or are named: damage anywhere in their files, and full disks."""

import collections
import contextlib
import json
import resource
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from v41flash.checkpoints import checksums
from v41flash.checkpoints.orbax import Checkpoints, DamagedCheckpoint, SaveError

_MASK = 2**32 - 1


def _sums(array):
    """The checksum in plain Python integers."""
    totals = [0, 0]
    for place, value in enumerate(array.ravel().tolist()):
        for i, (first, second) in enumerate([(0x85EBCA6B, 0xC2B2AE35), (0x27D4EB2F, 0x165667B1)]):
            h = value ^ (place * 0x9E3779B1 & _MASK)
            h = (h ^ h >> 16) * first & _MASK
            h = (h ^ h >> 13) * second & _MASK
            totals[i] = (totals[i] + (h ^ h >> 16)) & _MASK
    return "".join(f"{total:08x}" for total in totals)


def test_checksums_are_those_of_their_definition():
    rng = np.random.default_rng(0)
    words = rng.integers(0, 2**32, (3, 5, 2), np.uint32)
    tree = {"a": {"b": words.view(np.float32)}, "c": (words.astype(np.int32), words % 2 == 1)}
    found = checksums.of_tree(jax.tree.map(jnp.asarray, tree))
    assert found == {
        "a/b": f"float32:3x5x2:{_sums(words)}",
        "c/0": f"int32:3x5x2:{_sums(words)}",
        "c/1": f"bool:3x5x2:{_sums(words % 2)}",
    }
    halves = words.astype(np.uint16)
    found = checksums.of_tree({"h": halves.view(jnp.bfloat16), "s": np.float32(1.5)})
    assert found["h"] == f"bfloat16:3x5x2:{_sums(halves)}"
    assert found["s"] == f"float32::{_sums(np.array([1.5], np.float32).view(np.uint32))}"
    assert checksums.of_tree({}) == {}


def test_any_changed_bit_changes_the_checksum():
    rng = np.random.default_rng(1)
    value = rng.normal(size=(4, 3)).astype(np.float32)
    changed = [value]
    for element in range(value.size):
        for bit in range(32):
            other = value.copy()
            other.view(np.uint32).ravel()[element] ^= 1 << bit
            changed.append(other)
    changed += [value[::-1], np.roll(value, 1, axis=1)]
    assert len({checksums.of_tree([x])["0"] for x in changed}) == len(changed)


def test_what_cannot_be_compared_is_left_out():
    stored = checksums.of_tree({"a": np.float32(1), "b": np.float32(2)})
    found = checksums.of_tree({"a": np.int32(1), "b": np.float32(3), "c": np.float32(4)})
    assert checksums.differing(stored, found) == ["b"]


@pytest.mark.parametrize("note", [{}, [], {"a": 1}, {"a": 1, "checksum": "0"}, None])
def test_a_note_without_its_checksum(note):
    assert checksums.unsealed(checksums.sealed({"a": [1.5, None]})) == {"a": [1.5, None]}
    with pytest.raises(ValueError, match="checksum"):
        checksums.unsealed(note)


def _trees():
    key = jax.random.key(0)
    params = {
        f"layer_{i}": {"w": jax.random.normal(jax.random.fold_in(key, i), (24, 33))}
        for i in range(3)
    }
    params["norm"] = jnp.arange(7, dtype=jnp.bfloat16)
    return params, {"count": jnp.int32(3), "m": jax.tree.map(lambda x: 2 * x, params)}


def _equal(a, b):
    return all(
        np.array_equal(np.atleast_1d(x).view(np.uint8), np.atleast_1d(y).view(np.uint8))
        for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )


def _save(folder, steps=(2,), **options):
    params, opt_state = _trees()
    with Checkpoints(folder, writes=True, **options) as checkpoints:
        for step in steps:
            checkpoints.save(step, params=params, opt_state=opt_state, meta={"note": [1.5, step]})
            checkpoints.wait()


def _restore(folder, step=2):
    """ "exact", "silent", or "named" (then the message names the checkpoint)."""
    trees = _trees()
    params, opt_state = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), trees
    )
    try:
        with Checkpoints(folder) as checkpoints:
            found = checkpoints.restore(step, params=params, opt_state=opt_state)
            note = checkpoints.meta(step)
    except DamagedCheckpoint as error:
        assert error.step == step
        assert str(error).startswith(f"checkpoint {folder / str(step)}: ")
        assert "\n" not in str(error) and len(str(error)) < 600
        return "named"
    return "exact" if _equal(found, trees) and note == {"note": [1.5, step]} else "silent"


def _damages(data, rng, flips):
    """(what, damaged bytes or None for a missing file) of a file."""
    for _ in range(flips if data else 0):
        changed = bytearray(data)
        changed[rng.integers(len(data))] ^= 1 << int(rng.integers(8))
        yield "flipped", bytes(changed)
    yield "cut", data[: len(data) // 2]
    yield "missing", None


def _damage_everywhere(folder, flips, least):
    """Damages every file of a checkpoint of at least so many bytes; counts what came of it."""
    _save(folder)
    assert _restore(folder) == "exact"
    rng = np.random.default_rng(0)
    outcomes = collections.Counter()
    for path in sorted((folder / "2").rglob("*")):
        if not path.is_file() or path.stat().st_size < least:
            continue
        data = path.read_bytes()
        for what, damaged in _damages(data, rng, flips):
            path.unlink()
            if damaged is not None:
                path.write_bytes(damaged)
            outcome = _restore(folder)
            assert outcome != "silent", f"{path.relative_to(folder)}, {what}"
            outcomes[what, outcome] += 1
        path.write_bytes(data)
    assert _restore(folder) == "exact"
    return outcomes


def test_damage_in_the_arrays_is_named(tmp_path):
    # The files of this size hold the arrays.
    outcomes = _damage_everywhere(tmp_path / "c", flips=2, least=5000)
    assert outcomes["flipped", "named"] and outcomes["cut", "named"]


@pytest.mark.slow
def test_damage_in_any_file_is_named_or_harmless(tmp_path):
    outcomes = _damage_everywhere(tmp_path / "c", flips=24, least=0)
    print(dict(outcomes))
    assert sum(outcomes.values()) > 500
    assert outcomes["flipped", "named"] > 200


def test_libraries_alone_do_not_see_changed_values(tmp_path, monkeypatch):
    """The checksums are needed: without them a flipped bit comes back as another number."""
    monkeypatch.setattr(checksums, "differing", lambda *_: [])
    _save(tmp_path / "c")
    files = [p for p in (tmp_path / "c" / "2" / "params").rglob("*") if p.is_file()]
    path = max(files, key=lambda path: path.stat().st_size)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 16
    path.write_bytes(data)
    assert _restore(tmp_path / "c") == "silent"


def test_the_note_is_checked(tmp_path):
    _save(tmp_path / "c")
    path = tmp_path / "c" / "2" / "meta" / "metadata"
    note = json.loads(path.read_text())
    note["note"] = [2.5, 2]
    path.write_text(json.dumps(note))
    with Checkpoints(tmp_path / "c") as checkpoints:
        with pytest.raises(DamagedCheckpoint, match="does not have the recorded checksum"):
            checkpoints.meta(2)


@contextlib.contextmanager
def _no_file_above(size):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_save_that_fails_leaves_the_others(tmp_path):
    """A limit on the size of files, below that of any array, stands for the full disk."""
    folder = tmp_path / "c"
    params, opt_state = _trees()
    with Checkpoints(folder, keep=1, writes=True) as checkpoints:
        trees = dict(params=params, opt_state=opt_state)
        checkpoints.save(2, **trees, meta={"note": [1.5, 2]})
        checkpoints.wait()
        with _no_file_above(1000), pytest.raises(SaveError) as caught:
            checkpoints.save(4, **trees, meta={"note": [1.5, 4]})
            checkpoints.wait()
        assert caught.value.step == 4
        assert str(caught.value).startswith(f"checkpoint {folder / '4'} cannot be written: ")
        assert "\n" not in str(caught.value)
        assert checkpoints.steps() == [2]
        assert _restore(folder) == "exact"
        # There is room again.
        checkpoints.save(6, **trees, meta={"note": [1.5, 6]})
        checkpoints.wait()
    assert _restore(folder, 6) == "exact"
    with Checkpoints(folder, writes=True) as checkpoints:
        assert checkpoints.steps() == [6]
    assert sorted(path.name for path in folder.iterdir()) == ["6"]


def test_what_an_interrupted_save_left(tmp_path):
    folder = tmp_path / "c"
    _save(folder)
    left = folder / "4.orbax-checkpoint-tmp"
    shutil.copytree(folder / "2", left)
    with Checkpoints(folder) as checkpoints:
        assert checkpoints.steps() == [2]
    assert left.exists()
    _save(folder, steps=(4,))
    assert not left.exists()
    assert _restore(folder, 4) == "exact"


def test_what_an_interrupted_deletion_left(tmp_path, monkeypatch):
    """A checkpoint has lost its name before the first of its files is deleted."""
    folder = tmp_path / "c"
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", lambda *_, **__: None)
        _save(folder, steps=(2, 4), keep=1)
    left = folder / "superseded" / "2"
    assert (left / "meta").is_dir()
    assert _restore(folder, 4) == "exact"
    with Checkpoints(folder) as checkpoints:
        assert checkpoints.steps() == [4]
    assert left.exists()
    _save(folder, steps=(6,), keep=1)
    assert sorted(path.name for path in folder.iterdir()) == ["6"]


def test_steps_must_grow(tmp_path):
    _save(tmp_path / "c", steps=(4,))
    with pytest.raises(ValueError, match=r"step 3: .* has \[4\] already"):
        _save(tmp_path / "c", steps=(3,))
