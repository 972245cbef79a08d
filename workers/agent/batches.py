"""A batch of what a node's workers have sent: one record for all their reports of a step.

A controller has thousands of workers. What it does for each frame costs more than what it does with
the numbers in it, so an agent combines the frames that say only that a step is finished, and that a
worker lives.
"""

from __future__ import annotations

import pickle
from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

from rayzero.workers.agent.link import Frame, FrameKind, WorkerFrame
from rayzero.workers.messages import Heartbeat, StepReport
from rayzero.workers.step_rows import StepRows, combine

_COMBINED = (FrameKind.STEPS, FrameKind.QUIET)


class NodeBatch(NamedTuple):
    """The messages of a node's workers.

    Args:
        combined: (worker, number) of each frame that the rows and the beats are from. A worker's
            come before its other frames.
        rows: the reports of steps, each with the number of its worker's frame.
        beats: (worker, number of its frame, heartbeat).
        frames: all other frames, as they came.
    """

    combined: list[tuple[int, int]]
    rows: list[tuple[StepRows, tuple[int, ...]]]
    beats: list[tuple[int, int, Heartbeat]]
    frames: list[WorkerFrame]


def make_batch(received: Iterable[tuple[int, Frame]]) -> NodeBatch:
    """Combines workers' frames; those of each worker are in order."""
    batch = NodeBatch([], [], [], [])
    others: set[int] = set()  # workers with a frame that is not combined: no later one may be
    reports: defaultdict[tuple[int, int, tuple[str, ...]], list[tuple[int, int, StepReport]]]
    reports = defaultdict(list)
    for worker, frame in received:
        if frame.kind not in _COMBINED or worker in others:
            others.add(worker)
            is_answer = frame.kind is FrameKind.ANSWER
            batch.frames.append(WorkerFrame(worker, frame.number, frame.payload, is_answer))
            continue
        batch.combined.append((worker, frame.number))
        for message in pickle.loads(frame.payload):
            if isinstance(message, Heartbeat):
                batch.beats.append((worker, frame.number, message))
            else:
                key = message.generation, message.step, tuple(message.gauges)
                reports[key].append((worker, frame.number, message))
    # One worker may be steps ahead in its messages, and each worker's steps must stay in order.
    for key in sorted(reports, key=lambda key: key[:2]):
        workers, numbers, messages = zip(*reports[key], strict=True)
        batch.rows.append((combine(workers, messages), numbers))
    return batch
