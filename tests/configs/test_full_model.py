"""Every parameter of the full model: its shape, dtype and partitioning, as recorded.

`python -m tests.configs.test_full_model` writes the record anew.
"""

import functools
import math
import pathlib

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

from configs import v41_flash
from train import settings
from v41flash import sharding
from v41flash.accounting import parameters
from v41flash.nn import ced

RECORD = pathlib.Path(__file__).parents[1] / "golden" / "full_model_params.txt"


def described(config) -> list[str]:
    """`path dtype[shape] partitioning`, a line a parameter; axes of the mesh as the rules say."""
    shape = (1, ced.ALIGNMENT)
    rows = (*shape, config.num_engram_sites, config.engram_rows_per_token)
    inputs = [jnp.zeros(shape, jnp.int32)] * 3 + [jnp.zeros(rows, jnp.int32)]
    init = functools.partial(ced.CED(config).init, jax.random.key(0))
    boxed = jax.eval_shape(init, *inputs)["params"]
    specs = nn.logical_to_mesh(nn.get_partition_spec(boxed), sharding.RULES)
    leaves = jax.tree_util.tree_leaves_with_path(nn.unbox(boxed))
    lines = []
    where = jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, jax.sharding.PartitionSpec))
    for (path, leaf), spec in zip(leaves, where, strict=True):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        axes = ["+".join((a,) if isinstance(a, str) else a or ("-",)) for a in spec]
        lines.append(f"{name} {leaf.dtype}{list(leaf.shape)} {' '.join(axes) or '-'}")
    return lines


@pytest.fixture(scope="module")
def config():
    return settings.resolve(v41_flash.get_config()).model


def test_the_parameters_are_those_on_record(config):
    recorded = RECORD.read_text().splitlines()
    assert described(config) == recorded, "see the docstring of this file"


def test_the_record_counts_the_published_parameters(config):
    shapes = {
        line.split(" ")[0]: [
            int(size) for size in line[line.index("[") + 1 : line.index("]")].split(",")
        ]
        for line in RECORD.read_text().splitlines()
    }
    total = sum(math.prod(shape) for shape in shapes.values())
    filling = sum(config.engram_table_rows) - sum(config.engram_num_embeddings)
    assert 0 < filling < config.num_engram_sites * config.engram_row_multiple
    published = parameters.total(config)
    # The draft head is trained apart.
    expected = sum(published.values()) - published["draft"]
    assert total - filling * config.engram_head_dim == expected


if __name__ == "__main__":
    record = described(settings.resolve(v41_flash.get_config()).model)
    RECORD.write_text("\n".join(record) + "\n")
