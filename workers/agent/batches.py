"""Batches of what a node's workers have sent, which their agent makes for the controller.

A controller has thousands of workers, and handling a frame costs it more than handling the numbers
in the frame. An agent therefore combines the workers' reports of the same step into one record, the
other messages about their progress into another one, and equal answers into one answer.
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
_Sent: TypeAlias = tuple[int, int, WorkerMessage]  # (worker, number of its frame, message)


class NodeBatch(NamedTuple):
    """The messages of a node's workers.

    Args:
        combined: (worker, number) of each frame that was combined into the records. These frames
            precede all other frames of the same worker.
        records: the reports of each step, other messages, and heartbeats, in this order. Each
            record comes with the numbers of the frames that its messages are from.
        frames: the frames that were not combined, as they arrived.
        answers: the payload of each answer, with the workers that gave it.
    """

    combined: list[tuple[int, int]]
    records: list[tuple[NodeRecord, tuple[int, ...]]]
    frames: list[WorkerFrame]
    answers: list[tuple[bytes, list[int]]]


def make_batch(received: Iterable[tuple[int, Frame]]) -> NodeBatch:
    """Combines (worker, frame) pairs into a batch. The frames of each worker must be in order."""
    batch = NodeBatch([], [], [], [])
    answers: defaultdict[bytes, list[int]] = defaultdict(list)
    reports: defaultdict[tuple[int, int, tuple[str, ...]], list[_Sent]] = defaultdict(list)
    changes: list[_Sent] = []
    beats: list[_Sent] = []
    changed: set[int] = set()
    # Workers with a frame that is not combined: their later frames must not be combined either.
    uncombined: set[int] = set()
    for worker, frame in received:
        if frame.kind is FrameKind.ANSWER:
            answers[frame.payload].append(worker)
            continue
        messages: list[WorkerMessage] | None = None
        if frame.kind in _COMBINED and worker not in uncombined:
            messages = pickle.loads(frame.payload)
        if messages is None or _is_step_after_change(messages, has_changed=worker in changed):
            uncombined.add(worker)
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
    # A worker's messages may be from several steps, which must stay in order.
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
    """Returns whether a worker has reported a step after a change. The records would put the step
    before the change."""
    for message in messages:
        if has_changed and isinstance(message, StepReport):
            return True
        has_changed = has_changed or not isinstance(message, Heartbeat | StepReport)
    return False
