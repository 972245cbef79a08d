"""`deepspeed.accelerator`: this rank's device, CUDA where there is a GPU, else the CPU."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import nullcontext
from functools import cache, partial
from operator import attrgetter
from typing import Any

import torch

from rayzero.deepspeed.comm import get_local_rank
from rayzero.deepspeed.lookup import refused_attribute, resolve
from rayzero.engine.errors import ConfigError

__all__ = ["Accelerator", "get_accelerator"]


_OF_CUDA: Mapping[str, tuple[str, Any]] = {
    **{name: (name, None) for name in ("Event", "Stream", "current_stream", "default_stream")},
    **{name: (name, None) for name in ("set_device", "synchronize", "empty_cache")},
    **{name: (f"nvtx.{name}", None) for name in ("range_push", "range_pop")},
    **{
        f"reset_{name}": ("reset_peak_memory_stats", None)
        for name in ("peak_memory_stats", "max_memory_allocated", "max_memory_cached")
    },
    **{
        f"{peak}memory_{name}": (f"{peak}memory_{kind}", 0)  # bytes
        for peak in ("", "max_")
        for name, kind in (
            ("allocated", "allocated"),
            ("reserved", "reserved"),
            ("cached", "reserved"),
        )
    },
    "memory_stats": ("memory_stats", {}),
    "is_current_stream_capturing": ("is_current_stream_capturing", 0),
    "is_bf16_supported": ("is_bf16_supported", True),
    "current_device": ("current_device", get_local_rank),
    "device_count": ("device_count", lambda: int(os.environ.get("LOCAL_WORLD_SIZE", "1"))),
    "stream": ("stream", lambda stream: nullcontext()),
    "initial_seed": ("initial_seed", torch.initial_seed),
    "get_rng_state": ("get_rng_state", lambda *device: torch.get_rng_state()),
    "set_rng_state": ("set_rng_state", lambda state, *device: torch.set_rng_state(state)),
}
"""{name: (name in torch.cuda, its result on the CPU, or the function for the CPU)}."""

_VALUES: Mapping[str, tuple[Any, Any]] = {
    **dict.fromkeys(("is_available", "is_fp16_supported", "is_fp64_supported"), (True, True)),
    **dict.fromkeys(  # whether calls return when the work is done
        (
            "is_synchronized_device",
            "use_host_timers",
            "resolves_data_dependency",
            "handles_memory_backpressure",
        ),
        (False, True),
    ),
    "communication_backend_name": ("nccl", "gloo"),
    "get_compile_backend": ("inductor", "inductor"),  # torch.compile's default
    "random": (torch.random, torch.random),
}
"""{method: (its result on CUDA, its result on the CPU)}."""

_DTYPES = {
    "FloatTensor": torch.float32,
    "DoubleTensor": torch.float64,
    "HalfTensor": torch.float16,
    "BFloat16Tensor": torch.bfloat16,
    "IntTensor": torch.int32,
    "LongTensor": torch.int64,
    "ByteTensor": torch.uint8,
}


def host_memory(pages: str) -> int:
    """Returns the bytes of the host's memory: all (`PHYS`), or the free ones (`AVPHYS`)."""
    return os.sysconf(f"SC_{pages}_PAGES") * os.sysconf("SC_PAGE_SIZE")


class Accelerator:
    """DeepSpeed's accelerator; most of its methods are in the tables above."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._cuda = name == "cuda"

    def __getattr__(self, name: str) -> Any:
        if name in _OF_CUDA:
            function, on_cpu = _OF_CUDA[name]
            if self._cuda:
                return attrgetter(function)(torch.cuda)
            return on_cpu if callable(on_cpu) else lambda *_, **__: on_cpu
        if name in _VALUES:
            on_cuda, on_cpu = _VALUES[name]
            return lambda: on_cuda if self._cuda else on_cpu
        if name in _DTYPES:
            return partial(self._make_tensor, _DTYPES[name])
        known = (*dir(type(self)), *_OF_CUDA, *_VALUES, *_DTYPES)
        owner = f"rayzero has no deepspeed.get_accelerator().{name}"
        raise refused_attribute(owner, "Accelerator", name, known)

    def device_name(self, device_index: int | None = None) -> str:
        """Returns `cuda`, `cuda:1` or `cpu`."""
        return f"cuda:{device_index}" if self._cuda and device_index is not None else self._name

    def device(self, device_index: int | None = None) -> torch.device:
        return torch.device(self.device_name(device_index))

    def current_device_name(self) -> str:
        return self.device_name(self.current_device())

    def supported_dtypes(self) -> list[torch.dtype]:
        low = [torch.bfloat16] if self.is_bf16_supported() else []
        return [torch.float32, torch.float16, *low]

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == self._name

    def total_memory(self, device_index: int | None = None) -> int:
        """Returns the bytes of the GPU's memory, or on the CPU of the host's."""
        return torch.cuda.mem_get_info(device_index)[1] if self._cuda else host_memory("PHYS")

    def available_memory(self, device_index: int | None = None) -> int:
        """Returns the free bytes of the GPU's memory, or on the CPU of the host's."""
        return torch.cuda.mem_get_info(device_index)[0] if self._cuda else host_memory("AVPHYS")

    def default_generator(self, device_index: int) -> torch.Generator:
        return (
            torch.cuda.default_generators[device_index] if self._cuda else torch.default_generator
        )

    def set_compile_backend(self, backend: str) -> None:
        """Raises ConfigError for another backend than the default."""
        if backend != "inductor":
            raise ConfigError(
                f"set_compile_backend({backend!r}) was called",
                allowed="inductor",
                fix="set compile.backend in the config, or call engine.compile(backend=...)",
            )

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def pin_memory(self, tensor: torch.Tensor, align_bytes: int = 1) -> torch.Tensor:
        return tensor.pin_memory() if self._cuda else tensor

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return bool(tensor.is_pinned()) if self._cuda else True

    def _make_tensor(self, dtype: torch.dtype, *values: Any) -> torch.Tensor:
        """Returns a tensor on the device with these values, or an empty one of these sizes."""
        device = self.current_device_name() if self._cuda else "cpu"
        if values and all(isinstance(value, int) for value in values):
            return torch.empty(values, dtype=dtype, device=device)
        return torch.tensor(values[0] if values else [], dtype=dtype, device=device)


@cache
def get_accelerator() -> Accelerator:
    return Accelerator("cuda" if torch.cuda.is_available() else "cpu")


def __getattr__(name: str) -> Any:
    return resolve("accelerator", name)
