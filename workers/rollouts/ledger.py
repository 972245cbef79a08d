"""Which prompt is where: the buffer of rollouts without I/O and without a clock.

A prompt is issued with its content, and its task goes through the stages: at each it waits, is
leased to a worker, and done; lost and expired leases are leased again, and what comes late of an
old lease is refused. After the last stage it is ready, and is in the log from when the trainer
asks for more. The log is a cache: the trainer's state tells what was consumed.

Staleness. The batch of step s trains on the weights of s finished steps. Prompt number p may be
begun once p // prompts_per_batch <= published + max_version_lag; so `published`, the steps of the
newest weights that generators can have, alone paces them, and nothing is thrown away. A task that
was begun at version v is due in the batch of step v + max_version_lag at the latest. The log is in
the order of prompts, but for those that are not ready: these are passed over as long as every due
task still has its place, which is one inequality for each step d: at most
(d + 1) * prompts_per_batch - len(log) tasks that are not in the log are due by d. It holds when a
task is begun, because only so many prompts could be begun by then; and the log keeps it.
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
        prompts_per_batch: prompts of a training step; each has `group` samples.
        max_version_lag: steps that a sample's weights may be older than those it is trained on; 0:
            generators and trainer take turns.
        lease_s: for each stage, how long a task may be held without a sign.
        max_bytes: no further prompt is begun beyond it, but for the batch that is read next.
        prompts: of the whole job; None: without end.
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
    """A task that a worker works on. `content` is what the stage before made of the prompt: its
    samples; empty at the first one."""

    number: int
    attempt: int  # no two leases of a ledger have the same
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
    begun: int | None = None  # the version published when its samples were begun
    done_attempt: int = -1  # the last one that counted
    in_log: bool = False

    @property
    def nbytes(self) -> int:
        return len(self.prompt) + sum(map(len, self.content))


class RolloutLedger:
    """The prompts of one buffer. Times are seconds of any clock.

    Attributes:
        version: the newest weights that generators can have: the generation that has published
            them, and their finished steps.
    """

    def __init__(self, plan: RolloutPlan, first_attempt: int = 0) -> None:
        self.plan = plan
        self.version = 0, 0
        self._generation = -1
        self._attempts = count(first_attempt)
        self._tasks: dict[int, _Task] = {}  # all issued ones whose samples are still here
        self._waiting: list[set[int]] = [set() for _ in plan.lease_s]  # by stage
        self._leases: dict[int, TaskLease] = {}  # by attempt
        self._lost = set[int]()  # workers
        self._base = Consumed()  # stand before the log
        self._log: list[_Task] = []
        self._may_grow = False  # something has changed since no more could be appended
        self._next = 0  # no prompt below is missing
        self._nbytes = 0
        self._ready: set[int] = set()  # not in the log
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
        """The worker says which attempts of this stage it has. Its others are leased again: the
        reply with them was lost, or the tasks were dropped. Returns whether there are any."""
        known = set(held)
        return self._return(
            it
            for it in self._leases.values()
            if (it.worker, it.stage) == (worker, stage) and it.attempt not in known
        )

    def done(self, number: int, attempt: int, samples: Sequence[bytes]) -> bool:
        """Ends a lease with the group's samples. Returns False, and changes nothing, if the task
        has been leased again since; True also for what has counted already, if it is sent twice."""
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
        """A sign of life from the leases with these attempts: their limit starts again."""
        for attempt in attempts:
            if (lease := self._leases.get(attempt)) is not None:
                until_s = now_s + self.plan.lease_s[lease.stage]
                self._leases[attempt] = replace(lease, until_s=until_s)

    def lose(self, workers: Iterable[int]) -> None:
        """These workers are gone: others get their tasks, and they get none that they still wait
        for. Costs nothing for those that it knows of."""
        if new := {*workers} - self._lost:
            self._lost |= new
            self._return(it for it in self._leases.values() if it.worker in new)

    def expire(self, now_s: float) -> bool:
        """Ends the leases whose limit has passed. Returns whether there are any."""
        ended = [it for it in self._leases.values() if it.until_s <= now_s]
        self._totals.update(f"expired {lease.stage}" for lease in ended)
        return self._return(ended)

    def publish(self, generation: int, version: int) -> None:
        """Generators can have the weights of that many finished steps, and the trainer does not go
        back behind them: what was consumed before is dropped."""
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
        """The position before which the log's samples are gone."""
        return len(self._base)

    @property
    def end(self) -> int:
        return len(self._base) + len(self._log)

    def open(self, generation: int, consumed: Consumed) -> None:
        """The trainer's ranks of this generation read on from where exactly `consumed` stand
        before. A log that does not have that beginning is written anew from there: of what it had,
        all that is not consumed is used. Raises DataError for a generation that has ended."""
        if generation < self._generation:
            raise DataError(f"rollouts for generation {generation}", f"{self._generation}")
        self._generation = generation
        if not (self.start <= len(consumed) <= self.end) or self._at(len(consumed)) != consumed:
            self._begin_log(consumed)

    def wanted(self) -> list[int]:
        """The numbers of the prompts to issue, a batch ahead of what may be begun."""
        stop = self._admitted + self.plan.prompts_per_batch
        if self.plan.prompts is not None:
            stop = min(stop, self.plan.prompts)
        while self._next < stop and self._is_known(self._next):
            self._next += 1
        return [number for number in range(self._next, stop) if not self._is_known(number)]

    def issue(self, number: int, prompt: bytes) -> None:
        """The content of a prompt that is wanted; any other is ignored."""
        stop = self._admitted + self.plan.prompts_per_batch
        if self._next <= number < stop and not self._is_known(number):
            self._tasks[number] = _Task(number, prompt)
            self._waiting[0].add(number)
            self._nbytes += len(prompt)

    def read(self, start: int, stop: int) -> list[tuple[int, tuple[bytes, ...]]] | None:
        """(number, samples) of the prompts at these positions; None if too few are ready. Raises
        DataError if the samples are gone."""
        if start < self.start:
            raise DataError(f"rollouts from position {start}", f"{self.start} or later")
        self._extend_log(stop)
        if stop > self.end:
            return None
        entries = self._log[start - self.start : stop - self.start]
        return [(task.number, task.content) for task in entries]

    def consumed_at(self, position: int) -> Consumed | None:
        """The prompts before a position; None if too few are ready. Raises DataError as `read`."""
        return None if self.read(position, position) is None else self._at(position)

    def counts(self) -> RolloutCounts:
        """Counts what the buffer holds; its server knows `wait_s`, which is 0 here."""
        batch, stages = self.plan.prompts_per_batch, range(len(self.plan.lease_s))
        leased = Counter(it.stage for it in self._leases.values())
        newest = self._log[-batch:]
        first = self.end - len(newest)
        lags = [max(0, at // batch - (it.begun or 0)) for at, it in enumerate(newest, first)]
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
        """The prompts below may be begun."""
        plan = self.plan
        return (self.published + plan.max_version_lag + 1) * plan.prompts_per_batch

    def _is_known(self, number: int) -> bool:
        return number in self._tasks or number in self._base

    def _may_begin(self, number: int) -> bool:
        """Whether a prompt may be begun. Those of the next batch always may, or trainer and
        generators would wait for each other."""
        if number >= self._admitted:
            return False
        batch = self.plan.prompts_per_batch
        unfinished = len(self._leases) + sum(map(len, self._waiting[1:]))
        if unfinished + len(self._ready) < batch - self.end % batch:
            return True
        mean = self._totals["nbytes"] / max(1, self._totals["tasks"])
        return self._nbytes + (unfinished + 1) * mean <= self.plan.max_bytes

    def _return(self, leases: Iterable[TaskLease]) -> bool:
        """Ends leases without a result. Returns whether there are any."""
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
        """Appends ready tasks up to position `stop`, as many as there may be. One pass is enough:
        a task that has to give way to due ones still has to after others were appended."""
        if stop <= self.end or not self._may_grow:
            return
        lag = self.plan.max_version_lag
        begun = [it.begun for it in self._tasks.values() if not it.in_log]
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
        """Whether all that is due before `deadline` has its place if the next one is another's."""
        batch = self.plan.prompts_per_batch
        earlier = 0
        for by in range(self.end // batch, deadline):
            earlier += due[by]
            if earlier >= (by + 1) * batch - self.end:
                return False
        return True

    def _begin_log(self, consumed: Consumed) -> None:
        """An empty log behind `consumed`. A trainer that is behind the published version continues
        a state that is older: the versions since do not count any more."""
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
        self._leases = {it.attempt: it for it in self._leases.values() if it.number in self._tasks}
        for waiting in self._waiting:
            waiting.intersection_update(self._tasks)
        self._nbytes = sum(task.nbytes for task in kept)
        self._ready = {task.number for task in kept if task.stage == len(self.plan.lease_s)}
        self._may_grow = True
