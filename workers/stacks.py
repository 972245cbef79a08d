"""What the threads of this process do: their stacks, for a person who looks for a hang."""

from __future__ import annotations

import gc
import sys
import sysconfig
import threading
import traceback
from pathlib import Path
from threading import Lock
from traceback import FrameSummary
from types import FrameType

TRAINING_THREAD = "rayzero-train"
_PACKAGE = str(Path(__file__).parents[1])  # as in the names of code's files
_LIBRARIES = (_PACKAGE, sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), "<frozen")
"""Where the code is that the user did not write."""
_frames_lock = Lock()


def current_frames() -> dict[int, FrameType]:
    """Every thread's current frame, by its ident.

    Without garbage collection meanwhile: before Python 3.11.9, one that begins in
    `sys._current_frames` can deadlock the process (python/cpython#106883). The lock keeps another
    call from turning it on too early.
    """
    with _frames_lock:
        enabled = gc.isenabled()
        gc.disable()
        try:
            return sys._current_frames()
        finally:
            if enabled:
                gc.enable()


def format_stacks() -> str:
    """The training thread's stack from the user's function on; those of other threads that run code
    of the user's; the names of the others."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    stacks = {
        names.get(ident, f"{ident}, not Python's"): traceback.extract_stack(frame)
        for ident, frame in current_frames().items()
        if ident != threading.get_ident()
    }
    training = stacks.pop(TRAINING_THREAD, None)
    shown = {} if training is None else {TRAINING_THREAD: _below_callers(training)}
    shown |= {name: stack for name, stack in stacks.items() if any(map(_is_users, stack))}
    texts = [f"thread {name}\n{_format(stack)}" for name, stack in shown.items()]
    if others := sorted(stacks.keys() - shown.keys()):
        texts.append(f"other threads, without code of yours: {', '.join(others)}")
    return "\n".join(texts)


def _below_callers(stack: list[FrameSummary]) -> list[FrameSummary]:
    """Without what calls the user's function; all of it while that is not called."""
    first = next((n for n, frame in enumerate(stack) if _is_users(frame)), 0)
    return stack[first:]


def _is_users(frame: FrameSummary) -> bool:
    return not frame.filename.startswith(_LIBRARIES)


def _format(stack: list[FrameSummary]) -> str:
    return "".join(traceback.format_list(stack)).rstrip()
