"""A worker's process as the process of a script: its process group, and its end."""

from __future__ import annotations

import atexit
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d


@contextmanager
def script_end() -> Iterator[None]:
    """Calls what the script gives to `atexit` where the script ends without an error: the worker's
    process is killed later. What a module gives while it is imported is left to Python."""
    own_register = atexit.register
    functions: list[Callable[[], object]] = []

    def register(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        if not _is_called_by_script(sys._getframe(1)):
            return own_register(function, *args, **options)
        functions.append(lambda: function(*args, **options))
        return function

    atexit.register = register  # type: ignore[assignment]
    try:
        yield
    finally:
        atexit.register = own_register
    for function in reversed(functions):
        with suppress(Exception):  # as at the end of a process, where it is only printed
            function()


def _is_called_by_script(frame: FrameType | None) -> bool:
    """Whether the script calls it, directly or not, and no import is between them."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return False
        if frame.f_globals.get("__name__") == "__main__":
            return True
        frame = frame.f_back
    return False


@contextmanager
def own_process_group() -> Iterator[None]:
    """Within it `init_process_group` takes the worker's default group, and `destroy_process_group`
    leaves that alone, and ends groups of the script's own."""
    begin, end = c10d.init_process_group, c10d.destroy_process_group

    def init_process_group(*args: Any, **options: Any) -> None:
        """There is one already."""

    def destroy_process_group(group: Any = None) -> None:
        if group not in (None, dist.group.WORLD):
            end(group)

    homes: tuple[Any, ...] = (dist, c10d)
    try:
        for home in homes:
            home.init_process_group = init_process_group
            home.destroy_process_group = destroy_process_group
        yield
    finally:
        for home in homes:
            home.init_process_group, home.destroy_process_group = begin, end
