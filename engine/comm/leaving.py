"""The way out of a process that used gloo: its threads must be over before the interpreter is.

A gloo thread frees a collective's tensors after those who waited for it went on. One that does so
while Python is being finalized ends the process by std::terminate (torch 2.13: about one exit in
forty of a busy machine). The threads are over once nobody holds their process group.

`torch.distributed.nn.functional` holds it in the defaults of its functions when it is imported
behind the group's making, and the first step of any torch optimizer imports it.
"""

from __future__ import annotations

import atexit
import sys
from collections.abc import Callable
from threading import Thread
from weakref import WeakSet

import torch.distributed as dist

LIMIT_S = 5.0
"""How long a collective that others never came to may hold up the end of the process."""


class Hold:
    """Somebody's hold on a process group, until the process ends."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group: list[dist.ProcessGroup] = [group]
        _holds.add(self)

    @property
    def group(self) -> dist.ProcessGroup:
        return self._group[0]

    def let_go(self) -> None:
        self._group.clear()


_holds: WeakSet[Hold] = WeakSet()


def destroy_at_exit() -> None:
    """Of a default group that was made here: whoever makes it ends it, if the script does not."""
    atexit.register(_within_limit, _destroy)


def _destroy() -> None:
    if dist.is_initialized() and "nccl" not in dist.get_backend_config():
        dist.destroy_process_group()
    _let_go()


def _let_go() -> None:
    for hold in tuple(_holds):
        hold.let_go()
    functional = sys.modules.get("torch.distributed.nn.functional")
    for function in vars(functional).values() if functional else ():
        defaults = getattr(function, "__defaults__", None) or ()
        if any(isinstance(one, dist.ProcessGroup) for one in defaults):
            function.__defaults__ = tuple(
                None if isinstance(one, dist.ProcessGroup) else one for one in defaults
            )


def _within_limit(work: Callable[[], None]) -> None:
    """In a thread, for a group's end waits for its collectives."""
    thread = Thread(target=work, name="rayzero-leaving", daemon=True)
    thread.start()
    thread.join(LIMIT_S)


atexit.register(_within_limit, _let_go)
