"""Helpers that scripts import: `deepspeed.runtime.utils`, `MonitorMaster`, generation."""

from __future__ import annotations

import gc
import os
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rayzero.deepspeed.accelerator import get_accelerator, host_memory
from rayzero.deepspeed.comm import get_rank
from rayzero.engine.api.params import GatheredParameters
from rayzero.engine.config.model import EngineConfig
from rayzero.engine.config.monitors import MonitorConfig
from rayzero.engine.monitors import Event, make_monitors
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
    used = host_memory("PHYS") - host_memory("AVPHYS")
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


def move_to_device(
    item: Any, device: torch.device | str, criterion_func: Callable[[Any], bool] | None = None
) -> Any:
    """Returns a copy of nested lists, tuples and dicts on `device`. Tensors for which
    `criterion_func` is true are moved in place instead of copied."""

    def move(tensor: Tensor) -> Tensor:
        if criterion_func is None or not criterion_func(tensor):
            return tensor.to(device)
        tensor.data = tensor.data.to(device)
        return tensor

    return map_tensors(item, move)


def recursive_getattr(model: Any, module_name: str) -> Any:
    """Returns the attribute at a dotted name."""
    return attrgetter(module_name)(model)


def recursive_setattr(model: Any, module_name: str, module: Any) -> None:
    """Sets the attribute at a dotted name."""
    parent, _, name = module_name.rpartition(".")
    setattr(recursive_getattr(model, parent) if parent else model, name, module)


class MonitorMaster:
    """All monitors of a config that a script makes itself. They write on rank 0 only. The engine's
    monitors are `engine.monitor`."""

    def __init__(self, monitor_config: MonitorConfig) -> None:
        self.monitor_config = monitor_config
        self.enabled = monitor_config.enabled
        sections = {name: getattr(monitor_config, name) for name in MonitorConfig.model_fields}
        self._monitors = make_monitors(EngineConfig(**sections), {}, max(0, get_rank()))

    def write_events(self, event_list: Sequence[Event]) -> None:
        """Writes events, each `(name, value, samples)`, to each monitor."""
        self._monitors.write_events(event_list)


# transformers replaces the next two around `zero.Init`, to keep it from changing buffers' dtypes.
_orig_torch_arange = torch.arange


def zero_wrapper_for_fp_tensor_constructor(
    fn: Callable[..., Tensor], *args: Any, **kwargs: Any
) -> Callable[..., Tensor]:
    """Returns `fn` itself: constructors inside `zero.Init` keep the dtypes that they are given."""
    return fn


@contextmanager
def unwrap_model_for_generation(model: Any) -> Iterator[Any]:
    """Encloses generation by an engine. At stage 3 the weights are gathered once, instead of in
    every forward, so that ranks may generate different lengths. Collective at the beginning."""
    offload = getattr(model.optimizer, "parameter_offload", None)  # at stage 3 only
    with GatheredParameters(list(model.parameters())):
        if offload is not None:
            offload.remove()
        try:
            yield model
        finally:
            if offload is not None:
                offload._register_deepspeed_module(offload.module)
