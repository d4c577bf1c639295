"""The sections of a configuration as checked, typed values.

A configuration is a locked `ConfigDict` with exactly the sections model, data, optimizer, train,
eval, mesh and kernels. `resolve` turns it into `Settings`; a mistake is a `SettingsError` whose
text is one line that names the key, its value and what would be right.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

from ml_collections import ConfigDict

from v41flash.config import ConfigError, ModelConfig
from v41flash.errors import InputError
from v41flash.kernels import Kernels

SECTIONS = ("model", "data", "optimizer", "train", "eval", "mesh", "kernels")

# What may change between the parts of one run: how long it is, what is written down and when, and
# where and by which kernels it is computed. Everything else would make it another run.
FREE_ON_RESUME = (
    "train.steps",
    "train.log_every",
    "train.checkpoint_every",
    "train.keep_checkpoints",
    "train.profile_from",
    "train.profile_steps",
    "train.peak_flops",
    "train.time_optimizer",
    "train.max_loss_spike",
    "train.max_rewinds",
    "train.on_save_error",
    "train.check_kernels",
    "eval.",
    "mesh.",
    "kernels.",
)


OPTIMIZERS = ("adamw", "v41", "head_muon", "muon")


class SettingsError(InputError):
    """A configuration that cannot be run; the text is one line for the user."""


def _require(condition: bool, key: str, value: Any, right: str) -> None:
    if not condition:
        raise SettingsError(f"{key} = {_shown(value)}: must be {right}")


def _shown(value: Any) -> str:
    """In one line, as a section in place of a value is not."""
    return " ".join(repr(value).split())


@dataclasses.dataclass(frozen=True)
class OptimizerSettings:
    """`config.optimizer`. The horizon of the schedule is its own: it ignores `train.steps`."""

    # What happens to linear weights, and to the embedding, head and Engram tables; norm weights,
    # biases, sinks and mHC vectors have AdamW everywhere.
    #   adamw      AdamW, and AdamW without decay
    #   v41        the V4.1 recipe: Muon by heads and experts, and Sinkhorn-balanced updates
    #   head_muon  Muon by heads and experts, and AdamW without decay
    #   muon       Muon with the heads of a layer as one matrix, and AdamW without decay
    name: str = "adamw"
    learning_rate: float = 3e-4
    # None: a tenth of learning_rate.
    final_learning_rate: float | None = None
    warmup_steps: int = 100
    # First and last step of the cosine; None: no decay.
    decay_from: int | None = None
    decay_until: int | None = None
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-20
    weight_decay: float = 0.1
    # 0: no clipping. The indexers' gradients are neither counted nor clipped.
    clip_norm: float = 1.0
    # Momentum of Muon and of Sinkhorn-balanced updates, and the RMS of the updates of both.
    muon_momentum: float = 0.95
    sinkhorn_beta: float = 0.95
    update_rms: float = 0.18
    # Under v41: rows of a table whose norm is at most this times the mean are left alone.
    sinkhorn_tau: float = 1e-3
    # Times the learning rate: the Engram tables' rate under v41.
    engram_lr_factor: float = 5.0
    # Times the learning rate: that of the image encoder (not of its last norm and the aligner).
    vision_lr_factor: float = 1.0
    # Under v41: rows of an Engram table that a step may balance, where its cost shall follow the
    # rows in use (docs/optimizers.md, touched rows); a step with more does all. 0: always all.
    engram_capacity: int = 0

    def __post_init__(self):
        """Checks the values."""
        _require(
            self.name in OPTIMIZERS, "optimizer.name", self.name, f"one of {', '.join(OPTIMIZERS)}"
        )
        for name in (
            "learning_rate",
            "warmup_steps",
            "weight_decay",
            "clip_norm",
            "update_rms",
            "sinkhorn_tau",
            "engram_lr_factor",
            "vision_lr_factor",
            "engram_capacity",
        ):
            value = getattr(self, name)
            _require(0 <= value < math.inf, f"optimizer.{name}", value, "at least 0, finite")
        for name in ("beta1", "beta2", "muon_momentum", "sinkhorn_beta"):
            value = getattr(self, name)
            _require(0 <= value < 1, f"optimizer.{name}", value, "in [0, 1)")
        _require(self.eps > 0, "optimizer.eps", self.eps, "positive")
        for name in ("decay_from", "decay_until"):
            value = getattr(self, name)
            _require(
                value is None or isinstance(value, int),
                f"optimizer.{name}",
                value,
                "a step or None",
            )
        final = self.final_learning_rate
        _require(
            final is None or (isinstance(final, (int, float)) and final >= 0),
            "optimizer.final_learning_rate",
            final,
            "a number of at least 0, or None",
        )
        start, end = self.decay_from, self.decay_until
        _require(
            (start is None) == (end is None),
            "optimizer.decay_from, optimizer.decay_until",
            (start, end),
            "both given or both None",
        )
        _require(
            start is None or self.warmup_steps <= start < end,
            "optimizer.warmup_steps, decay_from, decay_until",
            (self.warmup_steps, start, end),
            "ordered warmup_steps <= decay_from < decay_until",
        )


@dataclasses.dataclass(frozen=True)
class TrainSettings:
    """`config.train`."""

    seed: int = 0
    # Run folder (of a run, or of an import) whose newest parameters this run starts with.
    init_from: str = ""
    steps: int = 1000
    # Microbatches per step; data.batch_size is the whole step's.
    accumulation: int = 1
    balance_weight: float = 1e-4
    indexer_weight: float = 1.0
    router_bias_speed: float = 1e-3
    # Steps at the start in which every visible entry is attended and the indexers learn from all.
    indexer_warmup_steps: int = 0
    # Leave the image encoder as it is; its last norm and the aligner are trained all the same. The
    # published recipe does so until the learning rate begins to decay (train.stages).
    freeze_vision: bool = False
    # ((from_step, {"model.key": value, "data.key": value, ...}), ...)
    stages: tuple = ()
    # Tokens whose logits exist at once in the loss, on each device.
    loss_chunk_tokens: int = 2048
    # Stop when the cross entropy is this many nats above its recent median in this stage; 0: only
    # when the loss is not finite.
    max_loss_spike: float = 3.0
    # Where the loss is not finite or too high: go back to the newest checkpoint and leave out the
    # batch, so many times in a process; 0: stop.
    max_rewinds: int = 0
    # A checkpoint cannot be written (a full disk): "stop", or "continue" without it. The last one
    # must be written. With several processes it always stops.
    on_save_error: str = "stop"
    # Steps at the start of a process in which every kernel is held against its reference, forward
    # and backward, on the tensors that it is given (docs/reliability.md).
    check_kernels: int = 0
    log_every: int = 10
    checkpoint_every: int = 100
    keep_checkpoints: int = 2
    # Trace profile_steps steps, starting with step profile_from, into the folder profile.
    profile_from: int = 0
    profile_steps: int = 0
    # Ceiling for MFU in FLOP/s per device; 0: measured at the start (accelerators only).
    peak_flops: float = 0.0
    # Log once, with the first step of this process, what the optimizer takes of a step
    # (optimizer_ms). It compiles the update once more and needs room for a second state.
    time_optimizer: bool = False

    def __post_init__(self):
        """Checks the values."""
        for name in (
            "steps",
            "accumulation",
            "loss_chunk_tokens",
            "log_every",
            "checkpoint_every",
            "keep_checkpoints",
        ):
            value = getattr(self, name)
            _require(value >= 1, f"train.{name}", value, "at least 1")
        for name in (
            "seed",
            "balance_weight",
            "indexer_weight",
            "router_bias_speed",
            "indexer_warmup_steps",
            "profile_from",
            "profile_steps",
            "peak_flops",
            "max_loss_spike",
            "max_rewinds",
            "check_kernels",
        ):
            value = getattr(self, name)
            _require(0 <= value < math.inf, f"train.{name}", value, "at least 0, finite")
        _require(
            self.on_save_error in ("stop", "continue"),
            "train.on_save_error",
            self.on_save_error,
            "'stop' or 'continue'",
        )


@dataclasses.dataclass(frozen=True)
class EvalSettings:
    """`config.eval`."""

    # Steps between held-out evaluations; 0: only at the end.
    every: int = 0
    # Held-out batches per evaluation.
    batches: int = 8
    # Tasks that are measured with them, ("needle:256", ..), and problems of each (`train.probes`).
    tasks: tuple = ()
    task_problems: int = 32
    # Compare with an order-2 byte n-gram model at the end (byte-level tokenizer only).
    byte_ngram: bool = True
    sample_prompt: str = ""
    # Tokens to draw at the end; 0: no sample.
    sample_tokens: int = 200
    sample_temperature: float = 0.8
    sample_seed: int = 0

    def __post_init__(self):
        """Checks the values."""
        _require(self.batches >= 1, "eval.batches", self.batches, "at least 1")
        _require(self.task_problems >= 1, "eval.task_problems", self.task_problems, "at least 1")
        for name in ("every", "sample_tokens", "sample_temperature", "sample_seed"):
            value = getattr(self, name)
            _require(0 <= value < math.inf, f"eval.{name}", value, "at least 0, finite")


@dataclasses.dataclass(frozen=True)
class MeshSettings:
    """`config.mesh`: sizes of the mesh axes; one of them may be -1 (what the others leave)."""

    data: int = -1
    fsdp: int = 1
    expert: int = 1
    context: int = 1
    tensor: int = 1
    # Call jax.distributed.initialize() first: one process of several.
    distributed: bool = False

    def sizes(self) -> dict[str, int]:
        """Axis name -> size, as `v41flash.sharding.make_mesh` takes them."""
        sizes = dataclasses.asdict(self)
        del sizes["distributed"]
        return sizes


@dataclasses.dataclass(frozen=True)
class Settings:
    """A whole configuration, checked. `data` is checked by `train.data` when it is opened."""

    model: ModelConfig
    data: ConfigDict
    optimizer: OptimizerSettings
    train: TrainSettings
    eval: EvalSettings
    mesh: MeshSettings
    kernels: Kernels


def closest(key: str, known: Iterable[str]) -> str:
    """A hint for a misspelled key: '; did you mean ...?', or nothing where nothing is near.

    The same section is searched first, then the others.
    """
    section, _, last = key.rpartition(".")
    names: dict[str, str] = {}
    for name in known:
        prefix, _, own = name.rpartition(".")
        if own not in names or prefix == section:
            names[own] = name
    here = [own for own, name in names.items() if name.rpartition(".")[0] == section]
    for candidates in (here, list(names)):
        near = difflib.get_close_matches(last, candidates, n=1, cutoff=0.75)
        if near:
            return f"; did you mean {names[near[0]]}?"
    return ""


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mapping -> {"a.b": value}; tuples become lists, as they do in JSON."""
    flat = {}
    for key, value in tree.items():
        if isinstance(value, (Mapping, ConfigDict)) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = json.loads(json.dumps(value))
    return flat


def to_json(config: ConfigDict) -> dict[str, Any]:
    """The configuration as plain JSON values."""
    return json.loads(json.dumps(config.to_dict()))


def read_section(kind: type, section: str, values: ConfigDict) -> Any:
    """One section as its dataclass.

    Raises:
        SettingsError: a key is unknown or missing, or a value has the wrong type.
    """
    fields = {field.name: field for field in dataclasses.fields(kind)}
    for key in values:
        if key not in fields:
            hint = closest(key, fields)
            raise SettingsError(f"config.{section}.{key}: no such key{hint}")
    for name in fields:
        if name not in values:
            raise SettingsError(
                f"config.{section}.{name} is missing; start from configs._defaults.get_config()"
            )
    values = {key: tuple(v) if isinstance(v, list) else v for key, v in values.items()}
    if kind is Kernels:
        # One name, or several to be tried in order: "mosaic_gpu,xla".
        for key, value in values.items():
            if isinstance(value, str):
                names = tuple(name.strip() for name in value.split(","))
                values[key] = names if len(names) > 1 else names[0]
            if value is not None and fields[key].default is None:
                _check_implementation(key, values[key])
    for name, value in values.items():
        default = fields[name].default
        if isinstance(default, bool) != isinstance(value, bool) and default is not None:
            raise SettingsError(f"{section}.{name} = {_shown(value)}: must be like {default!r}")
        if isinstance(default, (int, float)) and not isinstance(value, (int, float)):
            raise SettingsError(f"{section}.{name} = {_shown(value)}: must be a number")
        if isinstance(default, int) and isinstance(value, float):
            raise SettingsError(f"{section}.{name} = {_shown(value)}: must be a whole number")
    return kind(**values)


def _registries(op: str) -> list[Mapping[str, Any]]:
    """Name -> implementation, of every function of an op."""
    module = importlib.import_module(f"pallas_kernels.{op}")
    return [names for key, names in vars(module).items() if key.endswith("IMPLEMENTATIONS")]


def _check_implementation(op: str, requested: Any) -> None:
    """Refuses names that no op has, and what `pallas_kernels.dispatch` would refuse.

    Of a sequence, which may serve several ops, a function passes over the names that it lacks.
    """
    ops = [field.name for field in dataclasses.fields(Kernels) if field.default is None]
    known = {name for other in ops for registry in _registries(other) for name in registry}
    names = (requested,) if isinstance(requested, str) else requested
    texts = isinstance(names, tuple) and all(isinstance(name, str) for name in names)
    if texts and all(name in known for name in names):
        if all(any(name in registry for name in names) for registry in _registries(op)):
            return
    everywhere = sorted(set.intersection(*(set(registry) for registry in _registries(op))))
    raise SettingsError(
        f"kernels.{op} = {_shown(requested)}: must be a name of {', '.join(everywhere)}, or "
        f"several to be tried in order, separated by commas, of {', '.join(sorted(known))}"
    )


def _model(values: ConfigDict) -> ModelConfig:
    try:
        model = ModelConfig.from_dict(values.to_dict())
    except ConfigError as error:
        raise SettingsError(f"model.{error}") from error
    right = "'expanded': packed weights are for serving"
    _require(model.weight_form == "expanded", "model.weight_form", model.weight_form, right)
    return model


def resolve(config: ConfigDict) -> Settings:
    """Checks a configuration and gives its typed form.

    Raises:
        SettingsError: a section or key is missing or unknown, or a value is impossible.
    """
    for section in config:
        if section not in SECTIONS:
            raise SettingsError(
                f"config.{section}: no such section; there is {', '.join(SECTIONS)}"
            )
    for section in SECTIONS:
        if section not in config:
            raise SettingsError(f"config.{section} is missing; sections: {', '.join(SECTIONS)}")
    return Settings(
        model=_model(config.model),
        data=config.data,
        optimizer=read_section(OptimizerSettings, "optimizer", config.optimizer),
        train=read_section(TrainSettings, "train", config.train),
        eval=read_section(EvalSettings, "eval", config.eval),
        mesh=read_section(MeshSettings, "mesh", config.mesh),
        kernels=read_section(Kernels, "kernels", config.kernels),
    )


def check_resume(stored: Mapping[str, Any], current: Mapping[str, Any]) -> None:
    """Refuses to go on with a run under another configuration.

    Args:
        stored: the configuration of the run so far, as JSON values.
        current: the configuration that was asked for, likewise.

    Raises:
        SettingsError: a key differs that is not in `FREE_ON_RESUME`; names the first.
    """
    old, new = flatten(stored), flatten(current)
    absent = object()
    for key in sorted(old.keys() | new.keys()):
        if key in FREE_ON_RESUME or key.partition(".")[0] + "." in FREE_ON_RESUME:
            continue
        before, now = old.get(key, absent), new.get(key, absent)
        if before == now:
            continue
        shown = ["absent" if value is absent else json.dumps(value) for value in (before, now)]
        raise SettingsError(
            f"config.{key} is {shown[1]}, but the run in this workdir has {shown[0]}; "
            f"only train.steps, logging, eval, mesh and kernels may change on resume"
        )
