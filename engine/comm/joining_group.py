"""The default process group while it forms: a thread joins it, whoever asks for it waits.

NCCL needs 0.5 to 2 s for a group. Meanwhile the training thread builds the model and the engine,
and loads its state, for which no other rank is needed. A rank that asks torch for the default group
(`is_initialized`, `get_rank`, `new_group`, any collective) waits there, so that user code sees a
group that exists.

torch keeps the default group in one attribute, `default_pg` of `_world`, the object that it
declares as the place to override. All its functions read it there, in 2.11 to 2.13. We give that
object a class whose attribute waits. The object stays the same: others have imported it by name.
With a torch that keeps it elsewhere, nobody could be made to wait, so `start` does.
Modules of torch that are imported meanwhile do not wait: they only name the group as a default, and
`init_process_group` waits for the import of torch._dynamo.

Lifetime. The thread that trains starts a `JoiningGroup`, one at a time, and ends it: by `wait`, or
by `end_joining`, which interrupts the join until the thread has ended. The join limits itself.
Between `start` and its end only the joining thread changes torch's tables.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from threading import Event, Thread, current_thread

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

WAIT_CHECK_S = 0.05
"""How often a wait of the training thread looks whether it is to be interrupted."""
INTERRUPT_INTERVAL_S = 0.1
"""How often a join that is being ended is interrupted: it may be about to start another wait."""


class JoiningGroup:
    """The default group of one generation.

    Attributes:
        rank, world_size, device, backend: what the group will have.
    """

    def __init__(
        self,
        join: Callable[[], None],
        rank: int,
        world_size: int,
        device: torch.device,
        backend: str,
        check: Callable[[], None],
    ) -> None:
        """
        Args:
            join: creates the default group. Runs in a thread of its own.
            check: raises in the training thread if it is not to wait any longer.
        """
        self.rank = rank
        self.world_size = world_size
        self.device = device
        self.backend = backend
        self._join = join
        self._check = check
        self._error: BaseException | None = None
        self._ended = Event()
        self._owner = current_thread()
        self._thread = Thread(target=self._run, name="rayzero-join", daemon=True)

    def start(self) -> None:
        """Raises RuntimeError while another group is joining."""
        if _joining:
            raise RuntimeError("the previous process group is still joining")
        _joining.append(self)
        can_wait = _install_waiting_world()
        self._thread.start()
        if not can_wait:
            self.wait()

    def wait(self) -> None:
        """Returns when the group exists; raises what the join raised. At once in its own thread."""
        if current_thread() is self._thread:
            return
        while not self._ended.wait(WAIT_CHECK_S):
            self._check_owner()
        if self._error is not None:
            self._check_owner()  # an interrupt ends the join, too
            raise self._error

    def get_group(self) -> dist.ProcessGroup:
        """Waits for it. Raises ValueError if it was aborted since."""
        self.wait()
        return c10d._get_default_group()

    def end(self, interrupt: Callable[[], None]) -> None:
        while self._thread.is_alive():
            interrupt()
            self._thread.join(INTERRUPT_INTERVAL_S)
        if self in _joining:
            _joining.remove(self)

    def _check_owner(self) -> None:
        if current_thread() is self._owner:
            self._check()

    def _run(self) -> None:
        try:
            self._join()
            _joining.remove(self)
        except BaseException as error:  # noqa: BLE001  raised by whoever waits
            self._error = error
        finally:
            self._ended.set()


_joining: list[JoiningGroup] = []
"""The one that joins, or whose join has failed."""


def joining_group() -> JoiningGroup | None:
    """The default group, if it does not exist yet."""
    return next(iter(tuple(_joining)), None)  # its thread may remove it meanwhile


def end_joining(interrupt: Callable[[], None]) -> None:
    """Returns when no thread joins a group any more.

    Args:
        interrupt: ends the waits of the join. Called until it has ended.
    """
    if (joining := joining_group()) is not None:
        joining.end(interrupt)


def group_exists() -> bool:
    """Whether there is a default group now, without waiting for one that is joining."""
    return c10d._World.default_pg.fget(c10d._world) is not None  # type: ignore[attr-defined]


class _WaitingWorld(c10d._World):
    """torch's registry of groups, whose default group waits for the one that is joining."""

    @property
    def default_pg(self) -> dist.ProcessGroup | None:
        if (joining := joining_group()) is not None:
            if _is_read_by_an_import():
                return None
            joining.wait()
        return super().default_pg

    @default_pg.setter
    def default_pg(self, value: dist.ProcessGroup | None) -> None:
        c10d._World.default_pg.fset(self, value)  # type: ignore[attr-defined]


def _is_read_by_an_import() -> bool:
    """Whether a module of torch that is being imported reads it, for default arguments, where None
    means the default group. The joining thread may need that import's lock: it must not wait."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_globals.get("__name__") == c10d.__name__:
        frame = frame.f_back
    is_torch = str(frame.f_globals.get("__name__")).startswith("torch.")
    return is_torch and frame.f_code.co_name == "<module>"


def _install_waiting_world() -> bool:
    """For the rest of the process. False if torch keeps its default group in another way."""
    world = c10d._world
    if type(world) is c10d._World and isinstance(vars(c10d._World).get("default_pg"), property):
        world.__class__ = _WaitingWorld
    return type(world) is _WaitingWorld
