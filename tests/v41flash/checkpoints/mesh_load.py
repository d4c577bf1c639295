"""Reads the recorded published folder onto a mesh of 8 devices; one JSON line a weight form.

    python -m tests.v41flash.checkpoints.mesh_load

Run by `test_mesh_load.py`, with 8 CPU devices.
"""

from __future__ import annotations

import dataclasses
import json

import jax
import numpy as np

from tests.golden_storage import packed_params
from tests.v41flash.checkpoints.folders import RECORDED
from train.step import abstract_params
from v41flash import sharding
from v41flash.checkpoints import importing, names, streams
from v41flash.checkpoints.published import Published
from v41flash.nn import ced


def main() -> None:
    """Prints, per form: largest error, and how many arrays are spread over devices."""
    # So that arrays are put together of several chunks on every device.
    streams.CHUNK_BYTES = 4096
    published = Published.open(RECORDED)
    mesh = sharding.make_mesh({"data": 2, "fsdp": 2, "tensor": 2})
    for form, expected in (
        ("packed", packed_params(published)),
        ("bfloat16", names.to_params(published.config, published.values)),
    ):
        config = importing.model_config(published, form)
        abstract = abstract_params(ced.CED(dataclasses.replace(config, vision=None)), mesh)
        params = importing.to_devices(published, abstract, form)
        spread, errors = 0, []
        for path, leaf in jax.tree_util.tree_leaves_with_path(params):
            theirs = expected
            for key in path:
                theirs = theirs[key.key]
            spread += len({str(shard.index) for shard in leaf.addressable_shards}) > 1
            errors.append(np.abs(np.asarray(leaf, np.float64) - np.asarray(theirs, np.float64)))
        line = {"error": max(float(e.max()) for e in errors), "spread": spread, "of": len(errors)}
        print(json.dumps(line))


if __name__ == "__main__":
    main()
