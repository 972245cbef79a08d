"""Adapters to transformers' Trainer and Accelerate, and so to TRL and PEFT, for scripts under
`rayzero launch`. Nothing in `engine`, `workers` and `orchestrator` imports this package, which
connects by the hooks of `workers/launch/adapters.py`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from rayzero.huggingface.accelerator import patch_accelerator, patch_partial_state
from rayzero.huggingface.trainer import patch_trainer
from rayzero.workers.launch.adapters import on_begin, on_import, preloaded

PRIVATE = {
    "transformers.Trainer": (
        "_tr_loss",
        "_total_loss_scalar",
        "_globalstep_last_logged",
        "_initial_global_step",
        "_load_callback_state",
        "_maybe_log_save_evaluate",
        "_get_train_sampler",
    ),
    "accelerate.Accelerator": ("_dataloaders", "_schedulers"),
    "accelerate.state.GradientState": ("_set_sync_gradients",),
    "torch.optim.lr_scheduler.LRScheduler": ("_step_count",),
}
"""The private attributes that this package uses, by class. Another release may rename them."""


def install() -> None:
    """Installs the adapter: see `workers/launch/adapters.py`."""
    on_import("accelerate.accelerator", patch_accelerator)
    on_import("accelerate.state", patch_partial_state)
    on_import("transformers.trainer", patch_trainer)
    on_begin(_set_variables)
    preloaded.update(("transformers", "accelerate", "peft", "trl", "lightning"))


def _set_variables(launch: Mapping[str, Any]) -> None:
    """Passes stage and config of the command line to Accelerate, by the variables that it reads if
    the script has no config. Without either, Accelerate, and Trainer over it, train at stage 0."""
    stage, file = launch["stage"], launch["deepspeed_config"]
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    os.environ.pop("ACCELERATE_USE_CPU", None)  # with it they use DDP; the worker sets the device
    os.environ.setdefault("ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL", "true")
    if file is not None:
        os.environ["ACCELERATE_DEEPSPEED_CONFIG_FILE"] = file
    if stage is not None:
        os.environ["ACCELERATE_DEEPSPEED_ZERO_STAGE"] = str(stage)
    elif file is None:
        os.environ.setdefault("ACCELERATE_DEEPSPEED_ZERO_STAGE", "0")
