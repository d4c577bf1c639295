"""A traced program's time goes to the components that its operations come from."""

import json

import jax
import jax.numpy as jnp
import pytest

from train import hlo, profile

PATH = "jit(step)/jvp(CED)/CED._group/group_0/first/first.finish/"
AGAIN = "jit(step)/transpose(jvp(CED))/CED._group/group_0/jvp(CED)/CED._group/group_0/checkpoint/"


@pytest.mark.parametrize(
    "path, opcode, expected",
    [
        (PATH + "attn/indexer.query/mul", "fusion", ("indexer", "forward")),
        (PATH + "attn/dot_general", "fusion", ("attention", "forward")),
        (PATH + "attn/mpmd_map", "custom-call", ("attention kernels", "forward")),
        (PATH + "ffn/router/top_k", "sort", ("router", "forward")),
        (AGAIN + "rematted_computation/first/ffn/dot", "fusion", ("experts", "again")),
        (AGAIN + "first/first.read/hc_attn/mul", "fusion", ("hyper-connections", "backward")),
        ("jit(step)/transpose(jvp())/while/body/dot", "fusion", ("head and loss", "backward")),
        ("jit(step)/sqrt", "fusion", ("optimizer and rest", "forward")),
        ("", "copy", ("optimizer and rest", "forward")),
    ],
)
def test_places(path, opcode, expected):
    assert profile.place(hlo.Origin(opcode, path)) == expected


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    """A run folder with the trace of three steps of a program that names its parts as the model
    does, and of another program."""
    folder = tmp_path_factory.mktemp("run")

    def step(x, w):
        with jax.named_scope("ffn"):
            x = jnp.tanh(x @ w)
        with jax.named_scope("engram"):
            return jax.lax.fori_loop(0, 3, lambda _, x: jnp.sin(x @ w), x)

    x = jnp.ones((256, 256))
    update = jax.jit(step).lower(x, x).compile()
    other = jax.jit(lambda x: x @ x).lower(x).compile()
    profile.begin(folder, update)
    for _ in range(3):
        jax.block_until_ready((update(x, x), other(x)))
    jax.profiler.stop_trace()
    (folder / "config.json").write_text(json.dumps({"train": {"profile_steps": 3}}))
    return folder


def test_times_of_a_trace(workdir, capsys):
    assert profile.main([f"--workdir={workdir}", f"--json={workdir / 'out.json'}"]) == 0
    times = json.loads((workdir / "out.json").read_text())
    assert {"experts", "Engram"} <= set(times) <= {"experts", "Engram", "optimizer and rest"}
    assert all(passes["backward"] == passes["again"] == 0 for passes in times.values())
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].startswith("| ms a step") and shown[-1].startswith("| device")
    total = sum(sum(passes.values()) for passes in times.values())
    assert f"{total:.2f}" in shown[-1]


def test_what_is_counted(workdir):
    """Each operation of the program once, what other programs did and loops as a whole not."""
    program = (workdir / profile.FOLDER / profile.PROGRAM).read_text()
    origins = hlo.origins(program)
    name = next(key for key, origin in origins.items() if "/ffn/" in origin.op_name)
    loop = next(key for key, origin in origins.items() if origin.opcode == "while")
    found = [
        profile.Event(name, "jit_step", 3e6),
        profile.Event(name, "jit_step", 6e6),
        profile.Event(name, "jit_other", 1e9),
        profile.Event(loop, "jit_step", 1e9),
        profile.Event("no.such", "jit_step", 1e9),
    ]
    assert profile.components(found, program, steps=3) == {
        "experts": {"forward": 3.0, "again": 0.0, "backward": 0.0}
    }


def test_without_a_trace(tmp_path, capsys):
    assert profile.main([f"--workdir={tmp_path}"]) == 2
    error = capsys.readouterr().err
    assert "train.profile_steps" in error and error.count("\n") == 1
