"""Prints one JSON line per mesh on 8 CPU devices; test_meshes starts it in a process of its own."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from train import hlo
from v41flash.optim import (
    MatrixSpec,
    Rule,
    TableRows,
    TableSpec,
    head_muon,
    partition,
    sinkhorn_balanced,
    sinkhorn_rows_update,
)
from v41flash.optim.partition import specs

RULES = (
    Rule("queries", "muon", MatrixSpec(0, 2, batch=1)),
    Rule("experts", "muon", MatrixSpec(1, 3, batch=(0, 2))),
    Rule("plain", "muon", MatrixSpec(0, 1)),
    Rule("embed", "sinkhorn", TableSpec()),
    Rule("head", "sinkhorn", TableSpec(rows=1, columns=0)),
    Rule("table", "rows", TableSpec()),
)
SHAPES = {
    "queries": (8, 8, 16),
    "experts": (8, 8, 2, 16),
    "plain": (16, 8),
    "embed": (32, 8),
    "head": (8, 32),
    "table": (64, 8),
}
LAYOUT = {
    "queries": P(None, "b", "a"),
    "experts": P("a", "b"),
    "plain": P("a", "b"),
    "embed": P(("a", "b")),
    "head": P("a", "b"),
    "table": P(("a", "b")),
}


def optimizer(injected=False, **muon):
    """With `injected`, every number is an array of the state."""
    declared = specs(RULES)

    def make(factory, *static, **keywords):
        if injected:
            factory = optax.inject_hyperparams(factory, static_args=("specs", *static))
        return factory(learning_rate=1e-2, specs=declared, **keywords)

    return partition(
        {
            "muon": make(head_muon, "placed_at", compute_dtype="float32", **muon),
            "sinkhorn": make(sinkhorn_balanced, "iterations"),
            "rows": make(sinkhorn_balanced, "iterations", "capacity", capacity=16),
        },
        RULES,
    )


def arrays(seed):
    rng = np.random.default_rng(seed)
    tree = {name: rng.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}
    tree["table"][10:] = 0
    return tree


def run(tx, params, grads):
    """(parameters after two steps, state, the compiled update)."""
    state = tx.init(params)
    update = jax.jit(tx.update).lower(grads, state, params).compile()
    for _ in range(2):
        updates, state = update(grads, state, params)
        params = optax.apply_updates(params, updates)
    return params, state, update


def scanned(tx, params, grads):
    """As `run`, in one program: a loop whose steps may be skipped, as one in the middle is."""

    def step(carry, skip):
        def moved():
            updates, state = tx.update(grads, carry[1], carry[0])
            return optax.apply_updates(carry[0], updates), state

        return jax.lax.cond(skip, lambda: carry, moved), None

    def steps(*carry):
        return jax.lax.scan(step, carry, jnp.array([False, True, False]))[0]

    start = params, tx.init(params)
    compiled = jax.jit(steps).lower(*start).compile()
    return *compiled(*start), compiled


def sparse(mesh):
    """How far a table's row-sparse step is on a mesh from the same on one device."""
    rng = np.random.default_rng(0)
    table, values = (rng.normal(size=shape).astype(np.float32) for shape in ((64, 8), (6, 8)))
    rows, results = np.array([3, 50, -1, 3, 17, 64]), []
    for at in (None, NamedSharding(mesh, P(("a", "b")))):
        placed = jnp.asarray(table) if at is None else jax.device_put(table, at)
        state = TableRows.zeros(placed)
        for count in range(2):
            placed, state = jax.jit(functools.partial(sinkhorn_rows_update, capacity=16))(
                placed, state, count, rows, values, 0.1
            )
        results.append(np.asarray(placed))
    return float(np.max(np.abs(results[0] - results[1])))


def largest_batch(compiled):
    """Matrices that one device multiplies in the largest batched product of 8 x 8 Gram matrices."""
    sizes = [1]
    for line in compiled.as_text().splitlines():
        if " dot(" in line and "f32[" in line:
            shape = line.split("f32[", 1)[1].split("]")[0].split(",")
            if len(shape) == 3 and shape[1:] == ["8", "8"]:
                sizes.append(int(shape[0]))
    return max(sizes)


def largest_gather(compiled):
    """Elements of the largest array that a device gathers."""
    gathers = [one for one in hlo.collectives(compiled.as_text()) if one.kind == "all-gather"]
    return max((one.elements for one in gathers), default=0)


def on_mesh(shape, kind, ambient, placed, reference, run=run, **options):
    """What test_meshes looks at, for one mesh that is in force (ambient) or given, and parameters
    of which the optimizer is told how they lie (placed) or not."""
    mesh = jax.make_mesh(shape, ("a", "b"), axis_types=(kind,) * 2)
    layout = {name: NamedSharding(mesh, spec) for name, spec in LAYOUT.items()}
    params, grads = (jax.device_put(arrays(seed), layout) for seed in (0, 1))
    options |= {"placed_at": LAYOUT.__getitem__} if placed else {}
    if ambient:
        with jax.set_mesh(mesh):
            result, state, compiled = run(optimizer(**options), params, grads)
    else:
        result, state, compiled = run(optimizer(mesh=mesh, **options), params, grads)
    kept = [
        leaf.sharding.is_equivalent_to(layout[name], leaf.ndim)
        for path, leaf in jax.tree_util.tree_leaves_with_path(state)
        for name in layout
        if leaf.shape == SHAPES[name] and name in jax.tree_util.keystr(path)
    ]
    errors = [np.max(np.abs(np.asarray(result[name]) - reference[name])) for name in SHAPES]
    return {
        "mesh": shape,
        "axes": kind.name,
        "ambient": ambient,
        "placed": placed,
        "error": float(max(errors)),
        "kept": all(kept),
        "momenta": len(kept),
        "each": largest_batch(compiled),
        "gathered": largest_gather(compiled),
    }


def main():
    params, grads = (jax.tree.map(jnp.asarray, arrays(seed)) for seed in (0, 1))
    reference, _, alone = run(optimizer(), params, grads)
    print(json.dumps({"alone": largest_batch(alone)}))
    for kind in (AxisType.Auto, AxisType.Explicit):
        for shape, ambient in (((1, 8), True), ((2, 4), True), ((8, 1), True), ((2, 4), False)):
            print(json.dumps(on_mesh(shape, kind, ambient, False, reference)))
    for shape, ambient in (((2, 4), True), ((8, 1), False)):
        print(json.dumps(on_mesh(shape, AxisType.Auto, ambient, True, reference)))
    print(json.dumps(on_mesh((4, 2), AxisType.Explicit, True, True, reference)))
    for kind in (AxisType.Auto, AxisType.Explicit):
        mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(kind,) * 2)
        extra = {"injected": on_mesh((2, 4), kind, True, False, reference, injected=True)}
        extra["scanned"] = on_mesh((2, 4), kind, True, False, reference, run=scanned)
        print(json.dumps(extra | {"axes": kind.name, "sparse": sparse(mesh)}))


if __name__ == "__main__":
    main()
