"""Chunk sizes against their budget, on one device and under a mesh."""

import jax
import pytest

from pallas_kernels import chunking
from pallas_kernels.chunking import SMALLEST_CHUNK, chunk_size


@pytest.fixture
def megabyte(monkeypatch):
    monkeypatch.setattr(chunking, "CPU_BUDGET_BYTES", 2**20)


def mesh(kind, size):
    kinds = (kind, jax.sharding.AxisType.Auto)
    return jax.sharding.AbstractMesh((size, 2), ("a", "b"), axis_types=kinds)


def test_the_largest_temporary_stays_within_the_budget(megabyte):
    assert chunk_size(10_000, 1, 1024) == 1000
    assert chunk_size(10_000, 4, 1024) == 250
    assert chunk_size(100, 1, 1024) == 100
    assert chunk_size(10_000, 1, 1024, multiple=64) % 64 == 0


def test_a_chunk_is_never_tiny(megabyte):
    assert chunk_size(10_000, 1024, 2**20) >= SMALLEST_CHUNK - 1


def test_a_mesh_lends_the_budget_of_all_its_devices(megabyte):
    alone = chunk_size(10_000, 4, 1024)
    with jax.sharding.use_abstract_mesh(mesh(jax.sharding.AxisType.Auto, 4)):
        assert chunk_size(10_000, 8 * 4, 1024) == alone


def test_inside_shard_map_shapes_and_budget_are_local(megabyte):
    alone = chunk_size(10_000, 4, 1024)
    with jax.sharding.use_abstract_mesh(mesh(jax.sharding.AxisType.Manual, 4)):
        assert chunk_size(10_000, 2 * 4, 1024) == alone
