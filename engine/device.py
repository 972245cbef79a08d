"""The device of this process: streams, events, host reads, pinned memory, random state, health.

The only module that calls `torch.cuda` and `torch.accelerator`. All others use the `Device` of
`get_device`, so they run unchanged on another one: tests replace it with `replace_device`.

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
"""In CUDA's texts of errors after which every later call of the process fails."""


class DeviceError(RayzeroError):
    """A device does not answer, or computes wrongly: this process cannot use it any more."""


class Event:
    """A point in a stream; `torch.Event`, or this one on a CPU, where it is always reached."""

    def synchronize(self) -> None:
        """Returns when the stream has reached it. Releases the GIL."""

    def query(self) -> bool:
        """Whether the stream has reached it."""
        return True


class Stream:
    """A queue of kernels and copies; `torch.Stream`, or this one on a CPU, always empty."""

    def wait_stream(self, other: Stream) -> None:
        """Makes what is enqueued here from now on run after what is enqueued on `other` so far."""

    def wait_event(self, event: Event) -> None:
        """Makes what is enqueued here from now on run after the event."""

    def synchronize(self) -> None:
        """Returns when all that is enqueued here has run. Releases the GIL."""


class Device:
    """One device. In this class a CPU: every operation has run when it returns.

    Attributes:
        asynchronous: operations may run after they returned.
        separate_memory: the device's memory is not host memory.
        backend: torch.distributed's for its tensors.
        bucket_numel: the fewest and most elements of a bucket.
        part_numel: the most elements of a longer unit, such as an embedding, to reduce at once.
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
        """Whether a tensor is in this device's memory; on a CPU all are."""
        return tensor.device.type == self.torch_device.type

    def make_current(self) -> None:
        """Makes it the calling thread's default. That of a new thread is device 0."""

    def new_stream(self) -> Stream:
        """A stream that runs beside all others."""
        return Stream()

    def current_stream(self) -> Stream:
        """The calling thread's."""
        return Stream()

    @contextmanager
    def use_stream(self, stream: Stream) -> Iterator[None]:
        """Makes `stream` the calling thread's; it does not wait for the one before."""
        yield

    def record_event(self) -> Event:
        """An event behind all that is enqueued on the current stream."""
        return Event()

    def record_use(self, tensor: Tensor) -> None:
        """The current stream uses a tensor that another one may have allocated: its memory is not
        given to others before that."""

    def synchronize(self, timeout_s: float | None = None) -> None:
        """Returns when all streams are empty. Raises DeviceError after `timeout_s`."""

    def to_host(self, tensor: Tensor) -> Tensor:
        """A tensor of this device in host memory, after what is enqueued on the current stream;
        the tensor itself on a CPU. The host waits."""
        return tensor.detach()

    def read(self, tensor: Tensor) -> list[float]:
        """The elements of a tensor, by `to_host`: the only wait of the host in a training step
        without offload: once in it, twice in a job's first steps."""
        values: list[float] = self.to_host(tensor).reshape(-1).tolist()
        return values

    def send(self, values: Sequence[float], dtype: torch.dtype) -> Tensor:
        """A new flat tensor on the device. The host does not wait."""
        return torch.tensor(values, dtype=dtype, device=self.torch_device)

    def host_empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Host memory, pinned if that lets copies from and to the device run asynchronously."""
        return torch.empty(numel, dtype=dtype)

    def pin(self, tensor: Tensor) -> Tensor:
        """A copy in memory of `host_empty`; the tensor itself on a CPU."""
        return tensor

    def to_device(self, tensor: Tensor) -> Tensor:
        """A copy, enqueued on the current stream; the tensor itself if it is on the device. The
        host does not wait if `tensor` is pinned."""
        return tensor.to(self.torch_device, non_blocking=True)

    def register_host(self, memory: Tensor) -> None:
        """Pins host memory that exists, such as a mapped file. Takes seconds for tens of GB.
        Raises EngineError if the system refuses."""

    def unregister_host(self, memory: Tensor) -> None:
        """Ends `register_host`, with no copy in flight; before the memory is unmapped."""

    def peak_bytes(self) -> int | None:
        """The most bytes that this process had allocated; None on a CPU, or if it had none."""
        return None

    def utilization(self) -> float | None:
        """Share of the last second, or less, in which the device ran a kernel, of any process; None
        if that is not known: on a CPU, without the package nvidia-ml-py, of a part of a GPU."""
        return None

    def memory_info(self) -> tuple[int, int] | None:
        """Bytes that are free, and that tensors of this process have; None on a CPU."""
        return None

    def empty_cache(self) -> None:
        """Frees what torch caches: communicators, and other processes, cannot use that."""

    def rng_state(self) -> Tensor | None:
        """The state of the device's own generator, in host memory; None on a CPU."""
        return None

    def set_rng_state(self, state: Tensor) -> None:
        """Restores what `rng_state` returned."""

    def seed(self, seed: int) -> None:
        """Seeds the device's own generator."""

    def warm_up(self) -> None:
        """Creates what the first kernels would create: the context, libraries' handles."""

    def check_health(self, timeout_s: float) -> None:
        """Raises DeviceError unless a small kernel is right within `timeout_s`."""


class MetaDevice(Device):
    """The meta device, for plans of GPUs."""

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
        except Exception:  # noqa: BLE001  of the driver's library, or because it is not installed
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
            with self.use_stream(self.new_stream()):  # others may wait for an aborted collective
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
_replaced: dict[str, Device] = {}  # by torch's device type; by tests only


def get_device(torch_device: torch.device) -> Device:
    """The device of a tensor or an engine; one object for each of torch's."""
    return _replaced.get(torch_device.type) or _make_device(torch_device)


@cache
def _make_device(torch_device: torch.device) -> Device:
    return _KINDS.get(torch_device.type, Device)(torch_device)


@contextmanager
def replace_device(device: Device) -> Iterator[None]:
    """Tests: `device` stands for all of its torch device's type, in all threads of the process."""
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
    """GPUs that this process can use; 0 without one."""
    return torch.cuda.device_count()


def local_device() -> torch.device:
    """The GPU that this rank is to use, the CPU if there is none: LOCAL_RANK's of the visible ones,
    which may be fewer than a node's ranks; the current one without LOCAL_RANK."""
    if not (count := device_count()):
        return torch.device("cpu")
    local_rank = os.environ.get("LOCAL_RANK") or torch.accelerator.current_device_index()
    return torch.device("cuda", int(local_rank) % count)


def nccl_version() -> str | None:
    """The version in torch's build; None without GPUs, or NCCL."""
    if not (device_count() and dist.is_available() and dist.is_nccl_available()):
        return None
    return ".".join(map(str, torch.cuda.nccl.version()))


def is_device_failure(error: BaseException) -> bool:
    """Whether a device's context is unusable after `error`. It is not after running out of memory
    or wrong arguments of a launch."""
    text = str(error).lower()
    of_device = isinstance(error, torch.AcceleratorError) or "cuda error" in text
    return of_device and any(part in text for part in _POISONED)
