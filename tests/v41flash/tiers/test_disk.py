"""The store on disk: what goes in comes out or is a miss, budgets hold, processes may share it."""

import os

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.v41flash.tiers import kill_store
from v41flash.errors import InputError
from v41flash.tiers import page_file
from v41flash.tiers.disk import DiskStore
from v41flash.tiers.keys import PageNameError, digest, page_key, page_name

SIZE = 300
FILE = page_file.file_bytes(SIZE)


class Clock:
    def __init__(self):
        self.now = 1e9

    def __call__(self):
        return self.now


def key(number):
    return digest(b"test", number.to_bytes(4, "little"))


def payload(number):
    return np.random.default_rng(number).bytes(SIZE)


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def store(tmp_path, clock):
    return DiskStore(tmp_path / "store", budget=10 * FILE, min_lifetime=100, clock=clock)


def path_of(store, number):
    name = page_name(key(number))
    return store.folder / "pages" / name[:2] / name


def held(store, numbers):
    return [n for n in numbers if store.get(key(n), SIZE) is not None]


def on_disk(store):
    return sum(p.stat().st_size for p in store.folder.glob("pages/*/*"))


def test_round_trip(store):
    assert store.get(key(1), SIZE) is None
    assert store.put(key(1), payload(1))
    assert store.put(key(1), payload(1))
    assert store.get(key(1), SIZE) == payload(1)
    again = DiskStore(store.folder)
    assert again.get(key(1), SIZE) == payload(1)
    counts = store.counts
    assert (counts.hits, counts.misses, counts.written, counts.present) == (1, 1, 1, 1)
    assert store.usage == on_disk(store) == FILE == SIZE + 80


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """A store with page 1 in it, and the bytes of its file."""
    store = DiskStore(tmp_path_factory.mktemp("one"))
    store.put(key(1), payload(1))
    return store, path_of(store, 1).read_bytes()


def check_damage(one, data):
    store, _ = one
    path_of(store, 1).write_bytes(data)
    before = store.counts.damaged
    assert store.get(key(1), SIZE) is None
    assert store.counts.damaged == before + 1
    # Out of the way, so that the page can be written anew.
    assert not path_of(store, 1).exists()


@settings(deadline=None, max_examples=60)
@given(bits=st.sets(st.integers(0, 8 * FILE - 1), min_size=1, max_size=4))
@example(bits={0})
@example(bits={8 * FILE - 1})
def test_flipped_bits_are_found(one, bits):
    data = bytearray(one[1])
    for bit in bits:
        data[bit // 8] ^= 1 << bit % 8
    check_damage(one, bytes(data))


def test_a_flipped_bit_in_any_byte_of_the_header_is_found(one):
    for place in range(page_file.HEADER_BYTES):
        data = bytearray(one[1])
        data[place] ^= 1 << place % 8
        check_damage(one, bytes(data))


@settings(deadline=None, max_examples=40)
@given(length=st.integers(0, FILE - 1), tail=st.binary(min_size=1, max_size=9))
@example(length=0, tail=b"\0")
@example(length=79, tail=b"\0")
@example(length=FILE - 1, tail=b"\0")
def test_files_cut_short_or_too_long_are_found(one, length, tail):
    check_damage(one, one[1][:length])
    check_damage(one, one[1] + tail)


@pytest.mark.parametrize("kind", ["page of another key", "page of another size", "folder", "link",
                                  "pipe", "version"])  # fmt: skip
def test_what_is_foreign_is_a_miss(store, kind, tmp_path, caplog):
    store.put(key(1), payload(1))
    path = path_of(store, 1)
    whole = path.read_bytes()
    path.unlink()
    if kind == "page of another key":
        store.put(key(2), payload(2))
        path.write_bytes(path_of(store, 2).read_bytes())
    elif kind == "page of another size":
        path.write_bytes(page_file.header(key(1), b"abc") + b"abc")
    elif kind == "folder":
        path.mkdir()
    elif kind == "link":
        (tmp_path / "elsewhere").write_bytes(whole)
        path.symlink_to(tmp_path / "elsewhere")
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.write_bytes(whole.replace(b"V41PAGE\x01", b"V41PAGE\x02"))
    assert store.get(key(1), SIZE) is None
    assert str(path) in caplog.text and "damaged page" in caplog.text
    assert store.counts.damaged == 1 and store.counts.hits == 0
    if kind == "folder":  # In the way for good, which is said and does no harm.
        assert not store.put(key(1), payload(1)) or store.get(key(1), SIZE) is None
    else:
        assert store.put(key(1), payload(1)) and store.get(key(1), SIZE) == payload(1)
    if kind == "link":
        assert (tmp_path / "elsewhere").read_bytes() == whole


@settings(deadline=None, max_examples=50)
@given(name=st.text(max_size=80) | st.text(alphabet="0123456789abcdef./\\\0", max_size=66))
@example(name="../" * 20 + "etc/passwd")
@example(name="/" + "a" * 63)
@example(name="a" * 63 + "\n")
@example(name="A" * 64)
@example(name="\u0660" * 64)
def test_names_that_are_no_keys_are_refused(one, name):
    for wrong in (name, name.encode("utf-8", "replace")):
        if isinstance(wrong, bytes) and len(wrong) == 32:
            continue
        with pytest.raises(PageNameError, match="must be"):
            one[0].get(wrong, SIZE)
        with pytest.raises(PageNameError, match="must be"):
            one[0].put(wrong, b"")
    try:
        found = page_key(name)
    except PageNameError as error:
        assert len(str(error).splitlines()) == 1
    else:
        assert page_name(found) == name


def test_other_files_are_left_alone(store, clock):
    for name in ("notes.txt", "x" * 64, "ab/readme", "ab/" + "g" * 64):
        path = store.folder / "pages" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("mine")
    outside = store.folder / "outside"
    outside.mkdir()
    (outside / page_name(key(99))).write_text("mine")
    (store.folder / "pages" / "cd").symlink_to(outside)
    for number in range(30):
        assert store.put(key(number), payload(number))
        clock.now += 200
    assert store.counts.evicted
    assert (outside / page_name(key(99))).read_text() == "mine"
    assert (store.folder / "pages" / "notes.txt").read_text() == "mine"
    assert (store.folder / "pages" / "ab" / "readme").read_text() == "mine"


def test_least_recently_used_pages_make_room(store, clock):
    for number in range(10):
        assert store.put(key(number), payload(number))
        clock.now += 50
    assert store.usage == store.budget
    store.touch([key(0)])
    clock.now += 60
    # A sixteenth of the budget more than is needed is removed: two pages, but not the first one.
    assert store.put(key(10), payload(10))
    assert held(store, range(11)) == [0, *range(3, 11)]
    assert store.usage == on_disk(store) <= store.budget


def test_young_pages_are_not_removed(store, clock, caplog):
    for number in range(10):
        assert store.put(key(number), payload(number))
    clock.now += 99
    assert not store.put(key(10), payload(10))
    assert "new ones are not stored" in caplog.text
    assert store.counts.refused == 1 and held(store, range(11)) == list(range(10))
    clock.now += 61
    assert store.put(key(10), payload(10))
    assert not store.put(key(11), bytes(11 * FILE)) and store.counts.refused == 2


def test_a_prefix_outlives_what_follows_it(store, clock):
    chain = [key(number) for number in range(10)]
    for number in range(10):
        store.put(chain[number], payload(number))
    store.touch(chain)
    clock.now += 101
    store.put(key(10), payload(10))
    assert held(store, range(10)) == list(range(8))


def test_a_damaged_usage_is_counted_anew(store):
    usage = store.folder / "usage"
    for number, damage in enumerate((b"", bytes(24), usage.read_bytes()[:-1], None)):
        usage.unlink() if damage is None else usage.write_bytes(damage)
        assert store.usage == DiskStore(store.folder).usage == number * FILE
        usage.unlink() if damage is None else usage.write_bytes(damage)
        assert store.put(key(number), payload(number))
        assert store.usage == on_disk(store) == (number + 1) * FILE


def test_a_full_disk_costs_pages_not_answers(store, monkeypatch, caplog):
    def full(file, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    assert not store.put(key(1), payload(1))
    monkeypatch.undo()
    assert "No space left" in caplog.text and store.counts.failed == 1
    assert store.usage == 0 and not list((store.folder / "writing").iterdir())
    assert store.put(key(1), payload(1))


def test_refuses(tmp_path):
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(InputError, match="must be a folder to write to"):
            DiskStore(folder)
    with pytest.raises(InputError, match="budget 0 must be at least 1 byte"):
        DiskStore(tmp_path, budget=0)
    with pytest.raises(InputError, match="min_lifetime nan"):
        DiskStore(tmp_path, min_lifetime=float("nan"))


@pytest.mark.slow
def test_processes_share_a_store(tmp_path):
    """Pages come and go: the budget holds a quarter of them."""
    workers = [kill_store.start(tmp_path, seed, rounds=60) for seed in range(2)]
    reads = [int(worker.communicate(timeout=120)[0]) for worker in workers]
    assert [worker.returncode for worker in workers] == [0] * 2 and min(reads) > 5
    store = DiskStore(tmp_path, budget=kill_store.BUDGET)
    assert store.usage == on_disk(store) <= kill_store.BUDGET
    assert not list((tmp_path / "writing").iterdir())


def test_killed_writers(tmp_path):
    outcome = kill_store.run(tmp_path, kills=3, inside=1)
    assert outcome.kills >= 3 and outcome.inside >= 1 and outcome.checked > 0


@pytest.mark.slow
def test_200_killed_writers(tmp_path):
    outcome = kill_store.run(tmp_path, kills=200, inside=100)
    print(outcome)
    assert outcome.kills >= 200 and outcome.inside >= 100 and outcome.checked > 0
