"""A worker's process as the process of a script. It runs one script, so nothing is undone."""

from __future__ import annotations

import atexit
import logging
import os
import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from rayzero.workers.session import JobSession

log = logging.getLogger("rayzero.workers")


def set_program(args: dict[str, Any], target: str) -> None:
    """`sys.argv` and `sys.path` as python itself would set them for the script."""
    sys.argv = [target, *args["args"]]
    sys.path.insert(0, os.getcwd() if args["module"] else str(Path(target).resolve().parent))


def lend_process_group() -> None:
    """`init_process_group` takes the worker's default group; `destroy_process_group` leaves that
    alone, and ends groups of the script's own."""
    end = c10d.destroy_process_group

    def init_process_group(*args: Any, **options: Any) -> None:
        """There is one already."""

    def destroy_process_group(group: Any = None) -> None:
        if group not in (None, dist.group.WORLD):
            end(group)

    homes: tuple[Any, ...] = (dist, c10d)
    for home in homes:
        home.init_process_group = init_process_group
        home.destroy_process_group = destroy_process_group


def keep_files(session: JobSession) -> None:
    """`torch.save` leaves the files of finished epochs as they are: the script of a new worker
    comes to those epochs with the weights of a later step."""
    save = torch.save

    @wraps(save)
    def saving(obj: object, f: Any, *args: Any, **options: Any) -> None:
        engine = session.engine
        is_late = engine is not None and bool(engine.progress.script_lag)
        if is_late and isinstance(f, str | os.PathLike) and os.path.exists(f):
            log.warning("torch.save: %s of an epoch that is finished is not written again", f)
            return
        save(obj, f, *args, **options)

    torch.save = saving


def collect_exits() -> list[Callable[[], object]]:
    """The functions that the script gives to `atexit`, from now on: the worker's process is killed
    some time after the script's end. What a module gives while it is imported is left to Python."""
    register = atexit.register
    exits: list[Callable[[], object]] = []

    def collecting(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        if not _is_called_by_script(sys._getframe(1)):
            return register(function, *args, **options)
        exits.append(lambda: function(*args, **options))
        return function

    atexit.register = collecting  # type: ignore[assignment]
    return exits


def _is_called_by_script(frame: FrameType | None) -> bool:
    """Whether the script calls it, directly or not, and no import is between them."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return False
        if frame.f_globals.get("__name__") == "__main__":
            return True
        frame = frame.f_back
    return False
