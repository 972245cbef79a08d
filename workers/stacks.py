"""The stacks of this process's threads, for a person who looks for a hang."""

from __future__ import annotations

import gc
import sys
import sysconfig
import threading
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from traceback import FrameSummary
from types import FrameType

TRAINING_THREAD = "rayzero-train"
_PACKAGE = str(Path(__file__).parents[1])  # as in the names of code's files
_LIBRARIES = (_PACKAGE, sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), "<frozen")
"""Where the code is that the user did not write."""
_COLLECTIVES = str(Path(sysconfig.get_path("purelib"), "torch", "distributed"))
_PREFETCH = "rayzero-prefetch"
"""The loader's thread."""
_READS = ("read_samples", "fetch_item", "transform_row", "make_sample", "_make_samples")
"""Its functions that call a dataset, or a transform."""
_frames_lock = Lock()


@dataclass(frozen=True)
class Stacks:
    """The stacks of a process's threads, and where the training thread is.

    Args:
        text: their stacks.
        place: the line of the user's code in which the training thread stays, or the dataset that
            it waits for; empty if it is in none, as in a wait for other ranks.
        activity: what the loader does there.
    """

    text: str
    place: str = ""
    activity: str = ""


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


def read_stacks() -> Stacks:
    """The training thread's stack from the user's function on; those of other threads that run code
    of the user's; the names of the others."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = {
        names.get(ident, f"{ident}, not Python's"): frame
        for ident, frame in current_frames().items()
        if ident != threading.get_ident()
    }
    stacks = {name: traceback.extract_stack(frame) for name, frame in frames.items()}
    place, activity = _place(stacks.get(TRAINING_THREAD, [])), ""
    if not place and (reader := frames.get(_PREFETCH)) and _waits_for_data(stacks):
        place, activity = _place(stacks[_PREFETCH]), _read_activity(reader)
    training = stacks.pop(TRAINING_THREAD, None)
    shown = {} if training is None else {TRAINING_THREAD: _below_callers(training)}
    shown |= {name: stack for name, stack in stacks.items() if any(map(_is_users, stack))}
    texts = [f"thread {name}\n{_format(stack)}" for name, stack in shown.items()]
    if others := sorted(stacks.keys() - shown.keys()):
        texts.append(f"other threads, without code of yours: {', '.join(others)}")
    return Stacks("\n".join(texts), place, activity)


def _waits_for_data(stacks: Mapping[str, Sequence[FrameSummary]]) -> bool:
    """Whether the training thread is in the loader."""
    inner = next(filter(_is_packages, reversed(stacks.get(TRAINING_THREAD, []))), None)
    return inner is not None and Path(inner.filename).name in ("prefetch.py", "loader.py")


def _place(stack: list[FrameSummary]) -> str:
    """The innermost line of the user's, unless it called rayzero or a collective of torch's; of a
    dataset from a library, the line that the loader called."""
    called = None
    for frame in reversed(stack):
        if frame.filename.startswith(_COLLECTIVES):
            return ""
        if _is_packages(frame):
            if frame.name not in _READS or called is None:
                return ""
            return _line(called)
        if _is_users(frame):
            return _line(frame)
        called = frame
    return ""


def _line(frame: FrameSummary) -> str:
    return f"{frame.filename}:{frame.lineno}, in {frame.name}"


def _read_activity(frame: FrameType | None) -> str:
    """The work of the loader's thread: `reading sample 37`."""
    while frame is not None:
        is_read = frame.f_code.co_name in _READS and _is_file_of_package(frame.f_code.co_filename)
        if is_read and "failing" in frame.f_locals:
            return f"reading {frame.f_locals['failing']}"
        frame = frame.f_back
    return ""


def _is_packages(frame: FrameSummary) -> bool:
    return _is_file_of_package(frame.filename)


def _is_file_of_package(filename: str) -> bool:
    return filename.startswith(_PACKAGE)


def _below_callers(stack: list[FrameSummary]) -> list[FrameSummary]:
    """Without what calls the user's function; all of it while that is not called."""
    first = next((n for n, frame in enumerate(stack) if _is_users(frame)), 0)
    return stack[first:]


def _is_users(frame: FrameSummary) -> bool:
    return not frame.filename.startswith(_LIBRARIES)


def _format(stack: list[FrameSummary]) -> str:
    return "".join(traceback.format_list(stack)).rstrip()
