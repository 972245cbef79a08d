"""What a script changes in its process, outside its own module; undone before it runs again. The
worker's process group in place of the script's: a script makes and destroys none."""

from __future__ import annotations

import atexit
import builtins
import logging
import os
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d


class ProcessState:
    """The state of a process before a script was first entered. Used by the training thread.

    It holds the environment, the working directory, torch's, NumPy's and Python's random-number
    generators, and what a script replaces to be silent on all ranks but one: the standard streams,
    `print`, the level that `logging.disable` sets. Its rank may be another when it runs again.
    Between `watch` and `leave` it also records the exit functions and the handlers of
    loggers that the script adds; not those that a module adds while it is imported, since a module
    is imported once.
    """

    def __init__(self) -> None:
        self._environment = dict(os.environ)
        self._folder = os.getcwd()
        self._rng = torch.get_rng_state(), random.getstate(), np.random.get_state()
        self._streams = sys.stdout, sys.stderr
        self._print = builtins.print
        self._disabled_level = logging.root.manager.disable
        self._functions: list[Callable[[], object]] = []
        self._handlers: list[tuple[logging.Logger, logging.Handler]] = []
        self._register, self._add_handler = atexit.register, logging.Logger.addHandler

    def restore(self) -> None:
        """Sets what the script may have changed. The rank's variables stay those of its group."""
        own = {name: value for name, value in os.environ.items() if name in _GROUP_VARIABLES}
        for name in os.environ.keys() - self._environment.keys() - own.keys():
            del os.environ[name]
        os.environ.update(self._environment | own)
        os.chdir(self._folder)
        torch.set_rng_state(self._rng[0])
        random.setstate(self._rng[1])
        np.random.set_state(self._rng[2])
        sys.stdout, sys.stderr = self._streams
        builtins.print = self._print
        logging.disable(self._disabled_level)
        _reset_libraries()

    def watch(self) -> None:
        """From now on, records. Ends with `leave`."""

        def register(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
            if _is_called_by_script(sys._getframe(1)):
                self._functions.append(lambda: function(*args, **options))
                return function
            return self._register(function, *args, **options)

        def add_handler(logger: logging.Logger, handler: logging.Handler) -> None:
            if handler not in logger.handlers and _is_called_by_script(sys._getframe(1)):
                self._handlers.append((logger, handler))
            self._add_handler(logger, handler)

        atexit.register = register  # type: ignore[assignment]
        logging.Logger.addHandler = add_handler  # type: ignore[method-assign,assignment]

    def leave(self, *, finished: bool) -> None:
        """Removes the handlers; calls the exit functions, the last one first, if the script has
        come to its end, and forgets them otherwise: it will add them again."""
        atexit.register = self._register
        logging.Logger.addHandler = self._add_handler  # type: ignore[method-assign]
        functions, self._functions = self._functions[::-1], []
        for function in functions if finished else ():
            with suppress(Exception):  # as at the end of a process, where it is only printed
                function()
        for logger, handler in self._handlers:
            logger.removeHandler(handler)
        self._handlers.clear()


_GROUP_VARIABLES = frozenset(
    {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
)


def _is_called_by_script(frame: FrameType | None) -> bool:
    """Whether the script calls it, directly or not, and no import is between them."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return False
        if frame.f_globals.get("__name__") == "__main__":
            return True
        frame = frame.f_back
    return False


def _reset_libraries() -> None:
    """Accelerate's singletons, and transformers' reference to a DeepSpeed config, of the entry
    before: they hold its model, device and process group."""
    if (states := sys.modules.get("accelerate.state")) is not None:
        states.AcceleratorState._reset_state(reset_partial_state=True)
        states.GradientState._reset_state()
    if (deepspeed := sys.modules.get("transformers.integrations.deepspeed")) is not None:
        deepspeed.unset_hf_deepspeed_config()


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
