"""The table, whole."""

from __future__ import annotations

from rayzero.engine.config.keys import (
    elsewhere,
    offload,
    precision,
    storage,
    training,
    watching,
    zero,
)
from rayzero.engine.config.keys.rows import Key

GROUPS: dict[str, tuple[Key, ...]] = {
    "batch sizes": training.BATCHES,
    "optimizer, schedule, gradients": training.UPDATE,
    "fp16": precision.FP16,
    "bf16": precision.BF16,
    "other dtypes": precision.MIXED,
    "sharding": zero.SHARDING,
    "stage 3": zero.STAGE_3,
    "the rest of zero_optimization": zero.REST,
    "offloaded optimizer": offload.OPTIMIZER,
    "offloaded parameters": offload.PARAM,
    "activation checkpointing": training.ACTIVATIONS,
    "logs and timers": watching.LOGS,
    "monitors and profilers": watching.MONITORS,
    "checkpoints": storage.CHECKPOINTS,
    "NVMe": storage.AIO,
    "other parallelism": elsewhere.PARALLELISM,
    "data": elsewhere.DATA,
    "changes of the model": elsewhere.MODEL,
    "the run": elsewhere.RUN,
    "keys of our own": training.OURS,
}
"""All rows, by theme, in the order in which they are shown."""

KEYS: dict[str, Key] = {key.path: key for rows in GROUPS.values() for key in rows}
