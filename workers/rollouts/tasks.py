"""The generators' side of rollouts: the tasks that a worker takes and completes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any
from weakref import WeakSet

from rayzero.engine.errors import EngineError
from rayzero.workers.rollouts.address import BufferAddress
from rayzero.workers.rollouts.buffer_client import POLL_S, RolloutClient, decode, encode


class Task:
    """Prompts that this worker has taken, until it calls `done`. If the worker is lost, or holds
    the task longer than its role's limit, another worker gets the prompts.

    Attributes:
        prompts: the prompts.
        samples: the samples of the previous stage, a group for each prompt, in the order of the
            prompts; empty at the first stage.
        attempts: the attempt numbers of the leases of its prompts.
    """

    def __init__(
        self, tasks: Tasks, leases: list[tuple[int, int]], contents: Sequence[bytes]
    ) -> None:
        self._tasks = tasks
        self._leases = leases
        self._is_done = False
        self.attempts = [attempt for _, attempt in leases]
        size = len(contents) // len(leases)
        self.prompts = [decode(prompt) for prompt in contents[::size]]
        samples = [content for place, content in enumerate(contents) if place % size]
        self.samples = [decode(sample) for sample in samples]

    def done(self, results: Sequence[Any]) -> bool:
        """Ends the task with its samples.

        Args:
            results: at the first stage, a list or tuple of the group's samples for each prompt; at
                later stages, a result for each of `samples`. Values must be picklable; tensors
                arrive in host memory.

        Returns:
            Whether all results count: False if another worker has got a prompt meanwhile.

        Raises:
            EngineError: there are too few or too many results, or `done` was called before.
        """
        if self._is_done:
            raise EngineError("task.done() was called twice", "once for each task")
        contents = [encode(sample) for sample in self._flatten(results)]
        counted = self._tasks.finish(self, self._leases, contents)
        self._is_done = True
        return counted

    def extend(self) -> None:
        """Restarts the task's time limit: a sign of life of a task that takes long."""
        self._tasks.extend(self.attempts)

    def _flatten(self, results: Sequence[Any]) -> list[Any]:
        group = self._tasks.group
        if self.samples and len(results) == len(self.samples):
            return list(results)
        sizes = [len(result) if isinstance(result, list | tuple) else 1 for result in results]
        are_groups = not self.samples and all(
            isinstance(result, list | tuple) for result in results
        )
        if are_groups and sizes == [group] * len(self.prompts):
            return [sample for samples in results for sample in samples]
        raise EngineError(
            f"task.done() was called with {len(results)} results, of {sizes} samples",
            allowed=f"a result for each of the {len(self.samples)} task.samples"
            if self.samples
            else f"a list of {group} samples for each of the {len(self.prompts)} task.prompts",
            fix="pass all samples of the task, or set `group` of the rollouts",
        )


class Tasks:
    """An endless iterator over tasks. Iterated by one thread; any other threads may call
    `Task.done` and `Task.extend`, one at a time.

    Attributes:
        version: generation and finished steps of the newest weights that generators could have
            when a task was last requested.

    Args:
        find: returns the current buffer's address; None if there is no buffer at the moment.
        worker: this worker's index, by which the controller reports it lost.
        stage: the role's place in the chain of roles, from 0.
        group: samples of each prompt.
        timeout_s: as for `RolloutClient`.
        check: called while waiting, and with each take, done and extend: a sign of life. Raises
            when the worker is to stop.
        prompts: the most prompts of a task.
    """

    def __init__(
        self,
        find: Callable[[], BufferAddress | None],
        worker: int,
        stage: int,
        group: int,
        timeout_s: float,
        check: Callable[[], None],
        prompts: int = 1,
    ) -> None:
        if prompts < 1:
            raise EngineError(f"tasks of {prompts} prompts", "1 or more", "ctx.tasks(prompts=...)")
        self.group = group
        self.version = 0, 0
        self._worker = worker
        self._stage = stage
        self._prompts = prompts
        self._check = check
        self._takes = RolloutClient(find, timeout_s)
        self._results = RolloutClient(find, timeout_s)  # a second one, used while a take waits
        self._held: WeakSet[Task] = WeakSet()  # tasks that the function drops are leased again

    def __iter__(self) -> Iterator[Task]:
        return self

    def __next__(self) -> Task:
        """Waits for a task. Raises what `check` raises; DataError if no buffer answers."""
        while True:
            held = [attempt for task in list(self._held) for attempt in task.attempts]
            values, contents = self._takes.call(
                "take",
                self._stage,
                self._worker,
                self._prompts,
                held,
                POLL_S,
                limit_s=POLL_S,
                check=self._check,
            )
            generation, step = values["version"]
            self.version = generation, step
            leases = [(number, attempt) for number, attempt in values["leases"]]
            if leases:
                task = Task(self, leases, contents)
                self._held.add(task)
                return task

    def finish(self, task: Task, leases: list[tuple[int, int]], contents: list[bytes]) -> bool:
        """See `Task.done`."""
        values, _ = self._results.call("done", leases, contents=contents, check=self._check)
        self._held.discard(task)
        return all(values["counted"])

    def extend(self, attempts: list[int]) -> None:
        """See `Task.extend`."""
        self._results.call("extend", attempts, check=self._check)

    def close(self) -> None:
        """Closes its connections. Idempotent."""
        self._takes.close()
        self._results.close()
