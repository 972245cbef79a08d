"""A batch of what a node's workers have sent: their reports of a step in one record, others in one.

A controller has thousands of workers. What it does for each frame costs more than what it does with
the numbers in it, so an agent combines the frames that say how far a worker is, and equal answers.
"""

from __future__ import annotations

import pickle
from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple, TypeAlias

from rayzero.workers.agent.link import Frame, FrameKind, WorkerFrame
from rayzero.workers.messages import Heartbeat, StepReport, WorkerMessage
from rayzero.workers.step_rows import NodeMessages, NodeRecord, combine, combine_beats

_COMBINED = (FrameKind.STEPS, FrameKind.QUIET, FrameKind.CHANGES)
_Sent: TypeAlias = tuple[int, int, WorkerMessage]  # the worker, and the number of its frame


class NodeBatch(NamedTuple):
    """The messages of a node's workers.

    Args:
        combined: (worker, number) of each frame that the records are from. A worker's come before
            its other frames.
        records: the reports of each step, other messages, and heartbeats, in this order; each
            with the numbers of its workers' frames.
        frames: all other frames, as they came.
        answers: the payload of an answer, and the workers that have given it.
    """

    combined: list[tuple[int, int]]
    records: list[tuple[NodeRecord, tuple[int, ...]]]
    frames: list[WorkerFrame]
    answers: list[tuple[bytes, list[int]]]


def make_batch(received: Iterable[tuple[int, Frame]]) -> NodeBatch:
    """Combines workers' frames; those of each worker are in order."""
    batch = NodeBatch([], [], [], [])
    answers: defaultdict[bytes, list[int]] = defaultdict(list)
    reports: defaultdict[tuple[int, int, tuple[str, ...]], list[_Sent]] = defaultdict(list)
    changes: list[_Sent] = []
    beats: list[_Sent] = []
    changed: set[int] = set()
    others: set[int] = set()  # workers with a frame that is not combined: no later one may be
    for worker, frame in received:
        if frame.kind is FrameKind.ANSWER:
            answers[frame.payload].append(worker)
            continue
        messages: list[WorkerMessage] | None = None
        if frame.kind in _COMBINED and worker not in others:
            messages = pickle.loads(frame.payload)
        if messages is None or _is_step_after_change(messages, has_changed=worker in changed):
            others.add(worker)
            batch.frames.append(WorkerFrame(worker, frame.number, frame.payload))
            continue
        batch.combined.append((worker, frame.number))
        for message in messages:
            sent = worker, frame.number, message
            if isinstance(message, StepReport):
                key = message.generation, message.step, tuple(message.gauges)
                reports[key].append(sent)
            elif isinstance(message, Heartbeat):
                beats.append(sent)
            else:
                changes.append(sent)
                changed.add(worker)
    # One worker may be steps ahead in its messages, and each worker's steps must stay in order.
    for key in sorted(reports, key=lambda key: key[:2]):
        workers, numbers, of_step = zip(*reports[key], strict=True)
        batch.records.append((combine(workers, of_step), numbers))
    for record, sent_of in ((NodeMessages, changes), (combine_beats, beats)):
        if sent_of:
            workers, numbers, messages_of = zip(*sent_of, strict=True)
            batch.records.append((record(workers, messages_of), numbers))
    batch.answers.extend(answers.items())
    return batch


def _is_step_after_change(messages: list[WorkerMessage], *, has_changed: bool) -> bool:
    """Whether a worker has reported a step after a change, which would come before it."""
    for message in messages:
        if has_changed and isinstance(message, StepReport):
            return True
        has_changed = has_changed or not isinstance(message, Heartbeat | StepReport)
    return False
