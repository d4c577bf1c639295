"""Flax Linen modules, one file per component of the model."""
