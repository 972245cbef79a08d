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
"""Where the code is that the user did not write."""
_COLLECTIVES = str(Path(sysconfig.get_path("purelib"), "torch", "distributed"))
_PREFETCH = "rayzero-prefetch"
"""The loader's thread."""
_READS = ("read_samples", "fetch_item", "transform_row", "make_sample", "_make_samples")
"""Its functions that call a dataset, or a transform."""
_IDLE = "_read_ahead"
"""The function in which it waits until it may read ahead."""
_MOST_NAMED = 8
"""Ranks in a line; more are counted."""
_frames_lock = Lock()


@dataclass(frozen=True)
class Stacks:
    """The stacks of a process's threads, and where the training thread is.

    Args:
        text: their stacks.
        place: the line of the user's code in which the training thread stays, or the dataset that
            it waits for; empty if it is in none, as in a wait for other ranks.
        activity: what the loader does there.
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
    """A line on where a thread is: the collective, or its innermost frame, and the line of the
    user's from which it was called."""
    if place:
        return f"at {place}{f', {activity}' if activity else ''}"
    if not stack:
        return "not in the training function"
    collective = next((it for it in stack if it.filename.startswith(_COLLECTIVES)), stack[-1])
    wrapped = (it for it in stack if it.filename == collective.filename and it.name != "wrapper")
    name = next(wrapped, collective).name
    caller = next(filter(_is_users, reversed(stack)), None)
    return f"in {name}" + (f", called at {_line(caller)}" if caller is not None else "")


def group_summaries(summaries: Mapping[int, str]) -> str:
    """A line for each different summary, with the ranks that have it; the fewest ranks come first:

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
    return f"rank{'s' * (len(ranks) > 1)} {shown}{more}"


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
