"""The Ray actors of workers. Imports no torch, because the controller imports this file, too."""

from __future__ import annotations

import gc
import os
import socket
import struct
from fcntl import ioctl
from importlib import import_module
from typing import TYPE_CHECKING

import ray
from ray.util.placement_group import get_current_placement_group

from rayzero.workers.agent.link import worker_socket
from rayzero.workers.agent.message_sender import MessageSender
from rayzero.workers.lifetimes import WORKER_ASKS, OrphanWatch
from rayzero.workers.messages import WorkerInfo, WorkerSpec
from rayzero.workers.nccl_settings import use_interface
from rayzero.workers.vault.process_end import enable_crash_report
from rayzero.workers.worker_status import WorkerStatus

if TYPE_CHECKING:
    from rayzero.workers.roles.process import RoleProcess
    from rayzero.workers.worker import WorkerProcess

ACTOR_THREADS = 2
"""One thread is free for other calls while `describe` waits."""

_AGENT_WAIT_S = 10.0
"""Limit of a worker's wait, at its start, for its node's agent, which later detects its end."""
_SIOCGIFADDR = 0x8915  # of linux/sockios.h


class WorkerActor:
    """One rank's process. Created with `max_concurrency=ACTOR_THREADS`.

    Args:
        orphan_s: as in `OrphanWatch`.
    """

    def __init__(self, spec: WorkerSpec, index: int, orphan_s: float) -> None:
        enable_crash_report()
        gc.disable()  # until `describe`: imports with collections take a quarter more CPU time
        self._process = self._make_process(spec, index)
        self._spec = spec
        self._index = index
        self._sender: MessageSender | None = None
        self._info: WorkerInfo | None = None
        OrphanWatch(orphan_s, WORKER_ASKS)

    def _make_process(self, spec: WorkerSpec, index: int) -> WorkerProcess | RoleProcess:
        process: WorkerProcess = import_module("rayzero.workers.worker").WorkerProcess(spec, index)
        return process

    def describe(self) -> WorkerInfo:
        """Returns where this worker runs, once its process is ready for a generation. Its messages
        go to its node's agent from then on."""
        ip = self._process.node_address = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        if interface := interface_for(ip):
            use_interface(os.environ, interface)
        self._process.warm_up()
        gc.freeze()  # excludes the imported modules: a collection takes 0.3 ms instead of 170
        gc.enable()
        node_id = ray.get_runtime_context().get_node_id()
        if self._sender is None:
            address = worker_socket(self._spec.name, self._spec.run, node_id)
            process = self._process
            self._sender = MessageSender(address, self._index, process.poll, process)
        self._sender.wait_connected(_AGENT_WAIT_S)
        self._info = WorkerInfo(
            index=self._index,
            node_id=node_id,
            node=socket.gethostname(),
            ip=ip,
            pid=os.getpid(),
            cores=len(os.sched_getaffinity(0)),
        )
        return self._info

    def status(self) -> WorkerStatus | None:
        """Returns the `WorkerStatus`; None until `describe` has returned."""
        group = get_current_placement_group()
        if self._info is None or group is None:
            return None
        return self._process.status(self._info, group.id.hex())

    def members(self) -> tuple[WorkerInfo, ...]:
        """Returns the members of the worker's newest generation, by rank."""
        return self._process.members

    def ping(self) -> None:
        """Returns while the process lives. Ray fails the call, with the cause, when the process or
        its node has ended."""


class RoleActor(WorkerActor):
    """The process of one worker of a role."""

    def _make_process(self, spec: WorkerSpec, index: int) -> RoleProcess:
        module = import_module("rayzero.workers.roles.process")
        process: RoleProcess = module.RoleProcess(spec, index)
        return process


def interface_for(ip: str) -> str | None:
    """Returns the name of the network interface with that IPv4 address; None if there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                address = ioctl(any_socket, _SIOCGIFADDR, request)[20:24]
            except OSError:
                continue  # the interface has no IPv4 address
            if socket.inet_ntoa(address) == ip:
                return name
    return None
