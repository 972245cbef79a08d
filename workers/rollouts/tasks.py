"""The generators' side of rollouts: tasks, which are taken, worked on, and done."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any
from weakref import WeakSet

from rayzero.engine.errors import EngineError
from rayzero.workers.rollouts.address import BufferAddress
from rayzero.workers.rollouts.buffer_client import (
    POLL_S,
    RolloutClient,
    decode,
    encode,
)


class Task:
    """Some prompts that this worker has taken, until `done`. If that does not come, because the
    worker is lost or takes longer than its role's limit, another one gets them.

    Attributes:
        prompts: the prompts.
        samples: those of the stage before, a group for each prompt, in the order of the prompts;
            empty at the first stage.
        attempts: the numbers of its leases.
    """

    def __init__(
        self, tasks: Tasks, leases: list[tuple[int, int]], contents: Sequence[bytes]
    ) -> None:
        self._tasks = tasks
        self._leases = leases
        self._is_done = False
        self.attempts = [attempt for _, attempt in leases]
        size = len(contents) // len(leases)
        self.prompts = [decode(it) for it in contents[::size]]
        self.samples = [decode(it) for place, it in enumerate(contents) if place % size]

    def done(self, results: Sequence[Any]) -> bool:
        """Ends the task with its samples.

        Args:
            results: at the first stage, for each prompt a list or tuple of the group's samples; at
                later ones, for each of `samples` what it has become. Values that can be pickled;
                tensors arrive in host memory.

        Returns:
            Whether they count: not where another worker has got a prompt meanwhile.

        Raises:
            EngineError: there are too few or too many, or the task was done before.
        """
        if self._is_done:
            raise EngineError("task.done() was called twice", "once for each task")
        contents = [encode(sample) for sample in self._flatten(results)]
        counted = self._tasks.finish(self, self._leases, contents)
        self._is_done = True
        return counted

    def extend(self) -> None:
        """A sign of life of a task that takes long: its limit starts again."""
        self._tasks.extend(self.attempts)

    def _flatten(self, results: Sequence[Any]) -> list[Any]:
        group = self._tasks.group
        if self.samples and len(results) == len(self.samples):
            return list(results)
        sizes = [len(it) if isinstance(it, list | tuple) else 1 for it in results]
        are_groups = not self.samples and all(isinstance(it, list | tuple) for it in results)
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
    """An iterator over tasks, without end. By one thread; `Task.done` and `extend` by any others,
    one at a time.

    Attributes:
        version: generation and finished steps of the newest weights that generators could have
            when a task was last asked for.

    Args:
        find: the present buffer's address; None: there is none at the moment.
        worker: this worker's number, by which the controller reports it lost.
        stage: its place in the chain of roles, from 0.
        group: samples of a prompt.
        prompts: of a task, at most.
        timeout_s: for a buffer that answers.
        check: called while waiting, and with each take, done and extend: a sign of life. Raises
            where the worker is to stop.
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
        self._results = RolloutClient(find, timeout_s)  # while a take waits
        self._held: WeakSet[Task] = WeakSet()  # what the function has dropped is leased again

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
            if leases := [(number, attempt) for number, attempt in values["leases"]]:
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
