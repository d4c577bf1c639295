"""The pool on the host: budget, time to live, order of leaving."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from v41flash.errors import InputError
from v41flash.tiers.host import HostPool

BUDGET, TTL = 10, 5.0


class PoolMachine(RuleBasedStateMachine):
    """Against a plain list of (key, value, size, moment of the last use), oldest use first."""

    def __init__(self):
        super().__init__()
        self.now = 0.0
        self.pool = HostPool(BUDGET, TTL, clock=lambda: self.now)
        self.model = []

    def find(self, key):
        self.model = [entry for entry in self.model if entry[3] + TTL > self.now]
        return next((entry for entry in self.model if entry[0] == key), None)

    @rule(seconds=st.floats(0, 3))
    def wait(self, seconds):
        self.now += seconds

    @rule(number=st.integers(0, 5), size=st.integers(0, 12))
    def put(self, number, size):
        key = (bytes([number % 2]), bytes([number]))
        old = self.find(key)
        if old is not None:
            self.model.remove(old)
        value = object()
        assert self.pool.put(*key, value, size) == (size <= BUDGET)
        if size <= BUDGET:
            self.model.append((key, value, size, self.now))
            while sum(entry[2] for entry in self.model) > BUDGET:
                self.model.pop(0)

    @rule(number=st.integers(0, 5))
    def get(self, number):
        key = (bytes([number % 2]), bytes([number]))
        entry = self.find(key)
        assert self.pool.get(*key) is (entry and entry[1])
        if entry is not None:
            self.model.remove(entry)
            self.model.append((*entry[:3], self.now))

    @invariant()
    def agrees(self):
        self.find(None)
        assert len(self.pool) == len(self.model)
        assert self.pool.bytes == sum(entry[2] for entry in self.model) <= BUDGET
        for anchor in (b"\0", b"\1"):
            tails = sorted(key[1] for key, *_ in self.model if key[0] == anchor)
            assert self.pool.tails(anchor) == tails


PoolMachine.TestCase.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)
TestPool = PoolMachine.TestCase


def test_refuses():
    with pytest.raises(InputError, match="budget -1 must be 0 or more"):
        HostPool(-1)
    with pytest.raises(InputError, match="ttl 0 above 0 seconds"):
        HostPool(1, 0)
