"""What a run folder of `train.main` holds for serving: model, parameters, tokenizer."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from v41flash.checkpoints import workdirs
from v41flash.checkpoints.orbax import Checkpoints
from v41flash.config import ConfigError, ModelConfig
from v41flash.errors import InputError
from v41flash.kernels import Kernels
from v41flash.nn.ced import ALIGNMENT, CED
from v41flash.nn.dspark import DSpark
from v41flash.text import canonical
from v41flash.text import tokenizer as tokenizer_lib
from v41flash.text.tokenizer import Tokenizer

# Where `train.draft` saves a draft head, below the run's folder.
DRAFT_FOLDER = "draft"


@dataclasses.dataclass(frozen=True)
class Run:
    """A checkpoint with everything that it was trained with.

    Attributes:
        config: the model of the stage that made the checkpoint.
        kernels: as in its configuration.
        params: parameter tree of `v41flash.nn.ced.CED`, on one device.
        tokenizer: of its data.
        token_map: i32 [tokenizer.vocab_size], canonical ids.
        step: updates done.
        draft: parameters of the draft head that was trained on it, or None.
    """

    config: ModelConfig
    kernels: Kernels
    params: Any
    tokenizer: Tokenizer
    token_map: np.ndarray
    step: int
    draft: Any = None

    @classmethod
    def load(cls, workdir: str | Path, step: int | None = None) -> Run:
        """Reads a run folder.

        Args:
            workdir: the folder.
            step: of the checkpoint; the newest one when None.

        Raises:
            InputError: no run, no such checkpoint, a configuration that is none of this library's,
                or a tokenizer that has changed since.
        """
        workdir = Path(workdir)
        file = workdir / "config.json"
        if not file.is_file() or not (workdir / "checkpoints").is_dir():
            raise InputError(
                f"{workdir}: must be the folder of a training run (config.json and checkpoints/)"
            )
        try:
            values = json.loads(file.read_text())
        except ValueError as error:
            raise InputError(f"{file}: not JSON: {error}") from error
        with Checkpoints(workdir / "checkpoints") as stored:
            steps = stored.steps()
            if not steps:
                raise InputError(f"{workdir}: holds no checkpoint yet")
            step = steps[-1] if step is None else step
            if step not in steps:
                raise InputError(f"checkpoint {step}: {workdir} has {', '.join(map(str, steps))}")
            try:
                config = _model(values, step)
                kernels = _kernels(values["kernels"])
                name = values["data"]["tokenizer"]
                path = workdirs.tokenizer_file(name, workdir)
            except (KeyError, TypeError, ConfigError) as error:
                raise InputError(f"{file}: not a configuration of this version: {error}") from error
            params = stored.restore_params(step, _abstract(config))
            fingerprint = stored.meta(step).get("tokenizer")
        tokenizer = tokenizer_lib.load(
            name if path is None else str(path),
            bos_id=config.bos_token_id,
            eos_id=config.eos_token_id,
            pad_id=config.pad_token_id,
        )
        if tokenizer.vocab_size > config.vocab_size:
            raise InputError(
                f"{workdir}: tokenizer {name!r} has {tokenizer.vocab_size:,} ids; the model's"
                f" vocab_size is {config.vocab_size:,}"
            )
        if fingerprint not in (None, tokenizer.fingerprint):
            raise InputError(
                f"tokenizer {tokenizer.name!r}: not the one that checkpoint {step} of {workdir} was"
                f" made with: its fingerprint is {tokenizer.fingerprint}, not {fingerprint}"
            )
        draft = None
        if (workdir / DRAFT_FOLDER).is_dir():
            config, draft = _draft(config, workdir / DRAFT_FOLDER)
        token_map = canonical.canonical_map(tokenizer)
        return cls(config, kernels, params, tokenizer, token_map, step, draft)


def with_draft(config: ModelConfig, fields: Mapping[str, Any]) -> ModelConfig:
    """The model with a draft head: `fields` are those of ModelConfig that describe it.

    Raises:
        InputError: they do not make one.
    """
    fields = {k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()}
    own = config.compress_ratios[: config.num_hidden_layers]
    ratios = own + (0,) * fields["num_nextn_predict_layers"]
    try:
        return dataclasses.replace(config, compress_ratios=ratios, **fields)
    except ConfigError as error:
        raise InputError(f"draft head: {error}") from error


def _draft(config: ModelConfig, folder: Path) -> tuple[ModelConfig, Any]:
    """(the model with its draft head, the head's parameters)."""
    with Checkpoints(folder) as stored:
        step = stored.latest_step()
        if step is None:
            raise InputError(f"{folder}: holds no draft head")
        config = with_draft(config, stored.meta(step)["model"])
        return config, stored.restore_params(step, _on_device(abstract_draft(config)))


def abstract_draft(config: ModelConfig) -> Any:
    """Shapes of a draft head's parameters."""
    return jax.eval_shape(lambda key: init_draft(DSpark(config), key), jax.random.key(0))


def init_draft(head: DSpark, key: jax.Array) -> Any:
    """Fresh parameters of a draft head."""
    config = head.config
    one, d = jnp.ones(1, jnp.int32), config.hidden_size
    hidden = jnp.zeros((1, 1, len(config.dspark_target_layer_ids) * d), config.dtype)
    row = jnp.zeros((1, 1, config.head_dim), config.dtype)
    embed = jnp.zeros((config.vocab_size, d))

    def everything(module: DSpark) -> None:
        module.context_rows(hidden, one[None])
        module(one, one, (row,) * config.num_nextn_predict_layers, one, embed, embed.T)

    return nn.unbox(head.init(key, method=everything))["params"]


def _model(values: Mapping[str, Any], step: int) -> ModelConfig:
    """The model with what `train.stages` changed for the update that made the checkpoint."""
    # An imported checkpoint has step 0, and no stages.
    last = max(step - 1, 0)
    model = dict(values["model"])
    for start, overrides in values["train"]["stages"]:
        if start <= last:
            changed = ((key.split(".", 1), value) for key, value in overrides.items())
            model |= {key: value for (section, key), value in changed if section == "model"}
    if last < values["train"]["indexer_warmup_steps"]:
        model["dense_selection"] = True
    config = ModelConfig.from_dict(model)
    if config.main_kv_rounding != "after_rope":
        raise ConfigError("main_kv_rounding", config.main_kv_rounding, "cannot be served")
    return config


def _kernels(values: Mapping[str, Any]) -> Kernels:
    """One name, or several to be tried in order: "mosaic_gpu,xla"."""

    def names(value: Any) -> Any:
        if not isinstance(value, str):
            return value
        parts = tuple(part.strip() for part in value.split(","))
        return parts if len(parts) > 1 else parts[0]

    return Kernels(**{key: names(value) for key, value in values.items()})


def _abstract(config: ModelConfig) -> Any:
    """Shapes of the parameters, on the first device."""
    row = jax.ShapeDtypeStruct((1, ALIGNMENT), jnp.int32)
    rows = (1, ALIGNMENT, config.num_engram_sites, config.engram_rows_per_token)
    inputs = row, row, row, jax.ShapeDtypeStruct(rows, jnp.int32)
    boxed = jax.eval_shape(CED(config).init, jax.random.key(0), *inputs)["params"]
    return _on_device(nn.unbox(boxed))


def _on_device(shapes: Any) -> Any:
    where = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where), shapes
    )
