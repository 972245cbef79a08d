"""A process group of one generation, which a thread joins.

NCCL needs 0.5 to 2 s for a group, gloo a tenth of that. Meanwhile the training thread builds or
re-cuts its engine, and loads its state, for which no other rank is needed; a call that needs the
group waits for it.

Lifetime. The training thread starts a `JoiningGroup`, and ends it: by `wait`, or by `end`, which
interrupts the join until its thread has ended. The join limits itself.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Event, Thread, current_thread

import torch
import torch.distributed as dist

WAIT_CHECK_S = 0.05
"""How often a wait of the training thread looks whether it is to be interrupted."""
INTERRUPT_INTERVAL_S = 0.1
"""How often a join that is being ended is interrupted: it may be about to start another wait."""


class JoiningGroup:
    """The process group of all ranks of one generation.

    Attributes:
        rank, world_size, device, backend: what the group will have.
    """

    def __init__(
        self,
        join: Callable[[], dist.ProcessGroup],
        rank: int,
        world_size: int,
        device: torch.device,
        backend: str,
        check: Callable[[], None],
    ) -> None:
        """
        Args:
            join: creates the group. Runs in a thread of its own.
            check: raises in the training thread if it is not to wait any longer.
        """
        self.rank = rank
        self.world_size = world_size
        self.device = device
        self.backend = backend
        self._join = join
        self._check = check
        self._group: dist.ProcessGroup | None = None
        self._error: BaseException | None = None
        self._ended = Event()
        self._owner = current_thread()
        self._thread = Thread(target=self._run, name="rayzero-join", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def is_joining(self) -> bool:
        return self._thread.is_alive()

    @property
    def is_joined_by_caller(self) -> bool:
        """Whether the calling thread is the one that joins it."""
        return current_thread() is self._thread

    def wait(self) -> None:
        """Returns when the group exists; raises what the join raised."""
        while not self._ended.wait(WAIT_CHECK_S):
            self._check_owner()
        if self._error is not None:
            self._check_owner()  # an interrupt ends the join, too
            raise self._error

    def get_group(self) -> dist.ProcessGroup:
        """Waits for it. Raises DistError if it was aborted since."""
        self.wait()
        group = self._group
        if group is None:
            raise dist.DistError("the process group was aborted")
        return group

    def end(self, interrupt: Callable[[], None]) -> None:
        """Returns when no thread joins it any more.

        Args:
            interrupt: ends the waits of the join. Called until it has ended.
        """
        while self._thread.is_alive():
            interrupt()
            self._thread.join(INTERRUPT_INTERVAL_S)

    def forget(self) -> None:
        """The group was aborted: gloo's threads end with the last reference to it."""
        self._group = None

    def _check_owner(self) -> None:
        if current_thread() is self._owner:
            self._check()

    def _run(self) -> None:
        try:
            self._group = self._join()
        except BaseException as error:  # noqa: BLE001  raised by `wait`
            self._error = error
        finally:
            self._ended.set()


class PlannedGroup(JoiningGroup):
    """The process group of a generation that has not begun: what needs it waits for that."""

    def __init__(
        self,
        begin: Callable[[], JoiningGroup],
        rank: int,
        world_size: int,
        device: torch.device,
        backend: str,
    ) -> None:
        """
        Args:
            begin: waits for the generation, and returns its group. By the training thread.
        """
        super().__init__(self.get_group, rank, world_size, device, backend, check=lambda: None)
        self._begin = begin

    def wait(self) -> None:
        self._begin().wait()

    def get_group(self) -> dist.ProcessGroup:
        return self._begin().get_group()
