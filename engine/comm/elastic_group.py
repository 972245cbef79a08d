"""A worker's `dist.group.WORLD`, which stays the same object when the job's ranks change.

Each generation of ranks has a process group of its own, whose end a training function must not
see. So the default group is an `ElasticGroup`, registered as a backend of torch. It passes
collectives on to the group of the present generation, as torchft's process groups do.

Two kinds of calls complete on this rank alone (`local_completion`), instead of failing in the
caller's code: calls in a broken group, and calls of a new rank before its first step, where its
peers wait for it. `CallHost.requires_peers` makes exceptions. The new rank's calls return what the
same calls returned on the first ranks, as far as that is known.

The engine uses the generation's group directly (`process_group.connect_backend`).
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Thread
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from rayzero.engine.comm.local_completion import complete_locally, output_tensors
from rayzero.engine.errors import CollectiveError
from rayzero.engine.torch_private import (
    HashStore,
    Store,
    Work,
    abort_groups,
    default_group,
    describe_group,
    groups_newest_first,
    use_store_for_groups,
)

log = logging.getLogger("rayzero.engine")

END_LIMIT_S = 10.0
"""How long a new group waits until the previous group's threads have ended."""
_BACKEND = "rayzero"
_OBJECT_FUNCTIONS = ("broadcast_object_list", "scatter_object_list")
"""torch's functions that use received values as lengths, so that these must not be undefined."""


def _passed_on(name: str) -> Any:
    """Returns a method that passes a call of `ProcessGroup`'s method `name` on."""

    def call(self: ElasticGroup, *args: Any, **options: Any) -> Any:
        return self._call(name, args, options)

    return call


class CallHost:
    """Decides about the collectives that a training function calls itself. This class is used while
    no function runs: collectives always have peers, and failures are raised."""

    def local_reason(self) -> str:
        """Returns the reason why collectives complete on this rank alone. Empty if they do not."""
        return ""

    def replays(self, name: str, outputs: Sequence[Tensor]) -> bool:
        """Fills `outputs` with what the call returned on the first ranks. Returns whether it did,
        which is not the case if that is unknown."""
        return False

    def repeats(self) -> bool:
        """Returns whether calls on all ranks get what they have returned before, where `replays`
        knows that, instead of being made again."""
        return False

    def records(self) -> bool:
        """Returns whether results are recorded. Every collective then waits where it is called."""
        return False

    def record(self, name: str, outputs: Sequence[Tensor]) -> None:
        """Called when a collective that is to be recorded has completed with these outputs."""

    def requires_peers(self, outputs: Sequence[Tensor]) -> bool:
        """Returns whether a call with these outputs raises CollectiveError where it has no peers,
        instead of completing on this rank alone."""
        return False

    def makes_group(self) -> None:
        """Called before the function makes a group of its own."""

    def outlives(self, error: Exception) -> bool:
        """Returns whether the function continues although a collective has failed."""
        return False


class FinishedCall(Work):
    """The torch work of a collective that has completed."""

    def __init__(self) -> None:
        super().__init__()
        self._future: torch.futures.Future[None] = torch.futures.Future()
        self._future.set_result(None)

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def get_future(self) -> torch.futures.Future[None]:
        return self._future


class PassedCall(Work):
    """The torch work of a collective of the generation's group. If that fails and the function
    outlives the failure, `wait` calls `complete`, which writes the outputs, instead of raising."""

    def __init__(self, work: Work, complete: Callable[[], Work], host: CallHost) -> None:
        super().__init__()
        self._work = work
        self._complete = complete
        self._host = host

    def wait(self, *timeout: Any) -> bool:
        try:
            return self._work.wait(*timeout)
        except RuntimeError as error:
            if not self._host.outlives(error):
                raise
            self._complete()
            return True

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def get_future(self) -> Any:
        return self._work.get_future()


@dataclass(frozen=True, eq=False)
class GroupPlace:
    """This process's place in the group of one generation."""

    rank: int
    world_size: int
    device: torch.device
    backend: str


class ElasticGroup(dist.ProcessGroup):
    """The default process group of a worker, which passes calls on to the generation's group.

    The training thread calls `plan` and `form_group`, any thread the other methods.

    Attributes:
        place: this process's place in the present generation. None before the first generation,
            when this is the only rank.
        host: the `CallHost` of the running training function.
    """

    def __init__(self) -> None:
        super().__init__(0, 1)  # type: ignore[call-arg]  # torch declares one of two forms
        self.place: GroupPlace | None = None
        self.host = CallHost()
        self._group: dist.ProcessGroup | None = None  # the present generation's group
        self._ending: Thread | None = None  # ends the previous group
        self._is_forming = False
        self._begin: Callable[[], None] | None = None
        self._warned: GroupPlace | None = None

    def plan(self, place: GroupPlace, begin: Callable[[], None] | None = None) -> None:
        """Sets this process's place in a new generation, whose group does not exist yet.

        Args:
            begin: waits until the generation begins, and forms its group. Called by the training
                thread when the group is first needed.
        """
        self.place = place
        self._begin = begin
        describe_group(self, place.backend, place.world_size)

    def form_group(self, store: Store, **options: Any) -> dist.ProcessGroup:
        """Makes the group of all ranks of the present generation.

        Args:
            store: the generation's store, used also by groups that the function makes.
            options: options of `torch.distributed.new_group`.
        """
        if self._ending is not None:
            self._ending.join(END_LIMIT_S)
        use_store_for_groups(self, store)
        self._is_forming = True
        try:
            group: dist.ProcessGroup = dist.new_group(list(range(self.size())), **options)
        finally:
            self._is_forming = False
        self._group = group
        return group

    def get_group(self) -> dist.ProcessGroup:
        """Returns the generation's group, and forms it if that was not done yet. Raises DistError
        if it was aborted."""
        if self._begin is not None:
            self._begin()
        if (group := self._group) is None:
            raise dist.DistError("the process group was aborted")
        return group

    def abort_groups(self) -> None:
        """Aborts the generation's group and its subgroups, without waiting for peers. torch forgets
        the groups even if aborting fails."""
        try:
            abort_groups(groups_newest_first())
        finally:
            self._drop_group()

    def _drop_group(self) -> None:
        """Drops the last reference to the group in a thread of its own, because its destructor
        waits for gloo's threads (up to 10 ms), or NCCL's. The next group is formed after that."""
        if self._group is not None:
            last_reference = [self._group]
            self._group = None
            self._ending = Thread(target=last_reference.clear, name="rayzero-group-end")
            self._ending.start()

    # Attributes that torch reads

    def rank(self) -> int:
        return self.place.rank if self.place is not None else 0

    def size(self) -> int:
        return self.place.world_size if self.place is not None else 1

    getRank, getSize = rank, size  # noqa: N815  for callers in C++

    def getBackendName(self) -> str:  # noqa: N802
        return _BACKEND  # for "gloo" or "nccl", torch's C++ would expect that backend's class

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(self.place.device.type if self.place is not None else "cpu")]

    @property
    def bound_device_id(self) -> torch.device | None:
        """None, so that groups that are made of this one connect at their first collective.

        `new_group` reads this attribute first, and then needs the generation's store, so the group
        is formed here. Raises CollectiveError if the peers will not make the same group.
        """
        if self._is_forming or self.place is None or not _is_read_by_new_group():
            return None
        if reason := self.host.local_reason():
            raise CollectiveError(f"torch.distributed.new_group, while {reason}")
        self.host.makes_group()
        self.get_group()
        return None

    @bound_device_id.setter
    def bound_device_id(self, device: torch.device | None) -> None:
        return

    def _get_backend(self, device: torch.device) -> Any:
        if self._is_forming:
            raise RuntimeError("the process group is being made")
        return self.get_group()._get_backend(device)

    def _start_coalescing(self, device: torch.device) -> None:
        if not self._is_local():
            self.get_group()._start_coalescing(device)

    def _end_coalescing(self, device: torch.device) -> Work:
        return FinishedCall() if self._is_local() else self.get_group()._end_coalescing(device)

    def abort(self) -> None:
        """Does nothing. `abort_groups` aborts the generation's group, while this object stays."""

    shutdown = abort

    # Collectives

    allreduce = _passed_on("allreduce")
    allreduce_coalesced = _passed_on("allreduce_coalesced")
    reduce = _passed_on("reduce")
    broadcast = _passed_on("broadcast")
    allgather = _passed_on("allgather")
    all_gather_single = _passed_on("all_gather_single")
    all_gather_single_coalesced = _passed_on("all_gather_single_coalesced")
    gather = _passed_on("gather")
    scatter = _passed_on("scatter")
    reduce_scatter = _passed_on("reduce_scatter")
    reduce_scatter_single = _passed_on("reduce_scatter_single")
    reduce_scatter_single_coalesced = _passed_on("reduce_scatter_single_coalesced")
    alltoall = _passed_on("alltoall")
    all_to_all_single = _passed_on("all_to_all_single")
    barrier = _passed_on("barrier")
    send = _passed_on("send")
    recv = _passed_on("recv")
    recv_anysource = _passed_on("recv_anysource")
    # Names until torch 2.12, and for callers in C++.
    _allgather_base = _passed_on("_allgather_base")
    allgather_into_tensor_coalesced = _passed_on("allgather_into_tensor_coalesced")
    _reduce_scatter_base = _passed_on("_reduce_scatter_base")
    reduce_scatter_tensor_coalesced = _passed_on("reduce_scatter_tensor_coalesced")
    alltoall_base = _passed_on("alltoall_base")

    def _call(self, name: str, args: tuple[Any, ...], options: dict[str, Any]) -> Work:
        host, outputs = self.host, output_tensors(name, args)
        if self._is_local():
            return self._complete(name, args, outputs)
        if host.repeats() and host.replays(name, outputs):
            return FinishedCall()
        try:
            work = getattr(self.get_group(), name)(*args, **options)
            if not host.records():
                return PassedCall(work, lambda: self._complete(name, args, outputs), host)
            work.wait()
        except (RuntimeError, ValueError) as error:
            if not host.outlives(error):
                raise
            return self._complete(name, args, outputs)
        host.record(name, outputs)
        return FinishedCall()

    def _is_local(self) -> bool:
        return self.place is None or bool(self.host.local_reason())

    def _complete(self, name: str, args: tuple[Any, ...], outputs: list[Tensor]) -> Work:
        """Completes the call on this rank alone. Raises CollectiveError if it would receive an
        object of another rank, and the object is not known."""
        if self.host.replays(name, outputs):
            return FinishedCall()
        reason = self.host.local_reason()
        if self.host.requires_peers(outputs):
            raise CollectiveError(f"{name} needs all ranks, while {reason}")
        source = getattr(args[1], "rootRank", None) if len(args) > 1 else None
        if reason and source not in (None, self.rank()) and _is_called_for_objects():
            raise CollectiveError(
                f"an object of another rank was awaited, while {reason}",
                allowed="torch.distributed's collectives of tensors, which complete there on this "
                "rank alone",
            )
        if reason and self._warned is not self.place:
            self._warned = self.place
            log.warning("%s completed on rank %d alone, while %s", name, self.rank(), reason)
        complete_locally(name, args, self.rank(), self.size())
        return FinishedCall()


def elastic_group() -> ElasticGroup | None:
    """Returns this process's default group if it is an `ElasticGroup`, as in a worker, or None."""
    group = default_group()
    return group if isinstance(group, ElasticGroup) else None


def make_elastic_group() -> ElasticGroup:
    """Returns this process's `ElasticGroup`. Makes it, with this rank alone, if there is none."""
    if (existing := elastic_group()) is not None:
        return existing
    if not hasattr(dist.Backend, _BACKEND.upper()):
        devices = ["cpu", "cuda"]
        dist.Backend.register_backend(_BACKEND, lambda *_: ElasticGroup(), devices=devices)
    dist.init_process_group(_BACKEND, store=HashStore(), rank=0, world_size=1)
    return cast(ElasticGroup, dist.group.WORLD)


@contextmanager
def calls_of(host: CallHost) -> Iterator[None]:
    """Encloses the run of a training function. `host` decides about its collectives."""
    group = make_elastic_group()
    group.host = host
    try:
        yield
    finally:
        group.host = CallHost()


def _is_read_by_new_group() -> bool:
    return sys._getframe(2).f_code.co_name == "_new_group_with_tag"


def _is_called_for_objects() -> bool:
    """Returns whether one of `_OBJECT_FUNCTIONS` called the collective."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_name not in _OBJECT_FUNCTIONS:
        module = str(frame.f_globals.get("__name__"))
        if not module.startswith(("torch.distributed.", "rayzero.engine.comm.")):
            return False
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None
