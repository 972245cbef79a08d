"""A client that reads a job's log: from its process, and from the head's disk when that is gone."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from threading import Condition
from types import TracebackType
from typing import Any

from rayzero.orchestrator.head import reach
from rayzero.orchestrator.head.log import Place, read_log

LOOK_S = 0.5
"""How often somebody who follows a log asks."""
ANSWER_S = 15.0
"""How long an answer may take."""


class Readers:
    """Counts those who are reading, so that their connection is not closed under them."""

    def __init__(self) -> None:
        self._count = 0
        self._change = Condition()

    def __enter__(self) -> None:
        with self._change:
            self._count += 1

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._change:
            self._count -= 1
            self._change.notify_all()

    def wait(self, limit_s: float) -> None:
        """Until nobody reads."""
        with self._change:
            self._change.wait_for(lambda: self._count == 0, limit_s)


def live(actor: Any, path: str, follow: bool) -> Iterator[bytes]:
    """A running job's log, from its beginning, in parts; an empty one where there is no more yet.

    Args:
        path: the log's file on the head, for the rest of it when the process is gone.
        follow: to the job's end; else what there is.

    Raises:
        AwayError, GoneError: nobody answers.
    """
    place = Place()
    try:
        while True:
            over = reach.call(actor, "spec", timeout_s=ANSWER_S) is None
            part, place = reach.call(actor, "log", place, timeout_s=ANSWER_S)
            yield part
            if not part:
                if over or not follow:
                    return
                time.sleep(LOOK_S)
    except reach.GoneError:
        yield from left(path, place)


def left(path: str, place: Place | None = None) -> Iterator[bytes]:
    """The log of a job that has ended, from the disk of this machine, or else of the head's.

    Raises:
        GoneError: the head does not answer.
    """
    here = Path(path).is_file()
    place = place or Place()
    while True:
        part, place = (
            read_log(Path(path), place) if here else reach.on_head(read_log, Path(path), place)
        )
        if not part:
            return
        yield part
