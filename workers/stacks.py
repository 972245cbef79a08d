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

from rayzero.workers.messages import Heartbeat

TRAINING_THREAD = "rayzero-train"
_PACKAGE = str(Path(__file__).parents[1])  # as in the names of code's files
_LIBRARIES = (_PACKAGE, sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), "<frozen")
"""Prefixes of the files of code that the user did not write."""
_COLLECTIVES = str(Path(sysconfig.get_path("purelib"), "torch", "distributed"))
_PREFETCH = "rayzero-prefetch"
"""The name of the loader's thread."""
_READS = ("read_samples", "fetch_item", "transform_row", "make_sample", "_make_samples")
"""The functions of the loader's thread that call a dataset or a transform."""
_IDLE = "_read_ahead"
"""The function in which the loader's thread waits until it may read ahead."""
_MOST_NAMED = 8
"""How many ranks a line names; more ranks are counted."""
_frames_lock = Lock()


@dataclass(frozen=True)
class Stacks:
    """The stacks of a process's threads, and where the training thread is.

    Args:
        text: their stacks.
        place: the line of the user's code in which the training thread is, or of the dataset that
            it waits for; empty if there is none, as in a wait for other ranks.
        activity: what the loader does at `place`.
        summary: where the training thread is, in a line: `in all_reduce, called at train.py:12`.
        reads: whether a loader's thread is reading, ahead or for a batch that is waited for.
        beat: the training thread's progress at the same time.
    """

    text: str
    place: str = ""
    activity: str = ""
    summary: str = ""
    reads: bool = False
    beat: Heartbeat | None = None


def current_frames() -> dict[int, FrameType]:
    """Returns every thread's current frame, by the thread's ident.

    Garbage collection is off meanwhile: before Python 3.11.9, a collection that begins in
    `sys._current_frames` can deadlock the process (python/cpython#106883). The lock keeps another
    call from turning the collection on too early.
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
    """Returns the training thread's stack from the user's function on, the stacks of other
    threads that run user code, and the names of the other threads."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    named = [
        (names.get(ident, f"{ident}, not Python's"), frame)
        for ident, frame in current_frames().items()
        if ident != threading.get_ident()
    ]
    frames = dict(named)
    reads = any(name == _PREFETCH and frame.f_code.co_name != _IDLE for name, frame in named)
    stacks = {name: traceback.extract_stack(frame) for name, frame in frames.items()}
    place, activity = _place(stacks.get(TRAINING_THREAD, [])), ""
    if not place and (reader := frames.get(_PREFETCH)) and _waits_for_data(stacks):
        place, activity = _place(stacks[_PREFETCH]), _read_activity(reader)
    training = stacks.pop(TRAINING_THREAD, None)
    summary = _summarize(training or [], place, activity)
    shown = {} if training is None else {TRAINING_THREAD: _below_callers(training)}
    shown |= {name: stack for name, stack in stacks.items() if any(map(_is_users, stack))}
    texts = [f"thread {name}\n{_format(stack)}" for name, stack in shown.items()]
    if others := sorted(stacks.keys() - shown.keys()):
        texts.append(f"other threads, without code of yours: {', '.join(others)}")
    return Stacks("\n".join(texts), place, activity, summary, reads)


def _summarize(stack: Sequence[FrameSummary], place: str, activity: str) -> str:
    """Returns a line on where a thread is: the collective, or else the innermost frame, and the
    line of user code from which it was called."""
    if place:
        return f"at {place}{f', {activity}' if activity else ''}"
    if not stack:
        return "not in the training function"
    inner = next((frame for frame in stack if frame.filename.startswith(_COLLECTIVES)), stack[-1])
    same_file = [frame for frame in stack if frame.filename == inner.filename]
    name = next((frame.name for frame in same_file if frame.name != "wrapper"), inner.name)
    caller = next(filter(_is_users, reversed(stack)), None)
    return f"in {name}" + (f", called at {_line(caller)}" if caller is not None else "")


def group_summaries(summaries: Mapping[int, str]) -> str:
    """Returns a line for each summary, with the ranks that have it; the fewest ranks come first:

    rank 2: at loader.py:31, in read
    ranks 0, 1, 3: in all_reduce, called at train.py:12, in train
    """
    groups: dict[str, list[int]] = {}
    for rank, summary in sorted(summaries.items()):
        groups.setdefault(summary, []).append(rank)
    ordered = sorted(groups.items(), key=lambda group: len(group[1]))
    return "\n".join(f"{_name_ranks(ranks)}: {summary}" for summary, ranks in ordered)


def _name_ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:_MOST_NAMED]))
    more = f" and {len(ranks) - _MOST_NAMED} more" if len(ranks) > _MOST_NAMED else ""
    return f"{'ranks' if len(ranks) > 1 else 'rank'} {shown}{more}"


def _waits_for_data(stacks: Mapping[str, Sequence[FrameSummary]]) -> bool:
    """Returns whether the training thread is in the loader."""
    inner = next(filter(_is_packages, reversed(stacks.get(TRAINING_THREAD, []))), None)
    return inner is not None and Path(inner.filename).name in ("prefetch.py", "loader.py")


def _place(stack: list[FrameSummary]) -> str:
    """Returns the innermost line of user code; empty if that called rayzero, or a collective of
    torch. For a library's dataset, returns the line of the library that the loader called."""
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
    """Returns the work of the loader's thread, such as `reading sample 37`."""
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
    """Returns the stack from the user's first frame on; all of it if there is none."""
    first = next((n for n, frame in enumerate(stack) if _is_users(frame)), 0)
    return stack[first:]


def _is_users(frame: FrameSummary) -> bool:
    return not frame.filename.startswith(_LIBRARIES)


def _format(stack: list[FrameSummary]) -> str:
    return "".join(traceback.format_list(stack)).rstrip()
