"""DeepSpeed's activation checkpointing functions, over `torch.utils.checkpoint`.

Checkpointing is always non-reentrant, which keeps autograd's graph: gradients arrive as without
checkpointing, and stage 3 sees each block's recomputed forward. Method: Chen et al., "Training Deep
Nets with Sublinear Memory Cost", 2016.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from rayzero.engine.config import parse_config
from rayzero.engine.device import device_count
from rayzero.engine.errors import ConfigError


class _Options:
    """The options that `configure` set for the process."""

    configured = False
    in_cpu = False  # checkpointed inputs are saved in host memory


def configure(
    mpu_: Any = None,
    deepspeed_config: str | Path | dict[str, Any] | None = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """Configures `checkpoint` for the process.

    Args:
        deepspeed_config: a config, of which the section `activation_checkpointing` is read.
        checkpoint_in_cpu: save checkpointed inputs in host memory; None: as the config says.

    The other arguments are ignored, as are the config's keys of the same meaning; `rayzero config
    explain` says why.
    """
    if mpu_ is not None:
        raise ConfigError(
            "checkpointing.configure(mpu_=...) was given",
            allowed="None: there is no model parallelism",
        )
    section = parse_config(deepspeed_config).activation_checkpointing
    _Options.in_cpu = section.cpu_checkpointing if checkpoint_in_cpu is None else checkpoint_in_cpu
    _Options.configured = True


def is_configured() -> bool:
    """Returns whether `configure` was called; `checkpoint` works without it."""
    return _Options.configured


def reset() -> None:
    """Does nothing: no state is kept between two steps."""


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls `function(*args)`, and recomputes it in backward instead of saving activations.

    Random numbers are the same in the recomputation.
    """
    on_gpu = device_count() > 0
    keep = torch.autograd.graph.save_on_cpu(pin_memory=on_gpu) if _Options.in_cpu else nullcontext()
    with keep:
        return torch_checkpoint(function, *args, use_reentrant=False, **kwargs)


def non_reentrant_checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """Calls `checkpoint`, which is always non-reentrant."""
    return checkpoint(function, *args)
