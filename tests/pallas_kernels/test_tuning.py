"""The table of tuned configurations and its tuner."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.indexer import mosaic_gpu_dense, mosaic_gpu_gather
from pallas_kernels.sparse_attention import mosaic_gpu as attention
from pallas_kernels.topk import mosaic_gpu as topk
from pallas_kernels.tuning import Table, Tuning, tune


@dataclasses.dataclass(frozen=True)
class Config:
    steps: int


@pytest.fixture
def table(tmp_path):
    return Table(tmp_path / "tuned.json", Config)


def test_lookup_is_by_device_and_shape_class(table):
    kind = jax.devices()[0].device_kind
    assert table.lookup("wide", Config(1)) == Config(1)
    table.record("another device", "wide", Config(2))
    assert table.lookup("wide", Config(1)) == Config(1)
    table.record(kind, "wide", Config(3))
    table.record(kind, "narrow", Config(4))
    assert table.lookup("wide", Config(1)) == Config(3)
    assert table.lookup("narrow", Config(1)) == Config(4)


@pytest.mark.parametrize(
    "table, shape_class",
    [
        (mosaic_gpu_dense.TABLE, mosaic_gpu_dense.shape_class(jnp.float8_e4m3fn, full=False)),
        (mosaic_gpu_dense.TABLE, mosaic_gpu_dense.shape_class(jnp.bfloat16, full=True)),
        (mosaic_gpu_gather.TABLE, mosaic_gpu_gather.shape_class(64, jnp.uint8)),
        (attention.TABLE, attention.shape_class("fp4 rows", 4096)),
        (topk.TABLE, topk.shape_class(2048, 131072, 512)),
    ],
)
def test_tables_of_the_kernels(table, shape_class, monkeypatch):
    class H200:
        device_kind = "NVIDIA H200"

    monkeypatch.setattr(jax, "devices", lambda: [H200])
    assert isinstance(table.lookup(shape_class, None), table.config)


def test_unknown_field_is_refused(table):
    kind = jax.devices()[0].device_kind
    table.path.write_text(f'{{"{kind}": {{"wide": {{"stepz": 3}}}}}}')
    with pytest.raises(TypeError, match="stepz"):
        table.lookup("wide", Config(1))


def test_tuner_takes_the_fastest_that_is_right(table):
    def function(config):
        if config.steps == 0:
            raise ValueError("no steps")

        def work(x):
            y = jax.lax.fori_loop(0, config.steps, lambda _, y: jnp.sin(y @ y), x)
            return x + 0 * y + (config.steps == 1)  # one step is fastest, and wrong

        return work

    lines = []
    candidates = [Config(400), Config(0), Config(1), Config(4)]
    work = Tuning(table, "wide", candidates, function, (jnp.ones((64, 64)),))
    assert tune(work, budget=0.01, report=lines.append) == Config(4)
    assert table.lookup("wide", Config(1)) == Config(4)
    assert "ms" in lines[0] and "no steps" in lines[1] and "differs" in lines[2]


def test_nothing_runs(table):
    def function(config):
        raise ValueError("too large")

    work = Tuning(table, "wide", [Config(1)], function, ())
    assert tune(work, budget=0.01, report=lambda _: None) is None
    assert not table.path.exists()
