"""The collectives that a training function calls itself: the host's part, and their works."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from rayzero.engine.torch_private import Work


class CallHost:
    """The host's part in the collectives that a training function calls itself. This one is that of
    no function: they have peers, and fail."""

    def local_reason(self) -> str:
        """Why a collective completes on this rank alone; empty if it has peers."""
        return ""

    def replays(self, name: str, outputs: Sequence[Tensor]) -> bool:
        """Fills in what the call has returned before, if that is known."""
        return False

    def records(self) -> bool:
        """Whether results are wanted: then every collective is waited for where it is called."""
        return False

    def record(self, name: str, outputs: Sequence[Tensor]) -> None:
        """A collective has completed with these outputs."""

    def makes_group(self) -> None:
        """A group of the function's own is about to be made."""

    def outlives(self, error: Exception) -> bool:
        """Whether the function continues although a collective has failed."""
        return False


class FinishedCall(Work):
    """The work of a collective that has completed."""

    def __init__(self) -> None:
        super().__init__()
        self._future: torch.futures.Future[None] = torch.futures.Future()
        self._future.set_result(None)

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def get_future(self) -> torch.futures.Future[None]:
        return self._future


class PassedCall(Work):
    """The work of a collective of the generation's group. If the function outlives a failure,
    `wait` does not raise: `complete` writes the outputs."""

    def __init__(self, work: Work, complete: Callable[[], Work], host: CallHost) -> None:
        super().__init__()
        self._work = work
        self._complete = complete
        self._host = host

    def wait(self, *timeout: Any) -> bool:
        try:
            return self._work.wait(*timeout)
        except RuntimeError as error:
            if not self._host.outlives(error):
                raise
            self._complete()
            return True

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def get_future(self) -> Any:
        return self._work.get_future()
