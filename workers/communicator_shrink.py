"""Survivors of a lost rank shrink their communicator, instead of aborting it and making another.

Only with `recovery.communicator_shrink`, and only where ranks just go: the controller decides, and
names the ranks. `SHRINK_ABORT` ends the kernels that stand on this rank, as an abort does, so it
takes the abort's place: a thread of its own calls it when the generation is fenced, and what waits
for the device returns. The parent is aborted only after that thread has ended, failed, or exceeded
its limit: kernels launched meanwhile stand on it. Waits end at the limit, or with `abandon`.

`torch.distributed.shrink_group` is not used: it destroys the parent, which waits for the lost rank.
NCCL frees a parent that is aborted, also while it is being shrunk. Such a process may die: its loss
is one more fault. Not measured on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from threading import Event, Lock, Thread
from time import monotonic
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch.distributed import distributed_c10d

from rayzero.engine.device import get_device
from rayzero.engine.errors import CollectiveError, ConfigError
from rayzero.workers.messages import Assignment
from rayzero.workers.rendezvous_store import AuthenticatedStore

c10d: Any = distributed_c10d  # its internals have other types in each version
LIMIT_FACTOR, LEAST_LIMIT_S = 2.0, 2.0
"""A shrink may take so many times as long as this process's last join of a group, which it is to be
faster than; at least so many seconds."""


class CommunicatorShrinker:
    """One process's. At most one attempt in each generation; `begin` and `abandon` are called by
    command threads, `settle` by the fence's and the training thread, the others by the latter."""

    def __init__(self, longest_s: float) -> None:
        """
        Args:
            longest_s: the limit of an attempt, however long the join took.
        """
        self._longest_s = longest_s
        self.limit_s = 0.0
        """Of an attempt; 0: there is none in this job."""
        self._began_s: float | None = None
        """When this process began to join its group; None if that is a shrunken one."""
        self._lock = Lock()
        self._is_open = False
        self._attempt: _Attempt | None = None

    def open(self, device: torch.device) -> None:
        """The generation has joined its group. Raises ConfigError if that cannot be shrunk."""
        check_shrink(device)
        if self._began_s is not None:
            limit_s = LIMIT_FACTOR * (monotonic() - self._began_s)
            self.limit_s = min(self._longest_s, max(LEAST_LIMIT_S, limit_s))
        self._attempt, self._is_open = None, True

    def begin(
        self, device: torch.device, lost: Sequence[int], store: AuthenticatedStore | None
    ) -> None:
        """Starts to shrink the default group by the ranks `lost`, unless it may be aborted already.

        Args:
            store: the group's.
        """
        with self._lock:
            if self._is_open and store is not None:
                self._attempt = _Attempt(device, lost, store, self.limit_s)

    def abandon(self) -> None:
        """The attempt, if there is one, fails now: a rank that it waits for does not take part."""
        if (attempt := self._attempt) is not None:
            attempt.over.set()

    def settle(self) -> str | None:
        """Waits for the attempt; afterwards none can begin, and the group may be aborted. Returns
        None without one, else the error, empty if it succeeded."""
        with self._lock:
            self._is_open, attempt = False, self._attempt
        return None if attempt is None else attempt.settle()

    def take(self, assignment: Assignment) -> Any:
        """The backend of the next generation, if its assignment says so; else it is aborted. None:
        it is made by the join, which begins now."""
        self.abandon()  # nothing waits for an attempt of a function that has returned
        self.settle()
        backend = None if self._attempt is None else self._attempt.backend
        self._attempt, self._began_s = None, None if assignment.shrunk else monotonic()
        if assignment.shrunk and (backend is None or backend.rank() != assignment.rank):
            raise CollectiveError(f"rank {assignment.rank} has no shrunken communicator")
        if backend is not None and not assignment.shrunk:
            backend.abort()
            return None
        return backend


class _Attempt:
    """Owns the thread, which nothing can end while it is in NCCL but an abort of the parent."""

    def __init__(
        self, device: torch.device, lost: Sequence[int], store: AuthenticatedStore, limit_s: float
    ) -> None:
        self.over = Event()
        self.backend: Any = None
        self._limit_s = limit_s
        self._error = ""
        self._lock = Lock()
        args = device, sorted(lost), store
        Thread(target=self._run, args=args, name="rayzero-fence-shrink", daemon=True).start()

    def _run(self, device: torch.device, lost: list[int], store: AuthenticatedStore) -> None:
        error, child = "", None
        try:
            get_device(device).make_current()  # per thread
            store.detach()  # the child clones it: its server may be in the lost process
            if len(c10d._world.pg_map) > 1:
                raise RuntimeError(
                    "there are groups beside it, whose kernels a shrink does not end"
                )
            parent = c10d._get_default_group()._get_backend(device)
            child = parent.shrink(lost, c10d.SHRINK_ABORT)
        except Exception as raised:  # noqa: BLE001  # of any type: it is reported
            error = f"{type(raised).__name__}: {raised}"
        with self._lock:
            if not self._error:
                self.backend, self._error = child, error
            elif child is not None:
                child.abort()  # late
        self.over.set()

    def settle(self) -> str:
        self.over.wait(self._limit_s)
        with self._lock:
            if self.backend is None and not self._error:
                limit = f"within {self._limit_s:.3g} s"
                self._error = f"not all ranks took part {limit}, or another one was lost"
        return self._error


def check_shrink(device: torch.device) -> None:
    """Raises ConfigError if the default group cannot be shrunk."""
    backend: Any = c10d._get_default_group()._get_backend(device)
    if not getattr(backend, "supports_shrinking", False):
        raise ConfigError(
            f"recovery.communicator_shrink: the backend {get_device(device).backend} of torch "
            f"{torch.__version__} cannot shrink a communicator",
            allowed="GPUs (workers.gpus: 1), and torch 2.10 or newer built with NCCL 2.27 or newer",
            fix="recovery.communicator_shrink: false in the job file, or torch on the nodes",
        )


def register_default_group(backend: Any, store: Store, device: torch.device) -> None:
    """Makes a shrunken backend the default group, in torch's tables, as if it had been created."""
    group, name, world = backend, "0", c10d._world
    if not isinstance(backend, dist.ProcessGroup):  # a backend in Python is its own group
        group = dist.ProcessGroup(store, backend.rank(), backend.size())
        on_gpu = get_device(device).asynchronous
        kind = dist.ProcessGroup.BackendType.NCCL if on_gpu else dist.ProcessGroup.BackendType.GLOO
        group._register_backend(device, kind, backend)
        group._set_default_backend(kind)
        if on_gpu:
            group.bound_device_id = device
    group._set_group_name(name)
    group._set_group_desc("default_pg")
    own = get_device(device).backend
    world.pg_map[group] = own, store
    world.pg_names[group] = name
    world.pg_backend_config[group] = str(c10d.BackendConfig(dist.Backend(own)))
    world.pg_to_tag[group] = f"ptd:{name}"
    for tag in ("", f"ptd:{name}"):
        world.tags_to_pg.setdefault(tag, []).append(group)
    world.pg_group_ranks[group] = {rank: rank for rank in range(group.size())}
    c10d._register_process_group(name, group)
    c10d._update_default_pg(group)
    world.group_count = 1
