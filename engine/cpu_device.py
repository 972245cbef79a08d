"""A device as the engine sees it, and the CPU, on which every operation has run when it returns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor


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

    def record_event(self, stream: Stream | None = None) -> Event:
        """An event behind all that is enqueued on `stream`, by default the current one."""
        return Event()

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
