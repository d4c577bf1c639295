"""Every section with its defaults: what the files of this folder start from.

config = _defaults.get_config(presets.tiny(hidden_size=128))
config.train.steps = 300
"""

from __future__ import annotations

import dataclasses

from ml_collections import ConfigDict

from train import settings
from train.data import pipeline
from v41flash.config import ModelConfig
from v41flash.kernels import Kernels


def get_config(model: ModelConfig) -> ConfigDict:
    """All sections; `model` becomes the section of that name, field by field."""
    return ConfigDict(
        {
            "model": model.to_dict(),
            "data": pipeline.default_config(),
            "optimizer": dataclasses.asdict(settings.OptimizerSettings()),
            "train": dataclasses.asdict(settings.TrainSettings()),
            "eval": dataclasses.asdict(settings.EvalSettings()),
            "mesh": dataclasses.asdict(settings.MeshSettings()),
            "kernels": dataclasses.asdict(Kernels()),
        }
    )
