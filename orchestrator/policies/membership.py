"""The registry of workers, and the selection of the next generation's members. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from sys import intern

from rayzero.orchestrator.aio import ObservedState
from rayzero.orchestrator.errors import JobFailedError
from rayzero.orchestrator.policies.placement import CallState, FunctionCall
from rayzero.workers.messages import WorkerInfo


@dataclass(frozen=True)
class WorkerLimits:
    """How many members a generation has, and how many more workers are kept ready.

    Args:
        parts: number of indivisible parts of a step: the number of members must divide it. 0 if any
            number of members can train.
    """

    min: int
    max: int
    spares: int = 0
    parts: int = 0

    def size(self, available: int) -> int | None:
        """Returns how many of `available` workers should be members; None if more workers are to be
        waited for."""
        most = min(self.max, max(self.min, available))
        if available < self.min:
            return None
        if not self.parts:
            return most
        fitting = [n for n in range(self.min, self.max + 1) if self.parts % n == 0]
        if not fitting:
            return most  # the script's error says what it needs
        return max((n for n in fitting if n <= most), default=None)

    def least_above(self, available: int) -> int:
        """Returns how many workers there must be, if `available` are too few."""
        more = range(max(self.min, available + 1), self.max + 1)
        return next((n for n in more if self.size(n) is not None), self.min)


@dataclass(frozen=True)
class Selected:
    """The next generation.

    Args:
        members: its members, by index.
        displaced: workers that are not selected because their nodes are draining; to be replaced on
            other nodes.
        surplus: workers that are not needed any more.
    """

    members: tuple[WorkerInfo, ...]
    displaced: tuple[WorkerInfo, ...] = ()
    surplus: tuple[WorkerInfo, ...] = ()

    @cached_property
    def indices(self) -> frozenset[int]:
        return frozenset(worker.index for worker in self.members)


def select_members(
    ready: Sequence[WorkerInfo],
    limits: WorkerLimits,
    members: Collection[int] = (),
    draining_nodes: Collection[str] = (),
) -> Selected | None:
    """Selects members first, because they hold the state, then other ready workers. Workers on
    draining nodes are selected only if there are no others. Returns None if there are too few.

    Stable: with the selected workers as members, it selects the same ones again.

    Args:
        ready: by index.
        members: indices of the present members.
        draining_nodes: ids of draining nodes, and of unhealthy ones.
    """
    if limits.size(len(ready)) is None:
        return None
    if not draining_nodes and len(ready) == limits.size(len(ready)):
        return Selected(tuple(ready))  # the usual case: all of them
    draining = [worker for worker in ready if worker.node_id in draining_nodes]
    staying = [worker for worker in ready if worker.node_id not in draining_nodes]
    order = [
        *sorted(staying, key=lambda worker: worker.index not in members),
        *sorted(draining, key=lambda worker: worker.index not in members),
    ]
    size = limits.size(max(limits.min, len(staying))) or limits.size(len(ready)) or limits.min
    # Workers beyond a size that divides the step are kept, until more come.
    most = max(size, min(limits.max, len(staying)))
    return Selected(
        tuple(sorted(order[:size], key=lambda worker: worker.index)),
        displaced=tuple(order[max(size, len(staying)) :]),
        surplus=tuple(order[most + limits.spares : len(staying)]),
    )


def not_enough_error(available: int, limits: WorkerLimits, waited_s: float) -> JobFailedError:
    """Returns the error of a job that has too few workers, and got no replacements in time."""
    fitting = f", a number that divides {limits.parts} micro-batches" if limits.parts else ""
    return JobFailedError(
        f"{available} of at least {limits.least_above(available)} workers are left, and no "
        f"replacement was ready within {waited_s:g} s",
        allowed=f"{limits.min} to {limits.max} workers (workers.min, workers.max){fitting}",
        fix="workers.min or workers.start_timeout_s in the job file, or the size of the cluster",
    )


class WorkerRegistry(ObservedState):
    """Every worker the job ever had, by index.

    A worker is ready from `add` on: its process responds, and its node has a vault. It stays ready
    until it is lost or removed.
    """

    def __init__(self, limits: WorkerLimits, on_change: Callable[[], None] = lambda: None) -> None:
        super().__init__(on_change)
        self.limits = limits
        self.draining_nodes: frozenset[str] = frozenset()
        """Ids of nodes that are about to be removed."""
        self.unhealthy_nodes: frozenset[str] = frozenset()
        """Ids of nodes that failed their health check. Its only writer is NodeHealth."""
        self.head_answers = True
        """Whether the cluster's head answers. Without the head no worker can be started."""
        self.members: frozenset[int] = frozenset()
        """Indices of the newest generation's members."""
        self.calls: dict[int, FunctionCall] = {}
        """The call of each worker's training function. The dict is replaced when a function is
        called, because the selection depends on that; only `set_state` changes an entry in
        place."""
        self.awaiting_replacement: tuple[WorkerInfo, ...] = ()
        """Lost and retired workers whose reservations wait for a replacement."""
        self.awaited = 0
        """How many workers the next generation waits for now."""
        self.left_out: tuple[WorkerInfo, ...] = ()
        """Lost workers that failed as new ones, and are not replaced before the next fault or
        resize."""
        self._all: dict[int, WorkerInfo] = {}
        self._alive: dict[int, WorkerInfo] = {}
        self._ready: tuple[WorkerInfo, ...] | None = ()
        self._nodes: tuple[str, ...] | None = ()
        self._selection: tuple[tuple[object, ...], Selected | None] | None = None
        """The last selection, with the inputs it was made from."""
        self._version = 0
        """Increased by every change of the ready workers."""

    def add(self, workers: Iterable[WorkerInfo]) -> None:
        new = {worker.index: _with_shared_texts(worker) for worker in workers}
        self._all |= new
        self._alive |= new
        self._invalidate()

    def info(self, worker: int) -> WorkerInfo:
        return self._all[worker]

    def owns_process(self, worker: int, pid: int) -> bool:
        """Returns whether `pid` is of this worker's process, and not of a process of an earlier
        job."""
        return worker in self._all and self._all[worker].pid == pid

    def is_alive(self, worker: int) -> bool:
        return worker in self._alive

    @property
    def ready(self) -> tuple[WorkerInfo, ...]:
        """All ready workers, members or not, by index."""
        if self._ready is None:
            self._ready = tuple(map(self._alive.__getitem__, sorted(self._alive)))
        return self._ready

    @property
    def nodes(self) -> tuple[str, ...]:
        """The nodes of the ready workers, each once, in order of their first worker."""
        if self._nodes is None:
            self._nodes = tuple(dict.fromkeys(worker.node_id for worker in self.ready))
        return self._nodes

    @property
    def avoided_nodes(self) -> frozenset[str]:
        """The unhealthy nodes; none if there are no others."""
        unhealthy = self.unhealthy_nodes
        return unhealthy if unhealthy and not unhealthy.issuperset(self.nodes) else frozenset()

    @property
    def leaving_nodes(self) -> frozenset[str]:
        """The nodes whose workers are used only if there are no others."""
        return self.draining_nodes | self.avoided_nodes

    def mark_lost(self, *workers: int) -> None:
        """Removes workers whose processes ended; their reservations wait for replacements."""
        for worker in workers:
            self._alive.pop(worker, None)
        self._invalidate()
        self.awaiting_replacement += tuple(map(self.info, workers))

    def spent(self, *, stays: bool) -> list[int]:
        """Returns workers whose process is used up: a training function was called in it, and does
        not continue in the next generation.

        Args:
            stays: whether functions that wait in their loops continue.
        """
        called = [worker.index for worker in self.ready if worker.index in self.calls]
        if not stays:
            return called
        return [index for index in called if self.calls[index].state is CallState.RUNNING]

    def calls_of(self, workers: Iterable[int]) -> list[FunctionCall]:
        """Returns the calls of these workers' training functions, without workers that had none."""
        return [self.calls[worker] for worker in workers if worker in self.calls]

    def set_state(self, worker: int, state: CallState, *, keeps_rank: bool = False) -> None:
        """Records the state to which the call in a worker has come."""
        # Not a copy of the dict: thousands of workers do this in each repair.
        before = self.calls[worker]
        self.calls[worker] = before.come_to(state, keeps_rank=keeps_rank)
        if before.is_ahead:  # else nobody waits for it
            self._changed()

    def is_ahead(self, worker: int) -> bool:
        """Returns whether a worker's function was called before its generation."""
        call = self.calls.get(worker)
        return call is not None and call.is_ahead

    def leave_out(self, worker: int) -> None:
        """Removes a worker that is about to be ended because its function failed while it was
        new."""
        self.remove(worker)
        self.left_out += (self._all[worker],)

    def try_again(self) -> None:
        """Has the workers that were left out replaced now."""
        self.awaiting_replacement += self.left_out
        self.left_out = ()

    @property
    def present_limits(self) -> WorkerLimits:
        """The limits, without the workers that were left out."""
        least = self.limits.min - len(self.left_out)
        return replace(self.limits, min=max(1, least)) if self.left_out else self.limits

    def remove(self, worker: int) -> None:
        """Removes a worker that is about to be ended on purpose."""
        self._alive.pop(worker, None)
        self._invalidate()

    def select_members(self) -> Selected | None:
        """Returns the members of the next generation as of now; None if there are too few workers.
        Called often, and cached until an input changes."""
        limits = self.present_limits
        members = self.members
        draining = self.leaving_nodes
        inputs = (self._version, self.calls, limits, members, draining)
        if self._selection is None or self._selection[0] != inputs:
            selection = select_members(self._candidates(), limits, members, draining)
            self._selection = (inputs, selection)
        return self._selection[1]

    def _candidates(self) -> tuple[WorkerInfo, ...]:
        """Returns the ready workers. If functions were called before their generation, which has a
        certain size, workers that came later are left out, unless there are too few."""
        ahead = [worker for worker, call in self.calls.items() if call.is_ahead]
        if self._alive.keys().isdisjoint(ahead):  # the usual case
            return self.ready
        called = tuple(worker for worker in self.ready if worker.index in self.calls)
        return self.ready if self.present_limits.size(len(called)) is None else called

    def _invalidate(self) -> None:
        self._ready = self._nodes = None
        self._version += 1


def _with_shared_texts(worker: WorkerInfo) -> WorkerInfo:
    """Returns the worker with texts that the workers of a node share, because lists of workers are
    pickled."""
    return replace(
        worker, node_id=intern(worker.node_id), node=intern(worker.node), ip=intern(worker.ip)
    )
