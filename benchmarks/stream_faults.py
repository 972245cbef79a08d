"""Faults of the TCP streams between a job's controller and its agents, whose processes live on.

Their sockets are reached from outside, by copies of the processes' descriptors (pidfd_getfd(2)).
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import random
import socket
import struct
import termios
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass

import psutil

from benchmarks.soak_target import NotHeldError, Target

CONNECT_TIMEOUT_S = 60.0
"""Until a stream is there, or there again."""
DELAY_S = 2.0
STEPS_AFTER = 3
_PIDFD_GETFD = 438
_TCP_ESTABLISHED = 1
_LARGE = 1 << 30


@dataclass(frozen=True)
class Stream:
    """A connection of a controller to an agent, with the descriptors of both ends."""

    controller: int
    agent: int
    ports: tuple[int, int]
    fds: tuple[int, int]


def cut_stream(target: Target, rng: random.Random) -> None:
    """Breaks the connection of one agent: the controller makes another one, and nothing else
    happens."""
    stream = rng.choice(wait_for_streams(target))
    with _quiet(target), _copies(stream) as (end, _):
        end.shutdown(socket.SHUT_RDWR)
        if end.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _TCP_ESTABLISHED:
            raise NotHeldError(f"{target.text}: the connection is not cut")
        target.mark_fired()
        target.wait(
            lambda: not _lives(target, stream) or _has_another(target, stream),
            CONNECT_TIMEOUT_S,
            "another connection",
        )


def delay_stream(target: Target, rng: random.Random) -> None:
    """Nothing that is sent over the connections of all agents arrives for two seconds."""
    streams = wait_for_streams(target)
    with _quiet(target), ExitStack() as stack:
        ends = [end for it in streams for end in stack.enter_context(_copies(it))]
        try:
            for end in ends:  # a reader is woken when so much is there
                end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, _LARGE)
            time.sleep(DELAY_S)
            held = sum(map(_queued_bytes, ends))
        finally:
            for end in ends:
                end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
        if not held and all(_lives(target, stream) for stream in streams):
            raise NotHeldError(f"{target.text}: nothing was delayed")
        target.mark_fired()


def why_no_descriptors() -> str:
    """Why this machine cannot copy descriptors of other processes; empty if it can."""
    try:
        os.close(_copy_descriptor(os.getppid(), 0))
    except OSError as error:
        return f"descriptors of other processes cannot be copied: {error}"
    return ""


def wait_for_streams(target: Target) -> list[Stream]:
    """The connections of the newest controller with all agents, once it has some."""
    found: list[Stream] = []

    def find() -> bool:
        found[:] = _find_streams(target)
        return bool(found)

    target.wait(find, CONNECT_TIMEOUT_S, "a controller's connection to an agent")
    return found


def _find_streams(target: Target) -> list[Stream]:
    controllers, streams = target.controllers(), []
    with suppress(psutil.Error):
        outgoing = (
            {it.laddr.port: it for it in _connections(controllers[-1])} if controllers else {}
        )
        for agent in target.vaults():
            for its in _connections(agent):
                own = outgoing.get(its.raddr.port)
                if own is not None and own.raddr.port == its.laddr.port:
                    ports = own.laddr.port, its.laddr.port
                    streams.append(Stream(controllers[-1], agent, ports, (own.fd, its.fd)))
    return streams


def _connections(pid: int) -> list[psutil._common.pconn]:
    found = psutil.Process(pid).net_connections("tcp")
    return [it for it in found if it.status == psutil.CONN_ESTABLISHED]


def _lives(target: Target, stream: Stream) -> bool:
    return target.is_alive(stream.controller) and target.is_alive(stream.agent)


def _has_another(target: Target, stream: Stream) -> bool:
    others = [it for it in _find_streams(target) if it.agent == stream.agent]
    return any(it.ports != stream.ports for it in others)


@contextmanager
def _quiet(target: Target) -> Iterator[None]:
    """Checks that the fault inside ends no process of a job that trains, and lets it go on."""
    injected = target.injected()
    target.wait_for_step(target.step() + 1)
    before = [state.pid for state in target.wait_for_generation()]
    yield
    target.wait_for_step(target.step() + STEPS_AFTER)
    dead = [pid for pid in before if not target.is_alive(pid)]
    if dead and target.injected() == injected:
        raise NotHeldError(f"{target.text}: it has ended the processes {dead}")


@contextmanager
def _copies(stream: Stream) -> Iterator[tuple[socket.socket, socket.socket]]:
    """The sockets of both ends."""
    pids = stream.controller, stream.agent
    with ExitStack() as stack:
        first, second = (
            stack.enter_context(socket.socket(fileno=_copy_descriptor(pid, fd)))
            for pid, fd in zip(pids, stream.fds, strict=True)
        )
        yield first, second


def _copy_descriptor(pid: int, fd: int) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    process = os.pidfd_open(pid)
    try:
        copy = int(libc.syscall(_PIDFD_GETFD, process, fd, 0))
    finally:
        os.close(process)
    if copy < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return copy


def _queued_bytes(end: socket.socket) -> int:
    """Bytes that have arrived, and were not read."""
    reply = fcntl.ioctl(end, termios.FIONREAD, struct.pack("i", 0))
    return int(struct.unpack("i", reply)[0])
