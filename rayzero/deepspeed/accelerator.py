"""`deepspeed.accelerator`: this rank's device, CUDA where there is a GPU, else the CPU."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from typing import Any

import torch

from rayzero.deepspeed.comm import get_local_rank
from rayzero.deepspeed.lookup import refused_attribute, resolve
from rayzero.engine.errors import ConfigError

__all__ = ["Accelerator", "get_accelerator"]


_OF_TORCH: dict[str, tuple[str, Any]] = {
    **{name: (name, None) for name in ("set_device", "synchronize", "empty_cache")},
    **{name: (name, None) for name in ("current_stream", "default_stream")},
    "is_current_stream_capturing": ("is_current_stream_capturing", 0),
    **{
        f"{peak}memory_{name}": (f"{peak}memory_{kind}", 0)  # bytes
        for peak in ("", "max_")
        for name, kind in (
            ("allocated", "allocated"),
            ("reserved", "reserved"),
            ("cached", "reserved"),
        )
    },
    **{
        f"reset_{name}": ("reset_peak_memory_stats", None)
        for name in ("peak_memory_stats", "max_memory_allocated", "max_memory_cached")
    },
}
"""{method: (torch.cuda's function, what it returns on the CPU)}."""
_SYNCHRONIZED = ("use_host_timers", "resolves_data_dependency", "handles_memory_backpressure")
_ALWAYS = ("is_available", "is_fp16_supported", "is_fp64_supported")
_DTYPES = {
    "FloatTensor": torch.float32,
    "DoubleTensor": torch.float64,
    "HalfTensor": torch.float16,
    "BFloat16Tensor": torch.bfloat16,
    "IntTensor": torch.int32,
    "LongTensor": torch.int64,
    "ByteTensor": torch.uint8,
}


def _no_object(*args: Any, **options: Any) -> None:
    return None


def total_host_memory() -> int:
    """Bytes of the host's memory."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def available_host_memory() -> int:
    """Bytes of the host's memory that are free."""
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


class Accelerator:
    """DeepSpeed's accelerator."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._cuda = name == "cuda"

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

    def supported_dtypes(self) -> list[torch.dtype]:
        low = [torch.bfloat16] if self.is_bf16_supported() else []
        return [torch.float32, torch.float16, *low]

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == self._name

    def memory_stats(self, device_index: int | None = None) -> dict[str, Any]:
        return dict(torch.cuda.memory_stats(device_index)) if self._cuda else {}

    def total_memory(self, device_index: int | None = None) -> int:
        """Bytes of the device, on the CPU of the host."""
        if not self._cuda:
            return total_host_memory()
        return int(torch.cuda.get_device_properties(device_index or 0).total_memory)

    def available_memory(self, device_index: int | None = None) -> int:
        """Bytes that are free on the device, on the CPU on the host."""
        return torch.cuda.mem_get_info(device_index)[0] if self._cuda else available_host_memory()

    def is_triton_supported(self) -> bool:
        return self._cuda and torch.cuda.get_device_capability()[0] >= 7

    def is_synchronized_device(self) -> bool:
        """Whether calls return when the work is done; three other names mean the same."""
        return not self._cuda

    def stream(self, stream: Any) -> AbstractContextManager[Any]:
        """A context in which work goes to the stream; on the CPU it has no effect."""
        return torch.cuda.stream(stream) if self._cuda else nullcontext()

    @property
    def Stream(self) -> Any:  # noqa: N802
        """torch.cuda's class; on the CPU a function that returns None."""
        return torch.cuda.Stream if self._cuda else _no_object

    @property
    def Event(self) -> Any:  # noqa: N802
        """torch.cuda's class; on the CPU a function that returns None."""
        return torch.cuda.Event if self._cuda else _no_object

    def lazy_call(self, callback: Callable[[], Any]) -> Any:
        """Calls it, on a GPU when CUDA is initialized."""
        torch.cuda.init() if self._cuda else None
        return callback()

    def range_push(self, msg: str) -> None:
        """Begins a range of NVTX."""
        torch.cuda.nvtx.range_push(msg) if self._cuda else None

    def range_pop(self) -> None:
        """Ends a range of NVTX."""
        torch.cuda.nvtx.range_pop() if self._cuda else None

    def get_rng_state(self, device_index: int | None = None) -> torch.Tensor:
        if not self._cuda:
            return torch.get_rng_state()
        return torch.cuda.get_rng_state(self.device(device_index))

    def set_rng_state(self, new_state: torch.Tensor, device_index: int | None = None) -> None:
        if self._cuda:
            torch.cuda.set_rng_state(new_state, self.device(device_index))
        else:
            torch.set_rng_state(new_state)

    def initial_seed(self) -> int:
        return torch.cuda.initial_seed() if self._cuda else torch.initial_seed()

    def default_generator(self, device_index: int) -> torch.Generator:
        return (
            torch.cuda.default_generators[device_index] if self._cuda else torch.default_generator
        )

    def get_compile_backend(self) -> str:
        """torch.compile's default."""
        return "inductor"

    def set_compile_backend(self, backend: str) -> None:
        """Raises ConfigError for another backend than the default."""
        if backend != "inductor":
            raise ConfigError(
                f"set_compile_backend({backend!r}) was called",
                allowed="inductor",
                fix="compile.backend in the config, or engine.compile(backend=...)",
            )

    def visible_devices_envs(self) -> list[str]:
        return ["CUDA_VISIBLE_DEVICES"] if self._cuda else []

    def export_envs(self) -> list[str]:
        return ["NCCL", "LD_LIBRARY", "PATH"] if self._cuda else []

    def set_visible_devices_envs(
        self, current_env: dict[str, str], local_accelerator_ids: Sequence[int]
    ) -> None:
        """Writes the devices' numbers to an environment."""
        for name in self.visible_devices_envs():
            current_env[name] = ",".join(map(str, local_accelerator_ids))

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def random(self) -> Any:
        return torch.random

    def pin_memory(self, tensor: torch.Tensor, align_bytes: int = 1) -> torch.Tensor:
        return tensor.pin_memory() if self._cuda else tensor

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return bool(tensor.is_pinned()) if self._cuda else True

    def _make_tensor(self, dtype: torch.dtype, *values: Any) -> torch.Tensor:
        """A tensor on the device from values, or one of these sizes."""
        device = self.current_device_name() if self._cuda else "cpu"
        if values and all(isinstance(value, int) for value in values):
            return torch.empty(values, dtype=dtype, device=device)
        return torch.tensor(values[0] if values else [], dtype=dtype, device=device)

    def __getattr__(self, name: str) -> Any:
        if name in _OF_TORCH:
            function, on_cpu = _OF_TORCH[name]
            return getattr(torch.cuda, function) if self._cuda else lambda *_, **__: on_cpu
        if name in _DTYPES:
            return partial(self._make_tensor, _DTYPES[name])
        if name in _SYNCHRONIZED:
            return self.is_synchronized_device
        if name in _ALWAYS:
            return lambda: True
        known = (*dir(type(self)), *_OF_TORCH, *_DTYPES, *_SYNCHRONIZED, *_ALWAYS)
        owner = f"rayzero has no deepspeed.get_accelerator().{name}"
        raise refused_attribute(owner, "Accelerator", name, known)


@cache
def get_accelerator() -> Accelerator:
    return Accelerator("cuda" if torch.cuda.is_available() else "cpu")


def __getattr__(name: str) -> Any:
    return resolve("accelerator", name)
