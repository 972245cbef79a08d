"""`deepspeed.runtime.utils`, and `deepspeed.utils.module_utils`: helpers that scripts import."""

from __future__ import annotations

import gc
import os
import random
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from operator import attrgetter
from pathlib import Path
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


class DummyOptim:
    """An object with `param_groups` and nothing else."""

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        self.param_groups = [{"params": params}]


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


def get_global_norm(norm_list: Iterable[float]) -> float:
    """The L2 norm of a vector of which the norms of the parts are given."""
    return float(np.linalg.norm(list(norm_list)))


def prefix_sum_inc(weights: Sequence[float]) -> list[float]:
    """Inclusive sums."""
    return list(accumulate(weights))


def partition_uniform(num_items: int, num_parts: int) -> list[int]:
    """Bounds of contiguous parts whose sizes differ by at most one, the larger first."""
    if num_items <= num_parts:
        return [min(part, num_items) for part in range(num_parts + 1)]
    size, larger = divmod(num_items, num_parts)
    return [part * size + min(part, larger) for part in range(num_parts + 1)]


def partition_balanced(weights: Sequence[float], num_parts: int) -> list[int]:
    """Bounds of contiguous parts whose greatest and smallest weights differ least, among splits
    that are so for every prefix (the linear partition problem, by dynamic programming)."""
    count = len(weights)
    if count <= num_parts:
        return partition_uniform(count, num_parts)
    sums = [0.0, *accumulate(weights)]
    best: dict[tuple[int, int], tuple[float, float, float, int]] = {(0, 0): (0.0, 0.0, np.inf, 0)}
    for end in range(1, count + 1):
        for parts in range(1, min(end, num_parts) + 1):
            for start in range(end):
                if (start, parts - 1) not in best:
                    continue
                _, most, least, _ = best[start, parts - 1]
                weight = sums[end] - sums[start]
                most, least = max(most, weight), min(least, weight)
                row = (most - least, most, least, start)
                if (end, parts) not in best or row[0] <= best[end, parts][0]:
                    best[end, parts] = row
    bounds = [count]
    for parts in range(num_parts, 0, -1):
        bounds.append(best[bounds[-1], parts][3])
    return bounds[::-1]


def ensure_directory_exists(filename: str) -> None:
    """Makes the folder of a file."""
    Path(os.path.dirname(filename) or ".").mkdir(parents=True, exist_ok=True)


def empty_cache() -> None:
    """Releases the device's cached memory, and resets its peaks."""
    get_accelerator().empty_cache()
    get_accelerator().reset_peak_memory_stats()


def noop_decorator(func: Any) -> Any:
    return func


def call_to_str(base: str, *args: Any, **kwargs: Any) -> str:
    """A call as text."""
    given = [repr(arg) for arg in args] + [f"{key}={arg!r}" for key, arg in kwargs.items()]
    return f"{base}({', '.join(given)})"


def required_torch_version(
    min_version: float | str | None = None, max_version: float | str | None = None
) -> bool:
    """Whether torch's version is in this range."""
    if not (min_version or max_version):
        raise ValueError("required_torch_version() was called without min_version or max_version")
    version = torch.torch_version.TorchVersion(torch.__version__.partition("+")[0])
    too_old = min_version and version < str(min_version)
    return not (too_old or (max_version and version > str(max_version)))


def get_only_unique_item(items: Iterable[Any]) -> Any:
    """The value of items that are all equal. Raises ValueError if they are not."""
    values = set(items)
    if len(values) != 1:
        raise ValueError(f"{len(values)} different values were given, and one was expected")
    return values.pop()


def recursive_getattr(model: Any, module_name: str) -> Any:
    """The attribute at a dotted name."""
    return attrgetter(module_name)(model)


def recursive_setattr(model: Any, module_name: str, module: Any) -> None:
    """Sets the attribute at a dotted name."""
    parent, _, name = module_name.rpartition(".")
    setattr(recursive_getattr(model, parent) if parent else model, name, module)
