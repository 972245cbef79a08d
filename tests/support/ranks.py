"""Runs a function on several ranks, in a pool of long-lived processes.

Starting a process costs more than most tests compute, so processes are reused and only the process
group is new in each call. A failed call leaves the processes in an unknown state (a rank may be
stuck in a collective), so all of them are killed and the next call starts new ones.
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

from rayzero.workers.rendezvous_store import StoreClient, StoreServer
from tests.support.processes import PROCESSES

MAX_WORLD = 4
# Calls per process. Engines that a test does not close leak the threads of their process group.
MAX_CALLS = 50
# After the first failure: time for other ranks to report theirs, which often name the cause.
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
    """Call `fn(rank, world, *args)` on every rank of a new gloo group. Returns results by rank.

    `fn` must be a module-level function; arguments and results are pickled. With `world=0` it runs
    in one process without a process group, as `fn(0, 0, *args)`. Every call starts with the same
    seed and the default dtype. Catch expected errors inside `fn`, with `pytest.raises`: an error
    that leaves `fn` is raised as `RankError` and kills the processes.
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
    """Kill the processes. The next `run_ranks` starts new ones."""
    _POOL.kill()


class _Pool:
    """Owns the processes and their rendezvous store."""

    def __init__(self) -> None:
        self._members: list[tuple[BaseProcess, Connection]] = []
        self._store: StoreServer | None = None
        self._calls = 0
        self._last_call = 0  # of the current processes

    def call(self, world: int, payload: bytes, timeout_s: float) -> list[Any]:
        size = max(world, 1)
        port = self._ensure_started(size)
        self._calls += 1
        pipes = [pipe for _, pipe in self._members[:size]]
        for rank, pipe in enumerate(pipes):
            # `_collect` reports processes that died between two calls: their pipes are closed
            with suppress(BrokenPipeError, ConnectionResetError):
                pipe.send((port, self._calls, rank, world, timeout_s, payload))
        results = self._collect(pipes, timeout_s)
        for pipe in pipes:
            pipe.send(None)  # all ranks are done, so the group can be destroyed
        if self._calls >= self._last_call:
            self.kill()
        return results

    def kill(self) -> None:
        for process, pipe in self._members:
            process.kill()
            pipe.close()
        for process, _ in self._members:
            process.join(10)
        self._members.clear()

    def _ensure_started(self, size: int) -> int:
        """Start missing processes. Returns the port of the store."""
        if not self._members:
            self._last_call = self._calls + MAX_CALLS
        if self._store is None:
            self._store = StoreServer("127.0.0.1", CONNECT_S)
            self._store.admit(SECRET)
        while len(self._members) < size:
            parent_pipe, child_pipe = PROCESSES.Pipe()
            process = PROCESSES.Process(target=_serve, args=(child_pipe,), daemon=True)
            process.start()
            child_pipe.close()  # otherwise a dead process would not produce an EOF
            self._members.append((process, parent_pipe))
        return self._store.port

    def _collect(self, pipes: list[Connection], timeout_s: float) -> list[Any]:
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        deadline = time.monotonic() + timeout_s
        while len(results) + len(failures) < len(pipes):
            remaining_s = deadline - time.monotonic()
            pending = {pipe: r for r, pipe in enumerate(pipes) if r not in results | failures}
            ready = wait(list(pending), max(remaining_s, 0))
            if not ready:
                break
            for pipe in ready:
                rank = pending[pipe]
                succeeded, value = _receive(pipe)
                if succeeded:
                    results[rank] = pickle.loads(value)
                else:
                    failures[rank] = value
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        if failures:
            # a dead process caused its peers' errors, even if theirs arrived first
            first = next((r for r, text in failures.items() if text == _DIED), next(iter(failures)))
            others = [f"rank {r}: {text}" for r, text in failures.items() if r != first]
            raise RankError(first, "\n".join([failures[first], *others]))
        late = [rank for rank in range(len(pipes)) if rank not in results]
        if late:
            self._dump_stacks(late)
            raise RankError(late[0], f"ranks {late} did not finish in {timeout_s:g} s")
        return [results[rank] for rank in range(len(pipes))]

    def _dump_stacks(self, ranks: list[int]) -> None:
        """Make stuck ranks dump their stacks to stderr, which pytest captures."""
        for rank in ranks:
            pid = self._members[rank][0].pid
            if pid is not None:
                os.kill(pid, signal.SIGUSR1)
        time.sleep(GRACE_S)


SECRET = b"of the ranks of a test"
CONNECT_S = 60.0
_DIED = "the process died"
_store: list[StoreClient] = []  # its C++ part does not keep the Python object
_POOL = _Pool()
atexit.register(stop_ranks)


def _receive(pipe: Connection) -> tuple[bool, Any]:
    try:
        return pipe.recv()
    except (EOFError, ConnectionResetError):
        return False, _DIED


def _serve(pipe: Connection) -> None:
    """Main loop of a rank process: execute calls until killed."""
    parent = multiprocessing.parent_process()
    threading.Thread(target=_exit_with, args=(parent,), name="parent-watch", daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C and kills this process
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    gc.freeze()  # excludes imported modules: a collection takes a few ms instead of 150
    while True:
        port, call, rank, world, timeout_s, payload = pipe.recv()
        try:
            _initialize(port, call, rank, world, timeout_s)
            fn, args = pickle.loads(payload)
            answer = (True, pickle.dumps(fn(rank, world, *args)))
        except BaseException:  # noqa: BLE001  pytest's outcomes are not Exceptions
            answer = (False, traceback.format_exc())
        pipe.send(answer)
        pipe.recv()
        if dist.is_initialized():
            dist.destroy_process_group()
        fn = args = answer = payload = None
        gc.collect()


def _initialize(port: int, call: int, rank: int, world: int, timeout_s: float) -> None:
    random.seed(0)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float32)
    if world:
        limit = timedelta(seconds=timeout_s)
        _store[:] = [StoreClient("127.0.0.1", port, SECRET, timeout_s)]
        store = dist.PrefixStore(f"call{call}", _store[0])
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=limit)


def _exit_with(parent: Any) -> None:
    wait([parent.sentinel])
    os._exit(1)
