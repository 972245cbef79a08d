"""A device whose copies run when a test says so, on tensors in host memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import local
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rayzero.engine.device import Device


class LateEvent:
    reached = False
    error: Exception | None = None

    def __init__(self, stream: LateStream) -> None:
        self._stream = stream

    def query(self) -> bool:
        if self.error is not None:
            raise self.error
        return self.reached

    def synchronize(self) -> None:
        self.reach()

    def reach(self) -> None:
        while not self.reached:
            self._stream.step()


class LateStream:
    """Runs what is enqueued on it in `run`, up to a wait for an event that is not reached."""

    def __init__(self) -> None:
        self.queue: deque[LateEvent | Callable[[], object]] = deque()

    def wait_event(self, event: LateEvent) -> None:
        self.queue.append(event)

    def wait_stream(self, other: LateStream) -> None:
        self.wait_event(other.record())

    def record(self) -> LateEvent:
        event = LateEvent(self)
        self.queue.append(lambda: setattr(event, "reached", True))
        return event

    def synchronize(self) -> None:
        while self.queue:
            self.step()

    def step(self) -> None:
        """Runs one task, and what that waits for on other streams."""
        if not self.run(1) and self.queue:
            event = self.queue[0]
            assert isinstance(event, LateEvent)
            event.reach()

    def run(self, tasks: int = 10**9) -> int:
        """Runs up to so many tasks; returns how many."""
        done = 0
        while self.queue and done < tasks:
            task = self.queue[0]
            if isinstance(task, LateEvent):
                if not task.reached:
                    break
            else:
                task()
                done += 1
            self.queue.popleft()
        return done


class _Enqueue(TorchDispatchMode):
    """Copies are enqueued on a stream; other operations run at once."""

    def __init__(self, stream: LateStream) -> None:
        super().__init__()
        self._stream = stream

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is not torch.ops.aten.copy_.default:
            return func(*args, **(kwargs or {}))
        self._stream.queue.append(lambda: func(*args, **(kwargs or {})))
        return args[0]


class LateDevice(Device):
    """`compute` is every thread's current stream outside `use_stream`; a test enqueues on it."""

    asynchronous = True
    separate_memory = True

    def __init__(self, kind: str = "cpu") -> None:
        super().__init__(torch.device(kind))
        self.compute: Any = LateStream()
        self.streams: list[Any] = []
        self.registered: list[int] = []
        self._local = local()

    def new_stream(self) -> Any:
        self.streams.append(LateStream())
        return self.streams[-1]

    def current_stream(self) -> Any:
        return getattr(self._local, "stream", self.compute)

    @contextmanager
    def use_stream(self, stream: Any) -> Iterator[None]:
        self._local.stream = stream
        try:
            with _Enqueue(stream):
                yield
        finally:
            self._local.stream = self.compute

    def record_event(self) -> Any:
        return self.current_stream().record()

    def register_host(self, memory: Tensor) -> None:
        self.registered.append(memory.data_ptr())

    def unregister_host(self, memory: Tensor) -> None:
        self.registered.remove(memory.data_ptr())

    def run(self) -> None:
        """Runs everything, computation as early as its waits allow, copies as late."""
        while any(stream.queue for stream in (self.compute, *self.streams)):
            before = [len(stream.queue) for stream in (self.compute, *self.streams)]
            self.compute.run()
            for stream in self.streams:
                stream.run(1)
            if before == [len(stream.queue) for stream in (self.compute, *self.streams)]:
                raise AssertionError("streams wait for each other")
