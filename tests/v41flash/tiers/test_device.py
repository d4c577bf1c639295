"""Pages of the device: shared where prefixes are, never written to while others read them."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from v41flash.tiers.device import DevicePages, Lease

PAGES = 8
# Prefixes of a tree: page i of a sequence is named by its choices so far.
CHOICES = st.lists(st.integers(0, 1), max_size=4)


def keys_of(choices):
    return [bytes(choices[: i + 1]) for i in range(len(choices))]


class PagesMachine(RuleBasedStateMachine):
    """Keeps beside the pool what every page holds, as a device would."""

    def __init__(self):
        super().__init__()
        self.pool, self.leases = DevicePages(PAGES), []
        self.contents = [None] * PAGES

    @rule(choices=CHOICES, more=st.integers(0, 2))
    def begin(self, choices, more):
        keys = keys_of(choices)
        count = len(keys) + more
        used = {page for lease, _ in self.leases for page in lease.pages}
        try:
            lease = self.pool.lease(keys, count)
        except RuntimeError:
            held = sum(key in (self.contents[p] for p in used) for key in keys)
            assert count - held > PAGES - len(used) - len(set(keys))
            return
        assert len(lease.pages) == len(set(lease.pages)) == count
        for page, key in zip(lease.pages[: lease.shared], keys, strict=False):
            assert self.contents[page] == key
        # What is new is nobody else's, and is filled now.
        fresh = lease.pages[lease.shared :]
        assert not used & set(fresh)
        for number, page in enumerate(fresh, lease.shared):
            self.contents[page] = keys[number] if number < len(keys) else None
            if number < len(keys):
                self.pool.name(page, keys[number])
        self.leases.append((lease, keys))

    @rule(number=st.integers(0, 10))
    def end(self, number):
        if self.leases:
            lease, _ = self.leases.pop(number % len(self.leases))
            self.pool.release(lease)

    @invariant()
    def nothing_is_lost(self):
        used = {page for lease, _ in self.leases for page in lease.pages}
        assert self.pool.available == PAGES - len(used)
        for lease, keys in self.leases:
            for page, key in zip(lease.pages, keys, strict=False):
                assert self.contents[page] == key


PagesMachine.TestCase.settings = settings(max_examples=15, stateful_step_count=20, deadline=None)
TestPages = PagesMachine.TestCase


def test_prefixes_are_found_again_and_leave_from_their_ends():
    pool = DevicePages(4)
    keys = keys_of([0, 0, 0])
    lease = pool.lease(keys, 4)
    assert lease.shared == 0
    for page, key in zip(lease.pages, keys, strict=False):
        pool.name(page, key)
    pool.release(lease)
    again = pool.lease(keys, 3)
    assert again == Lease(lease.pages[:3], 3)
    pool.release(again)
    # Two pages are needed: the one that holds nothing, and the last of the prefix.
    other = pool.lease((), 2)
    assert set(other.pages) == {lease.pages[3], lease.pages[2]}
    assert pool.lease(keys, 2).shared == 2
    with pytest.raises(RuntimeError, match="1 pages wanted, 0 are not in use"):
        pool.lease((), 1)
