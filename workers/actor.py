"""Ray actor shell.

The Ray actor: a thin shell around `WorkerProcess`, and the only module here that knows Ray.

Which network interface has an address.
"""

from __future__ import annotations

import gc
import os
import socket
import struct
from collections.abc import Sequence
from fcntl import ioctl
from importlib import import_module
from typing import TYPE_CHECKING

import ray

from rayzero.workers.messages import (
    GenerationSpec,
    RankAssignment,
    WorkerInfo,
    WorkerMessage,
    WorkerSpec,
)
from rayzero.workers.vault.records import SlotInfo

if TYPE_CHECKING:
    from rayzero.workers.worker import WorkerProcess

_SIOCGIFADDR = 0x8915  # SIOCGIFADDR


def interface_for(ip: str) -> str | None:
    """The name of the interface with that IPv4 address; None when there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                found = ioctl(any_socket, _SIOCGIFADDR, request)[20:24]
            except OSError:
                continue  # it has no IPv4 address
            if socket.inet_ntoa(found) == ip:
                return name
    return None


COMMAND_THREADS = 4
"""One for the long poll; the others keep the worker reachable meanwhile."""


class WorkerActor:
    """One rank's process. Made with `max_concurrency=COMMAND_THREADS`."""

    def __init__(self, setup: WorkerSpec, index: int) -> None:
        # By name, because the controller's process imports this module to make the actor, and
        # must not import torch.
        host: type[WorkerProcess] = import_module("rayzero.workers.worker").WorkerProcess
        self._process = host(setup, index)
        self._index = index

    def describe(self) -> WorkerInfo:
        """Where this worker runs; answers as soon as its process is ready for work."""
        ip = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        # Else gloo listens where the host's name leads to, which need not be the cluster's network.
        if interface := interface_for(ip):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        self._process.warm_up()
        gc.freeze()  # what was imported stays: a collection then takes 0.3 ms instead of 170
        context = ray.get_runtime_context()
        return WorkerInfo(
            index=self._index,
            node_id=context.get_node_id(),
            node=socket.gethostname(),
            ip=ip,
            pid=os.getpid(),
        )

    def open_store(self) -> int:
        return self._process.open_store()

    def assign(self, formation: GenerationSpec, own: RankAssignment) -> None:
        self._process.assign(formation.assignment_for(own))

    def poll(self, timeout_s: float) -> list[WorkerMessage]:
        return self._process.poll(timeout_s)

    def stop(self, generation: int) -> None:
        self._process.stop(generation)

    def drain(self, generation: int) -> None:
        self._process.drain(generation)

    def fence(self, generation: int) -> None:
        self._process.fence(generation)

    def inject(self, faults: Sequence[str]) -> None:
        self._process.inject(faults)

    def salvage(self, vault: str) -> SlotInfo:
        return self._process.salvage(vault)

    def dump_stack(self) -> str:
        return self._process.dump_stack()
