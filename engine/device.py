"""The device of this process: streams, events, host reads, pinned memory, random state, health.

This is the only module that calls `torch.cuda` and `torch.accelerator`. All others use the `Device`
of `get_device`, so they run unchanged on another device: tests install one with `replace_device`.

Order on an asynchronous device. Kernels and non-blocking copies return when they are enqueued, and
run in the order of their stream. Another stream sees their results after `wait_stream` or
`wait_event`; the host after `to_host` or `read`, an event's or a stream's `synchronize`, or
`synchronize`. These release the GIL. If a collective that they wait for is aborted they return
early, and the result is undefined: the host must look for an interrupt before it uses it.

Lifetimes. A pinned tensor of torch's allocator may be dropped once its copy is enqueued: its memory
is not reused before the copy is done. Registered memory stays mapped until `unregister_host`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from threading import Thread
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from rayzero.engine.errors import EngineError, RayzeroError

T = TypeVar("T")

_POISONED = (
    "uncorrectable",
    "nvlink",
    "illegal memory access",
    "launch timed out",
    "assert triggered",
    "hardware stack error",
    "illegal instruction",
    "misaligned address",
    "address space",
    "invalid program counter",
    "unspecified launch failure",
    "unknown error",
    "busy or unavailable",
    "execution_failed",
)
"""Parts of the messages of CUDA errors after which every later call of the process fails."""


class DeviceError(RayzeroError):
    """A device does not answer, or computes wrongly: this process cannot use it any more."""


class Event:
    """A point in a stream: `torch.Event`, or on a CPU this class, which is always reached."""

    def synchronize(self) -> None:
        """Waits until the stream has reached the event. Releases the GIL."""

    def query(self) -> bool:
        """Returns whether the stream has reached the event."""
        return True


class Stream:
    """A queue of kernels and copies: `torch.Stream`, or on a CPU this class, which is empty."""

    def wait_stream(self, other: Stream) -> None:
        """Makes work that is enqueued here later run after all work that `other` has by now."""

    def wait_event(self, event: Event) -> None:
        """Makes work that is enqueued here later run after the event."""

    def synchronize(self) -> None:
        """Waits until all work that is enqueued here has run. Releases the GIL."""


class Device:
    """A device. The base class is a CPU: every operation has run when it returns.

    Attributes:
        asynchronous: operations may return before they have run.
        separate_memory: the device's memory is not host memory.
        backend: torch.distributed's backend for the device's tensors.
        bucket_numel: the fewest and the most elements of a bucket.
        part_numel: the most elements of a unit longer than a bucket that are reduced at once.
    """

    asynchronous = False
    separate_memory = False
    backend = "gloo"
    bucket_numel = 250_000, 4_000_000
    part_numel = 64_000_000

    def __init__(self, torch_device: torch.device) -> None:
        self.torch_device = torch_device

    @property
    def name(self) -> str:
        return self.torch_device.type

    def owns(self, tensor: Tensor) -> bool:
        """Returns whether a tensor is in memory of this type of device."""
        return tensor.device.type == self.torch_device.type

    def make_current(self) -> None:
        """Makes this the calling thread's current device. A new thread's is device 0."""

    def new_stream(self) -> Stream:
        """Returns a stream that runs concurrently with all others."""
        return Stream()

    def current_stream(self) -> Stream:
        """Returns the calling thread's current stream."""
        return Stream()

    @contextmanager
    def use_stream(self, stream: Stream) -> Iterator[None]:
        """Makes `stream` the current stream of the calling thread, in the context. It does not wait
        for the stream that was current before."""
        yield

    def record_event(self) -> Event:
        """Returns an event after all work that is enqueued on the current stream."""
        return Event()

    def record_use(self, tensor: Tensor) -> None:
        """Keeps a tensor's memory, which another stream may have allocated, from being reused
        before the work that is enqueued on the current stream by now has run."""

    def synchronize(self, timeout_s: float | None = None) -> None:
        """Waits until all streams are empty. Raises DeviceError after `timeout_s`."""

    def to_host(self, tensor: Tensor) -> Tensor:
        """Returns a copy in host memory, made after the work that is enqueued on the current
        stream; the tensor itself on a CPU. The host waits."""
        return tensor.detach()

    def read(self, tensor: Tensor) -> list[float]:
        """Returns the elements of a tensor, through `to_host`. Without offload, the host waits
        nowhere else in a training step: here once, twice in a job's first steps."""
        values: list[float] = self.to_host(tensor).reshape(-1).tolist()
        return values

    def send(self, values: Sequence[float], dtype: torch.dtype) -> Tensor:
        """Returns a new flat tensor on the device. The host does not wait."""
        return torch.tensor(values, dtype=dtype, device=self.torch_device)

    def host_empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Returns host memory, pinned if that makes copies to and from the device asynchronous."""
        return torch.empty(numel, dtype=dtype)

    def pin(self, tensor: Tensor) -> Tensor:
        """Returns a copy in pinned memory; the tensor itself on a CPU."""
        return tensor

    def to_device(self, tensor: Tensor) -> Tensor:
        """Returns a copy on the device, enqueued on the current stream; the tensor itself if it is
        there. The host does not wait if `tensor` is pinned."""
        return tensor.to(self.torch_device, non_blocking=True)

    def register_host(self, memory: Tensor) -> None:
        """Pins host memory that exists, such as a mapped file. Takes seconds for tens of GB.
        Raises EngineError if the system refuses."""

    def unregister_host(self, memory: Tensor) -> None:
        """Undoes `register_host`: before the memory is unmapped, with no copy in flight."""

    def peak_bytes(self) -> int | None:
        """Returns the most bytes that this process had allocated; None if it had none, on a CPU."""
        return None

    def utilization(self) -> float | None:
        """Returns the fraction of the last second, or less, in which the device ran kernels of any
        process; None if unknown: on a CPU or part of a GPU, without the package nvidia-ml-py."""
        return None

    def memory_info(self) -> tuple[int, int] | None:
        """Returns (free bytes, bytes of this process's tensors); None on a CPU."""
        return None

    def empty_cache(self) -> None:
        """Frees memory that torch caches, which communicators and other processes cannot use."""

    def rng_state(self) -> Tensor | None:
        """Returns the state of the device's own generator, in host memory; None on a CPU."""
        return None

    def set_rng_state(self, state: Tensor) -> None:
        """Restores what `rng_state` returned."""

    def seed(self, seed: int) -> None:
        """Seeds the device's own generator."""

    def warm_up(self) -> None:
        """Creates what the first kernels would create: the context, libraries' handles."""

    def check_health(self, timeout_s: float) -> None:
        """Raises DeviceError unless a small kernel gives the right result within `timeout_s`."""


class MetaDevice(Device):
    """The meta device, on which engines for GPUs are planned."""

    asynchronous = True
    separate_memory = True
    bucket_numel = 25_000_000, 64_000_000


class CudaDevice(Device):
    """A GPU of CUDA or ROCm."""

    asynchronous = True
    separate_memory = True
    backend = "nccl"
    bucket_numel = MetaDevice.bucket_numel

    @property
    def name(self) -> str:
        return torch.cuda.get_device_name(self.torch_device)

    def make_current(self) -> None:
        torch.accelerator.set_device_index(self.torch_device)

    def new_stream(self) -> Any:
        return torch.Stream(self.torch_device)

    def current_stream(self) -> Any:
        return torch.accelerator.current_stream(self.torch_device)

    @contextmanager
    def use_stream(self, stream: Any) -> Iterator[None]:
        before = self.current_stream()
        torch.accelerator.set_stream(stream)
        try:
            yield
        finally:
            torch.accelerator.set_stream(before)

    def record_event(self) -> Any:
        event = torch.Event(self.torch_device)
        event.record(self.current_stream())
        return event

    def record_use(self, tensor: Tensor) -> None:
        tensor.record_stream(self.current_stream())

    def synchronize(self, timeout_s: float | None = None) -> None:
        self._limit(timeout_s, lambda: torch.accelerator.synchronize(self.torch_device))

    def to_host(self, tensor: Tensor) -> Tensor:
        host = self.host_empty(tensor.numel(), tensor.dtype).view(tensor.shape)
        host.copy_(tensor.detach(), non_blocking=True)
        self.record_event().synchronize()
        return host

    def send(self, values: Sequence[float], dtype: torch.dtype) -> Tensor:
        return self.to_device(torch.tensor(values, dtype=dtype, pin_memory=True))

    def host_empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(numel, dtype=dtype, pin_memory=True)

    def pin(self, tensor: Tensor) -> Tensor:
        return tensor.pin_memory()

    def register_host(self, memory: Tensor) -> None:
        portable = 1  # pinned for all contexts
        code = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, portable))
        if code:
            raise EngineError(
                f"CUDA error {code}: {memory.nbytes} bytes of host memory could not be pinned",
                fix="raise the limit of locked memory: `ulimit -l`, or the container's",
            )

    def unregister_host(self, memory: Tensor) -> None:
        torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())

    def peak_bytes(self) -> int | None:
        if not torch.cuda.is_initialized():
            return None
        return torch.accelerator.max_memory_allocated(self.torch_device)

    def utilization(self) -> float | None:
        try:
            return torch.cuda.utilization(self.torch_device) / 100
        except Exception:  # noqa: BLE001  the driver's library raises, or is not installed
            return None

    def memory_info(self) -> tuple[int, int] | None:
        free, _ = torch.cuda.mem_get_info(self.torch_device)
        return free, torch.accelerator.memory_allocated(self.torch_device)

    def empty_cache(self) -> None:
        torch.accelerator.empty_cache()

    def rng_state(self) -> Tensor | None:
        return torch.cuda.get_rng_state(self.torch_device)

    def set_rng_state(self, state: Tensor) -> None:
        torch.cuda.set_rng_state(state, self.torch_device)

    def seed(self, seed: int) -> None:
        torch.cuda.default_generators[self.torch_device.index].manual_seed(seed)

    def warm_up(self) -> None:
        square = torch.ones(16, 16, device=self.torch_device)
        self.read(square @ square)

    def check_health(self, timeout_s: float) -> None:
        def add() -> list[float]:
            # Work on other streams may wait for an aborted collective.
            with self.use_stream(self.new_stream()):
                return self.read(torch.ones(1, device=self.torch_device) + 1)

        if (result := self._limit(timeout_s, add)) != [2.0]:
            raise DeviceError(f"{self.torch_device} is broken: it computes 1 + 1 = {result}")

    def _limit(self, timeout_s: float | None, work: Callable[[], T]) -> T:
        """Runs `work` in a thread: nothing can end a call of the driver, so after `timeout_s` the
        thread is left behind, and the process has to end."""
        if timeout_s is None:
            return work()
        results: list[T | Exception] = []

        def run() -> None:
            try:
                self.make_current()
                results.append(work())
            except Exception as error:  # noqa: BLE001  raised by the caller
                results.append(error)

        thread = Thread(target=run, name="rayzero-device", daemon=True)
        thread.start()
        thread.join(timeout_s)
        result = results[0] if results else TimeoutError(f"no answer within {timeout_s:g} s")
        if isinstance(result, Exception):
            raise DeviceError(f"{self.torch_device} is broken: {result}") from result
        return result


_KINDS: dict[str, type[Device]] = {"cuda": CudaDevice, "meta": MetaDevice}
_replaced: dict[str, Device] = {}  # {device type: device of `replace_device`}; empty but in tests


def get_device(torch_device: torch.device) -> Device:
    """Returns the one `Device` object of a torch device."""
    return _replaced.get(torch_device.type) or _make_device(torch_device)


@cache
def _make_device(torch_device: torch.device) -> Device:
    return _KINDS.get(torch_device.type, Device)(torch_device)


@contextmanager
def replace_device(device: Device) -> Iterator[None]:
    """Makes `get_device` return `device` for all torch devices of its type, in all threads of the
    process. Used by tests."""
    kind = device.torch_device.type
    before = _replaced.get(kind)
    _replaced[kind] = device
    try:
        yield
    finally:
        del _replaced[kind]
        if before is not None:
            _replaced[kind] = before


def device_count() -> int:
    """Returns the number of GPUs that this process can use."""
    return torch.cuda.device_count()


def local_device() -> torch.device:
    """Returns the GPU that this rank is to use, or the CPU if there is no GPU. LOCAL_RANK selects
    among the visible GPUs, which may be fewer than the node's ranks; by default the current GPU."""
    if not (count := device_count()):
        return torch.device("cpu")
    local_rank = os.environ.get("LOCAL_RANK") or torch.accelerator.current_device_index()
    return torch.device("cuda", int(local_rank) % count)


def nccl_version() -> str | None:
    """Returns the version of NCCL in torch's build; None without GPUs, or without NCCL."""
    if not (device_count() and dist.is_available() and dist.is_nccl_available()):
        return None
    return ".".join(map(str, torch.cuda.nccl.version()))


def is_device_failure(error: BaseException) -> bool:
    """Returns whether `error` leaves a device's context unusable. Running out of memory, or a
    launch with wrong arguments, does not."""
    text = str(error).lower()
    of_device = isinstance(error, torch.AcceleratorError) or "cuda error" in text
    return of_device and any(part in text for part in _POISONED)
