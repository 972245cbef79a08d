"""The assembled table KEYS.

The table of keys: a row for every key that DeepSpeed 0.19 knows, and for ours. Data only.

`rows` says what a row is, the files beside it hold the rows by theme, and `table` puts them
together. To land a feature, change its rows' `REFUSED` into `IMPLEMENTED`: nothing else here needs
to change. This file imports nothing.

The table, whole.
"""

from __future__ import annotations

from rayzero.engine.config.keys import io as storage
from rayzero.engine.config.keys import io as watching
from rayzero.engine.config.keys import offload, training, zero
from rayzero.engine.config.keys import training as precision
from rayzero.engine.config.keys import unsupported as elsewhere
from rayzero.engine.config.keys.spec import Key

KEY_GROUPS: dict[str, tuple[Key, ...]] = {
    "batch sizes": training.BATCH_KEYS,
    "optimizer, schedule, gradients": training.UPDATE_KEYS,
    "fp16": precision.FP16_KEYS,
    "bf16": precision.BF16_KEYS,
    "other dtypes": precision.OTHER_DTYPE_KEYS,
    "sharding": zero.SHARDING_KEYS,
    "stage 3": zero.STAGE_3_KEYS,
    "the rest of zero_optimization": zero.OTHER_ZERO_KEYS,
    "offloaded optimizer": offload.OFFLOAD_OPTIMIZER_KEYS,
    "offloaded parameters": offload.OFFLOAD_PARAM_KEYS,
    "activation checkpointing": training.ACTIVATION_KEYS,
    "logs and timers": watching.LOG_KEYS,
    "monitors and profilers": watching.MONITOR_KEYS,
    "checkpoints": storage.CHECKPOINT_KEYS,
    "NVMe": storage.AIO_KEYS,
    "other parallelism": elsewhere.PARALLELISM_KEYS,
    "data": elsewhere.DATA_KEYS,
    "changes of the model": elsewhere.MODEL_KEYS,
    "the run": elsewhere.RUN_KEYS,
    "keys of our own": training.RAYZERO_KEYS,
}
"""All rows, by theme, in the order in which they are shown."""

KEYS: dict[str, Key] = {key.path: key for rows in KEY_GROUPS.values() for key in rows}
