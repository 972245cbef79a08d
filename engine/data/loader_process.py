"""The processes that make samples, and the server that they are forked from.

A rank's server is a new interpreter: it imports torch once, starts no thread and runs no code of
the user, so that forking it is safe and quick. Forking a rank is not safe: it has threads, locks,
connections, perhaps a device. `multiprocessing`'s server would run the user's script again in each
process, and does not end one that hangs in code that holds the interpreter's lock.

How the processes end, also after a SIGKILL and in code that never returns:

- The rank ends: its server polls a pidfd of the rank, and a socket that closes with the rank. The
  server kills the process group of each process, with all that it has started, and ends.
- The server ends: the kernel kills its processes (PR_SET_PDEATHSIG).
- One process hangs, or is not needed any more: the server kills its group, and reaps it.

Samples come through socket pairs. Nothing has a name or is in shared memory: the kernel frees a
pair with the last process that holds an end.
"""

from __future__ import annotations

import ctypes
import gc
import io
import itertools
import os
import pickle
import random
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import traceback
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle
import numpy as np
import torch

SampleMaker = Callable[[Any], Any]
"""Makes a sample of the raw value that a source has read."""

_REQUEST = struct.Struct("!cI")  # kind, number of a process
_STATUS = struct.Struct("!i")
_FORK, _END = b"F", b"E"
_TIMEOUT_S = 30.0
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class BadSample:
    """Stands for a sample that could not be made. A loader process sends the `cause` as text."""

    reason: str
    cause: BaseException | None = None


def make_sample(maker: SampleMaker, raw: Any) -> Any:
    """Returns the sample of a raw value; a BadSample if the maker raises."""
    try:
        return maker(raw)
    except Exception as error:  # noqa: BLE001 -- of the user's code: raised or counted by the caller
        return BadSample(f"{type(error).__name__}: {error}", error)


class LoaderServer:
    """The handle of a server that this process has started. Any thread may call it. The server ends
    when nothing refers to the handle, and with this process."""

    def __init__(self) -> None:
        self._control, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with other:
            code = (
                f"import sys; sys.path[:] = {sys.path!r}; import {__name__} as it; "
                f"it.serve({other.fileno()}, {os.getpid()})"
            )
            self._process = subprocess.Popen(
                [sys.executable, "-c", code], stdin=subprocess.DEVNULL, pass_fds=[other.fileno()]
            )
        self._numbers = itertools.count()
        weakref.finalize(self, _stop_server, self._control, self._process)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def fork(self) -> tuple[int, Connection]:
        """Starts a process. Returns its number, and a connection to it. Raises OSError if the
        server has ended.

        The caller sends a pickled maker, then `(seed, [(position, raw), ...])` whenever the process
        is idle. The process answers None when it has the maker, then each sample.
        """
        number = next(self._numbers)
        own, other = socket.socketpair()
        with other:
            socket.send_fds(self._control, [_REQUEST.pack(_FORK, number)], [other.fileno()])
        return number, Connection(own.detach())

    def end(self, number: int) -> int:
        """Kills a process with all that it has started. Returns its status, as `os.waitpid`: that
        of its own end, if it had ended. Raises OSError if the server does not answer."""
        own, other = socket.socketpair()
        with own:
            with other:
                socket.send_fds(self._control, [_REQUEST.pack(_END, number)], [other.fileno()])
            own.settimeout(_TIMEOUT_S)
            answer = own.recv(_STATUS.size)
        if not answer:
            raise ConnectionError("the server has ended")
        return int(_STATUS.unpack(answer)[0])


_lock = threading.Lock()
_newest: weakref.ref[LoaderServer] | None = None


def loader_server() -> LoaderServer:
    """Returns the server of this process; a new one if there is none."""
    global _newest
    with _lock:
        server = _newest() if _newest is not None else None
        if server is None or server.has_ended:
            server = LoaderServer()
            _newest = weakref.ref(server)
        return server


def _stop_server(control: socket.socket, process: subprocess.Popen[bytes]) -> None:
    control.close()
    try:
        process.wait(_TIMEOUT_S)  # it may still be importing
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def serve(control_file: int, parent: int) -> None:
    """Runs the server until its parent ends, or closes the other end of the socket."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: the parent decides
    control = socket.socket(fileno=control_file)
    try:
        parent_file = os.pidfd_open(parent)
    except ProcessLookupError:
        return
    if os.getppid() != parent:
        return
    import_module("rayzero.engine.data.streams.iterable_source")  # the modules of the makers
    libc = ctypes.CDLL(None)
    gc.collect()
    gc.freeze()  # a collection in a process would copy all pages
    pids: dict[int, int] = {}
    try:
        while True:
            ready, _, _ = select.select([control.fileno(), parent_file], [], [])
            if parent_file in ready:
                return
            message, files, _, _ = socket.recv_fds(control, _REQUEST.size, 1)
            if not message:
                return
            kind, number = _REQUEST.unpack(message)
            if kind == _END:
                with socket.socket(fileno=files[0]) as answer, suppress(OSError):
                    answer.send(_STATUS.pack(_kill(pids.pop(number))))
                continue
            server = os.getpid()
            if (pid := os.fork()) == 0:
                os.close(parent_file)
                control.close()
                _begin(files[0], server, libc)
            os.close(files[0])
            pids[number] = pid
            with suppress(OSError):  # the process does the same
                os.setpgid(pid, pid)
    finally:
        for pid in pids.values():
            _kill(pid)


def _kill(pid: int) -> int:
    """Kills a process group, and returns its leader's status. The leader was not reaped before: its
    pid cannot be that of another process."""
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    return os.waitpid(pid, 0)[1]


def _begin(file: int, server: int, libc: ctypes.CDLL) -> None:
    """Body of a forked process, which does not return."""
    try:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == server:  # otherwise the server ended before `prctl`
            os.setpgid(0, 0)
            gc.enable()
            torch.set_num_threads(1)
            with suppress(EOFError, ConnectionError):  # the rank has closed the connection
                _make_samples(Connection(file))
    except BaseException:  # noqa: BLE001 -- it must not return into the server's loop
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(0)


def _make_samples(connection: Connection) -> None:
    maker = make_sample(pickle.loads, connection.recv_bytes())
    if isinstance(maker, BadSample):  # an error of the user's modules: raised in the rank
        connection.send_bytes(_dump_made(maker))
        return
    connection.send_bytes(dump(None))
    while True:
        seed, tasks = pickle.loads(connection.recv_bytes())
        for position, raw in tasks:
            _seed_sample(seed, position)
            connection.send_bytes(_dump_made(make_sample(maker, raw)))


def _seed_sample(seed: int, position: int) -> None:
    """Seeds random numbers by the job and the sample's position, whatever process makes it."""
    words = np.random.SeedSequence([seed & (1 << 64) - 1, position]).generate_state(4)
    random.seed(int(words[0]))
    np.random.seed(words[1])
    torch.default_generator.manual_seed(int(words[2]))


def _dump_made(made: Any) -> bytes:
    if isinstance(made, BadSample) and made.cause is not None:
        return _dump_bad(made.reason, made.cause)
    try:
        return dump(made)
    except Exception as error:  # noqa: BLE001 -- what the user's code returned
        return _dump_bad(f"it cannot be pickled: {type(error).__name__}: {error}", error)


def _dump_bad(reason: str, error: BaseException) -> bytes:
    """Pickles the error as text: the error itself may not be picklable."""
    text = "".join(traceback.format_exception(error))
    return dump(BadSample(reason, RuntimeError(text)))


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles tensors as numpy arrays, because torch's own way takes ten times as long. Pickles
    classes and functions of the user's script by value, as cloudpickle does."""

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is torch.Tensor and obj.device.type == "cpu" and not obj.requires_grad:
            with suppress(TypeError, RuntimeError):  # such as bfloat16, or sparse
                return torch.from_numpy, (obj.numpy(),)
        return super().reducer_override(obj)


def dump(value: Any) -> bytes:
    """Pickles a value for another process of the loader."""
    file = io.BytesIO()
    _Pickler(file, protocol=5).dump(value)
    return file.getvalue()
