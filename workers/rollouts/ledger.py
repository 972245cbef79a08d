"""The state of each prompt: the buffer of rollouts without I/O and without a clock.

A prompt is issued with its content, and its task goes through the stages. At each stage the task
waits, is leased to a worker, and is done. A task whose lease was lost or has expired is leased
again, and late results of the old lease are refused. After the last stage the task is ready; it is
appended to the log when the trainer asks for more. The log is a cache: the trainer's state tells
which prompts were consumed.

Staleness. The batch of step s trains on the weights of s finished steps. Prompt number p may be
begun once p // prompts_per_batch <= published + max_version_lag, where `published` is the step of
the newest weights that generators can have. That alone paces the generators, and no sample is
discarded. A task that was begun at version v is due in the batch of step v + max_version_lag at the
latest. The log is in the order of prompts, except that prompts that are not ready are passed over
as long as every due task still has its place. That is one inequality for each step d: at most
(d + 1) * prompts_per_batch - len(log) tasks that are not in the log are due by d. The inequalities
hold when a task is begun, because no more prompts could be begun by then; the log preserves them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from heapq import nsmallest
from itertools import count

from rayzero.engine.data.consumed import Consumed
from rayzero.engine.errors import ConfigError, DataError
from rayzero.workers.rollouts.counts import RolloutCounts


@dataclass(frozen=True)
class RolloutPlan:
    """The sizes and limits of a job's rollouts.

    Args:
        prompts_per_batch: prompts of a training step.
        group: samples of each prompt.
        max_version_lag: by how many steps the weights that make a sample may be older than the
            weights trained on it; 0: generators and trainer take turns.
        lease_s: for each stage, how long a worker may hold a task without extending it.
        max_bytes: size of the buffer beyond which no prompt is begun, except for those of the batch
            that is read next.
        prompts: number of prompts of the whole job; None: endless.
    """

    prompts_per_batch: int
    group: int
    max_version_lag: int = 1
    lease_s: tuple[float, ...] = (600.0,)
    max_bytes: int = 2**30
    prompts: int | None = None

    def __post_init__(self) -> None:
        sizes = (self.prompts_per_batch, self.group, self.max_version_lag + 1, len(self.lease_s))
        if min(sizes) < 1 or min(self.lease_s) <= 0:
            raise ConfigError(
                f"{self}",
                "prompts_per_batch and group 1 or more, max_version_lag 0 or more, lease_s above 0",
            )


@dataclass(frozen=True)
class TaskLease:
    """A task that a worker holds. `content` has the prompt's samples, as the previous stage made
    them; it is empty at the first stage."""

    number: int
    attempt: int  # unique among the leases of a ledger
    worker: int
    stage: int
    until_s: float
    prompt: bytes
    content: tuple[bytes, ...]


@dataclass
class _Task:
    number: int
    prompt: bytes
    stage: int = 0
    content: tuple[bytes, ...] = ()
    begun: int | None = None  # the version that was published when its samples were begun
    done_attempt: int = -1  # the last attempt that counted
    in_log: bool = False

    @property
    def nbytes(self) -> int:
        return len(self.prompt) + sum(map(len, self.content))


class RolloutLedger:
    """The prompts of one buffer. Times are seconds of any clock.

    Attributes:
        version: the newest weights that generators can have: the generation that published them,
            and the number of their finished steps.
    """

    def __init__(self, plan: RolloutPlan, first_attempt: int = 0) -> None:
        self.plan = plan
        self.version = 0, 0
        self._generation = -1
        self._attempts = count(first_attempt)
        self._tasks: dict[int, _Task] = {}  # all issued tasks that were not dropped, by number
        self._waiting: list[set[int]] = [set() for _ in plan.lease_s]  # by stage
        self._leases: dict[int, TaskLease] = {}  # by attempt
        self._lost = set[int]()  # workers
        self._base = Consumed()  # the prompts before the log
        self._log: list[_Task] = []
        self._may_grow = False  # whether more tasks may fit since the log was last extended
        self._next = 0  # all prompts below this number are known
        self._nbytes = 0
        self._ready: set[int] = set()  # numbers of ready tasks that are not in the log
        self._totals = Counter[str]()  # tasks that became ready, their bytes; expired leases

    @property
    def published(self) -> int:
        """Finished steps of the newest weights that generators can have."""
        return self.version[1]

    # The generators' side

    def take(self, stage: int, worker: int, count: int, now_s: float) -> list[TaskLease]:
        """Leases up to `count` tasks, the oldest first."""
        leases: list[TaskLease] = []
        if worker in self._lost:
            return leases
        for number in nsmallest(count, self._waiting[stage]):
            task = self._tasks[number]
            if stage == 0:
                if not self._may_begin(number):
                    break
                task.begun = self.published
            until_s = now_s + self.plan.lease_s[stage]
            lease = TaskLease(
                number, next(self._attempts), worker, stage, until_s, task.prompt, task.content
            )
            self._waiting[stage].remove(number)
            self._leases[lease.attempt] = lease
            leases.append(lease)
        return leases

    def keep(self, stage: int, worker: int, held: Iterable[int]) -> bool:
        """Keeps the leases of a worker at this stage whose attempts it holds, and ends its others:
        the reply with them was lost, or the worker dropped the tasks. Returns whether any ended."""
        known = set(held)
        return self._return(
            lease
            for lease in self._leases.values()
            if (lease.worker, lease.stage) == (worker, stage) and lease.attempt not in known
        )

    def done(self, number: int, attempt: int, samples: Sequence[bytes]) -> bool:
        """Ends a lease with the group's samples. Returns whether they count. If the task has been
        leased again since, returns False and changes nothing. A repeated call returns True."""
        if len(samples) != self.plan.group:
            raise DataError(f"{len(samples)} samples of prompt {number}", f"{self.plan.group}")
        task = self._tasks.get(number)
        if task is None or self._leases.pop(attempt, None) is None:
            return task is not None and task.done_attempt == attempt
        self._nbytes -= task.nbytes
        task.content = tuple(samples)
        self._nbytes += task.nbytes
        task.stage += 1
        task.done_attempt = attempt
        if task.stage < len(self.plan.lease_s):
            self._waiting[task.stage].add(number)
            return True
        self._ready.add(number)
        self._totals.update(tasks=1, nbytes=task.nbytes)
        self._may_grow = True
        return True

    def extend(self, attempts: Iterable[int], now_s: float) -> None:
        """Restarts the time limit of the leases with these attempts."""
        for attempt in attempts:
            lease = self._leases.get(attempt)
            if lease is not None:
                until_s = now_s + self.plan.lease_s[lease.stage]
                self._leases[attempt] = replace(lease, until_s=until_s)

    def lose(self, workers: Iterable[int]) -> None:
        """Ends the leases of lost workers, which get no more tasks. Ignores those known before."""
        newly_lost = {*workers} - self._lost
        if newly_lost:
            self._lost |= newly_lost
            self._return(lease for lease in self._leases.values() if lease.worker in newly_lost)

    def expire(self, now_s: float) -> bool:
        """Ends the leases whose time limit has passed. Returns whether there are any."""
        expired = [lease for lease in self._leases.values() if lease.until_s <= now_s]
        self._totals.update(f"expired {lease.stage}" for lease in expired)
        return self._return(expired)

    def publish(self, generation: int, version: int) -> None:
        """Notes that generators can have the weights of `version` finished steps. Drops the samples
        consumed by these steps, because the trainer does not go back further."""
        if generation < self._generation:
            return
        self.version = generation, max(self.published, version)
        drop = min(version * self.plan.prompts_per_batch, self.end) - self.start
        if drop > 0:
            self._base = self._base.add(task.number for task in self._log[:drop])
            for task in self._log[:drop]:
                self._nbytes -= self._tasks.pop(task.number).nbytes
            del self._log[:drop]

    # The trainer's side. Positions are in prompts.

    @property
    def start(self) -> int:
        """The log's first position: the samples before it were dropped."""
        return len(self._base)

    @property
    def end(self) -> int:
        return len(self._base) + len(self._log)

    def open(self, generation: int, consumed: Consumed) -> None:
        """Begins a generation, whose ranks read from the position before which the log has exactly
        the prompts `consumed`. If the log has other prompts there, it is written again from that
        position, with all of its samples that are not consumed. Raises DataError for a generation
        that has ended."""
        if generation < self._generation:
            raise DataError(f"rollouts for generation {generation}", f"{self._generation}")
        self._generation = generation
        if not (self.start <= len(consumed) <= self.end) or self._at(len(consumed)) != consumed:
            self._begin_log(consumed)

    def wanted(self) -> list[int]:
        """Returns the numbers of the prompts to issue, a batch ahead of those that may be begun."""
        stop = self._admitted + self.plan.prompts_per_batch
        if self.plan.prompts is not None:
            stop = min(stop, self.plan.prompts)
        while self._next < stop and self._is_known(self._next):
            self._next += 1
        return [number for number in range(self._next, stop) if not self._is_known(number)]

    def issue(self, number: int, prompt: bytes) -> None:
        """Adds a prompt with its content, if the prompt is wanted."""
        stop = self._admitted + self.plan.prompts_per_batch
        if self._next <= number < stop and not self._is_known(number):
            self._tasks[number] = _Task(number, prompt)
            self._waiting[0].add(number)
            self._nbytes += len(prompt)

    def read(self, start: int, stop: int) -> list[tuple[int, tuple[bytes, ...]]] | None:
        """Returns (number, samples) of the prompts at these positions; None if too few are ready.
        Raises DataError if the samples were dropped."""
        if start < self.start:
            raise DataError(f"rollouts from position {start}", f"{self.start} or later")
        self._extend_log(stop)
        if stop > self.end:
            return None
        entries = self._log[start - self.start : stop - self.start]
        return [(task.number, task.content) for task in entries]

    def consumed_at(self, position: int) -> Consumed | None:
        """Returns the prompts before a position; None if too few are ready. Raises as `read`."""
        return None if self.read(position, position) is None else self._at(position)

    def counts(self) -> RolloutCounts:
        """Returns the counts of the buffer. `wait_s` is 0 here: the server measures it."""
        batch, stages = self.plan.prompts_per_batch, range(len(self.plan.lease_s))
        leased = Counter(lease.stage for lease in self._leases.values())
        newest = self._log[-batch:]
        positions = range(self.end - len(newest), self.end)
        lags = [
            max(0, position // batch - (task.begun or 0))
            for position, task in zip(positions, newest, strict=True)
        ]
        return RolloutCounts(
            waiting=tuple(map(len, self._waiting)),
            leased=tuple(leased[stage] for stage in stages),
            ready=len(self._ready),
            read=self.end,
            published=self.published,
            nbytes=self._nbytes,
            max_bytes=self.plan.max_bytes,
            max_version_lag=self.plan.max_version_lag,
            lag_mean=sum(lags) / len(lags) if lags else None,
            lag_max=max(lags, default=None),
            expired=tuple(self._totals[f"expired {stage}"] for stage in stages),
            wait_s=(0.0,) * len(stages),
        )

    @property
    def _admitted(self) -> int:
        """The prompt number below which prompts may be begun."""
        plan = self.plan
        return (self.published + plan.max_version_lag + 1) * plan.prompts_per_batch

    def _is_known(self, number: int) -> bool:
        return number in self._tasks or number in self._base

    def _may_begin(self, number: int) -> bool:
        """Returns whether a prompt may be begun. `max_bytes` does not hold back the next batch:
        otherwise trainer and generators would wait for each other."""
        if number >= self._admitted:
            return False
        batch = self.plan.prompts_per_batch
        unfinished = len(self._leases) + sum(map(len, self._waiting[1:]))
        if unfinished + len(self._ready) < batch - self.end % batch:
            return True
        mean = self._totals["nbytes"] / max(1, self._totals["tasks"])
        return self._nbytes + (unfinished + 1) * mean <= self.plan.max_bytes

    def _return(self, leases: Iterable[TaskLease]) -> bool:
        """Ends leases without a result: their tasks wait again. Returns whether there are any."""
        ended = list(leases)
        for lease in ended:
            del self._leases[lease.attempt]
            self._waiting[lease.stage].add(lease.number)
            if lease.stage == 0:
                self._tasks[lease.number].begun = None
                self._may_grow = True
        return bool(ended)

    def _at(self, position: int) -> Consumed:
        return self._base.add(task.number for task in self._log[: position - self.start])

    def _extend_log(self, stop: int) -> None:
        """Appends as many ready tasks as it may, up to position `stop`. One pass is enough: a task
        that has to give way to due tasks still has to after other tasks were appended."""
        if stop <= self.end or not self._may_grow:
            return
        lag = self.plan.max_version_lag
        begun = [task.begun for task in self._tasks.values() if not task.in_log]
        due = Counter(version + lag for version in begun if version is not None)
        for number in sorted(self._ready):
            task = self._tasks[number]
            deadline = (task.begun or 0) + lag
            if self.end < stop and self._leaves_room(due, deadline):
                due[deadline] -= 1
                task.in_log = True
                self._log.append(task)
                self._ready.remove(number)
        self._may_grow = self.end >= stop

    def _leaves_room(self, due: Counter[int], deadline: int) -> bool:
        """Returns whether all tasks that are due before `deadline` still have their places if the
        log's next position goes to a task that is due then."""
        batch = self.plan.prompts_per_batch
        earlier = 0
        for step in range(self.end // batch, deadline):
            earlier += due[step]
            if earlier >= (step + 1) * batch - self.end:
                return False
        return True

    def _begin_log(self, consumed: Consumed) -> None:
        """Begins an empty log after `consumed`. If the trainer is behind the published version, it
        has gone back to an older state: the later versions do not count any more."""
        self._log = []
        self._base = consumed
        self._next = consumed.frontier
        steps = len(consumed) // self.plan.prompts_per_batch
        self.version = self.version[0], min(self.published, steps)
        kept = [
            task
            for task in self._tasks.values()
            if task.number not in consumed and task.number < self._admitted
        ]
        for task in kept:
            task.in_log = False
        self._tasks = {task.number: task for task in kept}
        leases = self._leases.values()
        self._leases = {lease.attempt: lease for lease in leases if lease.number in self._tasks}
        for waiting in self._waiting:
            waiting.intersection_update(self._tasks)
        self._nbytes = sum(task.nbytes for task in kept)
        self._ready = {task.number for task in kept if task.stage == len(self.plan.lease_s)}
        self._may_grow = True
