"""Exchanges on eight virtual devices under the worst of loads; test_exchange starts it."""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.engram_gather import engram_gather
from v41flash import exchange, sharding
from v41flash.nn import experts, lookup

B, T, D, E, K = 8, 16, 4, 8, 2
TOKEN = ("batch", "length", None)


def dense(x, chosen, weights, w):
    """Every token through every expert: what routing must come to."""
    gates = jnp.sum(jax.nn.one_hot(chosen, E) * weights[..., None], axis=-2)
    return jnp.einsum("btd,edf,bte->btf", x, w, gates)


def on_mesh(x, chosen, weights, w):
    def local(axes, x, chosen, weights, w):
        def products(rows, weight, held, sizes):
            owner = jnp.repeat(
                jnp.arange(sizes.size + 1),
                jnp.append(sizes, rows.shape[0] - sizes.sum()),
                total_repeat_length=rows.shape[0],
            )
            matrices = jnp.concatenate([held[0], jnp.zeros((1, D, D))])
            return jnp.einsum("md,mdf->mf", rows, matrices[owner]) * weight[:, None]

        flat = (part.reshape(-1, part.shape[-1]) for part in (x, chosen, weights))
        out = experts.routed(products, axes["experts"], *flat, (w,))
        return out.reshape(x.shape)

    run = sharding.on_shards(local, (TOKEN, TOKEN, TOKEN, ("experts", None, None)), list(TOKEN))
    return run(x, chosen, weights, w)


def check_experts(mesh):
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(B, T, D)), rng.normal(size=(E, D, D))
    weights, out = rng.random((B, T, K)), rng.normal(size=(B, T, D))
    x, w, weights, out = (a.astype(np.float32) for a in (x, w, weights, out))
    loads = {
        "even": rng.integers(0, E, (B, T, K)),
        "one expert": np.full((B, T, K), 5),
        "one device": rng.integers(6, 8, (B, T, K)),
    }

    def both(function, chosen):
        total = lambda x, weights, w: jnp.sum(function(x, chosen, weights, w) * out)  # noqa: E731
        return jax.value_and_grad(total, argnums=(0, 1, 2))(x, weights, w)

    run, plain = (jax.jit(lambda chosen, f=f: both(f, chosen)) for f in (on_mesh, dense))
    for name, chosen in loads.items():
        chosen = jnp.asarray(chosen, jnp.int32)
        expected = plain(chosen)
        with jax.set_mesh(mesh):
            got = run(chosen)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5), got, expected
        )
        print("experts", name, flush=True)


def check_tables(mesh):
    rng = np.random.default_rng(1)
    table = rng.normal(size=(64, D)).astype(np.float32)
    out = rng.normal(size=(B, T, 3 * D)).astype(np.float32)
    wanted = {
        "even": rng.integers(-1, 64, (B, T, 3)),
        "one row": np.full((B, T, 3), 9),
        "one device": rng.integers(56, 64, (B, T, 3)),
        "none": np.full((B, T, 3), -1),
    }

    def both(function, rows):
        return jax.value_and_grad(lambda table: jnp.sum(function(table, rows) * out))(table)

    run = jax.jit(lambda rows: both(lambda *a: lookup.look_up(*a, jnp.float32), rows))
    plain = jax.jit(lambda rows: both(engram_gather, rows))
    for name, rows in wanted.items():
        rows = jnp.asarray(rows, jnp.int32)
        expected = plain(rows)
        with jax.set_mesh(mesh):
            got = run(rows)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5), got, expected
        )
        print("tables", name, flush=True)


def main():
    mesh = sharding.make_mesh({"data": 2, "expert": 4})
    # Uneven loads take several turns here.
    assert exchange.capacity(2 * T * K, 4) < 2 * T * K
    check_experts(mesh)
    check_tables(mesh)
    check_tables(sharding.make_mesh({"fsdp": 2, "context": 2, "tensor": 2}))


if __name__ == "__main__":
    main()
