"""The streams and events of the NCCL-like device: queues of kernels, each run by a thread in order.

Streams run beside each other, and order themselves only by events, as on a GPU: what stands in one
does not hold up a copy in another.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

import torch

Kernel = Callable[[], None]
KERNEL_ERROR = "CUDA error: uncorrectable ECC error encountered (Xid 94, injected)"
CHECK_S = 0.05
"""How often what waits for an event looks for an error of the device."""


class Context:
    """What the streams of a device share: the error after which every later call fails."""

    def __init__(self) -> None:
        self.streams: list[Stream] = []
        self.error: BaseException | None = None

    def check(self) -> None:
        if self.error is not None:
            raise torch.AcceleratorError(str(self.error))

    def fail(self, error: BaseException) -> None:
        self.error = error
        for stream in [*self.streams]:
            stream.drop()

    def synchronize(self, timeout_s: float | None = None) -> None:
        """Raises the device's error, or TimeoutError."""
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        for stream in [*self.streams]:
            stream.synchronize(None if deadline_s is None else deadline_s - time.monotonic())


class Stream:
    """One queue. Its thread is a daemon and lives as long as the process, or until `end`."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._kernels: deque[Kernel] = deque()
        self._changed = threading.Condition()
        self._unfinished = 0
        self._runs = False
        self._on_end: Callable[[], None] | None = None
        context.streams.append(self)
        threading.Thread(target=self._run, name="nccl-like-stream", daemon=True).start()

    def launch(self, kernel: Kernel) -> None:
        """Raises the device's error if it is poisoned; RuntimeError if its queue was ended."""
        self._context.check()
        with self._changed:
            if self not in self._context.streams:
                raise RuntimeError("NCCL error: the stream of an aborted communicator")
            self._kernels.append(kernel)
            self._unfinished += 1
            self._changed.notify_all()

    def check(self) -> None:
        self._context.check()

    def poison(self, text: str = KERNEL_ERROR) -> None:
        """A kernel fails, behind what is queued: every later call of this process fails, and its
        collectives never start."""
        self.launch(lambda: self._context.fail(RuntimeError(text)))

    @property
    def busy(self) -> bool:
        return self._unfinished > 0

    def record(self) -> Event:
        return Event(self._context, self)

    def wait_event(self, event: Event) -> None:
        if not event.reached.is_set():
            self.launch(event.stand)

    def wait_stream(self, other: Stream) -> None:
        if other is not self:
            self.wait_event(other.record())

    def synchronize(self, timeout_s: float | None = None) -> None:
        """Raises the device's error, or TimeoutError."""
        with self._changed:
            if not self._changed.wait_for(lambda: not self._unfinished, timeout_s):
                raise TimeoutError(f"{self._unfinished} kernels after {timeout_s} s")
        self._context.check()

    def drop(self) -> None:
        """What is queued never starts."""
        with self._changed:
            self._kernels.clear()
            self._unfinished = int(self._runs)
            self._changed.notify_all()

    def end(self, then: Callable[[], None]) -> None:
        """Its thread ends after what is queued, and calls `then`."""
        with self._changed:
            self._on_end = then
            self._changed.notify_all()

    def _run(self) -> None:
        # Kernels are below autograd, and must not count as changes of what autograd has saved: the
        # launch was counted.
        keys = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)
        with torch._C._AutoDispatchBelowAutograd(), torch._C._ExcludeDispatchKeyGuard(keys):
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._kernels or self._on_end)
                    if self._on_end and not self._kernels:
                        self._context.streams.remove(self)
                        self._on_end()
                        return
                    kernel = self._kernels.popleft()
                    self._runs = True
                try:
                    kernel()
                except BaseException as error:  # noqa: BLE001  as a kernel's: late, and elsewhere
                    self._context.fail(error)
                del kernel  # and its tensors
                with self._changed:
                    self._runs = False
                    self._unfinished -= 1
                    self._changed.notify_all()


class Event:
    """A kernel that says that it has run."""

    def __init__(self, context: Context, stream: Stream) -> None:
        self._context, self.reached = context, threading.Event()
        stream.launch(self.reached.set)

    def stand(self) -> None:
        """A kernel that waits for it."""
        while not self.reached.wait(CHECK_S) and self._context.error is None:
            pass

    def synchronize(self) -> None:
        self.stand()
        self._context.check()

    def query(self) -> bool:
        self._context.check()
        return self.reached.is_set()
