"""Where numbers that are none come from: the layer whose outputs have them, or whose gradients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from v41flash.config import LayerGroup, ModelConfig

# Order of a layer's sublayers.
_SUBLAYERS = ("attention", "experts")


def describe(model: ModelConfig, nonfinite: Mapping[str, Any]) -> str:
    """Names the layer group where a step's numbers stop being finite.

    Args:
        model: of the run.
        nonfinite: the entry of a step's metrics (`train.step.make_train_step`): `layers` holds by
            group and sublayer how many rows have such outputs, `gradients` by group of parameters
            how many arrays of gradients.

    Returns:
        A part of a sentence. Forward, it begins in the first layer; backward in the last.
    """
    found = []
    for group in model.groups:
        for sublayer in _SUBLAYERS:
            found += _layers(group, sublayer, nonfinite["layers"].get(group.name, {}))
    if found:
        layer, _, text = min(found)
        return f"the first outputs that are not finite are those of {text} (layer {layer})"
    order = ["embed", "images", *(group.name for group in model.groups), "norm", "head"]
    groups = [name for name, count in nonfinite["gradients"].items() if int(count)]
    groups.sort(key=lambda name: order.index(name) if name in order else -1)
    if not groups:
        return "all outputs of layers and all gradients are finite"
    return (
        "all outputs of layers are finite; gradients are not in "
        f"{', '.join(reversed(groups))} (from the loss back)"
    )


def _layers(group: LayerGroup, sublayer: str, counts: Any) -> list[tuple[int, int, str]]:
    """(layer, order of the sublayer, text) of every bad sublayer of this kind in a group."""
    units = group.repeats
    first = np.asarray(counts["first"][sublayer]).reshape(units, 1)
    parts = [first]
    if group.reuse:
        parts.append(np.asarray(counts["reuse"][sublayer]).reshape(units, group.reuse))
    bad = np.flatnonzero(np.concatenate(parts, axis=1).ravel())
    place = _SUBLAYERS.index(sublayer)
    return [(group.start + int(i), place, f"{group.name}, {sublayer}") for i in bad]
