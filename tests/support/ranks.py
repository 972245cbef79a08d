"""Runs a function on several ranks, in processes that live for many calls.

To start a process costs more than most tests compute, so the processes are kept and only the
process group is new in each call. A call that fails leaves processes in an unknown state (a
rank may be stuck in a collective), so then all of them are killed and the next call starts afresh.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import multiprocessing
import os
import pickle
import random
import signal
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.distributed as dist

from tests.support.processes import PROCESSES

MAX_WORLD = 4
# Calls that processes live for. An engine that a test does not close leaves its group's threads.
CALLS = 50
# After a first failure: time for the other ranks to tell theirs, which often names the cause.
GRACE_S = 0.3


class RankError(Exception):
    """A rank raised, died, or did not finish in time.

    Attributes:
        rank: the rank that failed first.
    """

    def __init__(self, rank: int, text: str) -> None:
        super().__init__(f"rank {rank}: {text}")
        self.rank = rank


def run_ranks(
    world: int, fn: Callable[..., Any], *args: Any, timeout_s: float = 240.0
) -> list[Any]:
    """Calls `fn(rank, world, *args)` on every rank of a fresh gloo group; the results by rank.

    `fn` must be a module-level function; arguments and results are pickled. With `world=0` it runs
    in one process that has no process group, as `fn(0, 0, *args)`. Every call starts from the same
    seed and the default dtype. Expect an error inside `fn`, with `pytest.raises`: one that leaves
    `fn` is raised here as `RankError` and costs the processes.
    """
    if not 0 <= world <= MAX_WORLD:
        raise ValueError(f"world {world}; allowed: 0 to {MAX_WORLD}")
    payload = pickle.dumps((fn, args))
    try:
        return _POOL.call(world, payload, timeout_s)
    except BaseException:
        _POOL.kill()
        raise


def stop_ranks() -> None:
    """Kills the processes. The next `run_ranks` starts new ones."""
    _POOL.kill()


class _Pool:
    """Owns the processes and the store through which they find each other."""

    def __init__(self) -> None:
        self._members: list[tuple[BaseProcess, Connection]] = []
        self._store: dist.TCPStore | None = None
        self._calls = 0
        self._last = 0  # of these processes

    def call(self, world: int, payload: bytes, timeout_s: float) -> list[Any]:
        size = max(world, 1)
        port = self._ready(size)
        self._calls += 1
        ends = [end for _, end in self._members[:size]]
        for rank, end in enumerate(ends):
            # one that died between two calls is told by `_collect`, which reads the end of its pipe
            with suppress(BrokenPipeError, ConnectionResetError):
                end.send((port, self._calls, rank, world, timeout_s, payload))
        results = self._collect(ends, timeout_s)
        for end in ends:
            end.send(None)  # all are done: nobody waits for a peer, the group can go
        if self._calls >= self._last:
            self.kill()
        return results

    def kill(self) -> None:
        for process, end in self._members:
            process.kill()
            end.close()
        for process, _ in self._members:
            process.join(10)
        self._members.clear()

    def _ready(self, size: int) -> int:
        """Starts missing processes; returns the port of the store."""
        if not self._members:
            self._last = self._calls + CALLS
        if self._store is None:
            self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        while len(self._members) < size:
            ours, theirs = PROCESSES.Pipe()
            process = PROCESSES.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()  # else a dead process would never read as an end of file
            self._members.append((process, ours))
        return self._store.port

    def _collect(self, ends: list[Connection], timeout_s: float) -> list[Any]:
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        deadline = time.monotonic() + timeout_s
        while len(results) + len(failures) < len(ends):
            left_s = deadline - time.monotonic()
            waiting = {end: r for r, end in enumerate(ends) if r not in results | failures}
            ready = wait(list(waiting), max(left_s, 0))
            if not ready:
                break
            for end in ready:
                rank = waiting[end]
                good, value = _receive(end)
                if good:
                    results[rank] = pickle.loads(value)
                else:
                    failures[rank] = value
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        if failures:
            # a dead process is the cause of its peers' errors, whichever was noticed first
            first = next((r for r, text in failures.items() if text == _DIED), next(iter(failures)))
            others = [f"rank {r}: {text}" for r, text in failures.items() if r != first]
            raise RankError(first, "\n".join([failures[first], *others]))
        late = [rank for rank in range(len(ends)) if rank not in results]
        if late:
            self._dump_stacks(late)
            raise RankError(late[0], f"ranks {late} did not finish in {timeout_s:g} s")
        return [results[rank] for rank in range(len(ends))]

    def _dump_stacks(self, ranks: list[int]) -> None:
        """Lets stuck ranks print where they are to stderr, where pytest shows it."""
        for rank in ranks:
            pid = self._members[rank][0].pid
            if pid is not None:
                os.kill(pid, signal.SIGUSR1)
        time.sleep(GRACE_S)


_DIED = "the process died"
_POOL = _Pool()
atexit.register(stop_ranks)


def _receive(end: Connection) -> tuple[bool, Any]:
    try:
        return end.recv()
    except (EOFError, ConnectionResetError):
        return False, _DIED


def _serve(end: Connection) -> None:
    """The life of one process: calls, one after another, until it is killed."""
    parent = multiprocessing.parent_process()
    threading.Thread(target=_die_with, args=(parent,), name="parent-watch", daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle: it kills us
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    gc.freeze()  # what was imported stays: to collect then takes a few ms instead of 150
    while True:
        port, call, rank, world, timeout_s, payload = end.recv()
        try:
            _join(port, call, rank, world, timeout_s)
            fn, args = pickle.loads(payload)
            answer = (True, pickle.dumps(fn(rank, world, *args)))
        except BaseException:  # noqa: BLE001  also pytest's own, which are not Exceptions
            answer = (False, traceback.format_exc())
        end.send(answer)
        end.recv()
        if dist.is_initialized():
            dist.destroy_process_group()
        fn = args = answer = payload = None
        gc.collect()


def _join(port: int, call: int, rank: int, world: int, timeout_s: float) -> None:
    random.seed(0)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float32)
    if world:
        limit = timedelta(seconds=timeout_s)
        store = dist.PrefixStore(
            f"call{call}", dist.TCPStore("127.0.0.1", port, is_master=False, timeout=limit)
        )
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=limit)


def _die_with(parent: Any) -> None:
    wait([parent.sentinel])
    os._exit(1)
