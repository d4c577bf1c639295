"""Every section with its defaults: what the files of this folder start from.

config = _defaults.get_config(presets.tiny(hidden_size=128))
config.train.steps = 300
"""

from __future__ import annotations

import dataclasses
from typing import Any

from ml_collections import ConfigDict, config_dict

from train import settings
from train.data import pipeline
from train.rl import settings as rl
from v41flash.config import ModelConfig
from v41flash.kernels import Kernels


def _section(values: Any, **types: type) -> dict[str, Any]:
    """Fields of a dataclass; those that are None by default get the type that a flag may give."""
    return {
        name: config_dict.placeholder(types[name]) if value is None else value
        for name, value in dataclasses.asdict(values).items()
    }


def with_rl(config: ConfigDict) -> ConfigDict:
    """The same configuration, with the section of `train.rl.main` beside the others."""
    config.rl = ConfigDict(_section(rl.RLSettings()))
    return config


def get_config(model: ModelConfig) -> ConfigDict:
    """All sections; `model` becomes the section of that name, field by field."""
    return ConfigDict(
        {
            "model": model.to_dict(),
            "data": pipeline.default_config(),
            "optimizer": _section(
                settings.OptimizerSettings(),
                final_learning_rate=float,
                decay_from=int,
                decay_until=int,
            ),
            "train": _section(settings.TrainSettings()),
            "eval": _section(settings.EvalSettings()),
            "mesh": _section(settings.MeshSettings()),
            # Names as text, several separated by commas.
            "kernels": _section(
                Kernels(), **{field.name: str for field in dataclasses.fields(Kernels)}
            ),
        }
    )
