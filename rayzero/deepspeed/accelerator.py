"""`deepspeed.accelerator`: this rank's device, CUDA where there is a GPU, else the CPU."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from rayzero.deepspeed.comm import get_local_rank
from rayzero.engine.errors import did_you_mean

__all__ = ["Accelerator", "get_accelerator"]


def _cuda_call(name: str, on_cpu: int | None = None) -> Callable[..., Any]:
    """A method that calls `torch.cuda.<name>`; on the CPU it only returns `on_cpu`."""

    def call(self: Accelerator, *args: Any, **kwargs: Any) -> Any:
        return getattr(torch.cuda, name)(*args, **kwargs) if self._cuda else on_cpu

    return call


class Accelerator:
    """DeepSpeed's accelerator."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._cuda = name == "cuda"

    def is_available(self) -> bool:
        return True

    def device_name(self, device_index: int | None = None) -> str:
        """`cuda`, `cuda:1` or `cpu`."""
        return f"cuda:{device_index}" if self._cuda and device_index is not None else self._name

    def device(self, device_index: int | None = None) -> torch.device:
        return torch.device(self.device_name(device_index))

    def current_device(self) -> int:
        return torch.cuda.current_device() if self._cuda else get_local_rank()

    def current_device_name(self) -> str:
        return self.device_name(self.current_device())

    def device_count(self) -> int:
        """GPUs of this node; on the CPU the ranks of this node."""
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        return torch.cuda.device_count() if self._cuda else ranks

    def communication_backend_name(self) -> str:
        return "nccl" if self._cuda else "gloo"

    def is_bf16_supported(self) -> bool:
        return torch.cuda.is_bf16_supported() if self._cuda else True

    def is_fp16_supported(self) -> bool:
        return True

    def supported_dtypes(self) -> list[torch.dtype]:
        low = [torch.bfloat16] if self.is_bf16_supported() else []
        return [torch.float32, torch.float16, *low]

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == self._name

    set_device = _cuda_call("set_device")
    synchronize = _cuda_call("synchronize")
    empty_cache = _cuda_call("empty_cache")
    reset_peak_memory_stats = _cuda_call("reset_peak_memory_stats")
    memory_allocated = _cuda_call("memory_allocated", on_cpu=0)  # bytes
    max_memory_allocated = _cuda_call("max_memory_allocated", on_cpu=0)  # bytes

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def random(self) -> Any:
        return torch.random

    def pin_memory(self, tensor: torch.Tensor, align_bytes: int = 1) -> torch.Tensor:
        return tensor.pin_memory() if self._cuda else tensor

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return bool(tensor.is_pinned()) if self._cuda else True

    def __getattr__(self, name: str) -> Any:
        known = [entry for entry in dir(type(self)) if not entry.startswith("_")]
        raise AttributeError(
            f"rayzero has no deepspeed.get_accelerator().{name}{did_you_mean(name, known)}; "
            f"available: {', '.join(known)}"
        )


@cache
def get_accelerator() -> Accelerator:
    return Accelerator("cuda" if torch.cuda.is_available() else "cpu")
