"""What Ray does to a process that connects, and is undone: its printing, its way with SIGTERM."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from ray._private import worker  # its printing is nowhere public


@contextmanager
def unchanged() -> Iterator[None]:
    """Around a connection to Ray, when it is ours: the process behaves afterwards as before.

    - Ray prints the cluster's errors to stdout, whatever `log_to_driver` says. Those of a job are
      told by the job, in its words and where it is followed.
    - Ray's native code takes SIGTERM over: it would print a stack and end the process at once. Who
      had no handler gets a SystemExit in the main thread, so that `finally` and `atexit` have their
      turn.
    """
    ours = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGTERM) if ours else None
    try:
        yield
        _hush()
        before = _leave if before is signal.SIG_DFL else before
    finally:
        if before is not None:  # else it is another thread's, or a handler that is not Python's
            signal.signal(signal.SIGTERM, before)


def _hush() -> None:
    """Ends the thread that prints. Ray's own disconnecting does the same once more."""
    with suppress(AttributeError):  # another Ray may keep them elsewhere: then it prints
        worker.global_worker.threads_stopped.set()
        worker.global_worker.gcs_error_subscriber.close()  # type: ignore[attr-defined]


def _leave(number: int, frame: FrameType | None) -> None:
    del frame
    raise SystemExit(128 + number)
