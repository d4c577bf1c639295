"""Compiles a run's step for accelerators that are not there, and says what it needs.

    python -m train.aot --config=configs/v41_flash.py --topology=v5p:8x8x8 [--json=FILE]

The step is the one that `train.main` would compile for the same configuration; nothing but shapes
goes in. It takes the TPU compiler (`pip install -e '.[tpu]'`) and no TPU. Topologies are named as
the compiler names them: v5e:16x16, v5p:8x8x8, v6e:16x16, tpu7x:8x8x8.

Other flags: --stage=N compiles the step of a later stage of the configuration; --config.mesh.* and
--config.train.accumulation lay it out. --program=decode and --program=prefill compile a step of
serving instead, of the last stage's model, from the weights as they are published, with all devices
on the expert axis (`v41flash.serving.spread`): --sequences=N of --tokens=N each, --chunk=N tokens a
prefill step.
--optimization=O0 (the default) lets the compiler spend little on the code of each operation, a
ninth for a Newton-Schulz loop; what is computed, how it is laid out and what a device holds hardly
depend on it. UNKNOWN is the compiler's own choice, which a run has.
Exit status: 0 it fits, 1 it does not, 2 wrong flags.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import resource
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding

from pallas_kernels import dispatch
from train import hlo
from train import optimizer as optimizer_lib
from train import plan as plan_lib
from train import stages as stages_lib
from train import step as step_lib
from train.main import parse_config
from train.settings import Settings
from v41flash import command_line, sharding
from v41flash.cache import PAGE_TOKENS
from v41flash.errors import InputError
from v41flash.nn import ced
from v41flash.serving import spread
from v41flash.serving.forward import Model, Tail
from v41flash.serving.state import State
from v41flash.serving.weights import Weights

# Published memory of a device, GiB, by `device_kind`; a chip of TPU7x is two devices.
HBM_GIB = {
    "TPU v4": 32.0,
    "TPU v5 lite": 16.0,
    "TPU v5": 95.0,
    "TPU v6 lite": 32.0,
    "TPU7x": 96.0,
}
PROGRAMS = ("train", "decode", "prefill")
OPTIMIZATION = ("O0", "O1", "O2", "O3", "UNKNOWN")
# Set before the compiler is loaded: it must look for no TPU, and share the machine with others.
_ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


class DoesNotFit(Exception):
    """The compiler found no room for the program; the text is its own."""


@dataclasses.dataclass(frozen=True)
class Report:
    """What a compiled program needs, bytes and operations of one device.

    Attributes:
        program: "train", ...
        device_kind: of the compiler.
        devices: of the mesh.
        mesh: axis sizes.
        batch: rows (sequences) of a step, over all devices.
        length: tokens of a row.
        parameters: elements of the weights, over all devices; packed ones are bytes.
        parameter_bytes: the parameters held.
        optimizer_bytes: the optimizer's state.
        gradient_bytes: a gradient of every parameter, laid out as it is.
        batch_bytes: a batch, or the caches of the sequences served.
        argument_bytes: everything that goes in.
        temporary_bytes: gradients, activations and workspace.
        peak_bytes: arguments, results that take no argument's place, and temporaries.
        hbm_bytes: of the device; 0 unknown.
        dot_flops: matrix products of a step, mean over devices; kernels by their cost estimates.
        collectives: kind -> {"bytes": received in a step, "times": how often}.
        largest_copy: bytes and type of the largest array that a device copies as it is.
        kernels: op -> implementation that the program has -> why those before it declined.
        optimization: of the code, as the compiler was asked: of `OPTIMIZATION`.
        trace_seconds: to trace and lower.
        compile_seconds: to compile.
        host_bytes: peak memory of this process.
    """

    program: str
    device_kind: str
    devices: int
    mesh: dict[str, int]
    batch: int
    length: int
    parameters: int
    parameter_bytes: int
    optimizer_bytes: int
    gradient_bytes: int
    batch_bytes: int
    argument_bytes: int
    temporary_bytes: int
    peak_bytes: int
    hbm_bytes: int
    dot_flops: float
    collectives: dict[str, dict[str, float]]
    largest_copy: tuple[int, str]
    kernels: dict[str, dict[str, list[str]]]
    optimization: str
    trace_seconds: float
    compile_seconds: float
    host_bytes: int

    @property
    def activation_bytes(self) -> int:
        """Temporaries beside one set of gradients."""
        return max(self.temporary_bytes - self.gradient_bytes, 0)

    @property
    def fits(self) -> bool:
        """Whether a device has room."""
        return not self.hbm_bytes or self.peak_bytes <= self.hbm_bytes

    def rows(self) -> list[tuple[str, str]]:
        """The report as (name, value) lines for people."""
        layout = ", ".join(f"{axis} {size}" for axis, size in self.mesh.items() if size > 1)
        sizes = [
            ("parameters held", self.parameter_bytes),
            ("optimizer state", self.optimizer_bytes),
            ("gradients", self.gradient_bytes),
            ("activations, workspace", self.activation_bytes),
            ("batch or caches", self.batch_bytes),
            ("peak", self.peak_bytes),
            ("memory of a device", self.hbm_bytes),
        ]
        lines = [
            ("program", f"{self.program}, {self.batch} rows of {self.length:,} tokens"),
            ("devices", f"{self.devices} x {self.device_kind} ({layout or 'one device'})"),
            ("parameters", f"{self.parameters:,}"),
            *((name, f"{size / 2**30:.2f} GiB") for name, size in sizes if size),
            ("matrix products", f"{self.dot_flops / 1e12:.2f} TFLOP a device"),
        ]
        for kind, count in sorted(self.collectives.items()):
            moved, times = count["bytes"] / 2**30, int(count["times"])
            lines.append((kind, f"{moved:.2f} GiB in {times} exchanges"))
        copied, what = self.largest_copy
        lines.append(("largest copy", f"{copied / 2**20:.1f} MiB {what}"))
        for op, names in sorted(self.kernels.items()):
            lines.append((op, ", ".join(names)))
        spent = (
            f"{self.trace_seconds:.0f} s tracing, {self.compile_seconds:.0f} s compiling at "
            f"{self.optimization}"
        )
        lines.append(("compiled in", f"{spent}, {self.host_bytes / 2**30:.1f} GiB of this host"))
        lines.append(("fits", "yes" if self.fits else "NO"))
        return lines


def prepare_environment() -> None:
    """Sets what the TPU compiler wants to find; call before anything starts a JAX backend."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def devices_of(topology: str) -> Sequence[jax.Device]:
    """The devices of a topology that is not there.

    Args:
        topology: as "v5p:8x8x8".

    Raises:
        InputError: the compiler is not installed or does not know the topology.
    """
    try:
        return topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    except Exception as error:  # the compiler's plugin raises whatever it likes
        reason = str(error).strip().splitlines()[0]
        raise InputError(
            f"--topology={topology}: {reason}; it takes the extra 'tpu' of setup.py and a name "
            "such as v5e:4x4, v5p:8x8x8, v6e:16x16 or tpu7x:4x4x4"
        ) from error


def abstract_batch(settings: Settings, mesh: Mesh) -> dict[str, jax.ShapeDtypeStruct]:
    """The batch of one step as `train.data.pipeline` makes it, text alone; shapes only."""
    where = sharding.batch_sharding(mesh)
    data, model = settings.data, settings.model
    shape = (data.batch_size, data.sequence_length)

    def array(shape: tuple[int, ...], dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=where)

    names = ("tokens", "targets", "segment_ids", "positions")
    rows = (*shape, model.num_engram_sites, model.engram_rows_per_token)
    batch = {name: array(shape) for name in names}
    return batch | {"loss_mask": array(shape, jnp.float32), "engram_rows": array(rows)}


def local_bytes(tree: Any) -> int:
    """Bytes that one device holds of a tree of abstract arrays with shardings."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )


def compile_program(
    program: str, function: Any, arguments: tuple, mesh: Mesh, sizes: dict[str, int]
) -> tuple[Report, Any]:
    """Lowers and compiles a jitted function.

    Args:
        program: its name.
        function: jitted.
        arguments: abstract, with shardings.
        mesh: of them.
        sizes: the fields of `Report` that the caller knows.

    Returns:
        (the report, the executable).

    Raises:
        DoesNotFit: the compiler found that it does not.
    """
    started = time.perf_counter()
    with jax.set_mesh(mesh):
        with dispatch.recorded() as heard:
            traced = function.trace(*arguments)
        flops = hlo.dot_flops(traced.jaxpr.jaxpr, mesh.size) / mesh.size
        lowered = traced.lower()
        middle = time.perf_counter()
        try:
            compiled = lowered.compile()
        except jax.errors.JaxRuntimeError as error:
            if "hbm" not in str(error).lower():
                raise
            raise DoesNotFit(str(error).strip().splitlines()[0]) from error
    ended = time.perf_counter()
    memory = compiled.memory_analysis()
    results = memory.output_size_in_bytes - memory.alias_size_in_bytes
    text = compiled.as_text()
    moved: dict[str, dict[str, float]] = {}
    for one in hlo.collectives(text):
        total = moved.setdefault(one.kind, {"bytes": 0.0, "times": 0.0})
        total["bytes"] += one.bytes * one.times
        total["times"] += one.times
    kind = mesh.devices.flat[0].device_kind
    report = Report(
        program=program,
        device_kind=kind,
        devices=mesh.size,
        mesh=dict(mesh.shape),
        argument_bytes=memory.argument_size_in_bytes,
        temporary_bytes=memory.temp_size_in_bytes,
        peak_bytes=memory.argument_size_in_bytes + results + memory.temp_size_in_bytes,
        hbm_bytes=int(HBM_GIB.get(kind, 0) * 2**30),
        dot_flops=flops,
        collectives=moved,
        largest_copy=hlo.largest_copy(text),
        kernels={
            op: {name: sorted(reasons) for name, reasons in names.items()}
            for op, names in heard.items()
        },
        optimization=jax.config.jax_optimization_level,
        trace_seconds=middle - started,
        compile_seconds=ended - middle,
        host_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        **sizes,
    )
    return report, compiled


def train_step(settings: Settings, mesh: Mesh) -> tuple[Report, Any]:
    """Compiles the update that `train.loop` runs under `settings`; see `compile_program`."""
    plan_lib.check_layout(settings, mesh)
    model = ced.CED(settings.model, settings.kernels, indexer_loss=True)
    params = step_lib.abstract_params(model, mesh)
    optimizer = optimizer_lib.build(settings.optimizer, params)
    abstract = step_lib.abstract_state(params, optimizer)
    batch = abstract_batch(settings, mesh)
    step = step_lib.jit_train_step(
        step_lib.make_train_step(model, optimizer, settings), abstract, batch, mesh
    )
    parameter_bytes = local_bytes(abstract.params)
    sizes = dict(
        batch=settings.data.batch_size,
        length=settings.data.sequence_length,
        parameters=sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(abstract.params)),
        parameter_bytes=parameter_bytes,
        optimizer_bytes=local_bytes(abstract.opt_state),
        gradient_bytes=parameter_bytes,
        batch_bytes=local_bytes(batch),
    )
    return compile_program("train", step, (abstract, batch), mesh, sizes)


def serving_step(
    program: str, settings: Settings, mesh: Mesh, sequences: int, tokens: int, chunk: int
) -> tuple[Report, Any]:
    """Compiles a step of serving; see `compile_program`.

    Args:
        program: "decode" (a token of every sequence) or "prefill" (the encoder over `chunk`).
        settings: of the model and its kernels; weights are packed if it has a quantization_config.
        mesh: all of its devices on the `expert` axis.
        sequences: of all devices together.
        tokens: that a sequence's pages have room for.
        chunk: tokens of a sequence in a prefill step.
    """
    devices = mesh.shape[spread.AXIS]
    if sequences % devices or tokens % PAGE_TOKENS or settings.model.n_routed_experts % devices:
        raise InputError(
            f"--sequences={sequences} and the model's {settings.model.n_routed_experts} experts "
            f"must be multiples of the {devices} devices, --tokens={tokens} of {PAGE_TOKENS}"
        )
    config = settings.model
    if any(rows % devices for rows in config.engram_table_rows):
        raise InputError(
            f"Engram tables of {config.engram_table_rows} rows must divide over {devices} devices: "
            f"model.engram_row_multiple={devices} fills them up"
        )
    if config.quantization_config:
        config = dataclasses.replace(config, weight_form="packed", activation_format="fp8")
    model = Model(config, settings.kernels)
    pages = tokens // PAGE_TOKENS

    def make(table: jax.Array) -> tuple[Weights, State, Tail]:
        inputs = (jnp.zeros((1, ced.ALIGNMENT), jnp.int32),) * 3
        rows = (1, ced.ALIGNMENT, config.num_engram_sites, config.engram_rows_per_token)
        made = ced.CED(config).init(jax.random.key(0), *inputs, jnp.zeros(rows, jnp.int32))
        ids = np.zeros(1 + config.engram_pad_token_id, np.int32)
        weights = Weights.create(config, nn.unbox(made["params"]), ids)
        state = State.create(config, weights, sequences * pages, table)
        return weights, state, Tail.create(config, sequences, config.sliding_window)

    weights, state, tail = jax.eval_shape(make, jax.ShapeDtypeStruct((sequences, pages), jnp.int32))
    newest = jax.ShapeDtypeStruct((sequences,), jnp.int32)
    if program == "decode":
        function, shapes = spread.decode_step, (weights, state, newest)
    else:
        prompt = jax.ShapeDtypeStruct((sequences, chunk), jnp.int32)
        function, shapes = spread.prefill_step, (weights, state, tail, prompt)
    specs = (spread.weight_specs(weights), *map(spread.state_specs, shapes[1:]))
    arguments = jax.tree.map(
        lambda leaf, spec: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec)
        ),
        shapes,
        specs,
    )
    sizes = dict(
        batch=sequences,
        length=tokens,
        parameters=sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(weights)),
        parameter_bytes=local_bytes(arguments[0]),
        optimizer_bytes=0,
        gradient_bytes=0,
        batch_bytes=local_bytes(arguments[1:]),
    )
    step = spread.on_mesh(function, model, mesh, *arguments)
    return compile_program(program, step, arguments, mesh, sizes)


@command_line.program(__doc__)
def main(arguments: Sequence[str]) -> int:
    """Runs the command line; returns the exit status."""
    try:
        values = flags.FlagValues()
        topology = flags.DEFINE_string("topology", None, "What to compile for.", flag_values=values)
        output = flags.DEFINE_string("json", None, "File for the report.", flag_values=values)
        stage = flags.DEFINE_integer("stage", None, "Stage of the run.", flag_values=values)
        program = flags.DEFINE_enum("program", "train", PROGRAMS, "Which.", flag_values=values)
        sequences = flags.DEFINE_integer(
            "sequences", 0, "Served at once; 0: one a device.", flag_values=values
        )
        tokens = flags.DEFINE_integer("tokens", 2**20, "Of a sequence.", flag_values=values)
        chunk = flags.DEFINE_integer("chunk", 512, "Of a prefill step.", flag_values=values)
        level = flags.DEFINE_enum(
            "optimization", OPTIMIZATION[0], OPTIMIZATION, "Of the code.", flag_values=values
        )
        stages = stages_lib.resolve_stages(parse_config(arguments, values))
        if topology.value is None:
            raise InputError("--topology is missing: name one, such as --topology=v5p:8x8x8")
        last = len(stages) - 1
        number = stage.value
        if number is None:
            number = 0 if program.value == "train" else last
        if not 0 <= number <= last:
            raise InputError(f"--stage={number}: there are stages 0 to {last}")
        settings = stages[number].settings
        devices = devices_of(topology.value)
        jax.config.update("jax_optimization_level", level.value)
        if program.value == "train":
            report, _ = train_step(settings, sharding.make_mesh(settings.mesh.sizes(), devices))
        else:
            mesh = sharding.make_mesh({spread.AXIS: len(devices)}, devices)
            count = sequences.value or len(devices)
            report, _ = serving_step(
                program.value, settings, mesh, count, tokens.value, chunk.value
            )
    except DoesNotFit as error:
        print(f"does not fit: {error}", file=sys.stderr)
        return 1
    for name, value in report.rows():
        print(f"{name:24s} {value}")
    if output.value:
        content = dataclasses.asdict(report) | {"topology": topology.value, "fits": report.fits}
        Path(output.value).write_text(json.dumps(content, indent=2) + "\n")
    return 0 if report.fits else 1


if __name__ == "__main__":
    prepare_environment()
    sys.exit(main(sys.argv[1:]))
