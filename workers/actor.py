"""The Ray actor: a thin shell around `WorkerHost`, and the only module here that knows Ray."""

from __future__ import annotations

import gc
import os
import socket
from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING

import ray

from rayzero.workers.interfaces import interface_of
from rayzero.workers.messages import Formation, Message, Own, Setup, SlotInfo, WorkerInfo

if TYPE_CHECKING:
    from rayzero.workers.host import WorkerHost

COMMAND_THREADS = 4
"""One for the long poll; the others keep the worker reachable meanwhile."""


class WorkerActor:
    """One rank's process. Made with `max_concurrency=COMMAND_THREADS`."""

    def __init__(self, setup: Setup, index: int) -> None:
        # By name, because the controller's process imports this module to make the actor, and
        # must not import torch.
        host: type[WorkerHost] = import_module("rayzero.workers.host").WorkerHost
        self._host = host(setup, index)
        self._index = index

    def describe(self) -> WorkerInfo:
        """Where this worker runs; answers as soon as its process is ready for work."""
        ip = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        # Else gloo listens where the host's name leads to, which need not be the cluster's network.
        if interface := interface_of(ip):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        self._host.prepare()
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
        return self._host.open_store()

    def assign(self, formation: Formation, own: Own) -> None:
        self._host.assign(formation.place(own))

    def poll(self, timeout_s: float) -> list[Message]:
        return self._host.poll(timeout_s)

    def stop(self, generation: int) -> None:
        self._host.stop(generation)

    def drain(self, generation: int) -> None:
        self._host.drain(generation)

    def fence(self, generation: int) -> None:
        self._host.fence(generation)

    def inject(self, faults: Sequence[str]) -> None:
        self._host.inject(faults)

    def salvage(self, vault: str) -> SlotInfo:
        return self._host.salvage(vault)

    def dump_stack(self) -> str:
        return self._host.dump_stack()
