"""Optax transforms and schedules; imports jax, optax and pallas_kernels only."""

from v41flash.optim.axes import MatrixSpec, TableSpec
from v41flash.optim.head_muon import head_muon, scale_by_head_muon
from v41flash.optim.partition import PartitionError, Rule, partition
from v41flash.optim.recipe import V41_RULES, v41_optimizer
from v41flash.optim.schedule import warmup_constant_cosine
from v41flash.optim.sinkhorn import scale_by_sinkhorn, sinkhorn_balanced
from v41flash.optim.sinkhorn_rows import TableRows, scale_by_sinkhorn_rows, sinkhorn_rows_update

__all__ = [
    "V41_RULES",
    "MatrixSpec",
    "PartitionError",
    "Rule",
    "TableRows",
    "TableSpec",
    "head_muon",
    "partition",
    "scale_by_head_muon",
    "scale_by_sinkhorn",
    "scale_by_sinkhorn_rows",
    "sinkhorn_balanced",
    "sinkhorn_rows_update",
    "v41_optimizer",
    "warmup_constant_cosine",
]
