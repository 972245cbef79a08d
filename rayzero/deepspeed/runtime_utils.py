"""`deepspeed.runtime.utils`, and `deepspeed.utils.module_utils`: helpers that scripts import."""

from __future__ import annotations

import gc
import os
import random
from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rayzero.deepspeed.accelerator import (
    available_host_memory,
    get_accelerator,
    total_host_memory,
)
from rayzero.deepspeed.comm import get_rank
from rayzero.engine.errors import ConfigError
from rayzero.engine.tensor_tree import map_tensors

_GIB = 2**30

DEEPSPEED_ENVIRONMENT_NAME = os.environ.get("DS_ENV_FILE", ".deepspeed_env")
DEEPSPEED_ENVIRONMENT_PATHS = [os.path.expanduser("~"), "."]


def see_memory_usage(message: str, force: bool = False) -> None:
    """Prints the memory of rank 0's device and host under a message, if `force`; resets peaks."""
    if not force or get_rank() != 0:
        return
    gc.collect()
    device = get_accelerator()
    used = total_host_memory() - available_host_memory()
    print(message)
    print(
        f"allocated {device.memory_allocated() / _GIB:.2f} GiB, "
        f"at most {device.max_memory_allocated() / _GIB:.2f} GiB; "
        f"reserved {device.memory_reserved() / _GIB:.2f} GiB, "
        f"at most {device.max_memory_reserved() / _GIB:.2f} GiB; "
        f"host memory in use {used / _GIB:.2f} GiB"
    )
    device.reset_peak_memory_stats()


def set_random_seed(seed: int) -> None:
    """Seeds Python's, NumPy's and torch's generators."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed % 2**63)


def copy_to_device(
    item: Any, device: torch.device | str, criterion_func: Callable[[Any], bool] = torch.is_tensor
) -> Any:
    """A copy of nested lists, tuples and dicts, whose tensors that fulfil the criterion are on
    `device`."""
    return map_tensors(item, lambda one: one.to(device) if criterion_func(one) else one)


def move_to_device(
    item: Any, device: torch.device | str, criterion_func: Callable[[Any], bool] | None = None
) -> Any:
    """`copy_to_device`; tensors that fulfil a given criterion are moved themselves."""

    def move(tensor: Tensor) -> Tensor:
        if criterion_func is None or not criterion_func(tensor):
            return tensor.to(device)
        tensor.data = tensor.data.to(device)
        return tensor

    return map_tensors(item, move)


def clip_grad_norm_(
    parameters: Iterable[Tensor] | Tensor, max_norm: float, norm_type: float = 2, mpu: Any = None
) -> Tensor:
    """torch's function of that name, over gradients in `.grad`; an engine's are elsewhere, and
    `gradient_clipping` clips them."""
    if mpu is not None:
        raise ConfigError(
            "clip_grad_norm_(mpu=...) was called", allowed="None: all ranks are data parallel"
        )
    return nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)


def partition_uniform(num_items: int, num_parts: int) -> list[int]:
    """Bounds of contiguous parts whose sizes differ by at most one, the larger first."""
    if num_items <= num_parts:
        return [min(part, num_items) for part in range(num_parts + 1)]
    size, larger = divmod(num_items, num_parts)
    return [part * size + min(part, larger) for part in range(num_parts + 1)]


def required_torch_version(
    min_version: float | str | None = None, max_version: float | str | None = None
) -> bool:
    """Whether torch's version is in this range."""
    if not (min_version or max_version):
        raise ValueError("required_torch_version() was called without min_version or max_version")
    version = torch.torch_version.TorchVersion(torch.__version__.partition("+")[0])
    too_old = min_version and version < str(min_version)
    return not (too_old or (max_version and version > str(max_version)))


def recursive_getattr(model: Any, module_name: str) -> Any:
    """The attribute at a dotted name."""
    return attrgetter(module_name)(model)


def recursive_setattr(model: Any, module_name: str, module: Any) -> None:
    """Sets the attribute at a dotted name."""
    parent, _, name = module_name.rpartition(".")
    setattr(recursive_getattr(model, parent) if parent else model, name, module)
