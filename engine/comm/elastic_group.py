"""`dist.group.WORLD` of a worker: one object, whatever ranks the job has.

Each generation of ranks has a process group of its own, and a training function must not see one
end. So the default group is an `ElasticGroup`, registered as a backend of torch, which passes
collectives on to the group of the present generation, as torchft's process groups do.

Its collectives wait for a group that is still joining. Two kinds of calls complete on this rank
alone (`local_completion`), instead of failing in the caller's code: those in a broken group, and
those of a new rank that has not come to its first step, where its peers wait for it. A new rank
first gets what the same call has returned when the function ran for the first time.

The engine uses the generation's group itself (`process_group.connect_backend`).
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore, Store, Work
from torch.distributed import distributed_c10d as c10d

from rayzero.engine.comm.function_calls import CallHost, FinishedCall, PassedCall
from rayzero.engine.comm.joining_group import JoiningGroup
from rayzero.engine.comm.local_completion import complete_locally, output_tensors
from rayzero.engine.errors import CollectiveError

log = logging.getLogger("rayzero.engine")

_BACKEND = "rayzero"
_OBJECT_FUNCTIONS = ("broadcast_object_list", "scatter_object_list")
"""torch's, which read what they have received as a length."""


def _passed_on(name: str) -> Any:
    """The method `name` of `ProcessGroup`."""

    def call(self: ElasticGroup, *args: Any, **options: Any) -> Any:
        return self._call(name, args, options)

    return call


class ElasticGroup(dist.ProcessGroup):
    """Used by any thread; `begin`, `end_joining` and `abort_groups` by the host.

    Attributes:
        joining: the group of the present generation; None before the first, where the only rank is
            this one.
        host: of the training function that runs.
    """

    def __init__(self) -> None:
        super().__init__(0, 1)  # type: ignore[call-arg]  # torch declares one of two forms
        self.joining: JoiningGroup | None = None
        self.host = CallHost()
        self._told: JoiningGroup | None = None  # of the warning

    def begin(self, joining: JoiningGroup) -> None:
        """Calls `plan`, and starts to join the group."""
        self.plan(joining)
        joining.start()

    def plan(self, joining: JoiningGroup) -> None:
        """The ranks of another generation. Raises RuntimeError while an earlier one is joining."""
        if self.joining is not None and self.joining.is_joining:
            raise RuntimeError("the previous process group is still joining")
        self.joining = joining
        world = c10d._world
        _, store = world.pg_map[self]
        world.pg_map[self] = joining.backend, store
        world.pg_backend_config[self] = str(c10d.BackendConfig(c10d.Backend(joining.backend)))
        world.pg_group_ranks[self] = {rank: rank for rank in range(joining.world_size)}

    def form_group(self, store: Store, **options: Any) -> dist.ProcessGroup:
        """Makes the group of all ranks of the present generation; by the thread that joins it.

        Args:
            store: of the generation; also for the groups that the function makes.
            options: of `torch.distributed.new_group`.
        """
        world = c10d._world
        world.pg_map[self] = world.pg_map[self][0], store
        # Groups are named by a counter of the process, which an aborted join has incremented: peers
        # that had not got as far would wait for a group of another name.
        world.group_count = 1
        group: dist.ProcessGroup = dist.new_group(list(range(self.size())), **options)
        return group

    def end_joining(self, interrupt: Callable[[], None]) -> None:
        """See `JoiningGroup.end`."""
        if self.joining is not None:
            self.joining.end(interrupt)

    def abort_groups(self) -> None:
        """Aborts the generation's group, and those that were made of it, without waiting for peers.
        torch forgets them also if that fails."""
        world = c10d._world
        groups = [group for group in world.pg_names if group is not self]
        groups.sort(key=lambda group: world.pg_names[group], reverse=True)
        nccl = _nccl_backend(groups)
        try:
            if nccl is not None:
                nccl._group_start()  # else aborts of several communicators could deadlock
            for group in groups:
                group.abort()
            if nccl is not None:
                nccl._group_end()
        finally:
            for group in groups:
                _forget(group)
            if self.joining is not None:
                self.joining.forget()

    # What torch reads of a group

    def rank(self) -> int:
        return self.joining.rank if self.joining is not None else 0

    def size(self) -> int:
        return self.joining.world_size if self.joining is not None else 1

    getRank, getSize = rank, size  # noqa: N815  for callers in C++

    def getBackendName(self) -> str:  # noqa: N802
        return _BACKEND  # not "gloo" or "nccl", whose class torch's C++ then expects

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(self.joining.device.type if self.joining is not None else "cpu")]

    @property
    def bound_device_id(self) -> torch.device | None:
        """None: groups that are made of this one connect at their first collective. `new_group`
        reads it first, and needs the generation's store: so it waits. Raises CollectiveError where
        the peers do not make that group, too."""
        joining = self.joining
        if joining is None or joining.is_joined_by_caller or not _is_read_by_new_group():
            return None
        if reason := self.host.local_reason():
            raise CollectiveError(f"torch.distributed.new_group, while {reason}")
        self.host.makes_group()
        joining.wait()
        return None

    @bound_device_id.setter
    def bound_device_id(self, device: torch.device | None) -> None:
        return

    def _get_backend(self, device: torch.device) -> Any:
        if self.joining is None or self.joining.is_joined_by_caller:
            raise RuntimeError("no process group has been joined")
        return self.joining.get_group()._get_backend(device)

    def _start_coalescing(self, device: torch.device) -> None:
        if not self._is_local():
            self._group()._start_coalescing(device)

    def _end_coalescing(self, device: torch.device) -> Work:
        return FinishedCall() if self._is_local() else self._group()._end_coalescing(device)

    def abort(self) -> None:
        """The groups of the generations are aborted, not what they are reached by."""

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
    # Until torch 2.12, and for callers in C++.
    _allgather_base = _passed_on("_allgather_base")
    allgather_into_tensor_coalesced = _passed_on("allgather_into_tensor_coalesced")
    _reduce_scatter_base = _passed_on("_reduce_scatter_base")
    reduce_scatter_tensor_coalesced = _passed_on("reduce_scatter_tensor_coalesced")
    alltoall_base = _passed_on("alltoall_base")

    def _call(self, name: str, args: tuple[Any, ...], options: dict[str, Any]) -> Work:
        host, outputs = self.host, output_tensors(name, args)
        if self._is_local():
            return self._complete(name, args, outputs)
        try:
            work = getattr(self._group(), name)(*args, **options)
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
        return self.joining is None or bool(self.host.local_reason())

    def _group(self) -> dist.ProcessGroup:
        joining = self.joining
        if joining is None:
            raise RuntimeError("no process group has been joined")
        return joining.get_group()

    def _complete(self, name: str, args: tuple[Any, ...], outputs: list[Tensor]) -> Work:
        """Completes the call on this rank alone."""
        if self.host.replays(name, outputs):
            return FinishedCall()
        reason = self.host.local_reason()
        source = getattr(args[1], "rootRank", None) if len(args) > 1 else None
        if reason and source not in (None, self.rank()) and _is_called_for_objects():
            raise CollectiveError(
                f"an object of another rank was awaited, while {reason}",
                allowed="torch.distributed's collectives of tensors, which complete there on this "
                "rank alone",
            )
        if reason and self._told is not self.joining:
            self._told = self.joining
            log.warning("%s completed on rank %d alone, while %s", name, self.rank(), reason)
        complete_locally(name, args, self.rank(), self.size())
        return FinishedCall()


def elastic_group() -> ElasticGroup | None:
    """This process's default group, if it is one of a worker."""
    group = c10d._world.default_pg
    return group if isinstance(group, ElasticGroup) else None


def make_elastic_group() -> ElasticGroup:
    """The same; made if there is none, with this rank alone."""
    if (existing := elastic_group()) is not None:
        return existing
    if not hasattr(dist.Backend, _BACKEND.upper()):
        devices = ["cpu", "cuda"]
        dist.Backend.register_backend(_BACKEND, lambda *_: ElasticGroup(), devices=devices)
    dist.init_process_group(_BACKEND, store=HashStore(), rank=0, world_size=1)
    return cast(ElasticGroup, dist.group.WORLD)


@contextmanager
def calls_of(host: CallHost) -> Iterator[None]:
    """While a training function runs: its collectives are the host's concern."""
    group = make_elastic_group()
    group.host = host
    try:
        yield
    finally:
        group.host = CallHost()


def _nccl_backend(groups: Sequence[dist.ProcessGroup]) -> Any:
    for group in groups if dist.is_nccl_available() else ():
        with suppress(RuntimeError):
            backend = group._get_backend(torch.device("cuda"))
            if isinstance(backend, dist.ProcessGroupNCCL):
                return backend
    return None


def _forget(group: dist.ProcessGroup) -> None:
    """Removes an aborted group from torch's tables."""
    world = c10d._world
    name = world.pg_names.pop(group)
    tables: tuple[dict[Any, Any], ...] = (
        world.pg_map,
        world.pg_group_ranks,
        world.pg_backend_config,
        world.pg_coalesce_state,
    )
    for table in tables:
        table.pop(group, None)
    tag = world.pg_to_tag.pop(group, None)
    for tagged in (world.tags_to_pg.get(tag or "", []), world.tags_to_pg.get("", [])):
        if group in tagged:
            tagged.remove(group)
    torch._C._distributed_c10d._unregister_process_group(name)


def _is_read_by_new_group() -> bool:
    return sys._getframe(2).f_code.co_name == "_new_group_with_tag"


def _is_called_for_objects() -> bool:
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_name not in _OBJECT_FUNCTIONS:
        module = str(frame.f_globals.get("__name__"))
        if not module.startswith(("torch.distributed.", "rayzero.engine.comm.")):
            return False
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None
