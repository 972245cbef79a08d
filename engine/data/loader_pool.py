"""A rank's pool of processes that make samples."""

from __future__ import annotations

import os
import pickle
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from time import monotonic
from typing import Any

from rayzero.engine.config.sections import LoaderConfig
from rayzero.engine.data.loader_process import (
    BadSample,
    LoaderServer,
    SampleMaker,
    dump,
    loader_server,
)
from rayzero.engine.errors import DataError, named_errors

_CHECK_INTERVAL_S = 0.2
_MOST_TASKS = 16
"""Samples that one process is given at once."""


@dataclass(eq=False)
class SampleTicket:
    """Samples that are being made, at `position` and those after it. `made` has them by index."""

    position: int
    raws: Sequence[Any]
    made: dict[int, Any] = field(default_factory=dict)


@dataclass(eq=False)
class _LoaderProcess:
    number: int
    connection: Connection
    is_ready: bool = False
    since_s: float = field(default_factory=monotonic)  # time of the last message, either way
    tasks: deque[tuple[SampleTicket, int]] = field(default_factory=deque)  # the first is being made


class LoaderPool:
    """Makes samples in `config.num_workers` processes, which start with the first `submit`.

    A process is given a few samples at a time, and more only when it has answered all of them. So
    the two sides do not write at the same time, and a full socket cannot block both for good. The
    process that makes a sample does not matter: a sample has its place and its own random numbers.
    A sample is bad if it takes too long, or its process ends while making it; another process makes
    those after it.

    The lock is held for at most `_CHECK_INTERVAL_S`: the thread of a closed iteration may still
    call `take` when the thread of the next one comes. Samples that the former had begun are dropped
    when they are made.

    Args:
        maker: is pickled by cloudpickle, as the raw values are.

    Raises:
        DataError: the maker cannot be pickled.
    """

    def __init__(self, maker: SampleMaker, seed: int, config: LoaderConfig) -> None:
        self._server: LoaderServer = loader_server()
        self._maker = _dump(maker)
        self._seed = seed
        self._count = config.num_workers
        self._config = config
        self._lock = threading.Lock()
        self._queue: deque[tuple[SampleTicket, int]] = deque()
        self._processes: list[_LoaderProcess] = []
        weakref.finalize(self, _end_all, self._server, self._processes)

    def submit(self, position: int, raws: Sequence[Any]) -> SampleTicket:
        """Begins to make the samples at `position` and those after it, one of each raw value.
        Raises DataError as `take`, or if the raw values cannot be pickled."""
        ticket = SampleTicket(position, raws)
        with self._lock:
            self._queue += [(ticket, index) for index in range(len(raws))]
            self._give_tasks()
        return ticket

    def take(self, ticket: SampleTicket, check: Callable[[], None]) -> list[Any]:
        """Waits for the samples of a ticket. Returns each as the maker made it, or a BadSample.

        Args:
            check: raises if waiting is to end.

        Raises:
            DataError: a process cannot start.
        """
        while len(ticket.made) < len(ticket.raws):
            check()
            with self._lock:
                self._poll()
        return [ticket.made[index] for index in range(len(ticket.raws))]

    def drop_tasks(self) -> None:
        """Forgets the samples that were submitted, and are not begun."""
        with self._lock:
            self._queue.clear()

    def close(self) -> None:
        """Ends the processes. The next `submit` starts new ones."""
        with self._lock:
            self._queue.clear()
            _end_all(self._server, self._processes)

    def _give_tasks(self) -> None:
        while len(self._processes) < self._count:
            self._start()
        for process in self._processes:
            if process.tasks or not process.is_ready:
                continue
            share = min(_MOST_TASKS, max(1, len(self._queue) // (2 * self._count)))
            tasks = [self._queue.popleft() for _ in range(min(share, len(self._queue)))]
            if not tasks:
                return
            process.tasks.extend(tasks)
            process.since_s = monotonic()
            items = [(ticket.position + index, ticket.raws[index]) for ticket, index in tasks]
            try:  # ten times as fast as cloudpickle, for text
                message = pickle.dumps((self._seed, items), 5)
            except Exception:  # noqa: BLE001 -- of the user's classes
                message = _dump((self._seed, items))
            with suppress(ConnectionError):  # the process has ended, which the next poll sees
                process.connection.send_bytes(message)

    def _start(self) -> None:
        try:
            process = _LoaderProcess(*self._server.fork())
            self._processes.append(process)
            process.connection.send_bytes(self._maker)
        except OSError as error:
            raise self._server_error() from error

    def _poll(self) -> None:
        """Receives answers, replaces processes that take too long, and gives new tasks. A process
        whose answer only was not received yet does not take too long."""
        self._give_tasks()
        busy = {
            process.connection: process
            for process in self._processes
            if process.tasks or not process.is_ready
        }
        for connection in wait(list(busy), _CHECK_INTERVAL_S):
            self._receive(busy.pop(connection))  # type: ignore[call-overload]
        for process in busy.values():
            config = self._config
            limit_s = config.sample_timeout_s if process.is_ready else config.start_timeout_s
            if monotonic() - process.since_s > limit_s:
                self._replace(process, f"it was not done within {limit_s:g} s")
        self._give_tasks()

    def _receive(self, process: _LoaderProcess) -> None:
        try:
            answer = process.connection.recv_bytes()
        except (EOFError, OSError):
            self._replace(process, "")
            return
        try:
            made = pickle.loads(answer)
        except Exception as error:  # noqa: BLE001 -- of the user's class: raised or counted
            made = BadSample(f"it cannot be unpickled: {error}", error)
        process.since_s = monotonic()
        if process.is_ready:
            ticket, index = process.tasks.popleft()
            ticket.made[index] = made
        elif isinstance(made, BadSample):
            raise DataError(
                f"the training data cannot be loaded in a process of the loader: {made.reason}",
                fix="correct the dataset or transform, or set rayzero.loader.num_workers to 0",
            ) from made.cause
        process.is_ready = True

    def _replace(self, process: _LoaderProcess, reason: str) -> None:
        """Ends a process that takes too long or has ended; the next poll starts another one."""
        try:
            status = os.waitstatus_to_exitcode(self._server.end(process.number))
        except OSError as error:
            raise self._server_error() from error
        process.connection.close()
        self._processes.remove(process)
        reason = reason or f"its process has ended with status {status}"
        if not process.is_ready:
            raise DataError(
                f"a process of the loader did not start: {reason}",
                fix="see its output; a smaller rayzero.loader.num_workers needs less memory; "
                "rayzero.loader.start_timeout_s limits the time",
            )
        if process.tasks:
            ticket, index = process.tasks.popleft()
            ticket.made[index] = BadSample(reason)
        self._queue.extendleft(reversed(process.tasks))

    def _server_error(self) -> DataError:
        return DataError(
            f"the server of the loader's processes (pid {self._server.pid}) has ended",
            fix="find what has killed it, such as a lack of memory",
        )


def _dump(value: Any) -> bytes:
    with named_errors(
        lambda: "the training data cannot be sent to the loader's processes",
        "what cloudpickle can pickle, such as a dataset that opens its files when used",
        "correct the dataset or transform, or set rayzero.loader.num_workers to 0",
    ):
        return dump(value)


def _end_all(server: LoaderServer, processes: list[_LoaderProcess]) -> None:
    while processes:
        process = processes.pop()
        with suppress(OSError):  # the server has ended, and all of its processes with it
            server.end(process.number)
        process.connection.close()
