"""Runs the controller's commands in a worker's process, each exactly once."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rayzero.engine.errors import RayzeroError
from rayzero.workers.agent.link import Obedience, WorkerCommand, unpack_call

COMMAND_THREADS = 3
"""Threads for commands that run concurrently: a stack dump must not wait for a long salvage."""


def run_call(target: Any, method: str, arguments: Sequence[Any], *head: Any) -> bytes:
    """Calls a method of `target`. Returns the pickled reply: (*head, error or None, result)."""
    result, error = None, None
    try:
        result = getattr(target, method)(*arguments)
    except Exception as raised:  # noqa: BLE001  # any error goes to the caller
        error = raised
    try:
        return pickle.dumps((*head, error, result), pickle.HIGHEST_PROTOCOL)
    except Exception as raised:  # noqa: BLE001
        text = f"{method}: {error or result!r} cannot be sent: {raised}"
        return pickle.dumps((*head, RayzeroError(text), None))


class CommandRunner:
    """Runs commands on its own threads, which end with the process. Commands that are `in_order`
    run one after another on one thread; the others run concurrently.

    Args:
        target: the object whose methods the commands call.
        answer: sends an answer; called by any of the threads.
    """

    def __init__(self, target: Any, answer: Callable[[bytes], None]) -> None:
        self._target = target
        self._answer = answer
        self._obedience = Obedience()
        self._newest = 0  # the greatest number of the obeyed controller's commands
        self._in_order = ThreadPoolExecutor(1, "rayzero-order")
        self._concurrent = ThreadPoolExecutor(COMMAND_THREADS, "rayzero-command")

    def begin(self, command: WorkerCommand) -> None:
        """Begins a command, unless it has come before, over another agent's stream, or its
        controller has been superseded. Called by one thread."""
        controller, number = command.controller, command.number
        if not self._obedience.accepts(controller):
            return
        if self._obedience.supersede(controller):
            self._newest = 0
        if number > self._newest:
            self._newest = number
            pool = self._in_order if command.in_order else self._concurrent
            pool.submit(self._run, command)

    def _run(self, command: WorkerCommand) -> None:
        if command.controller != self._obedience.obeyed:
            return  # the controller was superseded meanwhile
        method, arguments = unpack_call(command.call)
        reply = run_call(self._target, method, (*arguments, *command.own))
        self._answer(pickle.dumps((command.controller.controller, command.number, reply)))
