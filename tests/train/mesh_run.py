"""States of all optimizers on a 2 x 2 mesh; test_optimizer starts it in a process of its own."""

import jax

from tests.train import micro
from train import optimizer as optimizer_lib
from train import settings, step
from v41flash import sharding
from v41flash.nn import ced


def check(name: str, model: ced.CED, mesh: jax.sharding.Mesh) -> None:
    """Buffers lie as their parameters do, everything else everywhere."""
    params = step.abstract_params(model, mesh)
    transform = optimizer_lib.build(settings.OptimizerSettings(name=name), params)
    abstract = step.abstract_state(params, transform)
    params = {
        jax.tree_util.keystr(path): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(abstract.params)
    }
    buffers = 0
    # A buffer's path ends with its parameter's: the longest, where several fit.
    for path, leaf in jax.tree_util.tree_leaves_with_path(abstract.opt_state):
        name_of_buffer = jax.tree_util.keystr(path)
        owners = [own for own in params if name_of_buffer.endswith(own)]
        if owners:
            param = params[max(owners, key=len)]
            buffers += 1
            assert (leaf.shape, leaf.sharding) == (param.shape, param.sharding), name_of_buffer
        else:
            assert leaf.sharding.is_fully_replicated, name_of_buffer
    count = len(params)
    assert buffers >= count - 2, (buffers, count)  # router biases may have none
    spread = [leaf for leaf in jax.tree.leaves(abstract) if not leaf.sharding.is_fully_replicated]
    assert len(spread) > 10


def main():
    mesh = sharding.make_mesh({"fsdp": 2, "tensor": 2})
    model = ced.CED(micro.model())
    for name in settings.OPTIMIZERS:
        check(name, model, mesh)
        print(name, "kept")


if __name__ == "__main__":
    main()
